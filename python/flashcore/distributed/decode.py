"""Decode with the keys of a KV cache divided between ranks: one exchange of (out, LSE)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashcore._attention import attention
from flashcore._core.scalars import integer, one_of
from flashcore.cache import merge
from flashcore.distributed.agreement import (Field, agree, call_field, choice, device_of, digest, number,
                                             tensor_fields)
from flashcore.distributed.comm import Comm

_COMBINES = ("all_gather", "all_to_all")


def decode_lengths(seqused_k: Tensor, *, group: Any = None, interleave: int = 1) -> Tensor:
    """The number of keys of each sequence that this rank's cache holds, int32.

    Key p of a sequence is on rank (p // interleave) % ranks: the ranks take turns, `interleave` keys at
    a time. A new key p is appended on that rank alone.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    turn = integer("interleave", interleave) * ranks
    lengths = seqused_k.long()
    last = (lengths % turn - rank * interleave).clamp(0, interleave)
    return (lengths // turn * interleave + last).to(torch.int32)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, seqused_k: Tensor, group: Any = None,
                     block_table: Tensor | None = None, interleave: int = 1, layout: str = "bhsd",
                     scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
                     combine: str = "all_gather", return_lse: bool = False,
                     reproducibility: str = "deterministic", check: bool = True) -> Any:
    """Attention of a few new queries over a KV cache whose keys are divided between ranks.

    q is the same on all ranks, [batch, q_heads, q_len, dim]. seqused_k, i32 [batch], has the whole
    lengths, including the keys of q's rows: the last query sees all keys, the one before it one key
    less, and so on. k_cache and v_cache hold this rank's keys (see decode_lengths) as in
    flashcore.attention, contiguous or paged with block_table.

    combine        "all_gather": every rank gets the whole result. "all_to_all": each rank gets its part
                   of the heads, q_heads / ranks of them, for a model that is tensor parallel
    check          compare shapes and options between ranks first; False saves that exchange
    """
    comm = Comm(group, "decode")
    if check:
        _agree(comm, q, k_cache, v_cache, seqused_k, block_table, interleave, layout, scale, softcap,
               sinks, combine, reproducibility)
    out, lse = _local(q, k_cache, v_cache, seqused_k, group, block_table, interleave, layout,
                      dict(scale=scale, softcap=softcap, reproducibility=reproducibility))
    first, count = 0, q.shape[2 if layout == "bshd" else 1]
    if combine == "all_to_all":
        count //= comm.size
        first = comm.rank * count
        sends = {r: [one[:, r * count:(r + 1) * count] for one in (out, lse)] for r in range(comm.size)}
    else:
        sends = {r: [out, lse] for r in range(comm.size)}
    own = sends.pop(comm.rank)
    shapes = {r: [one.shape for one in own] for r in sends}
    parts = comm.exchange(sends, shapes, out, "out and lse").wait()
    outs, lses = zip(*[own if r == comm.rank else parts[r] for r in range(comm.size)])
    made, total = _merged(list(outs), list(lses), q,
                          None if sinks is None else sinks[first:first + count].contiguous())
    made = made.transpose(1, 2) if layout == "bshd" else made
    return (made, total) if return_lse else made


def decode_bytes(*, batch: int, q_heads: int, q_len: int, v_dim: int, ranks: int,
                 combine: str = "all_gather") -> int:
    """Bytes that one rank sends in decode_attention()."""
    per_part = batch * q_heads * q_len * (v_dim + 1) * 4
    return per_part * (ranks - 1) // (ranks if combine == "all_to_all" else 1)


def _agree(comm: Comm, q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor, block_table: Tensor | None,
           interleave: int, layout: str, scale: float | None, softcap: float, sinks: Tensor | None,
           combine: str, reproducibility: str) -> None:
    error: Exception | None = None
    fields = [call_field("decode")]
    try:
        one_of("layout", layout, ("bhsd", "bshd"))
        for name, one in (("q", q), ("k_cache", k), ("v_cache", v)):
            if one.dim() != 4:
                raise ValueError(f"{name}: has {one.dim()} dimensions; wanted 4")
            if one.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: requires grad; decode_attention has no gradient, use it under "
                                 "torch.no_grad()")
        if integer("interleave", interleave) < 1:
            raise ValueError(f"interleave is {interleave}; wanted 1 or more")
        heads = q.shape[2 if layout == "bshd" else 1]
        if one_of("combine", combine, _COMBINES) == "all_to_all" and heads % comm.size:
            raise ValueError(f'combine is "all_to_all"; {comm.size} ranks cannot divide {heads} heads: '
                             'use combine="all_gather"')
        kv_heads = 1 if layout == "bhsd" and block_table is None else 2
        fields += tensor_fields("q", q, ("sequences", "entries in dimension 1", "entries in dimension 2",
                                         "entries per head"), "")
        fields += [Field(f"{name}.heads", one.shape[kv_heads], name + " has {} heads")
                   for name, one in (("k_cache", k), ("v_cache", v))]
        fields += [Field("v.dim", v.shape[3], "v_cache has {} entries per head"),
                   Field("paged", block_table is not None, "block_table given: {}", bool),
                   Field("interleave", interleave, "interleave is {}"),
                   choice("layout", layout, ("bhsd", "bshd")), choice("combine", combine, _COMBINES),
                   choice("reproducibility", reproducibility, ("deterministic", "batch_invariant")),
                   number("scale", q.shape[3] ** -0.5 if scale is None else float(scale)),
                   number("softcap", float(softcap)),
                   Field("sinks", sinks is not None, "sinks given: {}", bool),
                   digest("seqused_k", seqused_k.tolist())]
    except Exception as found:  # raised below, on all ranks: the others wait for this rank's header
        error = found
    agree(comm, fields, device_of(q, k, v), error)


def _local(q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor, group: Any, block_table: Tensor | None,
           interleave: int, layout: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) over this rank's keys, [batch, heads, q_len, dim]. Queries see different numbers of this
    rank's keys, so each has its own call."""
    if layout == "bshd":
        q = q.transpose(1, 2)
        if block_table is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
    outs, lses = [], []
    for i in range(q.shape[2]):
        whole = (seqused_k - (q.shape[2] - 1 - i)).clamp(min=0)
        out, lse = attention(q[:, :, i:i + 1], k, v, block_table=block_table, partial=True,
                             seqused_k=decode_lengths(whole, group=group, interleave=interleave),
                             **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _merged(outs: list[Tensor], lses: list[Tensor], q: Tensor,
            sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The parts of all ranks, merged in order of ranks."""
    made = torch.empty(outs[0].shape, dtype=q.dtype, device=q.device)
    out, lse = merge(outs, lses, sinks=sinks, out=made, return_lse=True)
    return out, lse
