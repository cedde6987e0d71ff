"""The local part of a step of the ring: this rank's rows and one block of keys, forward and backward."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashcore.distributed.job import Job
from flashcore.distributed.local import Gradients, Partials, attend, sink_gradients
from flashcore.distributed.masks import Mask, Segment
from flashcore.distributed.placement import Span, offsets


class Tile(NamedTuple):
    """The rows and keys of one local call, as ranges of those that a rank and a block hold."""
    rows: Span
    keys: Span
    first_key: int
    segments: Sequence[Segment]
    mask: Mask


@functools.lru_cache(maxsize=256)
def tiles(job: Job, rank: int, block: int) -> tuple[Tile, ...]:
    """The local calls of `rank` with the keys of rank `block`: one for each span of rows and span of keys
    that they see, or larger ones with the same pairs of a row and a key. Batch-invariant calls have
    bits that depend on the ranges of keys, so their ranges are the spans."""
    q_spans, k_spans, mask = job.q_spans[rank], job.k_spans[block], job.mask
    rows, keys = _ranges(q_spans), _ranges(k_spans)
    pairs = mask.pairs(q_spans, k_spans)
    if len(pairs) > 1 and not job.in_order and len(mask.q_docs) == 2:
        if q_spans == k_spans and mask.q_docs == mask.k_docs and mask.reach == (-1, 0):
            # Rows and keys are in the same ascending order, so one causal mask serves all spans.
            return (_joined(rows, keys, k_spans[0][0], mask),)
        if all(mask.segment_sees_all(one) for i, j in pairs
               for one in mask.segments(q_spans[i], k_spans[j])):
            return _unmasked(pairs, rows, keys, k_spans, replace(mask, causal=False, window=(-1, -1)))
    return tuple(Tile(rows[i], keys[j], k_spans[j][0], mask.segments(q_spans[i], k_spans[j]), mask)
                 for i, j in pairs)


def _unmasked(pairs: Sequence[tuple[int, int]], rows: Sequence[Span], keys: Sequence[Span],
              k_spans: Sequence[Span], mask: Mask) -> tuple[Tile, ...]:
    """Tiles of pairs without a hidden key: neighbouring rows that see the same keys are one call."""
    seen: dict[int, list[int]] = {}
    for i, j in pairs:
        seen.setdefault(i, []).append(j)
    groups: list[tuple[list[int], list[int]]] = []
    for i, these in seen.items():
        if groups and groups[-1][1] == these and groups[-1][0][-1] == i - 1:
            groups[-1][0].append(i)
        else:
            groups.append(([i], these))
    made = []
    for members, these in groups:
        runs: list[list[int]] = []  # of neighbouring keys
        for j in these:
            if runs and runs[-1][-1] == j - 1:
                runs[-1].append(j)
            else:
                runs.append([j])
        made += [_joined([rows[i] for i in members], [keys[j] for j in run], k_spans[run[0]][0], mask)
                 for run in runs]
    return tuple(made)


def _joined(rows: Sequence[Span], keys: Sequence[Span], first_key: int, mask: Mask) -> Tile:
    q, k = (rows[0][0], rows[-1][1]), (keys[0][0], keys[-1][1])
    return Tile(q, k, first_key, [Segment(0, q[1] - q[0], 0, k[1] - k[0], 0, 0)], mask)


def _ranges(spans: Sequence[Span]) -> list[Span]:
    """Where each span is in a tensor that holds them all."""
    return [(at, at + end - begin) for at, (begin, end) in zip(offsets(spans), spans)]


class ForwardStep:
    """Attention of a rank's rows over one block after the other."""

    def __init__(self, job: Job, rank: int, q: Tensor, v_dim: int) -> None:
        self._job, self._rank, self._q = job, rank, q
        self._out = q.new_empty((*q.shape[:3], v_dim))
        self._lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        self._partials = Partials(self._out, self._lse, _ranges(job.q_spans[rank]), job.in_order)

    def add(self, block: int, k: Tensor, v: Tensor) -> None:
        """k and v are those of rank `block`."""
        for tile in tiles(self._job, self._rank, block):
            (first, last), keys = tile.rows, slice(*tile.keys)
            out, lse = attend(self._q[:, :, first:last], k[:, :, keys], v[:, :, keys], tile.segments,
                              tile.mask, partial=True, **self._job.options)
            self._partials.add(tile.first_key, tile.rows, out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of the rank's rows."""
        self._partials.finish(sinks)
        return self._out, self._lse


class BackwardStep:
    """Gradients of a rank's rows and one block after the other."""

    def __init__(self, job: Job, rank: int, q: Tensor, out: Tensor, lse: Tensor,
                 grads: Sequence[Tensor]) -> None:
        """out and lse cover the keys of all ranks; grads are theirs."""
        self._job, self._rank, self._grads = job, rank, grads
        self._rows = q, out, lse
        self.dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def add(self, block: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Adds to dq. Returns dk and dv of the block, in f32, of this rank's rows alone."""
        q, out, lse = self._rows
        sums = Gradients(q[:, :, :0], k, v)
        sums.q = self.dq
        for tile in tiles(self._job, self._rank, block):
            sums.add(slice(*tile.rows), slice(*tile.keys), (q, k, v, out, lse), self._grads,
                     tile.segments, tile.mask, global_lse=True, **self._job.options)
        return [sums.k, sums.v]

    def dsinks(self, sinks: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[heads], of this rank's rows alone. k and v: any block."""
        q, out, lse = self._rows
        return sink_gradients(sinks, q, k, v, out, lse, self._grads, **self._job.options)
