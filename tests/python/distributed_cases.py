"""Functions that the tests of flashcore.distributed run on every rank (see distributed_support.Ranks)."""

import os
import time

import torch
import torch.distributed as dist

import flashcore
import flashcore.distributed as fcd

OPTIONS = ("causal", "window", "softcap", "scale")


def draw(case):
    """(q, k, v, sinks, weight of out, weight of lse) of the whole sequence, the same on every rank."""
    torch.manual_seed(case.get("seed", 0))
    dtype = getattr(torch, case.get("dtype", "float32"))
    batch, (q_heads, kv_heads) = case.get("batch", 1), case.get("heads", (4, 2))
    length = case["length"]
    k_length = case.get("k_length", length)
    dim, v_dim = case.get("dims", (16, 8))

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    return (normal(batch, q_heads, length, dim), normal(batch, kv_heads, k_length, dim),
            normal(batch, kv_heads, k_length, v_dim),
            torch.randn(q_heads) if case.get("sinks") else None,
            normal(batch, q_heads, length, v_dim), torch.randn(batch, q_heads, length))


def cut(one, case, name="lengths"):
    """This rank's rows, by shard(), or by the case's lengths."""
    if name in case:
        rank = dist.get_rank()
        begin = sum(case[name][:rank])
        return one[:, :, begin:begin + case[name][rank]].contiguous()
    return fcd.shard(one, 2, sharding=case.get("sharding", "zigzag"))


def arguments(case):
    made = {name: case[name] for name in (*OPTIONS, "reproducibility", "node", "head_ranks")
            if name in case}
    made |= dict(scheme=case["scheme"], sharding=case.get("sharding", "zigzag"))
    if "documents" in case:
        made["cu_seqlens"] = torch.tensor(case["documents"], dtype=torch.int32)
    return made


def packed(one):
    """[1, heads, rows, dim] as [rows, heads, dim]."""
    return one[0].transpose(0, 1)


def run(case):
    """{out, lse, dq, dk, dv, dsinks} of the whole sequence, and the bytes this rank sent."""
    q, k, v, sinks, d_out, d_lse = draw(case)
    shards = [cut(one, case, name).requires_grad_(case.get("backward", True)) for one, name in (
        (q, "lengths"), (k, "k_lengths" if "k_lengths" in case else "lengths"),
        (v, "k_lengths" if "k_lengths" in case else "lengths"))]
    d_out, d_lse = cut(d_out, case), cut(d_lse[..., None], case)[..., 0]
    inputs = [packed(one) for one in shards] if "documents" in case else shards
    if case.get("layout") == "bshd":
        inputs = [one.transpose(1, 2) for one in inputs]
    if sinks is not None:
        sinks.requires_grad_(case.get("backward", True))
    extra = {"layout": case["layout"]} if "layout" in case else {}
    with fcd.counted() as sent:
        out, lse = fcd.context_parallel_attention(*inputs, sinks=sinks, return_lse=True, **arguments(case),
                                                  **extra)
    if "documents" in case:
        out, lse = out.transpose(0, 1)[None], lse[None]
    if case.get("layout") == "bshd":
        out = out.transpose(1, 2)
    whole = dict(out=out.detach(), lse=lse.detach()[..., None])
    backward = {}
    if case.get("backward", True):
        with fcd.counted() as backward:
            ((out * d_out).sum().float() + (torch.where(lse.isfinite(), lse, 0.0) * d_lse).sum()).backward()
        whole |= dict(dq=shards[0].grad, dk=shards[1].grad, dv=shards[2].grad)
    made = {name: fcd.unshard(one, 2, sharding=case.get("sharding", "zigzag"))
            for name, one in whole.items()}
    made["lse"] = made["lse"][..., 0]
    if sinks is not None and case.get("backward", True):
        dist.all_reduce(sinks.grad)
        made["dsinks"] = sinks.grad
    return {name: one.numpy() if one.dtype != torch.bfloat16 else one.float().numpy()
            for name, one in made.items()} | dict(sent=sent, sent_backward=backward)


def placement(length, sharding, cu_seqlens):
    """(shard is inverted by unshard, positions of this rank, gradient of shard)."""
    x = torch.arange(length * 3).reshape(length, 3).float().requires_grad_()
    mine = fcd.shard(x, 0, sharding=sharding)
    (mine * (dist.get_rank() + 1)).sum().backward()
    back = fcd.unshard(mine.detach(), 0, sharding=sharding)
    ids = fcd.position_ids(length, sharding=sharding, cu_seqlens=cu_seqlens)
    rows = (x.grad[:, 0] / (dist.get_rank() + 1)).nonzero().flatten()
    return torch.equal(back, x.detach()), ids.tolist(), rows.tolist()


def uneven(lengths):
    """unshard() of contiguous shards with any lengths."""
    rank = dist.get_rank()
    whole = torch.arange(2 * sum(lengths)).reshape(2, -1)
    begin = sum(lengths[:rank])
    mine = whole[:, begin:begin + lengths[rank]]
    return torch.equal(fcd.unshard(mine, 1, sharding="contiguous"), whole)


def wrong_unshard(rank_of_wrong):
    mine = torch.zeros(2, 5 if dist.get_rank() == rank_of_wrong else 4, 3)
    fcd.unshard(mine, 0)
