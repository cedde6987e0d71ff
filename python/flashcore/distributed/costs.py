"""The cost model: seconds of work and of messages, from a small table of speeds. Nothing is measured."""

from dataclasses import dataclass
from typing import NamedTuple

from flashcore.distributed.job import Job
from flashcore.distributed.schemes import traffic


class Link(NamedTuple):
    """Bytes per second in one direction, and seconds until the first byte arrives."""
    bandwidth: float
    latency: float


# Nominal speeds of one GPU's links. Change an entry, or pass a Link, for other hardware.
LINKS = {"nvlink": Link(450e9, 10e-6), "pcie": Link(50e9, 10e-6), "infiniband": Link(50e9, 20e-6),
         "ethernet": Link(12.5e9, 50e-6)}
# FLOP/s of the attention kernels, forward and backward, 16-bit.
DEVICES = {"h200": (650e12, 450e12), "h100": (650e12, 450e12), "a100": (200e12, 140e12),
           "cpu": (1e11, 2e10)}
_BACKWARD_WORK = 2.5  # times the forward work
_SAMPLED = 64  # ranks; of more, the first, the middle and the last stand for all


class Step(NamedTuple):
    """A step on the rank that sends most. `hidden` is the part of `transfer` behind work, in seconds."""
    name: str
    bytes: int
    transfer: float
    hidden: float


@dataclass(frozen=True)
class Costs:
    """Of one direction, forward or backward."""
    steps: tuple[Step, ...]
    bytes: tuple[int, ...]  # per rank, or of the sampled ranks
    work: float  # seconds, of the rank with most work

    @property
    def transfer(self) -> float:
        return sum(one.transfer for one in self.steps)

    @property
    def hidden(self) -> float:
        """The share of the time of messages that is behind work; 1 if nothing is sent."""
        return sum(one.hidden for one in self.steps) / self.transfer if self.transfer else 1.0

    @property
    def total(self) -> float:
        return self.work + sum(one.transfer - one.hidden for one in self.steps)


def find_link(name: str, value: str | float | Link) -> Link:
    """A Link from a name of LINKS, a number of bytes per second, or a Link."""
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        if value not in LINKS:
            raise ValueError(f"{name} is {value!r}; wanted one of {', '.join(LINKS)}, a number of bytes "
                             "per second, or a Link")
        return LINKS[value]
    return Link(float(value), LINKS["infiniband"].latency)


def sampled(ranks: int) -> list[int]:
    return list(range(ranks)) if ranks <= _SAMPLED else [0, ranks // 2, ranks - 1]


def costs(job: Job, *, node: int, link: Link, net: Link, device: str, backward: bool) -> Costs:
    """The costs of a job on machines of `node` ranks, with `link` inside and `net` between them."""
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; wanted one of {', '.join(DEVICES)}, or add it to "
                         "flashcore.distributed.costs.DEVICES as FLOP/s of forward and backward")
    per_rank = [traffic(job, rank, backward) for rank in sampled(job.ranks)]
    work = _work_by_step(job, DEVICES[device][backward], backward)
    between = link if job.ranks <= node else net
    inside = link if job.head_ranks <= node else net
    steps: list[Step] = []
    computed, free = 0, 0.0  # steps of work, and the work of the last one that hides no message yet
    for i, (name, _) in enumerate(per_rank[0]):
        most = max(one[i][1] for one in per_rank)
        used = inside if job.head_ranks > 1 and i in (0, len(per_rank[0]) - 1) else between
        transfer = most / used.bandwidth + used.latency if most else 0.0
        hidden = 0.0
        if name.startswith("ring step"):
            if not name.endswith("dK and dV"):
                computed, free = computed + 1, work[computed]
            hidden = min(transfer, free)
            free -= hidden
        steps.append(Step(name, most, transfer, hidden))
    return Costs(tuple(steps), tuple(sum(n for _, n in one) for one in per_rank), sum(work))


def _work_by_step(job: Job, flops: float, backward: bool) -> list[float]:
    """Seconds of work of each step, on the rank that has most; one step for all but rings."""
    factor = (2 * job.dim + 2 * job.v_dim) * (_BACKWARD_WORK if backward else 1) / flops
    inner = job.one_head_group(0)
    some = sampled(inner.ranks)

    def of(rank: int, block: int) -> int:
        return inner.batch * inner.q_heads * sum(
            inner.mask.visible(q, k) for q in inner.q_spans[rank] for k in inner.k_spans[block])

    if job.scheme in ("gather", "halo"):
        whole = (0, inner.mask.k_docs[-1])
        return [factor * max(inner.batch * inner.q_heads * sum(
            inner.mask.visible(q, whole) for q in inner.q_spans[rank]) for rank in some)]
    return [factor * max(of(rank, (rank - step) % inner.ranks) for rank in some)
            for step in range(inner.ranks)]
