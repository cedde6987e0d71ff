"""Exchange between "some rows of all heads" and "all rows of some heads": the all-to-all of Ulysses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job
from flashcore.distributed.placement import Span, joined, put, rows, take

# A tensor has the heads and rows of the queries, or those of the keys.
Kinds = Sequence[str]


def _part(job: Job, member: int, kind: str) -> slice:
    one = job.heads(member)
    return slice(one.q_begin, one.q_end) if kind == "q" else slice(one.k_begin, one.k_end)


def _spans(job: Job, group: Sequence[int], kind: str) -> list[tuple[Span, ...]]:
    return [(job.q_spans if kind == "q" else job.k_spans)[r] for r in group]


def rows_to_heads(job: Job, comm: Comm, group: Sequence[int], tensors: Sequence[Tensor],
                  kinds: Kinds, step: str) -> list[Tensor]:
    """From this rank's rows of all heads to its heads of all rows of the group, in ascending order.

    Tensors are [batch, heads, rows, dim]; comm has the ranks of the group.
    """
    sends = {peer: [one[:, _part(job, peer, kind)] for one, kind in zip(tensors, kinds)]
             for peer in range(comm.size) if peer != comm.rank}
    mine = [one[:, _part(job, comm.rank, kind)] for one, kind in zip(tensors, kinds)]
    shapes = {peer: [[one.shape[0], one.shape[1], rows(_spans(job, group, kind)[peer]), one.shape[3]]
                     for one, kind in zip(mine, kinds)] for peer in sends}
    got = comm.exchange(sends, shapes, tensors[0], step, [one.dtype for one in tensors]).wait()
    made = []
    for i, (one, kind) in enumerate(zip(mine, kinds)):
        spans = _spans(job, group, kind)
        whole = joined([span for some in spans for span in some])
        full = one.new_empty((*one.shape[:2], rows(whole), one.shape[3]))
        for peer in range(comm.size):
            put(full, 2, whole, spans[peer], one if peer == comm.rank else got[peer][i])
        made.append(full)
    return made


def heads_to_rows(job: Job, comm: Comm, group: Sequence[int], tensors: Sequence[Tensor],
                  kinds: Kinds, step: str) -> list[Tensor]:
    """The inverse of rows_to_heads(). Heads that several ranks have are added up in order of ranks."""
    parts: dict[int, list[Tensor]] = {peer: [] for peer in range(comm.size)}
    for one, kind in zip(tensors, kinds):
        spans = _spans(job, group, kind)
        whole = joined([span for some in spans for span in some])
        for peer in range(comm.size):
            parts[peer].append(take(one, 2, whole, spans[peer]))
    mine = parts.pop(comm.rank)
    shapes: dict[int, list[list[int]]] = {}
    for peer in parts:
        counts = [_part(job, peer, kind) for kind in kinds]
        shapes[peer] = [[one.shape[0], part.stop - part.start, one.shape[2], one.shape[3]]
                        for one, part in zip(mine, counts)]
    got = comm.exchange(parts, shapes, tensors[0], step, [one.dtype for one in tensors]).wait()
    made = []
    for i, (one, kind) in enumerate(zip(mine, kinds)):
        total = job.q_heads if kind == "q" else job.kv_heads
        full = torch.zeros((one.shape[0], total, *one.shape[2:]), dtype=one.dtype, device=one.device)
        for peer in range(comm.size):
            full[:, _part(job, peer, kind)] += one if peer == comm.rank else got[peer][i]
        made.append(full)
    return made
