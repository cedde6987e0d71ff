"""Attention of one span of queries and one span of keys on this rank, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashcore._attention import attention
from flashcore.distributed.block_gradients import add_gradients
from flashcore.cache import merge
from flashcore.distributed.masks import Mask, Segment


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], mask: Mask,
           **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [batch, heads, rows, dim], which holds a span, over k and v, which hold another."""
    if len(segments) == 1:
        one = segments[0]
        place: dict[str, Any] = {}
        if not _is_default(one, mask):
            place = dict(q_start=one.q_start, k_start=one.k_start)
        k, v = k[:, :, one.k_begin:one.k_end], v[:, :, one.k_begin:one.k_end]
        out, lse = attention(q, k, v, causal=mask.causal, window=mask.window, return_lse=True, **place,
                             **options)
        return out, lse
    first = segments[0].k_begin
    k, v = (one[:, :, first:segments[-1].k_end] for one in (k, v))
    place = dict(cu_seqlens_q=_ints(q, [0] + [one.q_end for one in segments]),
                 cu_seqlens_k=_ints(q, [0] + [one.k_end - first for one in segments]),
                 max_q_len=max(one.q_end - one.q_begin for one in segments),
                 max_kv_len=max(one.k_end - one.k_begin for one in segments))
    if not all(_is_default(one, mask) for one in segments):
        place |= dict(q_start=_ints(q, [one.q_start for one in segments]),
                      k_start=_ints(q, [one.k_start for one in segments]))
    q, k, v = (one[0].transpose(0, 1) for one in (q, k, v))
    out, lse = attention(q, k, v, causal=mask.causal, window=mask.window, return_lse=True, **place,
                         **options)
    return out.transpose(0, 1)[None], lse[None]


def _is_default(one: Segment, mask: Mask) -> bool:
    """True if attention() places the rows right by itself: the last row at the last key."""
    if mask.reach == (-1, -1):
        return True
    shift = (one.k_end - one.k_begin) - (one.q_end - one.q_begin)
    return one.k_start == 0 and one.q_start == shift


def _ints(like: Tensor, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


_KEPT = 4  # partial results of a span that wait for a merge


class Partials:
    """Partial results of one span of queries.

    Merged four at a time, so that memory does not grow with the number of ranks; or, if `in_order`, kept
    and merged once in ascending order of their keys, which gives the same bits on every rank.
    """

    def __init__(self, q: Tensor, v: Tensor, in_order: bool) -> None:
        self._q, self._v_dim, self._in_order = q, v.shape[-1], in_order
        self._parts: list[tuple[int, Tensor, Tensor]] = []

    def add(self, first_key: int, out: Tensor, lse: Tensor) -> None:
        self._parts.append((first_key, out, lse))
        if len(self._parts) > _KEPT and not self._in_order:
            first, outs, lses = zip(*self._parts[:_KEPT])
            self._parts[:_KEPT] = [(first[0], *merge(outs, lses, return_lse=True))]

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse)."""
        shape = (*self._q.shape[:3], self._v_dim)
        out = self._q.new_empty(shape)
        if 0 in shape:
            return out, torch.empty(shape[:3], dtype=torch.float32, device=out.device)
        if not self._parts:  # no row sees a key
            none = torch.full(shape[:3], float("-inf"), device=out.device)
            self._parts.append((0, torch.zeros(shape, device=out.device), none))
        self._parts.sort(key=lambda one: one[0])
        _, outs, lses = zip(*self._parts)
        made, lse = merge(outs, lses, sinks=sinks, out=out, return_lse=True)
        return made, lse


class Gradients:
    """Sums of dq, dk and dv in f32 (f64 for f64 inputs), for tensors of these shapes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.q, self.k, self.v = (torch.zeros(one.shape, dtype=self.wide, device=one.device)
                                  for one in (q, k, v))

    def add(self, rows: slice, keys: slice, tensors: Sequence[Tensor], grads: Sequence[Tensor],
            segments: Sequence[Segment], mask: Mask, *, scale: float, softcap: float,
            global_lse: bool, sinks: Tensor | None = None, dsinks: Tensor | None = None) -> None:
        """Adds the gradients of one span of queries, `rows`, and one span of keys, `keys`.

        tensors are q, k, v, out and lse; grads are those of out and lse. With global_lse, the keys are
        some of the keys that the rows see, and out and lse cover all of them.
        """
        q, k, v, out, lse = tensors
        for one in segments:
            if not mask.segment_sees(one) and (sinks is None or one.q_begin >= one.q_end):
                continue
            a = slice(rows.start + one.q_begin, rows.start + one.q_end)
            b = slice(keys.start + one.k_begin, keys.start + one.k_end)
            main = (grads[0][:, :, a], q[:, :, a], k[:, :, b], v[:, :, b], out[:, :, a],
                    self.q[:, :, a], self.k[:, :, b], self.v[:, :, b])
            add_gradients(main, grads[1][:, :, a], lse=lse[:, :, a] if global_lse else None,
                          sinks=sinks, dsinks=dsinks, q_start=one.q_start, k_start=one.k_start,
                          causal=mask.causal, window=mask.window, scale=scale, softcap=softcap)


def sink_gradients(sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
                   grad_lse: Tensor) -> Tensor:
    """dsinks [heads] over these rows."""
    delta = (grad_out.float() * out.float()).sum(-1) - grad_lse
    weight = torch.exp(sinks.float()[None, :, None] - lse)
    return -(weight * delta).sum((0, 2))
