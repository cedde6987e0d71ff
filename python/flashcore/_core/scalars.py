"""Conversion of scalar arguments to the types of the C API. An error names the argument."""

from operator import index
from typing import Any


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else words[:57] + "..."


def integer(name: str, value: Any, bits: int = 64) -> int:
    """An integer that fits a signed C integer with that many bits. Floats and bools are rejected."""
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = int(index(value))
        except (TypeError, RuntimeError):  # torch raises RuntimeError for some tensors
            raise TypeError(f"{name} is {_shown(value)}; wanted an integer") from None
    if not -2**(bits - 1) <= value < 2**(bits - 1):
        raise ValueError(f"{name} is {value}; wanted a number of {bits} bits")
    return int(value)


def number(name: str, value: Any) -> float:
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{name}: requires grad, and gets none; give a number, or multiply q instead")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {_shown(value)}; wanted a number") from None
    except OverflowError:
        raise ValueError(f"{name} is {_shown(value)}; wanted a number that a double can hold") from None


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    try:
        if isinstance(value, (str, bytes)) or float(value) not in (0.0, 1.0):
            raise TypeError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} is {_shown(value)}; wanted True or False") from None
    return bool(value)


def one_of(name: str, value: Any, known: Any) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {_shown(value)}; wanted one of {', '.join(known)}")
    return value


def word(name: str, value: Any, what: str) -> str:
    """A str without NUL characters, so that C reads all of it."""
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{name} is {_shown(value)}; wanted {what}, a str")
    return value
