"""A log-log chart as SVG text, with lines or points per series. It has no dependencies."""

import math
from html import escape

COLOURS = {"ours": "#c8102e", "cudnn": "#2e7d32", "fa2": "#1565c0", "eff": "#8e24aa",
           "math": "#757575", "torch": "#1565c0", "fa3": "#ef6c00", "flash_attn": "#00838f",
           "flashinfer": "#6d4c41", "xformers": "#ad1457"}
_OTHER_COLOUR = "#9e9d24"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 400, 64, 48, 16, 120


def _decades(values):
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, high if high > low else low + 1


class Chart:
    """A chart. series is {name: [(x, y, tooltip)]}."""

    def __init__(self, x_label, y_label, series, lines=False):
        self.labels, self.series, self.lines = (x_label, y_label), series, lines
        points = [point for many in series.values() for point in many]
        self.x_range = _decades([x for x, _, _ in points])
        self.y_range = _decades([y for _, y, _ in points])

    def x(self, value):
        low, high = self.x_range
        share = (math.log10(value) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value):
        low, high = self.y_range
        share = (math.log10(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def _axes(self):
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for power in range(self.x_range[0], self.x_range[1] + 1):
            at = self.x(10.0**power)
            yield f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>'
            yield (f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">'
                   f'{10.0**power:g}</text>')
        for power in range(self.y_range[0], self.y_range[1] + 1):
            at = self.y(10.0**power)
            yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
            yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        middle = (_LEFT + right) / 2
        yield (f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">'
               f'{escape(self.labels[0])}</text>')
        yield (f'<text transform="translate(14,{(_TOP + bottom) / 2:.0f}) rotate(-90)" '
               f'text-anchor="middle">{escape(self.labels[1])}</text>')

    def _series(self, name, points):
        colour = COLOURS.get(name, _OTHER_COLOUR)
        if self.lines and len(points) > 1:
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y, _ in sorted(points))
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>'
        for x, y, what in points:
            yield (f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5" fill="{colour}">'
                   f'<title>{escape(name)}: {escape(what)}</title></circle>')

    def svg(self):
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg">',
                 *self._axes()]
        for number, (name, points) in enumerate(self.series.items()):
            parts += self._series(name, points)
            at = _TOP + 14 + 18 * number
            parts.append(f'<circle cx="{_WIDTH - _RIGHT + 16}" cy="{_HEIGHT - 60 - at}" r="4" '
                         f'fill="{COLOURS.get(name, _OTHER_COLOUR)}"/><text '
                         f'x="{_WIDTH - _RIGHT + 26}" y="{_HEIGHT - 56 - at}">{escape(name)}</text>')
        return "\n".join([*parts, "</svg>"])
