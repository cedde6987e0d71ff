"""Which rows see which keys, in terms of spans and packed documents."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashcore.distributed.placement import Span


class Segment(NamedTuple):
    """Rows and keys of one document, as ranges of a span of queries and a span of keys, and the
    positions of the first ones in the document."""
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    q_start: int
    k_start: int

    @property
    def is_bottom_right(self) -> bool:
        """True if the last row is at the last key, as in a call without positions."""
        shift = (self.k_end - self.k_begin) - (self.q_end - self.q_begin)
        return self.q_start - self.k_start == shift


@dataclass(frozen=True)
class Mask:
    """Documents and the mask inside a document. q_docs and k_docs hold the first row of each document
    and then the length. The last query of a document is aligned with its last key."""
    q_docs: tuple[int, ...]
    k_docs: tuple[int, ...]
    causal: bool
    window: tuple[int, int]

    @property
    def reach(self) -> tuple[int, int]:
        """How many keys a row sees on each side of its position; -1: all."""
        left, right = self.window
        return left, (0 if self.causal else right)

    def segments(self, q_span: Span, k_span: Span) -> list[Segment]:
        """The documents of q_span with their keys in k_span. Some may have no keys."""
        first = max(bisect_right(self.q_docs, q_span[0]) - 1, 0)
        last = bisect_left(self.q_docs, q_span[1])
        made = []
        for i in range(first, last):
            q_doc, k_doc = self.q_docs[i], self.k_docs[i]
            shift = (self.k_docs[i + 1] - k_doc) - (self.q_docs[i + 1] - q_doc)
            q = [_clamp(self.q_docs[j], q_span) for j in (i, i + 1)]
            k = [_clamp(self.k_docs[j], k_span) for j in (i, i + 1)]
            made.append(Segment(q[0] - q_span[0], q[1] - q_span[0], k[0] - k_span[0], k[1] - k_span[0],
                                q[0] - q_doc + shift, max(k[0] - k_doc, 0)))
        return made

    def sees(self, q_span: Span, k_span: Span) -> bool:
        """True if a row of q_span sees a key of k_span."""
        return any(self.segment_sees(one) for one in self.segments(q_span, k_span))

    def segment_sees(self, one: Segment) -> bool:
        if one.q_begin >= one.q_end or one.k_begin >= one.k_end:
            return False
        left, right = self.reach
        q_last = one.q_start + one.q_end - one.q_begin - 1
        k_last = one.k_start + one.k_end - one.k_begin - 1
        return (left < 0 or one.q_start - k_last <= left) and (right < 0 or one.k_start - q_last <= right)

    def segment_sees_all(self, one: Segment) -> bool:
        """True if every row of the segment sees all its keys."""
        left, right = self.reach
        q_last = one.q_start + one.q_end - one.q_begin - 1
        k_last = one.k_start + one.k_end - one.k_begin - 1
        return (left < 0 or q_last - one.k_start <= left) and (right < 0 or k_last - one.q_start <= right)

    def pairs(self, q_spans: Sequence[Span], k_spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Indices (i, j) of the spans of which q_spans[i] sees a key of k_spans[j]."""
        return [(i, j) for i, q in enumerate(q_spans) for j, k in enumerate(k_spans) if self.sees(q, k)]

    def keys_of(self, q_span: Span, in_window: bool) -> Span:
        """The smallest span with all keys that q_span sees. It starts at the first key of a document,
        or, if in_window, at the first key inside the window."""
        left, right = self.reach
        low, high = self.k_docs[-1], 0
        for i, one in enumerate(self.segments(q_span, (0, self.k_docs[-1]))):
            if one.q_begin >= one.q_end:
                continue
            size = one.k_end - one.k_begin
            q_last = one.q_start + one.q_end - one.q_begin - 1
            begin = max(one.q_start - left, 0) if in_window and left >= 0 else 0
            end = min(q_last + right + 1, size) if right >= 0 else size
            if begin < end:
                low, high = min(low, one.k_begin + begin), max(high, one.k_begin + end)
        return (low, high) if low < high else (0, 0)


def _clamp(row: int, span: Span) -> int:
    return min(max(row, span[0]), span[1])
