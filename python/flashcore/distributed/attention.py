"""context_parallel_attention(): attention over a sequence whose rows are divided between ranks."""

import os
from typing import Any

import torch
from torch import Tensor

from flashcore._core.scalars import flag, one_of
from flashcore.distributed.agreement import (Field, agree, call_field, choice, device_of, digest, number,
                                             tensor_fields)
from flashcore.distributed.comm import Comm
from flashcore.distributed.costs import SCHEMES, choose
from flashcore.distributed.job import Job
from flashcore.distributed.masks import Mask
from flashcore.distributed.placement import SHARDINGS, place_lengths
from flashcore.distributed.schemes import Attention

LAYOUTS = ("bhsd", "bshd")
REPRODUCIBILITIES = ("deterministic", "batch_invariant")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DIMS = ("sequences", "heads", "rows", "entries per head")


def context_parallel_attention(
        q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, scheme: str = "auto",
        sharding: str = "zigzag", layout: str = "bhsd", cu_seqlens: Any = None, causal: bool = False,
        window: tuple[int, int] = (-1, -1), scale: float | None = None, softcap: float = 0.0,
        sinks: Tensor | None = None, return_lse: bool = False,
        reproducibility: str = "deterministic", node: int | None = None,
        head_ranks: int | None = None) -> Any:
    """Attention over a sequence that is divided between the ranks of a process group.

    Every rank passes its shard of q, k and v and gets its shard of the result; shard() makes the shards.
    All ranks must make the call. Gradients: backward() is a collective call too.

    group          a torch.distributed process group; None: the default group
    scheme         "ring", "gather", "ulysses", "2d", "halo", or "auto"; explain() says which and why
    sharding       "zigzag" or "contiguous"; contiguous shards may have any lengths, also 0
    layout         "bhsd", [batch, heads, rows, dim], or "bshd"
    cu_seqlens     packed documents: the first row of each in the whole sequence, then its length; the
                   same on all ranks. q, k and v are then [rows, heads, dim], and the LSE [heads, rows]
    node           ranks per machine; default: LOCAL_WORLD_SIZE of torchrun, or all
    head_ranks     "2d": how many ranks divide the heads
    causal, window, scale, softcap, sinks, return_lse, reproducibility: as in flashcore.attention

    sinks is the whole [q_heads] on every rank. Its gradient on a rank is a part of the sum: add the
    ranks' gradients, as for every parameter that all ranks share.

    The ranks first compare shapes, dtypes and options; if they disagree, every rank raises the same
    ValueError before any data moves.
    """
    comm = Comm(group, "context_parallel_attention")
    job, _, _ = make_job(comm, "attention", q, k, v, scheme=scheme, sharding=sharding, layout=layout,
                         cu_seqlens=cu_seqlens, causal=causal, window=window, scale=scale,
                         softcap=softcap, sinks=sinks, reproducibility=reproducibility, node=node,
                         head_ranks=head_ranks)
    return run_job(job, comm, q, k, v, sinks, layout, cu_seqlens is not None, return_lse)


def run_job(job: Job, comm: Comm, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: str,
            packed: bool, return_lse: bool) -> Any:
    """The result in the caller's layout."""
    comm.scheme = job.scheme
    out, lse = Attention.apply(job, comm, *(_to_bhsd(one, layout, packed) for one in (q, k, v)), sinks)
    if packed:
        out, lse = out[0].transpose(0, 1), lse[0]
    elif layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _to_bhsd(one: Tensor, layout: str, packed: bool) -> Tensor:
    if packed:
        return one.transpose(0, 1)[None]
    return one.transpose(1, 2) if layout == "bshd" else one


def check_fits(job: Job, rank: int, q: Tensor, k: Tensor, v: Tensor, layout: str, packed: bool) -> None:
    """Raises if this rank's tensors are not those of the job."""
    key_rows = job.k_rows(rank)
    for name, one, heads, rows, dim in (("q", q, job.q_heads, job.q_rows(rank), job.dim),
                                        ("k", k, job.kv_heads, key_rows, job.dim),
                                        ("v", v, job.kv_heads, key_rows, job.v_dim)):
        wanted = (rows, heads, dim) if packed else (job.batch, heads, rows, dim)
        if layout == "bshd" and not packed:
            wanted = (job.batch, rows, heads, dim)
        if tuple(one.shape) != wanted or one.dtype != job.dtype:
            raise ValueError(f"{name}: is {str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}; the "
                             f"plan is for {str(job.dtype).removeprefix('torch.')} {wanted} on this rank. Make "
                             "a new plan with explain() on all ranks")


def make_job(comm: Comm, call: str, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Any = None,
             error: Exception | None = None, **options: Any) -> tuple[Job, str, int]:
    """(job, reason for the scheme, ranks per machine). Collective: exchanges the headers. `error`: what
    the caller found wrong on this rank."""
    fields: list[Field] = [call_field(call)]
    try:
        if error is not None:
            raise error
        documents = None if cu_seqlens is None else _documents(cu_seqlens)
        fields += _checked_fields(q, k, v, documents, comm.size, **options)
    except Exception as found:  # raised below, on all ranks: the others wait for this rank's header
        error = found
    headers = agree(comm, fields, device_of(q, k, v), error)
    lengths = [[one[f"{name}.rows"] for one in headers] for name in "qkv"]
    for r, (key_rows, value_rows) in enumerate(zip(lengths[1], lengths[2])):
        if key_rows != value_rows:
            raise ValueError(f"rank {r}: v has {value_rows} rows, k has {key_rows}; they must match")
    return (*_job(headers[0], lengths, documents, q, **options), headers[0]["node"])


def _documents(cu_seqlens: Any) -> list[int]:
    made = [int(one) for one in torch.as_tensor(cu_seqlens).tolist()]
    if not made or made[0] != 0 or any(a > b for a, b in zip(made, made[1:])):
        raise ValueError(f"cu_seqlens: is {made[:8]}; wanted ascending numbers that start with 0")
    return made


def _checked_fields(q: Tensor, k: Tensor, v: Tensor, documents: list[int] | None, ranks: int, *,
                    scheme: str, sharding: str, layout: str, causal: bool, window: tuple[int, int],
                    scale: float | None, softcap: float, sinks: Tensor | None, reproducibility: str,
                    node: int | None, head_ranks: int | None) -> list[Field]:
    """The header's fields. Raises if this rank's arguments are wrong by themselves."""
    packed = documents is not None
    for name, one in (("q", q), ("k", k), ("v", v)):
        if not isinstance(one, Tensor):
            raise TypeError(f"{name}: is a {type(one).__name__}; wanted a torch.Tensor")
        if one.dim() != (3 if packed else 4):
            wanted = "[rows, heads, dim] with cu_seqlens" if packed else "[batch, heads, rows, dim]"
            raise ValueError(f"{name}: has {one.dim()} dimensions; wanted {wanted}")
        if one.dtype not in _DTYPES or one.dtype != q.dtype:
            raise ValueError(f"{name}: dtype is {str(one.dtype).removeprefix('torch.')}; wanted float32, "
                             "float16 or bfloat16, the same for q, k and v")
        if one.device != q.device:
            raise ValueError(f"{name}: is on {one.device}, q is on {q.device}; wanted one device")
    one_of("layout", layout, LAYOUTS)
    q, k, v = (_to_bhsd(one, layout, packed) for one in (q, k, v))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: has {k.shape[1]} heads, q has {q.shape[1]}; q's number must be a multiple")
    if sinks is not None and (tuple(sinks.shape) != (q.shape[1],) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks: wanted float32 [{q.shape[1]}], one for each query head")
    left, right = window
    grad = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (q, k, v, sinks))
    fields = [field for name, one in (("q", q), ("k", k), ("v", v))
              for field in tensor_fields(name, one, _DIMS, "rows")]
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError("k and v: must have as many sequences as q")
    if k.shape[1] != v.shape[1] or k.shape[3] != q.shape[3]:
        raise ValueError("k and v: must have the same number of heads, and k the head dim of q")
    return fields + [
        choice("scheme", one_of("scheme", scheme, SCHEMES), SCHEMES),
        choice("sharding", one_of("sharding", sharding, SHARDINGS), SHARDINGS),
        choice("layout", layout, LAYOUTS), Field("causal", flag("causal", causal), "causal is {}", bool),
        Field("window_left", max(int(left), -1), "window's left side is {}"),
        Field("window_right", max(int(right), -1), "window's right side is {}"),
        number("scale", q.shape[3] ** -0.5 if scale is None else float(scale)),
        number("softcap", float(softcap)),
        Field("sinks", sinks is not None, "sinks given: {}", bool),
        choice("reproducibility", one_of("reproducibility", reproducibility, REPRODUCIBILITIES),
               REPRODUCIBILITIES),
        Field("gradients", grad, "gradients wanted: {}", bool),
        Field("packed", packed, "cu_seqlens given: {}", bool), digest("cu_seqlens", documents or []),
        Field("node", node or int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), "node is {}"),
        Field("head_ranks", head_ranks or 0, "head_ranks is {}")]


def _job(header: dict[str, int], lengths: list[list[int]], documents: list[int] | None, q: Tensor,
         *, scheme: str, sharding: str, causal: bool, scale: float | None, softcap: float,
         reproducibility: str, head_ranks: int | None, **_: Any) -> tuple[Job, str]:
    """The job, from what all ranks know. Every rank that fails here fails with the same error."""
    q_total, k_total = sum(lengths[0]), sum(lengths[1])
    if documents is not None:
        for name, total in (("q", q_total), ("k", k_total)):
            if documents[-1] != total:
                raise ValueError(f"cu_seqlens: ends with {documents[-1]}; the ranks have {total} rows "
                                 f"of {name} together")
    mask = Mask(tuple(documents or (0, q_total)), tuple(documents or (0, k_total)), bool(causal),
                (header["window_left"], header["window_right"]))
    chosen, count, reason = choose(
        scheme, ranks=len(lengths[0]), node=header["node"], q_heads=header["q.heads"],
        kv_heads=header["k.heads"], documents=len(mask.q_docs) - 1, reach=mask.reach,
        head_ranks=head_ranks)
    spans = []
    for name, one in zip("qk", lengths):
        try:
            spans.append(tuple(tuple(some) for some in place_lengths(one, sharding)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    dim = header["q.entries per head"]
    return Job(scheme=chosen, head_ranks=count, q_spans=spans[0], k_spans=spans[1], mask=mask,
               batch=header["q.sequences"], q_heads=header["q.heads"], kv_heads=header["k.heads"],
               dim=dim, v_dim=header["v.entries per head"], dtype=q.dtype,
               scale=dim ** -0.5 if scale is None else float(scale), softcap=float(softcap),
               reproducibility=reproducibility), reason
