"""Gradients of torch.ops.flashcore, by the library's kernels."""

from typing import Any

from flashcore._backward import attention_backward
from flashcore._torch.library import TENSORS

_NAMES = ("q", "k", "v", "sinks", "bias")


def backward(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *tensors: Any,
             causal: bool, window_left: int, window_right: int, scale: float | None, softcap: float,
             layout: str, partial: bool, wanted: list[bool]) -> tuple[Any, ...]:
    """(dq, dk, dv, dsinks, dbias). Gradients that are not `wanted` are empty tensors."""
    optional = {name: one for name, one in zip(TENSORS, tensors) if one is not None}
    if "block_table" in optional:
        raise NotImplementedError("block_table: gradients through pages are not supported; gather "
                                  "the pages first")
    names = [name for name, want in zip(_NAMES, wanted) if want]
    made = dict(zip(names, attention_backward(
        grad_out, q, k, v, out, lse, dlse=grad_lse, wanted=names, causal=causal,
        window=(window_left, window_right), scale=scale, softcap=softcap, layout=layout,
        partial=partial, **optional)))
    return tuple(made[name] if name in made else q.new_empty(0) for name in _NAMES)
