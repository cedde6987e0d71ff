"""Decode with the keys of a KV cache divided between ranks: one exchange of (out, LSE)."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flashcore._attention import attention
from flashcore._core import names
from flashcore._core.scalars import integer, one_of
from flashcore.cache import merge
from flashcore.distributed.agreement import (Field, agree, call_field, choice, device_of, digest, number,
                                             tensor_fields)
from flashcore.distributed.comm import Comm

COMBINES = ("all_gather", "all_to_all")


def decode_lengths(seqused_k: Tensor, *, group: Any = None, interleave: int = 1) -> Tensor:
    """The number of keys of each sequence that this rank's cache holds, int32.

    Key p of a sequence is on rank (p // interleave) % ranks: the ranks take turns, `interleave` keys at
    a time. A new key p is appended on that rank alone.
    """
    return own_lengths(seqused_k, dist.get_world_size(group), dist.get_rank(group),
                        integer("interleave", interleave))


def own_lengths(lengths: Tensor, ranks: int, rank: int, interleave: int) -> Tensor:
    """decode_lengths() of any rank."""
    turn = interleave * ranks
    lengths = lengths.long()
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
    call = _Call(comm.size, comm.rank, seqused_k, block_table, interleave, layout, sinks, combine,
                 dict(scale=scale, softcap=softcap, reproducibility=reproducibility))
    fields, error = [call_field("decode")], None
    try:
        if check:
            fields += _checked_fields(call, q, k_cache, v_cache)
        # Before the header, so that whatever this rank alone cannot compute is an error on all ranks.
        out, lse = _local(call, q, k_cache, v_cache)
    except Exception as found:  # raised below, on all ranks: the others wait for this rank's header
        if not check:
            raise
        error = found
    if check:
        agree(comm, fields, device_of(q, k_cache, v_cache), error)
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


class _Call(NamedTuple):
    """The arguments of one call, on one rank, without q and the cache."""
    ranks: int
    rank: int
    seqused_k: Tensor
    block_table: Tensor | None
    interleave: int
    layout: str
    sinks: Tensor | None
    combine: str
    options: dict[str, Any]

    @property
    def row_axis(self) -> int:
        """That of the keys. In pages, a row is a key of a page."""
        return 2 if self.layout == "bhsd" and self.block_table is None else 1

    def own_lengths(self, lengths: Tensor) -> Tensor:
        return own_lengths(lengths, self.ranks, self.rank, self.interleave)


def _checked_fields(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> list[Field]:
    """The header's fields. Raises if this rank's arguments are wrong by themselves; attention() checks
    the rest."""
    one_of("layout", call.layout, ("bhsd", "bshd"))
    for name, one in (("q", q), ("k_cache", k), ("v_cache", v)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name}: is a {type(one).__name__}; wanted a torch.Tensor")
        if one.dim() != 4:
            raise ValueError(f"{name}: has {one.dim()} dimensions; wanted 4")
        if one.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires grad; decode_attention has no gradient, use it under "
                             "torch.no_grad()")
    if integer("interleave", call.interleave) < 1:
        raise ValueError(f"interleave is {call.interleave}; wanted 1 or more")
    heads = q.shape[2 if call.layout == "bshd" else 1]
    if one_of("combine", call.combine, COMBINES) == "all_to_all" and heads % call.ranks:
        raise ValueError(f'combine is "all_to_all"; {call.ranks} ranks cannot divide {heads} heads: '
                         'use combine="all_gather"')
    if call.sinks is not None and (tuple(call.sinks.shape) != (heads,) or call.sinks.dtype != torch.float32
                                   or call.sinks.device != q.device):
        raise ValueError(f"sinks: wanted float32 [{heads}] on {q.device}, one for each query head")
    _check_capacity(call, q, k)
    fields = tensor_fields("q", q, ("sequences", "entries in dimension 1", "entries in dimension 2",
                                    "entries per head"), "")
    fields += [Field(f"{name}.heads", one.shape[3 - call.row_axis], name + " has {} heads")
               for name, one in (("k_cache", k), ("v_cache", v))]
    scale, softcap = call.options["scale"], call.options["softcap"]
    return fields + [
        Field("v.dim", v.shape[3], "v_cache has {} entries per head"),
        Field("paged", call.block_table is not None, "block_table given: {}", bool),
        Field("interleave", call.interleave, "interleave is {}"),
        choice("layout", call.layout, ("bhsd", "bshd")), choice("combine", call.combine, COMBINES),
        choice("reproducibility", call.options["reproducibility"], ("deterministic", "batch_invariant")),
        number("scale", q.shape[3] ** -0.5 if scale is None else float(scale)),
        number("softcap", float(softcap)), Field("sinks", call.sinks is not None, "sinks given: {}", bool),
        digest("seqused_k", call.seqused_k.tolist())]


def _check_capacity(call: _Call, q: Tensor, k: Tensor) -> None:
    """Raises if the cache of this rank cannot hold its part of the keys."""
    lengths = call.seqused_k
    if tuple(lengths.shape) != (q.shape[0],) or lengths.is_floating_point():
        raise ValueError(f"seqused_k: is {str(lengths.dtype).removeprefix('torch.')} {tuple(lengths.shape)}; "
                         f"wanted int32 ({q.shape[0]},), one length for each sequence")
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"seqused_k: has {int(lengths.min())}; wanted 0 or more")
    capacity = k.shape[call.row_axis]
    if call.block_table is not None:
        capacity *= call.block_table.shape[-1]
    own = call.own_lengths(lengths)
    if own.numel() and int(own.max()) > capacity:
        raise ValueError(f"k_cache: holds {capacity} keys of a sequence; this rank's part of seqused_k "
                         f"has {int(own.max())}")


def _local(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over this rank's keys, [batch, heads, q_len, dim]. Queries see different numbers of this
    rank's keys, so each has its own call."""
    if call.layout == "bshd":
        q = q.transpose(1, 2)
        if call.block_table is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
    outs, lses = [], []
    for i in range(q.shape[2]):
        whole = (call.seqused_k - (q.shape[2] - 1 - i)).clamp(min=0)
        out, lse = names.call({"k": "k_cache", "v": "v_cache"}, attention, q[:, :, i:i + 1], k, v,
                              block_table=call.block_table, partial=True,
                              seqused_k=call.own_lengths(whole), **call.options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _merged(outs: list[Tensor], lses: list[Tensor], q: Tensor,
            sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The parts of all ranks, merged in order of ranks."""
    made = torch.empty(outs[0].shape, dtype=q.dtype, device=q.device)
    out, lse = merge(outs, lses, sinks=sinks, out=made, return_lse=True)
    return out, lse
