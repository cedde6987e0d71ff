"""Runs a scheme, with gradients."""

from typing import Any

import torch
from torch import Tensor

from flashcore.distributed import gather, heads, ring
from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job


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
