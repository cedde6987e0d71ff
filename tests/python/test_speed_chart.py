"""The chart of the speed relative to the best peer: its bars and labels, and README's picture."""

import contextlib
import io
import re
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from flashcore.bench import command, results
from flashcore.bench.narrow_speed_chart import NarrowSpeedChart
from flashcore.bench.speed_chart import SpeedChart, bars_of
from support import case

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python3 -m flashcore.bench --chart docs/images/speed_h200.svg --results bench/results/h200.json"
SVG = "{http://www.w3.org/2000/svg}"


def row(name, us=10.0, suite="x", note=None, **peers):
    return {**case(name=name).fields(), "suite": suite, "us": us, "peers_us": peers,
            "peers_note": note or {}}


def result(*rows, **fields):
    return {"gpu": "NVIDIA H200", "date": "2026-01-02T03:04:05Z", "fingerprint": "0123456789abcdef",
            "rows": list(rows), **fields}


def draw(given):
    chart = SpeedChart(given, bars_of(given))
    return chart, ElementTree.fromstring(chart.svg())


def drawn_bars(picture):
    """The bars of cases. Bars of the legend have no title."""
    return [one for one in picture.iter(SVG + "rect") if one.find(SVG + "title") is not None]


def texts(picture, kind=None):
    return ["".join(one.itertext()) for one in picture.iter(SVG + "text") if kind in (None, one.get("class"))]


def run(*arguments):
    """(exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.main([*arguments])
    return code, out.getvalue(), err.getvalue()


class Bars(unittest.TestCase):
    def test_groups_and_rows_in_the_order_of_the_file(self):
        given = result(row("b", fa3=9.0), row("a", fa3=12.0), row("b", fa3=11.0))
        self.assertEqual([(bar.group, round(bar.speed, 6)) for bar in bars_of(given)],
                         [("b", 0.9), ("b", 1.1), ("a", 1.2)])
        _, picture = draw(given)
        tops = [float(one.get("y")) for one in drawn_bars(picture)]
        self.assertEqual(tops, sorted(tops))
        names = [one for one in texts(picture, "group") if one in "ab"]
        self.assertEqual(names, ["b", "a"])  # each once

    def test_the_best_peer_counts(self):
        bar, = bars_of(result(row("a", fa2=30.0, cudnn=12.5, eff=20.0)))
        self.assertEqual((bar.peer, bar.speed, bar.figure), ("cudnn", 1.25, "1.250 cuDNN"))

    def test_a_case_without_peers_is_omitted(self):
        self.assertEqual([bar.group for bar in bars_of(result(row("a"), row("b", fa3=9.0)))], ["b"])

    def test_suites(self):
        given = result(row("a", suite="anchors", fa3=9.0), row("b", suite="regression", fa3=9.0),
                       row("c", suite="simt", fa3=9.0))
        self.assertEqual([bar.group for bar in bars_of(given)], ["a"])
        self.assertEqual([bar.group for bar in bars_of(given, suites=["regression", "simt"])], ["b", "c"])
        self.assertEqual([bar.group for bar in bars_of(given, names=["c"])], [])
        only = result(row("b", suite="regression", fa3=9.0))
        self.assertEqual([bar.group for bar in bars_of(only)], ["b"])


class Drawing(unittest.TestCase):
    def test_lengths_are_linear_from_0_and_coloured_by_side(self):
        chart, picture = draw(result(row("a", fa3=5.0), row("a", fa3=9.5), row("a", fa3=10.0), row("a", fa3=20.0)))
        shown = drawn_bars(picture)
        self.assertEqual([one.get("class") for one in shown], ["slower", "slower", "faster", "faster"])
        unit = chart.x(1.0) - chart.x(0.0)
        for one, speed in zip(shown, (0.5, 0.95, 1.0, 2.0)):
            self.assertAlmostEqual(float(one.get("width")), unit * speed, delta=0.1)
            self.assertAlmostEqual(float(one.get("x")), chart.left, delta=0.1)
        self.assertGreater(0.05 * unit, 5)  # pixels: 5 % can be seen

    def test_1_is_marked_above_the_bars(self):
        for peer in (1.0, 9.0, 19.6, 130.0, 5000.0):
            chart, picture = draw(result(row("a", fa3=peer)))
            line, = [one for one in picture.iter(SVG + "line") if one.get("class") == "one"]
            self.assertEqual(line.get("x1"), line.get("x2"))
            self.assertAlmostEqual(float(line.get("x1")), chart.x(1.0), delta=0.1)
            children = list(picture)
            self.assertGreater(children.index(line), children.index(drawn_bars(picture)[-1]))
            marks = [one for one in texts(picture, "group") if one in ("1", "1.00")]
            self.assertEqual(len(marks), 2, peer)  # above and below
            self.assertLessEqual(chart.x(peer / 10), chart.left + chart.plot + 1e-6)
            self.assertLess(chart.x(1.0), chart.left + chart.plot)

    def test_gridlines_stay_in_the_plot(self):
        for speed in (0.4, 1.3, 2.2, 3.12, 4.9, 7.0, 12.0, 31.0):
            given = result(row("a", us=10.0, cudnn=10.0 * speed))
            for form in (SpeedChart, NarrowSpeedChart):
                chart = form(given, bars_of(given))
                lines = ElementTree.fromstring(chart.svg()).iter(SVG + "line")
                self.assertLessEqual(max(float(one.get("x2")) for one in lines), chart.left + chart.plot + 0.1,
                                     f"{form.__name__}, {speed}")

    def test_names_are_escaped(self):
        given = result(row("<a&b>", note={"p<q": 'says "<no>"'}, **{"p<q": 12.0}), gpu="G<1>")
        chart, picture = draw(given)  # it parses
        self.assertNotIn("<a&b>", chart.svg())
        for text in ("<a&b>", "1.200 p<q *", '* the peer: says "<no>"'):
            self.assertIn(text, texts(picture))
        self.assertIn("G<1>", picture.find(SVG + "title").text)

    def test_title_and_description(self):
        _, picture = draw(result(row("a", fa3=9.0), row("a", fa3=12.0)))
        self.assertEqual(picture.get("role"), "img")
        self.assertIn("NVIDIA H200", picture.find(SVG + "title").text)
        about = picture.find(SVG + "desc").text
        for words in ("2026-01-02", "0123456789abcdef", "1 of 2 cases", "0.900 to 1.200"):
            self.assertIn(words, about)
        heading = " ".join(texts(picture))
        for words in ("NVIDIA H200", "2026-01-02", "0123456789abcdef", case().shape_text()):
            self.assertIn(words, heading)

    def test_long_names_make_it_wider(self):
        chart, _ = draw(result(row("n" * 80, fa3=9.0)))
        self.assertGreater(chart.width, 800)
        self.assertGreaterEqual(chart.plot, 240)

    def test_no_rows(self):
        with self.assertRaisesRegex(ValueError, "nothing to draw"):
            draw(result())


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.picture = self.folder / "new" / "speed.svg"

    def chart(self, given, *arguments):
        results.write(self.folder / "one.json", given)
        return run("--chart", str(self.picture), "--results", str(self.folder / "one.json"), *arguments)

    def test_selected_cases(self):
        given = result(row("a", suite="anchors", fa3=9.0), row("b", suite="regression", fa3=9.0))
        self.assertEqual(self.chart(given), (0, f"written: {self.picture}\n", ""))
        self.assertEqual(self.picture.read_text(), SpeedChart(given, bars_of(given)).svg() + "\n")
        self.assertEqual(self.chart(given, "--suite", "regression")[0], 0)
        self.assertIn(">b</text>", self.picture.read_text())

    def test_invalid_input(self):
        for given in (result(), result(row("a")), {"gpu": "x"}):
            code, _, err = self.chart(given)
            self.assertEqual(code, 2)
            self.assertIn("nothing to draw", err)
        self.assertFalse(self.picture.exists())
        code, _, err = run("--chart", str(self.picture), "--results", "/no/such/file.json")
        self.assertEqual(code, 2)
        self.assertIn("there is no file", err)
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
            command.main(["--results", "one.json"])
        self.assertIn("--chart OUT.svg", err.getvalue())

    def test_the_file_must_be_given_if_there_are_several(self):
        folder = self.folder / "bench" / "results"
        results.write(folder / "a.json", result())
        self.assertEqual(command.default_results(self.folder), folder / "a.json")
        results.write(folder / "b.json", result())
        for root in (self.folder, None):
            with self.assertRaisesRegex(ValueError, "--results: wanted"):
                command.default_results(root)


class ReadmePicture(unittest.TestCase):
    def test_it_equals_the_output_of_the_command(self):
        committed = ROOT / "docs" / "images" / "speed_h200.svg"
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "speed.svg"
            code, _, err = run("--chart", str(made), "--results", str(ROOT / "bench" / "results" / "h200.json"))
            self.assertEqual(code, 0, err)
            self.assertTrue(made.read_bytes() == committed.read_bytes(), f"it is stale; make it anew: {COMMAND}")
        self.assertLess(committed.stat().st_size, 60_000)
        self.assertEqual(ElementTree.parse(committed).getroot().get("width"), "800")

    def test_readme_shows_it_and_the_command(self):
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertRegex(readme, re.escape("](docs/images/speed_h200.svg)"))
        self.assertIn(COMMAND, readme)


if __name__ == "__main__":
    unittest.main()
