"""Result files: their fields, atomic writing, and all committed files."""

import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from flashcore.bench import cases, results
from support import case

ROOT = Path(__file__).resolve().parents[2]


def row(**fields):
    return {**case().fields(), "kernel": "fwd_generic_f32", "kernel_fingerprint": "0" * 16, "us": 1.5,
            "spread": 0.01, "error": 1e-7, "peers_us": {"cudnn": 2.0}, **fields}


def result(**fields):
    return {"fingerprint": "0123456789abcdef", "gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0",
            "torch": "2", "cudnn": "9", "date": "2026-01-01T00:00:00Z", "command": "x",
            "stages": {"build": {"status": "passed", "seconds": 1.0, "details": {}}},
            "rows": [row()], **fields}


class Schema(unittest.TestCase):
    def test_a_good_file(self):
        self.assertEqual(results.problems_of(result()), [])
        both = row(call="flashcore.attention", bare_us=1.25)
        self.assertEqual(results.problems_of(result(rows=[both])), [])
        compared = row(baselines_us={"plain": 2.0}, baseline_ratios={"plain": 1.1})
        self.assertEqual(results.problems_of(result(rows=[compared])), [])

    def test_each_fault_is_found(self):
        faults = [
            result(fingerprint="stale"),
            {name: value for name, value in result().items() if name != "driver"},
            result(stages={"build": {"status": "great", "seconds": 1}}),
            result(stages={"build": {"status": "failed", "seconds": 1}}),  # without a reason
            result(stages={"build": {"status": "passed"}}),
            result(rows=[row(us=0)]),
            result(rows=[row(us="fast")]),
            result(rows=[row(call="flashcore.attention")]),  # without the time of the C call
            result(rows=[row(call="flashcore.attention", bare_us=0)]),
            result(rows=[row(spread=float("nan"))]),
            result(rows=[row(error=-1)]),
            result(rows=[row(kernel="")]),
            result(rows=[row(kernel_fingerprint="abc")]),
            result(rows=[row(peers_us={"cudnn": 0})]),
            result(rows=[row(peers_us=None)]),
            result(rows=[row(baselines_us={"plain": 0})]),
            result(rows=[row(baseline_ratios={"plain": None})]),
            result(rows=[{name: value for name, value in row().items() if name != "causal"}]),
            result(rows=[row(), row()]),
        ]
        for number, fault in enumerate(faults):
            self.assertTrue(results.problems_of(fault), f"fault {number}")

    def test_the_committed_files(self):
        known = None
        if (ROOT / "bench" / "cases.json").is_file():
            known = cases.load(ROOT / "bench" / "cases.json")
        for path in sorted((ROOT / "bench" / "results").glob("*.json")):
            with self.subTest(path.name):
                content = json.loads(path.read_text(encoding="utf-8"))
                self.assertEqual(results.problems_of(content), [])
                self.assertEqual(path.name, results.file_name(content["gpu"]) if content["gpu"] else
                                 results.cpu_file_name(content["cpu"], content["threads"]))
                if known is None:
                    continue
                for number, one in enumerate(content["rows"]):
                    self.assertIn(cases.Case.of(one), known, f"row {number} is no case of bench/cases.json")


class Files(unittest.TestCase):
    def test_names(self):
        for gpu, name in (("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
                          ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("Tesla T4", "t4"),
                          ("../../etc", "etc"), ("", "unknown")):
            self.assertEqual(results.file_name(gpu), f"{name}.json")

    def test_names_of_cpus(self):
        intel = """processor	: 0
vendor_id	: GenuineIntel
model		: 85
model name	: Intel(R) Xeon(R) CPU @ 2.50GHz
stepping	: 4
power management:
"""
        arm = """processor	: 0
CPU implementer	: 0x41
CPU variant	: 0x3
CPU part	: 0xd0c
"""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cpuinfo"
            for text, name, file in (
                    (intel, "Intel Xeon 2.50GHz model 85 stepping 4",
                     "intel-xeon-2-50ghz-model-85-stepping-4-1-thread.json"),
                    (arm, "implementer 0x41 part 0xd0c variant 0x3",
                     "implementer-0x41-part-0xd0c-variant-0x3-1-thread.json")):
                path.write_text(text, encoding="utf-8")
                self.assertEqual(results.cpu_name(path), name)
                self.assertEqual(results.cpu_file_name(name, 1), file)
            self.assertNotEqual(results.cpu_name(Path(folder) / "missing"), "")
        self.assertEqual(results.cpu_file_name("A", 16), "a-16-threads.json")

    def test_writing_is_atomic(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "new" / "one.json"
            results.write(path, {"rows": [1]})
            with self.assertRaises(ValueError):
                results.write(path, {"rows": [float("nan")]})
            with mock.patch.object(os, "replace", side_effect=OSError("no space")):
                with self.assertRaises(OSError):
                    results.write(path, {"rows": [2]})
            self.assertEqual(results.read(path), {"rows": [1]})
            self.assertEqual(os.listdir(path.parent), ["one.json"])
            self.assertIsNone(results.read(path.parent / "other.json"))

    def test_rows_of_the_same_case_are_replaced(self):
        old = [row(name="a", us=1), row(name="b", us=2)]
        new = [row(name="b", us=3), row(name="c", us=4)]
        merged = results.merge_rows(old, new)
        self.assertEqual([(one["name"], one["us"]) for one in merged],
                         [("a", 1), ("b", 3), ("c", 4)])

    def test_numbers_are_readable_and_json(self):
        self.assertEqual(results.rounded({"a": [1.23456789, True, "x"], "b": float("inf")}),
                         {"a": [1.2346, True, "x"], "b": "inf"})
        text = results.dumps({"samples": [1.5, 2.0, 1e-7], "words": ["a", "b"], "none": []})
        self.assertIn('"samples": [1.5, 2.0, 1e-07]', text)
        self.assertEqual(json.loads(text)["words"], ["a", "b"])


if __name__ == "__main__":
    unittest.main()
