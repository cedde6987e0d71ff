"""Job: one distributed attention as all ranks know it after the header."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flashcore.distributed.masks import Mask
from flashcore.distributed.placement import Span, joined, rows


class Heads(NamedTuple):
    """The query heads [q_begin, q_end) and the KV heads that they need."""
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


@dataclass(frozen=True)
class Job:
    """q_spans and k_spans: the spans of every rank. head_ranks: over how many ranks heads are divided."""
    scheme: str
    head_ranks: int
    q_spans: tuple[tuple[Span, ...], ...]
    k_spans: tuple[tuple[Span, ...], ...]
    mask: Mask
    batch: int
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    dtype: torch.dtype
    scale: float
    softcap: float
    reproducibility: str

    @property
    def ranks(self) -> int:
        return len(self.q_spans)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the local attention() calls."""
        return dict(scale=self.scale, softcap=self.softcap, reproducibility=self.reproducibility)

    @property
    def in_order(self) -> bool:
        return self.reproducibility == "batch_invariant"

    def group_of(self, rank: int) -> list[int]:
        """The ranks that divide heads with this rank."""
        first = rank // self.head_ranks * self.head_ranks
        return list(range(first, first + self.head_ranks))

    def ring_of(self, rank: int) -> list[int]:
        """The ranks with the same heads as this rank."""
        return list(range(rank % self.head_ranks, self.ranks, self.head_ranks))

    def heads(self, member: int) -> Heads:
        """The heads of rank `member` of a group."""
        count = self.q_heads // self.head_ranks
        begin, per_kv = member * count, self.q_heads // max(self.kv_heads, 1)
        if count == 0:
            return Heads(0, 0, 0, 0)
        return Heads(begin, begin + count, begin // per_kv, -(-(begin + count) // per_kv))

    @property
    def shares_kv_heads(self) -> bool:
        """True if several ranks of a group need the same KV head."""
        return self.head_ranks > self.kv_heads

    def one_head_group(self, rank: int) -> "Job":
        """The job that is left for the ranks of ring_of(rank) once heads are divided: each holds the
        rows of its group, and its own heads."""
        one = self.heads(rank % self.head_ranks)
        groups = [self.group_of(first) for first in range(0, self.ranks, self.head_ranks)]
        q_spans, k_spans = (tuple(tuple(joined([span for r in group for span in spans[r]]))
                                  for group in groups) for spans in (self.q_spans, self.k_spans))
        return replace(self, head_ranks=1, q_spans=q_spans, k_spans=k_spans,
                       q_heads=one.q_end - one.q_begin, kv_heads=one.k_end - one.k_begin)

    def q_rows(self, rank: int) -> int:
        return rows(self.q_spans[rank])

    def k_rows(self, rank: int) -> int:
        return rows(self.k_spans[rank])
