"""Options of attention(): their order, their names in C, and their normalized values."""

from collections.abc import Sequence
from typing import Any

from flashcore._core.scalars import flag, integer, number, one_of, word

# Optional arrays in the order in which they are passed around. Names are those of the C struct.
OPTIONAL = ("sinks", "alibi_slopes", "bias", "mask", "q_start", "k_start", "cu_seqlens_q",
            "cu_seqlens_k", "used_k", "block_table")
NONE = (None,) * len(OPTIONAL)
_PYTHON_NAMES = {"used_k": "seqused_k"}
# The other arguments, in the order in which they are passed around.
OPTIONS = ("causal", "window", "scale", "softcap", "layout", "num_splits", "reproducibility",
           "return_lse", "max_q_len", "max_kv_len", "partial", "checked", "kernel")
NO_WINDOW = (-1, -1)
LAYOUTS = {"bhsd": 0, "bshd": 1}
REPRODUCIBILITY = {"deterministic": 0, "batch_invariant": 1}

Options = tuple[Any, ...]  # values of OPTIONAL or of OPTIONS, in that order
Given = Sequence[tuple[str, Any, Any]]  # (C name, adapter, array) of each optional array passed


def python_name(name: str) -> str:
    """The Python keyword of an optional array."""
    return _PYTHON_NAMES.get(name, name)


def normalize_options(causal: Any, window: Any, scale: Any, softcap: Any, layout: Any,
                      num_splits: Any, reproducibility: Any, return_lse: Any, max_q_len: Any,
                      max_kv_len: Any, partial: Any, checked: Any, kernel: Any) -> Options:
    """Converts the options to plain Python values. Raises if a value has the wrong type."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window is {window!r}; wanted (left, right)") from None
    return (flag("causal", causal),
            (integer("window_left", left), integer("window_right", right)),
            None if scale is None else number("scale", scale), number("softcap", softcap),
            one_of("layout", layout, LAYOUTS), integer("num_splits", num_splits, 32),
            one_of("reproducibility", reproducibility, REPRODUCIBILITY),
            flag("return_lse", return_lse), integer("max_q_len", max_q_len),
            integer("max_kv_len", max_kv_len), flag("partial", partial), flag("checked", checked),
            None if kernel is None else word("kernel", kernel, "the id of a kernel"))
