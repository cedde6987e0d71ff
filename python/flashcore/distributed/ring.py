"""Scheme "ring": K and V travel from rank to rank, and each rank attends to one block at a time.

At step i rank r holds the block of rank r - i. It receives the next block while it computes. A block
stops at the last rank that sees one of its keys.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flashcore.distributed.comm import Comm, Pending
from flashcore.distributed.job import Job
from flashcore.distributed.local import Gradients, Partials, attend, sink_gradients
from flashcore.distributed.placement import Span, offsets

Result = tuple[Tensor, Tensor]


@functools.lru_cache(maxsize=64)
def last_hops(job: Job) -> tuple[int, ...]:
    """For each block, the number of hops to the last rank that sees one of its keys."""
    return tuple(next((hop for hop in range(job.ranks - 1, 0, -1) if job.mask.pairs(
        job.q_spans[(block + hop) % job.ranks], job.k_spans[block])), 0) for block in range(job.ranks))


class _Ring:
    """The way of the blocks, as one rank sees it."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self.job, self.comm, self.rank, self.size = job, comm, comm.rank, comm.size
        self.hops = last_hops(job)

    def block(self, step: int) -> int:
        """The block that this rank holds at a step."""
        return (self.rank - step) % self.size

    def shapes(self, block: int) -> list[list[int]]:
        job = self.job
        return [[job.batch, job.kv_heads, job.k_rows(block), dim] for dim in (job.dim, job.v_dim)]

    def pass_on(self, step: int, held: Sequence[Tensor] | None, like: Tensor, name: str,
                dtype: torch.dtype) -> Pending:
        """Starts to send what this rank holds at `step` and to receive what it holds at the next."""
        arriving = self.block(step + 1)
        sends = {(self.rank + 1) % self.size: held} if held and step < self.hops[self.block(step)] else {}
        shapes = {}
        if step + 1 <= self.hops[arriving]:
            shapes[(self.rank - 1) % self.size] = self.shapes(arriving)
        return self.comm.exchange(sends, shapes, like, name, [dtype, dtype])

    def arrived(self, pending: Pending) -> list[Tensor] | None:
        """None if the block does not come this far."""
        return pending.wait().get((self.rank - 1) % self.size)


def forward(job: Job, comm: Comm, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Result:
    """(out, lse) of this rank's rows."""
    ring = _Ring(job, comm)
    q_spans = job.q_spans[comm.rank]
    queries = [q.narrow(2, at, end - begin) for (begin, end), at in zip(q_spans, offsets(q_spans))]
    if comm.size == 1 and len(q_spans) == 1 and len(job.k_spans[0]) == 1:  # needs no merge
        segments = job.mask.segments(q_spans[0], job.k_spans[0][0])
        return attend(q, k, v, segments, job.mask, sinks=sinks, **job.options)
    partials = [Partials(one, v, job.in_order) for one in queries]
    held: list[Tensor] | None = [k, v]
    for step in range(comm.size):
        if step + 1 < comm.size:
            pending = ring.pass_on(step, held, k, f"ring step {step + 1}", k.dtype)
        if held is not None:
            k_spans = job.k_spans[ring.block(step)]
            starts = offsets(k_spans)
            for i, j in job.mask.pairs(q_spans, k_spans):
                begin, end = k_spans[j]
                keys, values = (one.narrow(2, starts[j], end - begin) for one in held)
                segments = job.mask.segments(q_spans[i], k_spans[j])
                partials[i].add(begin, *attend(queries[i], keys, values, segments, job.mask,
                                               partial=True, **job.options))
        if step + 1 < comm.size:
            held = ring.arrived(pending)
    results = [one.result(sinks) for one in partials]
    if len(results) == 1:
        return results[0]
    if not results:  # this rank has no rows
        return (q.new_empty((*q.shape[:3], v.shape[-1])),
                torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def backward(job: Job, comm: Comm, tensors: Sequence[Tensor], sinks: Tensor | None,
             grads: Sequence[Tensor]) -> list[Tensor | None]:
    """[dq, dk, dv, dsinks] of this rank's rows, not rounded. tensors are q, k, v, out and lse.

    K and V travel again. The sums dK and dV of a block follow one step behind, since each rank adds to
    them only after its own computation, and at the end go home to the block's rank.
    """
    ring = _Ring(job, comm)
    q, k, v, out, lse = tensors
    q_spans = job.q_spans[comm.rank]
    dq = Gradients(q, k[:, :, :0], v[:, :, :0])
    wide = dq.wide
    dsinks = None if sinks is None else sink_gradients(sinks, out, lse, *grads)
    held: list[Tensor] | None = [k, v]
    sums_pending: Pending | None = None
    finished: dict[int, list[Tensor]] = {}
    for step in range(comm.size):
        block, more = ring.block(step), step + 1 < comm.size
        if more:
            pending = ring.pass_on(step, held, k, f"ring step {step + 1}", k.dtype)
        sums = None
        if held is not None:
            added = Gradients(q[:, :, :0], *held)
            added.q = dq.q
            _add_block(job, added, q_spans, job.k_spans[block], (q, *held, out, lse), grads)
            sums = [added.k, added.v]
        before = None if sums_pending is None else ring.arrived(sums_pending)
        if before is not None and sums is not None:
            sums = [one + own for one, own in zip(before, sums)]
        if more:
            sums_pending = ring.pass_on(step, sums, k, f"ring step {step + 1}, dK and dV", wide)
        if sums is not None and step == ring.hops[block]:
            finished[block] = sums
        if more:
            held = ring.arrived(pending)
    dk, dv = _send_home(ring, finished, k, wide)
    return [dq.q, dk, dv, dsinks]


def _add_block(job: Job, sums: Gradients, q_spans: Sequence[Span],
               k_spans: Sequence[Span], tensors: Sequence[Tensor],
               grads: Sequence[Tensor]) -> None:
    q_at, k_at = offsets(q_spans), offsets(k_spans)
    for i, j in job.mask.pairs(q_spans, k_spans):
        q_len, k_len = (span[1] - span[0] for span in (q_spans[i], k_spans[j]))
        sums.add(slice(q_at[i], q_at[i] + q_len), slice(k_at[j], k_at[j] + k_len), tensors, grads,
                 job.mask.segments(q_spans[i], k_spans[j]), job.mask, scale=job.scale,
                 softcap=job.softcap, global_lse=True)


def _send_home(ring: _Ring, finished: dict[int, list[Tensor]], like: Tensor,
               wide: torch.dtype) -> list[Tensor]:
    """This rank's dK and dV, from the last rank that added to them."""
    own = finished.pop(ring.rank, None)
    last = (ring.rank + ring.hops[ring.rank]) % ring.size
    shapes = {} if own is not None else {last: ring.shapes(ring.rank)}
    got = ring.comm.exchange(finished, shapes, like, "dK and dV home", [wide, wide]).wait()
    return own if own is not None else got[last]
