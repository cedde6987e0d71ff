"""A result file as CSV and as an HTML page with plots."""

import csv
import html.parser
import io
import json
import re
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from flashcore.bench import chart as chart_module
from flashcore.bench import command, report, table
from flashcore.bench.narrow_speed_chart import NarrowSpeedChart
from flashcore.bench.speed_chart import SpeedChart, bars_of

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parents[2]


def result(**fields):
    rows = []
    for length, us in ((512, 10.0), (2048, 100.0), (8192, 1000.0)):
        rows.append(dict(kind="fwd", name=f"n{length}", dtype="f16", batch=1, q_heads=8, kv_heads=8,
                         q_len=length, kv_len=length, head_dim=64, causal=False, cold_l2=False,
                         suite="x", kernel="fwd_<kernel>", us=us, spread=0.01, error=1e-4,
                         peers_us={"cudnn": 2 * us}, ratios={"cudnn": 0.5}, peers_note={}))
    rows[0]["peers_us"], rows[0]["ratios"] = {}, {}
    rows[0]["peers_note"] = {"cudnn": 'it said "no"'}
    return {"gpu": "NVIDIA H200", "rows": rows, "command": "python3 <x>", **fields}


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.attributes.append((tag, dict(attributes)))


class Report(unittest.TestCase):
    def test_csv(self):
        rows = list(csv.DictReader(io.StringIO(report.to_csv(result()))))
        self.assertEqual([row["name"] for row in rows], ["n512", "n2048", "n8192"])
        self.assertEqual((rows[1]["us"], rows[1]["cudnn_us"], rows[1]["ours_over_cudnn"]),
                         ("100.0", "200.0", "0.5"))
        self.assertEqual(rows[0]["cudnn_us"], "")
        self.assertAlmostEqual(float(rows[1]["tflops"]), 4 * 8 * 2048**2 * 64 / 100 / 1e6)

    def test_the_page_is_self_contained(self):
        text = report.to_html(result())
        tags = Tags(text)
        self.assertEqual(tags.found.count("svg"), 3)  # bars for wide and narrow screens, one group of lengths
        # Points of FlashCore and of the peer if it has a time; and both in the legend.
        self.assertEqual(tags.found.count("circle"), 3 + 2 + 2)
        self.assertFalse(set(tags.found) & {"script", "link", "img", "iframe"})
        self.assertFalse([one for _, one in tags.attributes if "src" in one or "href" in one])
        self.assertIn("fwd_&lt;kernel&gt;", text)
        self.assertIn("python3 &lt;x&gt;", text)
        self.assertIn('class="faster">0.50', text)
        self.assertIn("it said &quot;no&quot;", text)

    def test_the_page_opens_with_the_speed_chart(self):
        given = result()
        drawn = SpeedChart(given, bars_of(given)).svg()
        page = report.to_html(given)
        self.assertIn(drawn, page)
        self.assertEqual(page.index("<svg"), page.index(drawn))
        self.assertLess(page.index(drawn), page.index("<h2>"))
        self.assertIn(NarrowSpeedChart(given, bars_of(given)).svg(), page)

    def test_the_narrow_chart_has_the_same_bars(self):
        given = result()
        wide, narrow = (ElementTree.fromstring(one(given, bars_of(given)).svg())
                        for one in (SpeedChart, NarrowSpeedChart))
        self.assertEqual((narrow.get("width"), wide.get("width")), ("360", "800"))
        figures = []
        for picture in (wide, narrow):
            bars = [one for one in picture.iter(SVG + "rect") if one.find(SVG + "title") is not None]
            line, = [one for one in picture.iter(SVG + "line") if one.get("class") == "one"]
            unit = float(line.get("x1")) - float(bars[0].get("x"))
            figures.append([(one.get("class"), one.find(SVG + "title").text,
                             round(float(one.get("width")) / unit, 2)) for one in bars])
        self.assertEqual(*figures)
        self.assertEqual([speed for _, _, speed in figures[0]], [2.0, 2.0])

    def test_times_of_both_calls(self):
        """A row of flashcore.attention also has the C call's time; an older row has only that time."""
        given = result(peers={"fa3": "3.0.0", "xformers": "not installed"})
        given["rows"][1].update(call="flashcore.attention", bare_us=90.0)
        rows = list(csv.DictReader(io.StringIO(report.to_csv(given))))
        self.assertEqual([(row["call"], row["us"], row["bare_us"]) for row in rows[:2]],
                         [("", "10.0", ""), ("flashcore.attention", "100.0", "90.0")])
        page = report.to_html(given)
        self.assertIn("<td>100<td>90<td>", page)
        self.assertIn("<td>10<td><td>", page)
        self.assertIn("fa3 3.0.0, xformers not installed", page)
        heading, _, old, new, _ = table.markdown(given).splitlines()
        self.assertEqual({line.count("|") for line in (heading, old, new)}, {heading.count("|")})
        self.assertIn("| 10 |  | 1.0 % |", old)
        self.assertIn("| 100 | 90 | 1.0 % |", new)

    def test_positions_of_points(self):
        """The axes are logarithmic: doubling the time moves a point by the same distance everywhere."""
        (_, chart), = report.latency_charts(result())
        distances = {round(chart.y(b[1]) - chart.y(a[1]), 6)
                     for a, b in zip(chart.series["ours"][1:], chart.series["cudnn"])}
        self.assertEqual(len(distances), 1)
        self.assertLess(distances.pop(), 0)  # y grows downwards in SVG
        for x, y, _ in chart.series["ours"]:
            self.assertTrue(0 < chart.x(x) < 640 and 0 < chart.y(y) < 400)
        self.assertEqual(chart.x_ticks, [512, 2048, 8192])
        self.assertEqual(chart.y_ticks, [10, 20, 50, 100, 200, 500, 1000, 2000])

    def test_ticks_enclose_every_value(self):
        for low, high in ((1, 1), (0.3, 0.31), (9.99, 10.01), (3, 7000), (100, 1000)):
            ticks = chart_module._ticks([low, high])
            self.assertTrue(len(ticks) >= 2 and ticks[0] <= low and high <= ticks[-1], (low, high, ticks))
            self.assertEqual(ticks, sorted(set(ticks)))

    def test_several_batches_of_one_length_have_their_own_charts(self):
        given = result()
        for row in result()["rows"]:
            given["rows"].append({**row, "batch": 4})
        titles = [title for title, _ in report.latency_charts(given)]
        self.assertEqual(titles, ["prefill f16, heads 8, dim 64, batch 1", "prefill f16, heads 8, dim 64, batch 4"])

    def test_only_dense_cases_of_one_suite_share_a_chart(self):
        for change in ({"suite": "y"}, {"window": 128}, {"page_size": 16}, {"v_dim": 32}, {"used_k": [3]}):
            given = result()
            given["rows"].append({**given["rows"][0], "q_len": 4096, "kv_len": 4096, **change})
            (_, chart), = report.latency_charts(given)
            self.assertEqual(chart.x_ticks, [512, 2048, 8192], change)

    def test_no_gpu_and_no_rows(self):
        page = report.to_html({"gpu": "", "threads": 2, "rows": []})
        self.assertIn("CPU, 2 threads", page)
        self.assertIn("No case has a peer's time.", page)
        self.assertNotIn("<svg", page)

    def test_results_in_the_tree(self):
        for path in (ROOT / "bench" / "results").glob("*.json"):
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / path.name
                copy.write_text(path.read_text())
                self.assertEqual(command.main(["--report", str(copy)]), 0)
                rows = json.loads(copy.read_text())["rows"]
                lines = copy.with_suffix(".csv").read_text().splitlines()
                self.assertEqual(len(lines), len(rows) + 1)
                page = copy.with_suffix(".html").read_text()
                self.assertEqual(len(re.findall("<tr>", page)), len(rows) + 1)
        self.assertEqual(command.main(["--report", "/no/such/file.json"]), 2)


if __name__ == "__main__":
    unittest.main()
