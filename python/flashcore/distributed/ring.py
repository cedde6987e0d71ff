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
from flashcore.distributed.local import attend
from flashcore.distributed.ring_step import BackwardStep, ForwardStep

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
    ring, q_spans = _Ring(job, comm), job.q_spans[comm.rank]
    if comm.size == 1 and len(q_spans) == 1 and len(job.k_spans[0]) == 1:  # needs no merge
        segments = job.mask.segments(q_spans[0], job.k_spans[0][0])
        return attend(q, k, v, segments, job.mask, sinks=sinks, **job.options)
    local = ForwardStep(job, comm.rank, q, v.shape[-1])
    held: list[Tensor] | None = [k, v]
    for step in range(comm.size):
        if step + 1 < comm.size:
            pending = ring.pass_on(step, held, k, f"ring step {step + 1}", k.dtype)
        if held is not None:
            local.add(ring.block(step), *held)
        if step + 1 < comm.size:
            held = ring.arrived(pending)
    return local.result(sinks)


def backward(job: Job, comm: Comm, tensors: Sequence[Tensor], sinks: Tensor | None,
             grads: Sequence[Tensor]) -> list[Tensor | None]:
    """[dq, dk, dv, dsinks] of this rank's rows, not rounded. tensors are q, k, v, out and lse.

    K and V travel again. The sums dK and dV of a block follow one step behind, since each rank adds to
    them only after its own computation, and at the end go home to the block's rank.
    """
    ring = _Ring(job, comm)
    q, k, v, out, lse = tensors
    local = BackwardStep(job, comm.rank, q, out, lse, grads)
    dsinks = None if sinks is None else local.dsinks(sinks, k, v)
    held: list[Tensor] | None = [k, v]
    sums_pending: Pending | None = None
    finished: dict[int, list[Tensor]] = {}
    for step in range(comm.size):
        block, more = ring.block(step), step + 1 < comm.size
        if more:
            pending = ring.pass_on(step, held, k, f"ring step {step + 1}", k.dtype)
        sums = None if held is None else local.add(block, *held)
        before = None if sums_pending is None else ring.arrived(sums_pending)
        if before is not None and sums is not None:
            sums = [one + own for one, own in zip(before, sums)]
        if more:
            sums_pending = ring.pass_on(step, sums, k, f"ring step {step + 1}, dK and dV", torch.float32)
        if sums is not None and step == ring.hops[block]:
            finished[block] = sums
        if more:
            held = ring.arrived(pending)
    dk, dv = _send_home(ring, finished, k)
    return [local.dq, dk, dv, dsinks]


def _send_home(ring: _Ring, finished: dict[int, list[Tensor]], like: Tensor) -> list[Tensor]:
    """This rank's dK and dV, from the last rank that added to them."""
    own = finished.pop(ring.rank, None)
    last = (ring.rank + ring.hops[ring.rank]) % ring.size
    shapes = {} if own is not None else {last: ring.shapes(ring.rank)}
    got = ring.comm.exchange(finished, shapes, like, "dK and dV home", [torch.float32] * 2).wait()
    return own if own is not None else got[last]
