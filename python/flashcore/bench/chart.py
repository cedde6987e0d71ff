"""A log-log chart as SVG text, one line per series. It has no dependencies."""

import math
from html import escape

COLOURS = {"ours": "#c8102e", "cudnn": "#2e7d32", "fa2": "#1565c0", "eff": "#8e24aa",
           "math": "#757575", "torch": "#1565c0", "fa3": "#ef6c00", "flash_attn": "#00838f",
           "flashinfer": "#6d4c41", "xformers": "#ad1457"}
_OTHER_COLOUR = "#9e9d24"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 64, 48, 16, 120


_LABEL_GAP = 44  # between the figures of the x axis


def _ticks(values):
    """The numbers 1, 2, 5, 10, ... around all values: at least two."""
    found: list[float] = []
    power = 10.0 ** math.floor(math.log10(min(values)))
    while not found or found[-1] < max(values) or len(found) < 2:
        found += [step * power for step in (1, 2, 5)]
        power *= 10
    low = max(one for one in found if one <= min(values))
    high = min(one for one in found if one >= max(values) and one > low)
    return [one for one in found if low <= one <= high]


class Chart:
    """A chart. series is {name: [(x, y, tooltip)]}. The x axis has a tick for each x that fits."""

    def __init__(self, x_label, y_label, series):
        self.labels, self.series = (x_label, y_label), series
        points = [point for many in series.values() for point in many]
        self.x_ticks = sorted({x for x, _, _ in points})
        self.y_ticks = _ticks([y for _, y, _ in points])

    @staticmethod
    def _share(value, ticks):
        """The position of value between the first (0) and the last tick (1)."""
        width = math.log10(ticks[-1] / ticks[0])
        return math.log10(value / ticks[0]) / width if width else 0.5

    def x(self, value):
        return _LEFT + 12 + self._share(value, self.x_ticks) * (_WIDTH - _LEFT - _RIGHT - 24)

    def y(self, value):
        return _HEIGHT - _BOTTOM - self._share(value, self.y_ticks) * (_HEIGHT - _BOTTOM - _TOP)

    def _axes(self):
        right, bottom, last = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, -math.inf
        for tick in self.x_ticks:
            at = self.x(tick)
            yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>'
            if at - last >= _LABEL_GAP:
                last = at
                yield f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>'
        for tick in self.y_ticks:
            at = self.y(tick)
            yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
            yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,.10g}</text>'
        middle = (_LEFT + right) / 2
        yield (f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">'
               f'{escape(self.labels[0])}</text>')
        yield (f'<text transform="translate(14,{(_TOP + bottom) / 2:.0f}) rotate(-90)" '
               f'text-anchor="middle">{escape(self.labels[1])}</text>')

    def _series(self, name, points):
        colour = COLOURS.get(name, _OTHER_COLOUR)
        if len(points) > 1:
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y, _ in sorted(points))
            width = 2.5 if name == "ours" else 1.5
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{path}"/>'
        for x, y, what in points:
            yield (f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5" fill="{colour}">'
                   f'<title>{escape(name)}: {escape(what)}</title></circle>')

    def svg(self):
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg">',
                 *self._axes()]
        # In the order of the lines' ends, from the top.
        order = sorted(self.series.items(), key=lambda item: -max(item[1])[1])
        for number, (name, points) in enumerate(order):
            parts += self._series(name, points)
            at = _TOP + 10 + 18 * number
            parts.append(f'<circle cx="{_WIDTH - _RIGHT + 16}" cy="{at}" r="4" '
                         f'fill="{COLOURS.get(name, _OTHER_COLOUR)}"/><text '
                         f'x="{_WIDTH - _RIGHT + 26}" y="{at + 4}">{escape(name)}</text>')
        return "\n".join([*parts, "</svg>"])
