"""Placement: which rows of a sequence each rank holds, shard() and position_ids().

A span is (begin, end) in rows of the whole sequence. A rank's shard is its spans one after another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashcore._core.scalars import one_of

Span = tuple[int, int]
SHARDINGS = ("zigzag", "contiguous")


def place(length: int, ranks: int, sharding: str) -> list[list[Span]]:
    """The spans of every rank, for shards that are as equal as possible.

    "contiguous": rank r holds part r of `ranks` parts. "zigzag": the parts r and 2*ranks-1-r of 2*ranks
    parts, which gives all ranks the same work under a causal mask.

    >>> place(16, 2, "zigzag")
    [[(0, 4), (12, 16)], [(4, 12)]]
    """
    parts = ranks if one_of("sharding", sharding, SHARDINGS) == "contiguous" else 2 * ranks
    cuts = [i * length // parts for i in range(parts + 1)]
    spans = [*zip(cuts, cuts[1:])]
    if sharding == "contiguous":
        return [joined([one]) for one in spans]
    return [joined([spans[r], spans[parts - 1 - r]]) for r in range(ranks)]


def place_lengths(lengths: Sequence[int], sharding: str) -> list[list[Span]]:
    """The spans of every rank, for shards of these lengths. Contiguous shards may have any lengths."""
    if sharding == "contiguous":
        ends = [sum(lengths[:r + 1]) for r in range(len(lengths))]
        return [joined([(end - n, end)]) for n, end in zip(lengths, ends)]
    spans = place(sum(lengths), len(lengths), sharding)
    for r, (one, n) in enumerate(zip(spans, lengths)):
        if rows(one) != n:
            raise ValueError(f"rank {r}: has {n} rows; zigzag placement of {sum(lengths)} rows on "
                             f"{len(lengths)} ranks gives it {rows(one)}. Make the shards with "
                             'flashcore.distributed.shard, or pass sharding="contiguous"')
    return spans


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans in ascending order, without empty ones, adjacent ones as one."""
    made: list[Span] = []
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if made and made[-1][1] >= begin:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((begin, end))
    return made


def rows(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def offsets(spans: Sequence[Span]) -> list[int]:
    """Where each span begins in the tensor that holds the spans one after another."""
    return [rows(spans[:i]) for i in range(len(spans))]


def overlap(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """The rows that are in both, in ascending order."""
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return joined(both)


def take(x: Tensor, dim: int, held: Sequence[Span], wanted: Sequence[Span]) -> Tensor:
    """The rows `wanted` of x, whose dimension dim holds the spans `held`."""
    parts = []
    for (begin, end), offset in zip(held, offsets(held)):
        for low, high in overlap([(begin, end)], wanted):
            parts.append(x.narrow(dim, offset + low - begin, high - low))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def put(x: Tensor, dim: int, held: Sequence[Span], given: Sequence[Span], values: Tensor,
        add: bool = False) -> None:
    """Writes values, which hold the spans `given`, into x, which holds the spans `held`, or adds them."""
    for (begin, end), offset in zip(held, offsets(held)):
        for low, high in overlap([(begin, end)], given):
            target = x.narrow(dim, offset + low - begin, high - low)
            source = take(values, dim, given, [(low, high)])
            if add:
                target += source
            else:
                target.copy_(source)


def shard(x: Tensor, dim: int, *, group: Any = None, sharding: str = "zigzag") -> Tensor:
    """This rank's rows of x along dim. Every rank passes the whole x. Gradients flow through it."""
    spans = place(x.shape[dim], dist.get_world_size(group), sharding)
    whole = [(0, x.shape[dim])]
    return take(x, dim, whole, spans[dist.get_rank(group)]).contiguous()


def position_ids(length: int, *, group: Any = None, sharding: str = "zigzag",
                 cu_seqlens: Any = None, device: Any = None) -> Tensor:
    """Position of each of this rank's rows, int64: for rotary embeddings and for labels.

    `length` is the length of the whole sequence. With cu_seqlens, which holds the first row of each
    packed document and the length, positions start at 0 in each document.
    """
    whole = torch.arange(length, device=device)
    if cu_seqlens is not None:
        starts = torch.as_tensor(cu_seqlens, device=device).long()
        if starts.dim() != 1 or starts.numel() == 0 or int(starts[0]) or int(starts[-1]) != length:
            raise ValueError(f"cu_seqlens: wanted the first row of each document and then the length, "
                             f"[0, ..., {length}]")
        whole = whole - starts[torch.searchsorted(starts, whole, right=True) - 1]
    return shard(whole, 0, group=group, sharding=sharding)
