"""The HTML page of a result file in a headless Chromium, at two widths.

Nothing may overflow the page, all bars must be visible with lengths proportional to the speeds, and labels
must be legible and must not overlap. Faults injected by CSS show that each rule can fail.
FLASHCORE_BROWSER names the browser; without one, the page is NOT TESTED.
"""

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from flashcore.bench import report
from flashcore.bench.speed_chart import bars_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = (os.environ.get("FLASHCORE_BROWSER", ""), "chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for found in map(shutil.which, filter(None, NAMES)) if found), None)
if BROWSER is None:
    raise unittest.SkipTest("no Chromium is installed (package chromium)")

WIDTHS = (1280, 420)
SMALLEST_TEXT = 8  # pixels

# Runs in the page and writes its findings as JSON into the enclosing document.
MEASURE = """
<script>
const all = selector => [...document.querySelectorAll(selector)].filter(one => one.getClientRects().length);
const box = one => { const r = one.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const found = {
  width: innerWidth, scroll: document.documentElement.scrollWidth,
  bars: all("svg.speed rect").filter(one => one.querySelector("title")).map(box),
  one: all("svg.speed line.one").map(box),
  pictures: all("svg").map(svg => ({box: box(svg), texts: [...svg.querySelectorAll("text")].map(
    one => ({words: one.textContent, box: box(one)}))})),
};
frameElement.nextElementSibling.textContent = JSON.stringify(found);
</script>
"""


def measure(page, views):
    """The findings of MEASURE for each (width, more CSS). Each view is a frame of one document, because a
    window of Chromium is at least 500 pixels wide."""
    frames = []
    for width, style in views:
        inside = html.escape(page.replace("</html>", f"<style>{style}</style>{MEASURE}</html>"))
        frames.append(f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{inside}"></iframe>'
                      '<pre class="measured"></pre>')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text('<!doctype html><meta charset="utf-8">' + "".join(frames), encoding="utf-8")
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=240)
    found = re.findall(r'<pre class="measured">([^<]+)</pre>', done.stdout)
    if len(found) != len(views):
        raise AssertionError(f"{BROWSER} measured {len(found)} of {len(views)} views (exit {done.returncode}):\n"
                             f"{done.stderr[-2000:]}")
    return [json.loads(html.unescape(one)) for one in found]


def overlap(one, other):
    """Whether two boxes share more than a pixel in each direction."""
    return (min(one[2], other[2]) - max(one[0], other[0]) > 1
            and min(one[3], other[3]) - max(one[1], other[1]) > 1)


def overlapping(texts):
    ordered = sorted(texts, key=lambda one: one["box"][1])
    for number, one in enumerate(ordered):
        for other in ordered[number + 1:]:
            if other["box"][1] >= one["box"][3]:
                break
            if overlap(one["box"], other["box"]):
                yield one["words"], other["words"]


def faults(found, bars):
    """The faults of the page, as sentences."""
    width = found["width"]
    if found["scroll"] > width:
        yield f"the page is {found['scroll']} pixels wide in a window of {width}"
    if len(found["bars"]) != len(bars) or len(found["one"]) != 1:
        yield f"{len(found['bars'])} bars and {len(found['one'])} marks of 1.0; wanted {len(bars)} and 1"
        return
    unit = found["one"][0][0] - found["bars"][0][0]
    for bar, (left, _, right, _) in zip(bars, found["bars"]):
        if left < 0 or right > width:
            yield f"bar {bar.group} {bar.label} is not visible"
        if abs((right - left) - bar.speed * unit) > 1:
            yield f"bar {bar.group} {bar.label} is {right - left:.1f} long; wanted {bar.speed * unit:.1f}"
    for picture in found["pictures"]:
        for text in picture["texts"]:
            left, top, right, bottom = text["box"]
            if left < 0 or right > width:
                yield f"label {text['words']!r} is not visible"
            if min(bottom - top, right - left) < SMALLEST_TEXT and len(text["words"]) > 1:
                yield f"label {text['words']!r} is {min(bottom - top, right - left):.1f} pixels high"
        for one, other in overlapping(picture["texts"]):
            yield f"labels {one!r} and {other!r} overlap"


# (width, CSS that breaks a rule, part of the expected message)
PLANTED = [
    (420, ".scroll { overflow-x: visible; }", "the page is"),
    (420, ".wide { display: block !important; } .narrow { display: none !important; }", "pixels high"),
    (420, ".narrow { margin-left: 60px; width: 388px; }", "is not visible"),
    (1280, "svg.speed text { font-size: 16px; }", "overlap"),
    (1280, ".charts text { font-size: 40px; }", "overlap"),
    (1280, "svg.speed rect { transform: scaleX(1.1); }", "long; wanted"),
    (1280, ".wide { display: none; }", "0 bars"),
]


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        result = json.loads((ROOT / "bench" / "results" / "h200.json").read_text(encoding="utf-8"))
        cls.bars = bars_of(result)
        views = [*((width, "") for width in WIDTHS), *((width, style) for width, style, _ in PLANTED)]
        cls.found = measure(report.to_html(result), views)

    def test_the_page_at_two_widths(self):
        for width, found in zip(WIDTHS, self.found):
            with self.subTest(width=width):
                self.assertEqual(found["width"], width)
                self.assertEqual([*faults(found, self.bars)], [])

    def test_injected_faults_are_found(self):
        for (width, style, words), found in zip(PLANTED, self.found[len(WIDTHS):]):
            with self.subTest(style=style):
                self.assertEqual(found["width"], width)
                self.assertTrue([one for one in faults(found, self.bars) if words in one])


if __name__ == "__main__":
    unittest.main()
