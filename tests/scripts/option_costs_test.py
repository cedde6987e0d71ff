"""Tests scripts/checks/option_costs: a figure of README that differs from the measured one is reported."""
import importlib.machinery
import importlib.util
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("option_costs", str(ROOT / "scripts" / "checks" / "option_costs"))
script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(script)

README = """## Features

| | CPU | H200, plain = 1 |
|-|-|-|
| types | f32 | |
| ALiBi; softcap (above 256: CPU) | yes | 1.20; 1.39 |
| paged KV, 64 keys a page; 16 | yes | 1.06; 1.2 |

## Next
"""
PERFORMANCE = """| option | time |
|-|-|
| ALiBi | 1.18 to 1.20 |
| softcap 50 | 1.39 |
| paged KV, 256 / 64 / 16 / 4 keys a page | 1.05 / 1.06 / 1.2 / 3.0 |
"""


def row(name, ratio, **fields):
    return {"suite": "options", "name": name, "baseline_ratios": {"plain": ratio}, **fields}


class OptionCosts(unittest.TestCase):
    def problems(self, readme=README, performance=PERFORMANCE, rows=()):
        return script.problems(readme, performance, {"rows": list(rows)})

    def test_figures_of_the_document(self):
        self.assertEqual(self.problems(), [])
        found = self.problems(README.replace("1.39", "1.38"))
        self.assertEqual(found, ["README.md: softcap is 1.38; docs/performance.md has 1.39"])
        self.assertEqual(len(self.problems(performance=PERFORMANCE.replace("/ 1.2 /", "/ 1.3 /"))), 1)

    def test_figures_of_the_result_file(self):
        """They count as soon as there are any, rounded as printed."""
        self.assertEqual(self.problems(rows=[row("alibi", 1.2004), row("pages-16", 1.2411)]), [])
        found = self.problems(rows=[row("alibi", 1.1251), row("other", 9.0)])
        self.assertEqual(found, ["README.md: ALiBi is 1.20; bench/results/h200.json, row alibi has 1.13"])
        self.assertEqual(self.problems(rows=[row("alibi", 9.0, suite="x"), row("alibi", 9.0, baseline_ratios={})]), [])

    def test_mistakes_of_the_table(self):
        for old, new, words in (("; 1.39", "", "2 options, 1 figures"), ("plain = 1", "", "no column of times"),
                                ("1.20; 1.39 |\n| paged KV, 64 keys a page; 16 | yes | 1.06; 1.2",
                                 "|\n| paged | yes |", "no option has a figure")):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                self.problems(README.replace(old, new))
        self.assertRegex(self.problems(README.replace("ALiBi", "wings"))[0], "\"wings\" is not known")
        with self.assertRaisesRegex(ValueError, "no row \"ALiBi\""):
            self.problems(performance=PERFORMANCE.replace("ALiBi", "alibi"))

    def test_every_option_is_a_case(self):
        text = (ROOT / "bench" / "cases.json").read_text(encoding="utf-8")
        for case, _, _ in script.OPTIONS.values():
            self.assertIn(f'"name": "{case}"', text)


if __name__ == "__main__":
    unittest.main()
