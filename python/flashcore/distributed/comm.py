"""Messages between ranks, on torch.distributed. All schemes send through Comm.exchange()."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = Sequence[int]
_counters: list[dict[str, int]] = []


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that this process sends inside the block: {step: bytes}. Headers do not count.

    >>> with counted() as sent:
    ...     pass
    >>> sent
    {}
    """
    sent: dict[str, int] = {}
    _counters.append(sent)
    try:
        yield sent
    finally:
        _counters.remove(sent)


class Comm:
    """A process group, or some of its ranks, as schemes see it: ranks 0 to size-1.

    It makes no process groups of its own: messages go from rank to rank in the given group.
    """

    def __init__(self, group: Any, scheme: str, members: Sequence[int] | None = None) -> None:
        self.group, self.scheme = group, scheme
        self.members = list(range(dist.get_world_size(group)) if members is None else members)
        self.rank = self.members.index(dist.get_rank(group))
        self.size = len(self.members)

    def some(self, members: Sequence[int]) -> "Comm":
        """The same group, restricted to these of its ranks."""
        return Comm(self.group, self.scheme, [self.members[one] for one in members])

    def all_gather(self, one: Tensor) -> list[Tensor]:
        """One small tensor of equal shape from each rank of the whole group."""
        made = [torch.empty_like(one) for _ in range(self.size)]
        try:
            dist.all_gather(made, one, group=self.group)
        except RuntimeError as error:
            raise self._failure("header", None, error) from error
        return made

    def exchange(self, sends: Mapping[int, Sequence[Tensor]], shapes: Mapping[int, Sequence[Shape]],
                 like: Tensor, step: str, dtypes: Sequence[torch.dtype] | None = None) -> "Pending":
        """Starts one message to each rank of `sends` and from each rank of `shapes`.

        A message is a list of tensors. The receiver knows their shapes and dtypes (default: like's).
        wait() returns {rank: tensors}. Both sides leave out messages without bytes.
        """
        operations, received, alive = [], {}, []
        for peer, tensors in sends.items():
            flat = _pack(tensors)
            if flat.numel():
                alive.append(flat)
                operations.append((dist.isend, flat, peer))
                for sent in _counters:
                    sent[step] = sent.get(step, 0) + flat.numel()
        for peer, wanted in shapes.items():
            types = [like.dtype] * len(wanted) if dtypes is None else dtypes
            size = sum(math.prod(shape) * one.itemsize for shape, one in zip(wanted, types))
            flat = torch.empty(size, dtype=torch.uint8, device=like.device)
            received[peer] = (flat, wanted, types)
            if size:
                operations.append((dist.irecv, flat, peer))
        works: list[tuple[int, Any]] = []
        try:
            made = [dist.P2POp(function, flat, self._global(peer), self.group)
                    for function, flat, peer in operations]
            started = dist.batch_isend_irecv(made) if made else []
        except RuntimeError as error:
            raise self._failure(step, None, error) from error
        peers = [peer for _, _, peer in operations]
        # NCCL returns one handle for the whole batch.
        works += zip(peers if len(started) == len(peers) else [-1] * len(started), started)
        return Pending(self, step, works, received, alive)

    def _global(self, peer: int) -> int:
        group = dist.group.WORLD if self.group is None else self.group
        return int(dist.get_global_rank(group, self.members[peer]))

    def _failure(self, step: str, peer: int | None, error: Exception) -> RuntimeError:
        other = "" if peer is None or peer < 0 else f" with rank {self.members[peer]}"
        return RuntimeError(
            f"{self.scheme}, {step}: the exchange{other} failed. A rank ended or did not answer within "
            f"the group's timeout; make a new process group before the next call. torch says: {error}")


class Pending:
    """Messages under way."""

    def __init__(self, comm: Comm, step: str, works: list[tuple[int, Any]],
                 received: dict[int, Any], alive: list[Tensor]) -> None:
        self._comm, self._step, self._works = comm, step, works
        self._received, self._alive = received, alive

    def wait(self) -> dict[int, list[Tensor]]:
        """The received tensors of each rank. With NCCL only the stream waits, not the host."""
        for peer, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._comm._failure(self._step, peer, error) from error
        self._alive = []
        return {peer: _unpack(*one) for peer, one in self._received.items()}


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' bytes one after another."""
    flat = [one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _unpack(flat: Tensor, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    made, begin = [], 0
    for shape, dtype in zip(shapes, dtypes):
        end = begin + math.prod(shape) * dtype.itemsize
        made.append(flat[begin:end].view(dtype).view(*shape))
        begin = end
    return made
