"""Functions that the tests of flashcore.distributed run on every rank (see distributed_support.Ranks)."""

import os
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import distributed_bounds
import distributed_support
import flashcore
import flashcore.distributed as fcd
from flashcore.distributed import comm, placement as placement_module

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


def shards_of(case, tensors):
    """This rank's rows of q, k and v."""
    keys = "k_lengths" if "k_lengths" in case else "lengths"
    return [cut(one, case, name) for one, name in zip(tensors, ("lengths", keys, keys))]


def as_passed(case, shards):
    """(the shards in the case's layout, the option for it)."""
    if "documents" in case:
        shards = [packed(one) for one in shards]
    if case.get("layout") == "bshd":
        shards = [one.transpose(1, 2) for one in shards]
    return shards, {"layout": case["layout"]} if "layout" in case else {}


def run(case):
    """{out, lse, dq, dk, dv, dsinks} of the whole sequence, and the bytes this rank sent."""
    q, k, v, sinks, d_out, d_lse = draw(case)
    shards = [one.requires_grad_(case.get("backward", True)) for one in shards_of(case, (q, k, v))]
    d_out, d_lse = cut(d_out, case), cut(d_lse[..., None], case)[..., 0]
    inputs, extra = as_passed(case, shards)
    if sinks is not None:
        sinks.requires_grad_(case.get("backward", True))
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


def one_device(case):
    """The result of one call on one device."""
    q, k, v, sinks, *_ = draw(case)
    options = {name: case[name] for name in (*OPTIONS, "reproducibility") if name in case}
    if "documents" not in case:
        out, lse = flashcore.attention(q, k, v, sinks=sinks, return_lse=True, **options)
        return dict(out=out.float().numpy(), lse=lse.numpy())
    starts = torch.tensor(case["documents"], dtype=torch.int32)
    out, lse = flashcore.attention(*(packed(one) for one in (q, k, v)), sinks=sinks, cu_seqlens_q=starts,
                                   cu_seqlens_k=starts, return_lse=True, **options)
    return dict(out=out.transpose(0, 1)[None].numpy(), lse=lse[None].numpy())


def merged_ranges(case):
    """The ring's ranges of keys on one device: every chunk of rows over every chunk of keys it sees,
    merged in ascending order of keys."""
    q, k, v, sinks, *_ = draw(case)
    length, blocks = case["length"], dist.get_world_size() // case.get("head_ranks", 1)
    chunks = sorted(span for some in placement_module.place(length, blocks, "zigzag") for span in some)
    outs, lses = [], []
    for begin, end in chunks:
        parts = [flashcore.attention(q[:, :, begin:end], k[:, :, low:high], v[:, :, low:high],
                                     q_start=begin, k_start=low, causal=True, partial=True,
                                     reproducibility=case["reproducibility"])
                 for low, high in chunks if low <= begin]
        made = torch.empty((*q.shape[:2], end - begin, v.shape[-1]), dtype=q.dtype)
        out, lse = flashcore.merge(*zip(*parts), sinks=sinks, out=made, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, 2)
    return dict(out=out.float().numpy(), lse=torch.cat(lses, 2).numpy())


def windowed_ranges(case):
    """The ranges of halo on one device: every chunk of rows over the keys inside its window."""
    q, k, v, sinks, *_ = draw(case)
    outs, lses = [], []
    for begin, end in sorted(span for some in placement_module.place(
            case["length"], dist.get_world_size(), "zigzag") for span in some):
        low = max(begin - case["window"][0], 0)
        out, lse = flashcore.attention(q[:, :, begin:end], k[:, :, low:end], v[:, :, low:end], sinks=sinks,
                                       q_start=begin, k_start=low, causal=True, window=case["window"],
                                       reproducibility=case["reproducibility"], return_lse=True)
        outs.append(out)
        lses.append(lse)
    return dict(out=torch.cat(outs, 2).float().numpy(), lse=torch.cat(lses, 2).numpy())


def decode_twice(combine):
    """True if two equal calls of decode_attention() have equal bits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 8 * dist.get_world_size(), n, 16) for n in (2, 50, 50))
    options = dict(seqused_k=torch.tensor([90, 7, 60]), combine=combine, return_lse=True)
    first, second = (fcd.decode_attention(q, k, v, **options) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second))


def decode(case):
    """(results, expected results, their bounds, bytes sent, bytes said) with interleaved keys."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = getattr(torch, case.get("dtype", "float32"))
    lengths, interleave, q_len = case["lengths"], case.get("interleave", 1), case.get("q_len", 1)
    (q_heads, kv_heads), capacity, dim = case["heads"], max(case["lengths"]), 16
    q = torch.randn(len(lengths), q_heads, q_len, dim).to(dtype)
    k, v = (torch.randn(len(lengths), kv_heads, capacity, dim).to(dtype) for _ in range(2))
    sinks = torch.randn(q_heads) if case.get("sinks") else None
    mine = [p for p in range(capacity) if p // interleave % ranks == rank]
    caches = [one[:, :, mine].contiguous() for one in (k, v)]
    options, table = dict(softcap=case.get("softcap", 0.0)), None
    if case.get("paged"):
        caches, table = _pages(caches)
    layout = case.get("layout", "bhsd")
    if layout == "bshd":
        caches = [one.transpose(1, 2) for one in caches]
    combine = case.get("combine", "all_gather")
    with fcd.counted() as sent:
        out, lse = fcd.decode_attention(
            q.transpose(1, 2) if layout == "bshd" else q, *caches, block_table=table, sinks=sinks,
            seqused_k=torch.tensor(lengths, dtype=torch.int32), interleave=interleave, layout=layout,
            combine=combine, return_lse=True, **options)
    out = out.transpose(1, 2) if layout == "bshd" else out
    parts = []
    for b, n in enumerate(lengths):
        inputs = [one[b:b + 1, :, :rows].double() for one, rows in ((q, q_len), (k, n), (v, n))]
        want = dict(zip(("out", "lse"), (one.numpy() for one in distributed_support.definition(
            *inputs, sinks=sinks, causal=True, **options))))
        limit = distributed_bounds.whole(
            *(one.numpy() for one in inputs), None, None, want, case.get("dtype", "float32"), causal=True,
            sinks=None if sinks is None else sinks.double().numpy(), **options)
        parts.append((want, limit))
    want, limit = ({name: np.concatenate([one[i][name] for one in parts]) for name in ("out", "lse")}
                   for i in range(2))
    if combine == "all_to_all":
        own = slice(rank * (q_heads // ranks), (rank + 1) * (q_heads // ranks))
        want, limit = ({name: one[:, own] for name, one in some.items()} for some in (want, limit))
    plan = fcd.predict(capacity, ranks=ranks, batch=len(lengths), q_heads=q_heads, kv_heads=kv_heads,
                       head_dim=dim, dtype=dtype, decode=True, q_len=q_len, interleave=interleave,
                       combine=combine)
    return (dict(out=out.float().numpy(), lse=lse.numpy()), want, limit, sent, dict(plan.sent(rank)[0]))


def _pages(caches):
    """The caches in pages of 4 keys, in another order, and the block table."""
    batch, heads, length, dim = caches[0].shape
    count = max(-(-length // 4), 1)
    table = torch.randperm(batch * count).reshape(batch, count).to(torch.int32)
    made = []
    for one in caches:
        padded = torch.nn.functional.pad(one, (0, 0, 0, 4 * count - length))
        pages = padded.reshape(batch, heads, count, 4, dim).permute(0, 2, 3, 1, 4)
        full = torch.empty(batch * count, 4, heads, dim, dtype=one.dtype)
        full[table.long().flatten()] = pages.reshape(-1, 4, heads, dim)
        made.append(full)
    return made, table


def explain(case):
    """(plan's text, scheme, bytes of each step of this rank: forward, backward)."""
    q, k, v, sinks, *_ = draw(case)
    shards, extra = as_passed(case, shards_of(case, (q, k, v)))
    plan = fcd.explain(*shards, sinks=sinks, **arguments(case), **extra)
    said = [dict(one) for one in plan.sent(dist.get_rank())]
    totals = [one.bytes[dist.get_rank()] for one in (plan.forward, plan.backward)]
    return str(plan), plan.scheme, said, totals


def disagree(kind, wrong):
    """A call in which the arguments of rank `wrong` differ from those of the others."""
    odd = dist.get_rank() == wrong
    q, k, v = torch.zeros(1, 4, 6, 16), torch.zeros(1, 2, 6, 16), torch.zeros(1, 2, 6, 8)
    options = dict(sharding="contiguous", scheme="ring", node=1)
    if odd and kind == "heads":
        k, v = (torch.zeros(1, 4, 6, one.shape[-1]) for one in (k, v))
    if odd and kind == "dtype":
        q, k, v = (one.to(torch.bfloat16) for one in (q, k, v))
    if odd and kind == "scheme":
        options["scheme"] = "gather"
    if odd and kind == "softcap":
        options["softcap"] = 1.5
    if odd and kind == "window":
        options["window"] = (3, -1)
    if odd and kind == "value rows":
        v = v[:, :, :5]
    if odd and kind == "gradients":
        q.requires_grad_()
    shapes = {"batch": (2, 4, 6, 16), "head dim": (1, 4, 6, 8)}
    if odd and kind in shapes:
        q = torch.zeros(shapes[kind])
        k, v = torch.zeros(q.shape[0], 2, 6, q.shape[3]), torch.zeros(q.shape[0], 2, 6, 8)
    if odd and kind == "value dim":
        v = torch.zeros(1, 2, 6, 16)
    if kind == "layout":
        q, k, v = (torch.zeros(1, 6, 6, 16) for _ in range(3))
    given = {"causal": False, "scale": 0.5, "layout": "bshd", "sharding": "zigzag", "node": 2, "head_ranks": 2,
             "reproducibility": "batch_invariant", "sinks": torch.zeros(4)}
    if odd and kind in given:
        options[kind] = given[kind]
    if odd and kind == "wrong by itself":
        k = k[0]
    if odd and kind == "wrong type":
        q = q.numpy()
    if kind == "zigzag":
        options["sharding"] = "zigzag"
        q, k, v = (one[:, :, :4] if odd else one for one in (q, k, v))
    if kind == "documents":
        q, k, v = (packed(one) for one in (q, k, v))
        options["cu_seqlens"] = [0, 3 if odd else 4, 6 * dist.get_world_size()]
    if kind == "length of documents":
        q, k, v = (packed(one) for one in (q, k, v))
        options["cu_seqlens"] = [0, 4, 5]
    if kind == "another call" and odd:
        fcd.unshard(q, 2)
    with fcd.counted() as sent:
        try:
            fcd.context_parallel_attention(q, k, v, **{"causal": True, **options})
        finally:
            assert not sent, "data moved before the error"


def decode_disagree(kind, wrong):
    """A call of decode_attention() in which the arguments of rank `wrong` are wrong or differ."""
    odd = dist.get_rank() == wrong
    q, k, v = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 8, 8)
    options = dict(seqused_k=torch.tensor([5, 6], dtype=torch.int32))
    if kind in ("sinks", "sinks dtype", "sinks given"):
        options["sinks"] = torch.zeros(4)
    if kind in ("pages", "page"):
        k, v = torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 8)
        options["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    if odd:
        k, v, options = _odd_decode(kind, k, v, options)
        if kind == "type":
            q = q.numpy()
    with fcd.counted() as sent:
        try:
            fcd.decode_attention(q, k, v, **options)
        finally:
            assert not sent, "data moved before the error"


def _odd_decode(kind, k, v, options):
    shapes = {"head dim": (2, 2, 8, 8), "heads": (2, 4, 8, 16), "batch": (3, 2, 8, 16),
              "capacity": (2, 2, 2, 16), "dims": (2, 8, 16)}
    if kind in shapes:
        k = torch.zeros(shapes[kind])
    if kind in ("heads", "batch", "capacity"):
        v = torch.zeros(*shapes[kind][:3], 8)
    if kind == "dtype":
        k = k.bfloat16()
    if kind == "value dim":
        v = torch.zeros(2, 2, 8, 16)
    given = {
        "lengths": ("seqused_k", torch.tensor([5, 7], dtype=torch.int32)),
        "lengths shape": ("seqused_k", torch.tensor([5], dtype=torch.int32)),
        "negative length": ("seqused_k", torch.tensor([-1, 6], dtype=torch.int32)),
        "sinks": ("sinks", torch.zeros(3)), "sinks dtype": ("sinks", torch.zeros(4).double()),
        "sinks given": ("sinks", None),
        "pages": ("block_table", torch.tensor([[0], [2]], dtype=torch.int64)),
        "page": ("block_table", torch.tensor([[4, 1], [2, 3]], dtype=torch.int32)),
        "scale": ("scale", 0.5), "softcap": ("softcap", 2.0), "interleave": ("interleave", 2),
        "combine": ("combine", "all_to_all"), "reproducibility": ("reproducibility", "batch_invariant"),
    }
    return k, v, {**options, **dict([given[kind]] if kind in given else [])}


def unshard_disagree(kind, wrong):
    """A call of unshard() in which an argument of rank `wrong` is wrong."""
    odd = dist.get_rank() == wrong
    x = torch.zeros(2, 3, requires_grad=odd and kind == "gradient")
    fcd.unshard(x, 5 if odd and kind == "dim" else 0,
                sharding="zig" if odd and kind == "sharding" else "zigzag")


def die(victim, when):
    """Rank `victim` ends without a word: before the call, or between forward and backward."""
    q, k, v = (torch.randn(1, 4, 64, 16, requires_grad=True) for _ in range(3))
    if when == "forward" and dist.get_rank() == victim:
        os._exit(9)
    out = fcd.context_parallel_attention(q, k, v, scheme="ring", causal=True)
    if when == "backward" and dist.get_rank() == victim:
        os._exit(9)
    out.sum().backward()


def die_at(victim, scheme, number, options):
    """Rank `victim` ends instead of its exchange `number`, counted over forward and backward."""
    if dist.get_rank() == victim:
        exchange, left = comm.Comm.exchange, [number]

        def last(self, *arguments, **keywords):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return exchange(self, *arguments, **keywords)

        comm.Comm.exchange = last
    if scheme == "decode":
        cache = torch.randn(1, 4, 16, 16)
        fcd.decode_attention(cache[:, :, :1], cache, cache, seqused_k=torch.tensor([40]))
    elif scheme == "unshard":
        fcd.unshard(torch.zeros(4, 3), 0, sharding="contiguous")
    else:
        q, k, v = (torch.randn(1, 12, 24, 16, requires_grad=True) for _ in range(3))
        fcd.context_parallel_attention(q, k, v, scheme=scheme, causal=True, **options).sum().backward()


def late(sleeper, seconds):
    """Rank `sleeper` comes later than the group's timeout."""
    if dist.get_rank() == sleeper:
        time.sleep(seconds)
        return None
    q = torch.randn(1, 2, 8, 16)
    return fcd.context_parallel_attention(q, q, q, scheme="gather")


def decode_bits(dtype, combine):
    """(equal out, equal lse): decode_attention() and one device that merges each rank's keys."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q = torch.randn(1, 2 * ranks, 1, 16).to(getattr(torch, dtype))
    k, v = (torch.randn(1, ranks, 37, 16).to(q.dtype) for _ in range(2))
    options = dict(reproducibility="batch_invariant")
    mine = [[one[:, :, r::ranks].contiguous() for one in (k, v)] for r in range(ranks)]
    out, lse = fcd.decode_attention(q, *mine[rank], seqused_k=torch.tensor([37], dtype=torch.int32),
                                    combine=combine, return_lse=True, **options)
    parts = [flashcore.attention(q, *one, partial=True, **options) for one in mine]
    want, want_lse = flashcore.merge(*zip(*parts), out=torch.empty_like(q), return_lse=True)
    if combine == "all_to_all":
        want, want_lse = (one[:, 2 * rank:2 * rank + 2] for one in (want, want_lse))
    return torch.equal(out, want), torch.equal(lse, want_lse)


def plan(case):
    """(equal bits of Plan.run and the call, no header was sent, what a wrong tensor raises)."""
    q, k, v, sinks, *_ = draw(case)
    shards = [cut(one, case) for one in (q, k, v)]
    extra = {}
    if "documents" in case:
        shards = [packed(one) for one in shards]
    if "layout" in case:
        shards, extra = [one.transpose(1, 2) for one in shards], dict(layout=case["layout"])
    made = fcd.explain(*shards, sinks=sinks, **arguments(case), **extra)
    want = fcd.context_parallel_attention(*shards, sinks=sinks, return_lse=True, **arguments(case), **extra)
    with mock.patch.object(comm.Comm, "all_gather", side_effect=AssertionError) as header:
        got = made.run(*shards, sinks=sinks, return_lse=True)
    try:
        made.run(shards[0][..., :8], *shards[1:], sinks=sinks)
        wrong = ""
    except ValueError as error:
        wrong = str(error)
    return all(torch.equal(a, b) for a, b in zip(got, want)), not header.called, wrong
