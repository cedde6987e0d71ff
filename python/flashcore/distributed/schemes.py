"""Chooses a scheme, and runs it with gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from flashcore.distributed import gather, heads, ring
from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job

SCHEMES = ("auto", "ring", "gather", "ulysses", "2d", "halo")


def choose(scheme: str, *, ranks: int, node: int, q_heads: int, kv_heads: int, documents: int,
           reach: tuple[int, int], head_ranks: int | None = None) -> tuple[str, int, str]:
    """(scheme, ranks that divide heads, reason). node: ranks per machine. Raises ValueError if the given
    scheme does not fit."""
    if scheme == "auto":
        return _choose(ranks, node, q_heads, kv_heads, documents, reach)
    if scheme == "ulysses":
        _check_heads(ranks, q_heads, kv_heads)
        return scheme, ranks, "given by the caller"
    if scheme == "2d":
        count = _largest(ranks, node, kv_heads) if head_ranks is None else head_ranks
        if count < 1 or ranks % count:
            raise ValueError(f"head_ranks is {count}; wanted a divisor of the {ranks} ranks")
        _check_heads(count, q_heads, kv_heads)
        return scheme, count, "given by the caller"
    if scheme == "halo" and min(reach) < 0:
        raise ValueError('scheme is "halo", which needs a window: pass window=(left, right), or '
                         'window=(left, -1) with causal=True')
    return scheme, 1, "given by the caller"


def _choose(ranks: int, node: int, q_heads: int, kv_heads: int, documents: int,
            reach: tuple[int, int]) -> tuple[str, int, str]:
    if ranks == 1:
        return "gather", 1, "one rank sends nothing"
    if min(reach) >= 0:
        return "halo", 1, "a window: each rank needs only the keys next to its rows"
    if documents > 1:
        return "gather", 1, "packed documents: one exchange, and one call over many documents"
    if ranks <= node and kv_heads % ranks == 0:
        return "ulysses", ranks, (f"{ranks} ranks of one machine divide {kv_heads} KV heads: its bytes "
                                  "per row do not grow with the number of ranks")
    count = _largest(ranks, node, kv_heads)
    if ranks > node and count > 1:
        return "2d", count, (f"several machines: {count} ranks divide the heads, so that a step between "
                             f"machines has {count} times the work for the same bytes")
    return "ring", 1, f"{kv_heads} KV heads cannot be divided by {ranks} ranks"


def _largest(ranks: int, node: int, kv_heads: int) -> int:
    """The largest number of ranks of one machine that divides the KV heads."""
    common = math.gcd(ranks, kv_heads)
    return max(one for one in range(1, common + 1) if common % one == 0 and one <= max(node, 1))


def _check_heads(count: int, q_heads: int, kv_heads: int) -> None:
    if q_heads % count or (kv_heads % count and count % max(kv_heads, 1)):
        raise ValueError(f"{count} ranks cannot divide {q_heads} query heads and {kv_heads} KV heads "
                         "evenly; use scheme=\"ring\", or as many ranks as divide both numbers")


def traffic(job: Job, rank: int, backward: bool = False) -> list[tuple[str, int]]:
    """(step, bytes that this rank sends in it), in order."""
    inner = job.one_head_group(rank)
    between: list[tuple[str, int]] = _module(job).traffic(inner, rank // job.head_ranks, backward)
    if job.head_ranks == 1:
        return between
    first, last = heads.traffic(job, rank, backward)
    return [first, *between, last]


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of this rank's rows, all tensors [batch, heads, rows, dim]."""

    @staticmethod
    def forward(ctx: Any, job: Job, comm: Comm, q: Tensor, k: Tensor, v: Tensor,
                sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        group = job.group_of(comm.rank)
        inner, own_sinks = job.one_head_group(comm.rank), sinks
        if job.head_ranks > 1:
            q, k, v = heads.rows_to_heads(job, comm.some(group), group, (q, k, v), "qkk",
                                          "q, k, v by heads")
            own = job.heads(comm.rank % job.head_ranks)
            own_sinks = None if sinks is None else sinks[own.q_begin:own.q_end].contiguous()
        out, lse = _module(job).forward(inner, comm.some(job.ring_of(comm.rank)), q, k, v, own_sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.job, ctx.comm = job, comm
        if job.head_ranks > 1:
            lse, out = heads.heads_to_rows(job, comm.some(group), group, (lse[..., None], out), "qq",
                                           "out by rows")
            lse = lse[..., 0]
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        job, comm = ctx.job, ctx.comm
        q, k, v, out, lse, sinks = ctx.saved_tensors
        group, own = job.group_of(comm.rank), job.heads(comm.rank % job.head_ranks)
        own_sinks = sinks
        if job.head_ranks > 1:
            grad_lse, grad_out = heads.rows_to_heads(
                job, comm.some(group), group, (grad_lse[..., None], grad_out), "qq", "dO by heads")
            grad_lse = grad_lse[..., 0]
            own_sinks = None if sinks is None else sinks[own.q_begin:own.q_end].contiguous()
        dq, dk, dv, dsinks = _module(job).backward(
            job.one_head_group(comm.rank), comm.some(job.ring_of(comm.rank)), (q, k, v, out, lse),
            own_sinks, (grad_out, grad_lse))
        if job.head_ranks > 1:
            kv_dtype = dk.dtype if job.shares_kv_heads else job.dtype
            dk, dv, dq = heads.heads_to_rows(
                job, comm.some(group), group, (dk.to(kv_dtype), dv.to(kv_dtype), dq.to(job.dtype)),
                "kkq", "gradients by rows")
        if dsinks is not None:
            full = torch.zeros(sinks.shape, dtype=dsinks.dtype, device=sinks.device)
            full[own.q_begin:own.q_end] = dsinks
            dsinks = full.to(sinks.dtype)
        return (None, None, dq.to(job.dtype), dk.to(job.dtype), dv.to(job.dtype), dsinks)


def _module(job: Job) -> Any:
    return gather if job.scheme in ("gather", "halo") else ring
