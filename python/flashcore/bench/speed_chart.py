"""Speed relative to the best peer as SVG text, for README and the HTML page.

Each case has a horizontal bar on a linear axis from 0 with a mark at 1.0. It has no dependencies.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from flashcore.bench.cases import Case
from flashcore.bench.table import best_peer, device

# Suites of old shapes, of the fallback kernel, of the CPU, and of options, whose baselines are our own calls.
DIAGNOSTIC_SUITES = ("regression", "simt", "cpu", "options")
PEER_NAMES = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "eff": "torch efficient",
              "math": "torch math", "flash_attn": "flash_attn", "flashinfer": "FlashInfer",
              "xformers": "xFormers"}
_WIDTH, _LEAST_PLOT, _MARGIN, _GAP, _RIGHT_GAP = 800, 240, 12, 10, 20
_ROW, _BAR, _GROUP_GAP, _HEAD, _AXIS = 15, 10, 7, 72, 22
_CHARACTER, _BOLD = 6.2, 7.2  # upper bounds of the mean advance at 11 px, because SVG cannot measure text
# Every rule names svg.speed, because the style applies to the whole HTML page. The picture has its own
# background, because an <img> does not know the background of its page.
_STYLE = """
svg.speed { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
svg.speed .back { fill: #ffffff; } svg.speed text { fill: #1f2328; } svg.speed .faint { fill: #59636e; }
svg.speed .head { font-size: 15px; font-weight: 600; } svg.speed .group { font-weight: 600; }
svg.speed .tick { stroke: #d1d9e0; } svg.speed .one { stroke: #1f2328; stroke-width: 1.5; }
svg.speed .faster { fill: #2f81c7; } svg.speed .slower { fill: #e0823d; }
@media (prefers-color-scheme: dark) {
svg.speed .back { fill: #0d1117; } svg.speed text { fill: #e6edf3; } svg.speed .faint { fill: #9198a1; }
svg.speed .tick { stroke: #30363d; } svg.speed .one { stroke: #e6edf3; }
}
"""


@dataclass(frozen=True)
class Bar:
    group: str
    label: str
    peer: str
    speed: float  # the best peer's time / ours
    times: str
    note: str  # remark on the peer's time; usually empty

    @property
    def side(self) -> str:
        return "faster" if self.speed >= 1 else "slower"

    @property
    def figure(self) -> str:
        return f"{self.speed:.3f} {PEER_NAMES.get(self.peer, self.peer)}" + (" *" if self.note else "")


def shown_suites(rows: list[dict[str, Any]]) -> set[str]:
    """All suites but the diagnostic ones. A file with only diagnostic suites shows them."""
    there = {row["suite"] for row in rows}
    return there.difference(DIAGNOSTIC_SUITES) or there


def bars_of(result: dict[str, Any], suites: Collection[str] = (), names: Collection[str] = ()) -> list[Bar]:
    """One bar per row with a peer's time, grouped by case name, in the order of the file."""
    groups: dict[str, list[Bar]] = {}
    rows = result.get("rows", [])
    shown = suites or shown_suites(rows)
    for row in rows:
        peer = best_peer(row)
        if peer is None or row["suite"] not in shown or (names and row["name"] not in names):
            continue
        case, theirs = Case.of(row), row["peers_us"][peer]
        groups.setdefault(case.name, []).append(
            Bar(case.name, case.shape_text(), peer, theirs / row["us"],
                f"FlashCore {row['us']:.4g} us, {PEER_NAMES.get(peer, peer)} {theirs:.4g} us",
                row.get("peers_note", {}).get(peer, "")))
    return [bar for group in groups.values() for bar in group]


def _axis(highest: float) -> tuple[float, float]:
    """(end of the axis, gridline distance). At most 10 gridlines follow 0; 1.0 is never at the edge."""
    step = 0.25
    while highest > 10 * step:
        step *= 2
    return step * math.ceil(max(highest, 1.25) / step), step


class SpeedChart:
    def __init__(self, result: dict[str, Any], bars: list[Bar]):
        if not bars:
            raise ValueError("no selected row has a peer's time: there is nothing to draw")
        self.result, self.bars = result, bars
        self.label_x = _MARGIN + _GAP + _BOLD * max(len(bar.group) for bar in bars)
        self.left = self.label_x + _GAP + _CHARACTER * max(len(bar.label) for bar in bars)
        right = _RIGHT_GAP + _MARGIN + _CHARACTER * max(len(bar.figure) for bar in bars)
        self.plot = max(_LEAST_PLOT, _WIDTH - self.left - right)
        self.width: float = self.left + self.plot + right
        self.figure_x = self.left + self.plot + _RIGHT_GAP
        self.end, self.step = _axis(max(bar.speed for bar in bars))
        self.tops = self._tops()
        self.top = _HEAD + _AXIS
        self.bottom = self.tops[-1] + _ROW + _GROUP_GAP
        self.notes = sorted({bar.note for bar in bars if bar.note})
        self.height = self.bottom + _AXIS + _ROW * len(self.notes)

    def _tops(self) -> list[int]:
        """The y of each bar's row, with a gap before each group."""
        tops, y, group = [], _HEAD + _AXIS, None
        for bar in self.bars:
            y += _GROUP_GAP if bar.group != group else 0
            tops.append(y)
            y, group = y + _ROW, bar.group
        return tops

    def x(self, speed: float) -> float:
        return self.left + self.plot * speed / self.end

    @property
    def title(self) -> str:
        return f"FlashCore on {device(self.result)}: speed relative to the best peer"

    @property
    def origin(self) -> str:
        return (f"Measured {self.result.get('date', '')[:10] or 'on an unknown day'}, sources "
                f"{self.result.get('fingerprint', 'unknown')}.")

    @property
    def description(self) -> str:
        faster = sum(bar.side == "faster" for bar in self.bars)
        speeds = [bar.speed for bar in self.bars]
        return (f"{self.origin} Each bar is the best peer's time divided by FlashCore's. FlashCore is faster "
                f"in {faster} of {len(speeds)} cases. The speed relative to the best peer is "
                f"{min(speeds):.3f} to {max(speeds):.3f}.")

    def _heading(self) -> Iterator[str]:
        yield f'<text class="head" x="{_MARGIN}" y="24">{escape(self.title)}</text>'
        yield (f'<text class="faint" x="{_MARGIN}" y="42">{escape(self.origin)} Length: the best peer\'s time / '
               "FlashCore's.</text>")
        for x, side, words in ((_MARGIN, "faster", "above 1.0: FlashCore is faster"),
                               (_MARGIN + 200, "slower", "below 1.0: the best peer is faster")):
            yield f'<rect class="{side}" x="{x}" y="52" width="10" height="10"/>'
            yield f'<text x="{x + 15}" y="61">{words}</text>'
        above = _HEAD + _AXIS - 8
        for at, words in ((_MARGIN, "case"), (self.label_x, "batch, heads, length, dim"),
                          (self.figure_x, "speed, best peer")):
            yield f'<text class="faint" x="{at:.1f}" y="{above}">{words}</text>'

    def _vertical(self, kind: str, speed: float) -> str:
        at = self.x(speed)
        return (f'<line class="{kind}" x1="{at:.1f}" y1="{self.top}" x2="{at:.1f}" '
                f'y2="{self.bottom}"/>')

    def _grid(self) -> Iterator[str]:
        speeds = {number * self.step for number in range(round(self.end / self.step) + 1)}
        for speed in sorted(speeds | {1.0}):
            yield self._vertical("tick", speed)
            kind = "group" if speed == 1 else "faint"
            for y in (self.top - 8, self.bottom + 15):
                yield (f'<text class="{kind}" x="{self.x(speed):.1f}" y="{y}" text-anchor="middle">'
                       f"{f'{speed:.2f}' if self.step < 1 else f'{speed:g}'}</text>")

    def _row(self, bar: Bar, top: int, first: bool) -> Iterator[str]:
        base = top + _ROW - 4
        if first:
            yield f'<text class="group" x="{_MARGIN}" y="{base}">{escape(bar.group)}</text>'
        yield f'<text x="{self.label_x:.1f}" y="{base}">{escape(bar.label)}</text>'
        yield (f'<rect class="{bar.side}" x="{self.left:.1f}" y="{top + (_ROW - _BAR) / 2:.1f}" '
               f'width="{self.x(bar.speed) - self.left:.1f}" height="{_BAR}">'
               f"<title>{escape(bar.times)}</title></rect>")
        yield f'<text x="{self.figure_x:.1f}" y="{base}">{escape(bar.figure)}</text>'

    def _footnotes(self) -> Iterator[str]:
        for number, note in enumerate(self.notes):
            y = self.bottom + _AXIS + _ROW * number + 8
            yield f'<text class="faint" x="{_MARGIN}" y="{y}">* the peer: {escape(note)}</text>'

    def svg(self) -> str:
        parts = [f'<svg class="speed" xmlns="http://www.w3.org/2000/svg" role="img" '
                 f'width="{self.width:.0f}" height="{self.height}" '
                 f'viewBox="0 0 {self.width:.0f} {self.height}">',
                 f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.description)}</desc>",
                 f"<style>{_STYLE}</style>", '<rect class="back" width="100%" height="100%"/>',
                 *self._heading(), *self._grid()]
        group = None
        for bar, top in zip(self.bars, self.tops):
            parts += self._row(bar, top, bar.group != group)
            group = bar.group
        # Drawn after the bars, so that a bar that ends near 1.0 does not hide the line.
        parts += [self._vertical("one", 1.0), *self._footnotes(), "</svg>"]
        return "\n".join(parts)


def write(result: dict[str, Any], path: Path, suites: Collection[str] = (), names: Collection[str] = ()) -> Path:
    """Writes the picture of a result file. Returns its path."""
    text = SpeedChart(result, bars_of(result, suites, names)).svg() + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
