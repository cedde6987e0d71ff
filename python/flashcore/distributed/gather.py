"""Schemes "gather" and "halo": each rank receives all keys that its rows see, then attends once.

"halo" is for windows: a rank receives the keys inside the window alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job
from flashcore.distributed.local import Gradients, attend
from flashcore.distributed.placement import Span, joined, offsets, overlap, put, rows, take

Result = tuple[Tensor, Tensor]


def keys_of(job: Job, rank: int) -> list[Span]:
    """For each span of this rank's queries, the keys it sees.

    A batch-invariant call gives a row all keys from the first on: its bits then do not depend on the
    number of ranks.
    """
    in_window = job.scheme == "halo" or not job.in_order
    return [job.mask.keys_of(one, in_window) for one in job.q_spans[rank]]


def _message(job: Job, source: int, target: int) -> list[Span]:
    """The rows of K and V that rank `source` sends to rank `target`."""
    return overlap(job.k_spans[source], joined(keys_of(job, target)))


def _gathered(job: Job, comm: Comm, k: Tensor, v: Tensor) -> tuple[list[Span], Tensor, Tensor]:
    """(spans, keys, values): all that this rank's rows see."""
    needed = joined(keys_of(job, comm.rank))
    own = job.k_spans[comm.rank]
    others = [r for r in range(comm.size) if r != comm.rank]
    sends = {r: [take(one, 2, own, _message(job, comm.rank, r)) for one in (k, v)] for r in others}
    shapes = {r: [[*one.shape[:2], rows(_message(job, r, comm.rank)), one.shape[3]] for one in (k, v)]
              for r in others}
    got = comm.exchange(sends, shapes, k, "keys and values").wait()
    made = []
    for i, one in enumerate((k, v)):
        full = one.new_empty((*one.shape[:2], rows(needed), one.shape[3]))
        put(full, 2, needed, own, one)
        for r in others:
            put(full, 2, needed, _message(job, r, comm.rank), got[r][i])
        made.append(full)
    return needed, made[0], made[1]


def forward(job: Job, comm: Comm, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Result:
    """(out, lse) of this rank's rows."""
    needed, keys, values = _gathered(job, comm, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    q_spans = job.q_spans[comm.rank]
    for span, at, seen in zip(q_spans, offsets(q_spans), keys_of(job, comm.rank)):
        part = slice(at, at + span[1] - span[0])
        out[:, :, part], lse[:, :, part] = attend(
            q[:, :, part], take(keys, 2, needed, [seen]), take(values, 2, needed, [seen]),
            job.mask.segments(span, seen), job.mask, sinks=sinks, **job.options)
    return out, lse


def backward(job: Job, comm: Comm, tensors: Sequence[Tensor], sinks: Tensor | None,
             grads: Sequence[Tensor]) -> list[Tensor | None]:
    """[dq, dk, dv, dsinks] of this rank's rows, not rounded. tensors are q, k, v, out and lse.

    K and V are gathered again. Each rank sends dK and dV to the ranks of the keys, which add them up in
    order of ranks.
    """
    q, k, v, out, lse = tensors
    needed, keys, values = _gathered(job, comm, k, v)
    sums = Gradients(q, keys, values)
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    q_spans = job.q_spans[comm.rank]
    for span, at, seen in zip(q_spans, offsets(q_spans), keys_of(job, comm.rank)):
        first = rows(overlap(needed, [(0, seen[0])]))
        own = sums.add(slice(at, at + span[1] - span[0]), slice(first, first + seen[1] - seen[0]),
                       (q, keys, values, out, lse), grads, job.mask.segments(span, seen), job.mask,
                       sinks=sinks, **job.options)
        dsinks = own if dsinks is None else dsinks + own
    dk, dv = _scattered(job, comm, needed, sums, k, v)
    return [sums.q, dk, dv, dsinks]


def _scattered(job: Job, comm: Comm, needed: Sequence[Span], sums: Gradients, k: Tensor,
               v: Tensor) -> list[Tensor]:
    """This rank's dK and dV, summed over the ranks that see its keys."""
    own = job.k_spans[comm.rank]
    others = [r for r in range(comm.size) if r != comm.rank]
    sends = {r: [take(one, 2, needed, _message(job, r, comm.rank)) for one in (sums.k, sums.v)]
             for r in others}
    shapes = {r: [[*one.shape[:2], rows(_message(job, comm.rank, r)), one.shape[3]] for one in (k, v)]
              for r in others}
    got = comm.exchange(sends, shapes, sums.k, "dK and dV").wait()
    made = []
    for i, (one, local) in enumerate(((k, sums.k), (v, sums.v))):
        full = torch.zeros(one.shape, dtype=torch.float32, device=one.device)
        for r in range(comm.size):
            put(full, 2, own, needed if r == comm.rank else _message(job, comm.rank, r),
                local if r == comm.rank else got[r][i], add=True)
        made.append(full)
    return made
