"""Translates argument names in error messages to the names that the caller used."""

import re
from collections.abc import Callable, Mapping
from typing import Any

# Text that follows an argument name, but not an English word: "k: ...", "q has 4", "than from;".
_AS_ARGUMENT = r"(?=[:;,\[)]| is\b| has\b|'s\b)"
# Argument names of the library -> those of the Python calls.
_EVERYWHERE = {"q_scale": "q.scale", "k_scale": "k.scale", "v_scale": "v.scale",
               "q_scale_block": "q.block_rows", "kv_scale_block": "block_rows"}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Replaces all names in one pass, because a new name can equal another old name."""
    alternatives = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({alternatives})\b{_AS_ARGUMENT}", lambda found: names[found[1]], text)


def in_python(text: str) -> str:
    """A message of the C library with Python's argument names."""
    text = re.sub(r"\bmerge: parts\[(\d+)\]\.(out|lse)\b", r"\2s[\1]", text).removeprefix("merge: ")
    return re.sub(rf"\b({'|'.join(_EVERYWHERE)})\b", lambda found: _EVERYWHERE[found[1]], text)


def call(names: Mapping[str, str], function: Callable[..., Any], *arguments: Any,
         **options: Any) -> Any:
    """Calls function(...). Its errors mention names[name] instead of name."""
    try:
        return function(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = renamed(str(error), names)
        if text == str(error) or type(error) not in (ValueError, TypeError, NotImplementedError):
            raise
        raise type(error)(text) from error
