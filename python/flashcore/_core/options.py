"""Options of attention(): their order, their names in C, and their normalized values."""

from collections.abc import Sequence
from typing import Any

from flashcore._core.options_table import ARRAYS, OPTIONS, normalize_options, set_options

__all__ = ["NONE", "NO_WINDOW", "OPTIONAL", "OPTIONS", "Given", "Options", "are_exact",
           "normalize_options", "python_name", "set_options"]

# Optional arrays in the order in which they are passed around. Names are those of the C struct. The
# last two are a block mask, which Python takes as mask=.
OPTIONAL = (*(field for field, _ in ARRAYS), "mask_blocks", "mask_bits")
NONE = (None,) * len(OPTIONAL)
_PYTHON_NAMES = dict(ARRAYS)
NO_WINDOW = (-1, -1)

Options = tuple[Any, ...]  # values of OPTIONAL or of OPTIONS, in that order
Given = Sequence[tuple[str, Any, Any]]  # (C name, adapter, array) of each optional array passed


def are_exact(options: Options) -> bool:
    """True if the integers among the options are of type int. True and 1.0 equal 1 as keys of a cache, but
    normalize_options() rejects them."""
    window = options[1]
    return type(options[5]) is type(options[8]) is type(options[9]) is int and (
        window is NO_WINDOW or type(window[0]) is type(window[1]) is int)


def python_name(name: str) -> str:
    """The Python keyword of an optional array."""
    return _PYTHON_NAMES.get(name, name)
