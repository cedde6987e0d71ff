"""The library's model of schemes: the choice of one, its bytes, and its time from nominal speeds.

The model is C++ (src/distributed): `flashcore explain --ranks` prints the same numbers. Nothing is
measured.
"""

import ctypes
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashcore._core import abi
from flashcore._core.library import library
from flashcore._core.scalars import one_of
from flashcore.distributed.job import Job
from flashcore.distributed.placement import SHARDINGS

SCHEMES = ("auto", "ring", "gather", "ulysses", "2d", "halo")
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


class Link(NamedTuple):
    """Bytes per second in one direction, and seconds until the first byte arrives."""
    bandwidth: float
    latency: float


class Step(NamedTuple):
    """A step on the rank that sends most. `hidden` is the part of `transfer` behind work, in seconds."""
    name: str
    bytes: int
    transfer: float
    hidden: float


@dataclass(frozen=True)
class Costs:
    """Of one direction, forward or backward. Times are in seconds."""
    steps: tuple[Step, ...]
    bytes: tuple[int, ...]  # sent by each rank; of more than 64 ranks, by the first, the middle and the last
    work: float  # of the rank with most work
    transfer: float
    hidden: float  # the share of `transfer` that is behind work; 1 if nothing is sent
    total: float


@functools.cache
def _speeds() -> dict[str, dict[str, Any]]:
    """The library's tables. Callers may change them."""
    read = json.loads(library().distributed_speeds())
    return {"LINKS": {name: Link(*one) for name, one in read["links"].items()},
            "DEVICES": {name: tuple(one) for name, one in read["devices"].items()}}


def __getattr__(name: str) -> Any:
    """LINKS: {name: Link}. DEVICES: {name: (FLOP/s forward, backward, bytes per second of memory)}. Change
    an entry, or pass a Link, for other hardware."""
    if name in ("LINKS", "DEVICES"):
        return _speeds()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_link(name: str, value: str | float | Link) -> Link:
    """A Link from a name of LINKS, a number of bytes per second, or a Link."""
    links: dict[str, Link] = _speeds()["LINKS"]
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        if value not in links:
            raise ValueError(f"{name} is {value!r}; wanted one of {', '.join(links)}, a number of bytes "
                             "per second, or a Link")
        return links[value]
    return Link(float(value), links["infiniband"].latency)


def _ints(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def choose(scheme: str, *, ranks: int, node: int, q_heads: int, kv_heads: int, documents: int,
           reach: tuple[int, int], head_ranks: int | None = None) -> tuple[str, int, str]:
    """(scheme, ranks that divide heads, reason). node: ranks per machine. Raises ValueError if the given
    scheme does not fit."""
    number = SCHEMES.index(one_of("scheme", scheme, SCHEMES))
    code, bits = abi.DTYPES["bf16"]
    problem = abi.DistributedProblem(
        ranks=ranks, ranks_per_node=max(node, 1), scheme=number, head_ranks=head_ranks or 0,
        dtype=abi.DType(code, bits, 1), q_heads=q_heads, kv_heads=max(kv_heads, 1),
        window_left=reach[0], window_right=reach[1], documents=_ints([0] * (documents + 1)),
        documents_count=documents + 1)
    chosen, count, reason = library().distributed_choose(problem)
    return SCHEMES[chosen], count, reason


class Model:
    """A job with the speeds of its machines, as the library sees it."""

    def __init__(self, job: Job, *, scheme: str, head_ranks: int | None, sharding: str, node: int,
                 link: Link, net: Link, device: str, by_heads: bool = False) -> None:
        devices = _speeds()["DEVICES"]
        if device not in devices:
            raise ValueError(f"device is {device!r}; wanted one of {', '.join(devices)}, or add it to "
                             "flashcore.distributed.costs.DEVICES: FLOP/s forward and backward, bytes/s "
                             "of memory")
        code, bits = abi.DTYPES[_DTYPES[job.dtype]]
        packed = len(job.mask.q_docs) > 2
        self._problem = abi.DistributedProblem(
            ranks=job.ranks, ranks_per_node=node, scheme=(*SCHEMES, "decode").index(scheme),
            sharding=SHARDINGS.index(sharding), head_ranks=head_ranks or 0, causal=job.mask.causal,
            reproducibility=job.in_order, dtype=abi.DType(code, bits, 1), batch=job.batch,
            q_heads=job.q_heads, kv_heads=job.kv_heads, head_dim=job.dim, v_dim=job.v_dim,
            window_left=job.mask.window[0], window_right=job.mask.window[1],
            q_rows=_ints([job.q_rows(r) for r in range(job.ranks)]),
            k_rows=_ints([job.k_rows(r) for r in range(job.ranks)]),
            documents=_ints(job.mask.q_docs) if packed else None,
            documents_count=len(job.mask.q_docs) if packed else 0,
            link_bandwidth=link.bandwidth, link_latency=link.latency, net_bandwidth=net.bandwidth,
            net_latency=net.latency, forward_flops=devices[device][0],
            backward_flops=devices[device][1], memory_bandwidth=devices[device][2], by_heads=by_heads)

    def plan(self) -> tuple[Costs, Costs, str]:
        """(forward, backward, text)."""
        read = json.loads(library().distributed_plan(self._problem))
        forward, backward = (
            Costs(steps=tuple(Step(*step) for step in one["steps"]), bytes=tuple(one["bytes"]),
                  work=one["work_s"], transfer=one["transfer_s"], hidden=one["hidden"],
                  total=one["total_s"]) for one in (read["forward"], read["backward"]))
        return forward, backward, read["text"].rstrip("\n")

    def sent(self, rank: int) -> list[list[tuple[str, int]]]:
        """(step, bytes that this rank sends in it), in order: forward, backward."""
        read = json.loads(library().distributed_plan(self._problem, rank))
        return [[(step, sent) for step, sent in one] for one in read["sent"]]
