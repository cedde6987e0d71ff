"""Attention of one span of queries and one span of keys on this rank, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashcore._attention import attention
from flashcore._backward import attention_backward
from flashcore.cache import merge
from flashcore.distributed.masks import Mask, Segment
from flashcore.distributed.placement import Span


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], mask: Mask,
           **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of q [batch, heads, rows, dim], which holds a span, over k and v, which hold another."""
    k, v = (_keys_of(segments, one) for one in (k, v))
    packed = len(segments) > 1
    if packed:
        q, k, v = (_packed(one) for one in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, **_place(q, segments, mask, options), **options)
    return (_unpacked(out), lse[None]) if packed else (out, lse)


def gradients(tensors: Sequence[Tensor], grads: Sequence[Tensor], segments: Sequence[Segment],
              mask: Mask, **options: Any) -> list[Tensor]:
    """[dq, dk, dv] in f32, and dsinks if sinks are given: of one span of queries and one of keys.

    tensors are q, k, v, out and lse; grads are those of out and lse. dk and dv have the keys of the
    segments alone.
    """
    q, k, v, out, lse = tensors
    d_out, d_lse = grads
    k, v = (_keys_of(segments, one) for one in (k, v))
    packed = len(segments) > 1
    if packed:
        q, k, v, out, d_out = (_packed(one) for one in (q, k, v, out, d_out))
        lse, d_lse = lse[0], d_lse[0]
    wanted = ("q", "k", "v") if options.get("sinks") is None else ("q", "k", "v", "sinks")
    made = attention_backward(d_out, q, k, v, out, lse, dlse=d_lse, wanted=wanted, grad_dtype="f32",
                              **_place(q, segments, mask, options), **options)
    return [*(_unpacked(one) if packed else one for one in made[:3]), *made[3:]]


def _keys_of(segments: Sequence[Segment], one: Tensor) -> Tensor:
    return one[:, :, segments[0].k_begin:segments[-1].k_end]


def _packed(one: Tensor) -> Tensor:
    """[1, heads, rows, dim] as [rows, heads, dim]."""
    return one[0].transpose(0, 1)


def _unpacked(one: Tensor) -> Tensor:
    return one.transpose(0, 1)[None]


def _place(q: Tensor, segments: Sequence[Segment], mask: Mask, options: dict[str, Any]) -> dict[str, Any]:
    """The mask and the positions as options of a call. A call without positions, or without a mask, has
    more kernels to choose from and less to do, so both are left out where they change no value. Batch-
    invariant calls keep them, because the mask may decide the bits."""
    place: dict[str, Any] = {}
    invariant = options.get("reproducibility") == "batch_invariant"
    if invariant or not all(mask.segment_sees_all(one) for one in segments):
        place |= dict(causal=mask.causal, window=mask.window)
        if mask.reach != (-1, -1) and not all(
                one.is_bottom_right and not (invariant and one.k_start) for one in segments):
            place |= dict(q_start=_ints(q, [one.q_start for one in segments]),
                          k_start=_ints(q, [one.k_start for one in segments]))
    if len(segments) == 1:
        for name in ("q_start", "k_start"):
            if name in place:
                place[name] = getattr(segments[0], name)
        return place
    first = segments[0].k_begin
    return place | dict(cu_seqlens_q=_ints(q, [0] + [one.q_end for one in segments]),
                        cu_seqlens_k=_ints(q, [0] + [one.k_end - first for one in segments]),
                        max_q_len=max(one.q_end - one.q_begin for one in segments),
                        max_kv_len=max(one.k_end - one.k_begin for one in segments))


def _ints(like: Tensor, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


_KEPT = 4  # partial results of a row that wait for a merge

Part = tuple[int, Tensor, Tensor]  # first key, out, lse


class Partials:
    """Partial results of a rank's rows, whose out and lse they are merged into.

    Merged four at a time, so that memory does not grow with the number of ranks; or, if `in_order`, kept
    and merged once in ascending order of their keys, which gives the same bits on every rank. Spans of
    rows that have had the same parts so far are one region, merged in one launch.
    """

    def __init__(self, out: Tensor, lse: Tensor, spans: Sequence[Span], in_order: bool) -> None:
        """spans: the ranges of rows of which a part has all or none."""
        self._out, self._lse, self._spans, self._in_order = out, lse, spans, in_order
        self._regions: dict[Span, list[Part]] = {(0, out.shape[2]): []}

    def add(self, first_key: int, rows: Span, out: Tensor, lse: Tensor) -> None:
        for region in list(self._regions):
            if region[0] < rows[0] < region[1] or region[0] < rows[1] < region[1]:
                self._split(region)
        for (a, b), parts in self._regions.items():
            if rows[0] <= a and b <= rows[1]:
                own = slice(a - rows[0], b - rows[0])
                parts.append((first_key, out[:, :, own], lse[:, :, own]))
                if len(parts) > _KEPT and not self._in_order:
                    first, outs, lses = zip(*parts[:_KEPT])
                    parts[:_KEPT] = [(first[0], *merge(outs, lses, return_lse=True))]

    def _split(self, region: Span) -> None:
        """Divides a region into its spans."""
        parts = self._regions.pop(region)
        for a, b in self._spans:
            if region[0] <= a and b <= region[1]:
                own = slice(a - region[0], b - region[0])
                self._regions[a, b] = [(key, out[:, :, own], lse[:, :, own]) for key, out, lse in parts]

    def finish(self, sinks: Tensor | None) -> None:
        """Writes out and lse."""
        for (a, b), parts in self._regions.items():
            _finish(self._out[:, :, a:b], self._lse[:, :, a:b], parts, sinks)


def _finish(out: Tensor, lse: Tensor, parts: list[Part], sinks: Tensor | None) -> None:
    if 0 in out.shape:
        lse.fill_(float("-inf"))
        return
    if not parts:  # no row sees a key
        none = torch.full_like(lse, float("-inf"), memory_format=torch.contiguous_format)
        parts = [(0, torch.zeros_like(out, dtype=none.dtype), none)]
    _, outs, lses = zip(*sorted(parts, key=lambda one: one[0]))
    lse.copy_(merge(outs, lses, sinks=sinks, out=out, return_lse=True)[1])


class Gradients:
    """Sums of dq, dk and dv in f32, for tensors of these shapes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.k, self.v = (torch.zeros(one.shape, dtype=torch.float32, device=one.device)
                                  for one in (q, k, v))

    def add(self, rows: slice, keys: slice, tensors: Sequence[Tensor], grads: Sequence[Tensor],
            segments: Sequence[Segment], mask: Mask, **options: Any) -> Tensor | None:
        """Adds the gradients of one span of queries, `rows`, and one span of keys, `keys`. Returns dsinks
        if sinks are given. tensors and grads are those of gradients(), of all rows and keys."""
        sinks = options.get("sinks")
        if rows.start >= rows.stop or (sinks is None and not any(map(mask.segment_sees, segments))):
            return None if sinks is None else torch.zeros_like(sinks)
        q, k, v, out, lse = tensors
        dq, dk, dv, *dsinks = gradients(
            (q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]),
            [one[:, :, rows] for one in grads], segments, mask, **options)
        seen = slice(keys.start + segments[0].k_begin, keys.start + segments[-1].k_end)
        self.q[:, :, rows] += dq
        self.k[:, :, seen] += dk
        self.v[:, :, seen] += dv
        return dsinks[0] if dsinks else None


def sink_gradients(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                   grads: Sequence[Tensor], **options: Any) -> Tensor:
    """dsinks [heads] over these rows, whose out and lse cover keys of other ranks."""
    if 0 in out.shape:
        return torch.zeros_like(sinks)
    (made,) = attention_backward(grads[0], q, k[:, :, :0], v[:, :, :0], out, lse, dlse=grads[1],
                                 sinks=sinks, wanted=("sinks",), global_lse=True, **options)
    return made
