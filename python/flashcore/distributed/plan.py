"""explain() and predict(): which scheme, why, how many bytes, and how much of their time is hidden."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashcore._core.scalars import integer, one_of
from flashcore.distributed.attention import check_fits, make_job, run_job
from flashcore.distributed.comm import Comm
from flashcore.distributed.costs import Costs, Link, Model, choose, find_link
from flashcore.distributed.decode import COMBINES, own_lengths
from flashcore.distributed.job import Job
from flashcore.distributed.masks import Mask
from flashcore.distributed.placement import place


class Call(NamedTuple):
    """The arguments of explain() that a later run needs."""
    group: Any
    layout: str
    packed: bool
    has_sinks: bool


@dataclass(frozen=True)
class Plan:
    """What context_parallel_attention() would do. print() shows it as a table; run() does it."""
    job: Job
    reason: str
    sharding: str
    forward: Costs
    backward: Costs
    text: str
    model: Model = field(repr=False, compare=False)
    call: Call | None = None

    @property
    def scheme(self) -> str:
        return self.job.scheme

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None,
            return_lse: bool = False) -> Any:
        """context_parallel_attention() with the arguments of explain(), without its header.

        For many calls with the same shapes, such as the layers of a model. Each rank compares its
        tensors with the plan by itself: if one rank raises, the others wait until the group's timeout.
        """
        if self.call is None:
            raise ValueError("this plan is from predict(), which has no process group; use explain()")
        comm = Comm(self.call.group, self.scheme)
        check_fits(self.job, comm.rank, q, k, v, self.call.layout, self.call.packed)
        if (sinks is not None) != self.call.has_sinks:
            raise ValueError("sinks: pass them to both explain() and run(), or to neither")
        return run_job(self.job, comm, q, k, v, sinks, self.call.layout, self.call.packed, return_lse)

    def sent(self, rank: int) -> list[list[tuple[str, int]]]:
        """(step, bytes that a rank sends in it), in order: forward, backward."""
        return self.model.sent(rank)

    def __str__(self) -> str:
        return self.text


def explain(q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, link: str | float | Link = "nvlink",
            net: str | float | Link = "infiniband", device: str | None = None, **options: Any) -> Plan:
    """The plan of context_parallel_attention() with the same arguments. Collective, moves no data.

    link, net      speed inside a machine and between machines: a name of costs.LINKS, bytes per second,
                   or a Link
    device         a name of costs.DEVICES; default: "cpu" for CPU tensors, else "h200"
    """
    given = {**_DEFAULTS, **options}
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"explain() got an unexpected keyword argument '{name}'")
    speeds = dict(link=find_link("link", link), net=find_link("net", net))
    job, reason, node = make_job(Comm(group, "explain"), "explain", q, k, v, **given)
    call = Call(group, given["layout"], given["cu_seqlens"] is not None, given["sinks"] is not None)
    return _plan(job, reason, given["sharding"], call, scheme=given["scheme"],
                 head_ranks=given["head_ranks"], node=node,
                 device=device or ("cpu" if q.device.type == "cpu" else "h200"), **speeds)


_DEFAULTS: dict[str, Any] = dict(
    scheme="auto", sharding="zigzag", layout="bhsd", cu_seqlens=None, causal=False, window=(-1, -1),
    scale=None, softcap=0.0, sinks=None, reproducibility="deterministic", node=None, head_ranks=None)


def predict(length: int, *, ranks: int, q_heads: int, kv_heads: int, head_dim: int = 128,
            batch: int = 1, dtype: torch.dtype = torch.bfloat16, scheme: str = "auto",
            sharding: str = "zigzag", causal: bool = True, window: tuple[int, int] = (-1, -1),
            cu_seqlens: Any = None, node: int = 8, head_ranks: int | None = None,
            link: str | float | Link = "nvlink", net: str | float | Link = "infiniband",
            device: str = "h200", decode: bool = False, q_len: int = 1, interleave: int = 1,
            combine: str = "all_gather") -> Plan:
    """The plan for a sequence of `length` rows, without a process group and without a GPU.

    decode         that of decode_attention(): q_len new queries of each sequence, over caches of `length`
                   keys; interleave and combine as there. scheme, sharding and causal do not apply

    >>> predict(1 << 20, ranks=64, q_heads=64, kv_heads=8).scheme
    '2d'
    >>> predict(65536, ranks=8, batch=8, q_heads=32, kv_heads=8, decode=True).forward.bytes[0]
    924672
    """
    speeds = dict(link=find_link("link", link), net=find_link("net", net), device=device)
    sizes = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, dim=head_dim, v_dim=head_dim, dtype=dtype,
                 scale=head_dim ** -0.5, softcap=0.0, reproducibility="deterministic")
    if decode:
        if cu_seqlens is not None or tuple(window) != (-1, -1) or head_ranks is not None:
            raise ValueError("cu_seqlens, window and head_ranks: decode has none of them")
        by_heads = one_of("combine", combine, COMBINES) == "all_to_all"
        return _plan(_decode_job(length, ranks, q_len, interleave, sizes), "", sharding, None,
                     scheme="decode", head_ranks=None, node=node, by_heads=by_heads, **speeds)
    docs = (0, length) if cu_seqlens is None else tuple(int(one) for one in cu_seqlens)
    mask = Mask(docs, docs, causal, window)
    chosen, count, reason = choose(scheme, ranks=ranks, node=node, q_heads=q_heads, kv_heads=kv_heads,
                                   documents=len(docs) - 1, reach=mask.reach, head_ranks=head_ranks)
    spans = tuple(tuple(one) for one in place(length, ranks, sharding))
    job = Job(scheme=chosen, head_ranks=count, q_spans=spans, k_spans=spans, mask=mask, **sizes)
    return _plan(job, reason, sharding, None, scheme=scheme, head_ranks=head_ranks, node=node, **speeds)


def _decode_job(length: int, ranks: int, q_len: int, interleave: int, sizes: dict[str, Any]) -> Job:
    """All ranks have the new queries. The spans of the keys have their numbers alone."""
    q_spans, k_spans = (((0, q_len),),) * ranks, []
    for rank in range(ranks):
        own = own_lengths(torch.tensor([length]), ranks, rank, integer("interleave", interleave))
        k_spans.append(((0, int(own[0])),))
    return Job(scheme="decode", head_ranks=1, q_spans=q_spans, k_spans=tuple(k_spans),
               mask=Mask((0, q_len), (0, length), False, (-1, -1)), **sizes)


def _plan(job: Job, reason: str, sharding: str, call: Call | None, **given: Any) -> Plan:
    model = Model(job, sharding=sharding, **given)
    forward, backward, text = model.plan()
    reason = reason or text.split("reason    ")[1].split("\n")[0]
    return Plan(job, reason, sharding, forward, backward, text, model, call)
