"""unshard(): the whole tensor on every rank, from each rank's rows."""

from typing import Any

import torch
from torch import Tensor

from flashcore._core.scalars import integer, one_of
from flashcore.distributed.agreement import Field, agree, call_field, choice, device_of, tensor_fields
from flashcore.distributed.comm import Comm
from flashcore.distributed.placement import SHARDINGS, place_lengths, put


def unshard(x: Tensor, dim: int, *, group: Any = None, sharding: str = "zigzag") -> Tensor:
    """The whole tensor on every rank, from each rank's rows along dim: the inverse of shard().

    Contiguous shards may have any lengths. The result has no gradient: compute a loss on the shards,
    and add up the losses of the ranks.
    """
    comm = Comm(group, "unshard")
    dim, lengths = _agree(comm, x, dim, sharding)
    spans = place_lengths(lengths, sharding)
    shapes = {peer: [(*x.shape[:dim], n, *x.shape[dim + 1:])] for peer, n in enumerate(lengths)
              if peer != comm.rank and n}
    sends = {peer: [x] for peer in range(comm.size) if peer != comm.rank and x.shape[dim]}
    parts = comm.exchange(sends, shapes, x, "all-gather").wait()
    made = x.new_empty((*x.shape[:dim], sum(lengths), *x.shape[dim + 1:]))
    for peer in range(comm.size):
        if lengths[peer]:
            one = x if peer == comm.rank else parts[peer][0]
            put(made, dim, [(0, sum(lengths))], spans[peer], one)
    return made


def _agree(comm: Comm, x: Tensor, dim: int, sharding: str) -> tuple[int, list[int]]:
    """(dim, not negative, and the number of rows of every rank's x along it)."""
    fields, error = [call_field("unshard")], None
    try:
        dim, more = _fields(x, dim, sharding)
        fields += more
    except Exception as found:  # raised below, on all ranks: the others wait for this rank's header
        error = found
    headers = agree(comm, fields, device_of(x), error)
    return dim, [one[f"x.entries in dimension {dim}"] for one in headers]


def _fields(x: Tensor, dim: int, sharding: str) -> tuple[int, list[Field]]:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: is a {type(x).__name__}; wanted a torch.Tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x: requires grad, and unshard() has no gradient; compute the loss on the "
                         "shards, or pass x.detach()")
    if not -x.dim() <= integer("dim", dim) < x.dim():
        raise ValueError(f"dim is {dim}; x has {x.dim()} dimensions")
    dim %= x.dim()
    fields = [Field("dim", dim, "dim is {}"),
              choice("sharding", one_of("sharding", sharding, SHARDINGS), SHARDINGS)]
    return dim, fields + tensor_fields("x", x, [f"entries in dimension {i}" for i in range(x.dim())],
                                       f"entries in dimension {dim}")
