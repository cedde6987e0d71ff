"""The speed chart for narrow screens: each bar has its label above it, not beside it."""

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from flashcore.bench.speed_chart import Bar, SpeedChart

_WIDTH, _MARGIN = 360, 12
_ROW, _BAR, _GROUP, _HEAD, _AXIS = 27, 8, 20, 76, 22


class NarrowSpeedChart(SpeedChart):
    """The same bars as SpeedChart, in 360 units of width."""

    def __init__(self, result: dict[str, Any], bars: list[Bar]):
        super().__init__(result, bars)
        self.width, self.left, self.plot = _WIDTH, float(_MARGIN), float(_WIDTH - 2 * _MARGIN)
        if self.end > 4 * self.step:  # fewer gridlines: their figures need room
            self.step *= 2
            self.end = self.step * math.ceil(self.end / self.step)  # no gridline beyond the plot
        self.tops = self._narrow_tops()
        self.top, self.bottom = _HEAD + _AXIS, self.tops[-1] + _ROW + 6
        self.height = self.bottom + _AXIS + 15 * len(self.notes)

    def _narrow_tops(self) -> list[int]:
        """The y of each bar's row, with room for the name before each group."""
        tops, y, group = [], _HEAD + _AXIS, None
        for bar in self.bars:
            y += _GROUP if bar.group != group else 0
            tops.append(y)
            y, group = y + _ROW, bar.group
        return tops

    def _heading(self) -> Iterator[str]:
        yield f'<text class="group" x="{_MARGIN}" y="18">Speed relative to the best peer</text>'
        yield f'<text class="faint" x="{_MARGIN}" y="34">{escape(self.origin)}</text>'
        for y, side, words in ((42, "faster", "above 1.0: FlashCore is faster"),
                               (58, "slower", "below 1.0: the best peer is faster")):
            yield f'<rect class="{side}" x="{_MARGIN}" y="{y}" width="10" height="10"/>'
            yield f'<text x="{_MARGIN + 15}" y="{y + 9}">{words}</text>'

    def _row(self, bar: Bar, top: int, first: bool) -> Iterator[str]:
        if first:
            yield f'<text class="group" x="{_MARGIN}" y="{top - 4}">{escape(bar.group)}</text>'
        yield f'<text x="{_MARGIN}" y="{top + 11}">{escape(bar.label)}</text>'
        yield (f'<text x="{_WIDTH - _MARGIN}" y="{top + 11}" text-anchor="end">'
               f"{escape(bar.figure)}</text>")
        yield (f'<rect class="{bar.side}" x="{self.left:.1f}" y="{top + 15}" '
               f'width="{self.x(bar.speed) - self.left:.1f}" height="{_BAR}">'
               f"<title>{escape(bar.times)}</title></rect>")
