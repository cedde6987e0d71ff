"""Arguments have other names inside: errors must have those the caller knows."""

import re
from collections.abc import Callable, Mapping
from typing import Any

# Follows a name that is an argument in a message, not an English word: "k: ...", "q has 4", "than from;".
_AS_ARGUMENT = r"(?=[:;,\[)]| is\b| has\b|'s\b)"
# The C library's names of arguments, and the names that every Python call uses.
_EVERYWHERE = {"used_k": "seqused_k", "q_scale": "q.scale", "k_scale": "k.scale",
               "v_scale": "v.scale", "q_scale_block": "q.block_rows",
               "kv_scale_block": "block_rows"}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """All names at once: one may become another's old name."""
    alternatives = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({alternatives})\b{_AS_ARGUMENT}", lambda found: names[found[1]], text)


def in_python(text: str) -> str:
    """The C library's words with Python's names."""
    text = re.sub(r"\bmerge: parts\[(\d+)\]\.(out|lse)\b", r"\2s[\1]", text).removeprefix("merge: ")
    return re.sub(rf"\b({'|'.join(_EVERYWHERE)})\b", lambda found: _EVERYWHERE[found[1]], text)


def call(names: Mapping[str, str], function: Callable[..., Any], *arguments: Any,
         **options: Any) -> Any:
    """function(...), whose errors say names[name] where it says name."""
    try:
        return function(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = renamed(str(error), names)
        if text == str(error) or type(error) not in (ValueError, TypeError, NotImplementedError):
            raise
        raise type(error)(text) from error
