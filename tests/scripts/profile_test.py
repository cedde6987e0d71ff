"""Tests scripts/profile: parsing of ncu's raw page, and messages about a missing ncu or case.

SAMPLE tests the parser and is not a measurement. It has the documented format of
`ncu --csv --page raw` (names, units, one line per kernel) with invented figures.
"""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import profile_summary  # noqa: E402

COLUMNS = {  # name: (unit, value)
    "ID": ("", "0"),
    "Process ID": ("", "4711"),
    "Kernel Name": ("", "attention(AttentionParams)"),
    "Block Size": ("", "(128, 1, 1)"),
    "Grid Size": ("", "(264, 1, 1)"),
    "CC": ("", "9.0"),
    "gpu__time_duration.sum": ("nsecond", "1,234,500"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "12.5"),
    "launch__registers_per_thread": ("register/thread", "206"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "31.25"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", "44.0"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", "71.5"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "1.0"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "n/a"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("%", "55.5"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "12.4"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "0.25"),
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": ("inst", "1.75"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "0.50"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.10"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1.00"),
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": ("inst", "0.05"),
    "smsp__average_warps_issue_stalled_not_issued_wait_per_issue_active.ratio": ("inst", "9.00"),
}


def table(columns, kernels=1):
    def line(cells):
        return ",".join(f'"{cell}"' for cell in cells)

    values = line(value for _, value in columns.values())
    return "\n".join(["==PROF== Connected to process 4711", line(columns),
                      line(unit for unit, _ in columns.values()), *[values] * kernels]) + "\n"


SAMPLE = table(COLUMNS)


class Summary(unittest.TestCase):
    def shown(self, text=SAMPLE):
        lines = profile_summary.summary(text).splitlines()
        return {line[:24].strip(): line[24:].strip() for line in lines}

    def test_figures(self):
        shown = self.shown()
        self.assertEqual(shown["kernel"], "attention")
        self.assertEqual(shown["grid, block"], "(264, 1, 1), (128, 1, 1)")
        self.assertEqual(shown["duration"], "1234 us")
        self.assertEqual(shown["tensor pipe"], "71.5 %")  # the first metric counts
        self.assertEqual(shown["XU (exp2, reciprocal)"], "44 %")
        self.assertEqual(shown["L2"], "31.25 %")
        self.assertEqual(shown["DRAM"], "12.5 %")
        self.assertEqual(shown["issue slots"], "55.5 %")  # the first metric has no number
        self.assertEqual(shown["occupancy"], "12.4 %")
        self.assertEqual(shown["registers per thread"], "206")

    def test_missing_metrics_are_reported(self):
        self.assertEqual(self.shown()["FMA pipe"], "not reported by this ncu")

    def test_stalls_are_sorted(self):
        kernels, _ = profile_summary.parse(SAMPLE)
        self.assertEqual([reason for reason, _ in profile_summary.stalls(kernels[0])],
                         ["math pipe throttle", "selected", "wait", "long scoreboard", "barrier",
                          "short scoreboard"])
        text = profile_summary.summary(SAMPLE)
        self.assertIn("math pipe throttle", text)
        self.assertNotIn("short scoreboard", text)  # the sixth

    def test_other_units(self):
        for unit, value in (("usecond", "1,234.5"), ("msecond", "1.2345"), ("ns", "1234500")):
            changed = {**COLUMNS, "gpu__time_duration.sum": (unit, value)}
            self.assertEqual(self.shown(table(changed))["duration"], "1234 us", unit)

    def test_no_table_and_no_kernel(self):
        for text in ("", "==ERROR== something\n", table(COLUMNS, kernels=0)):
            with self.assertRaises(profile_summary.NoKernel):
                profile_summary.summary(text)


class Script(unittest.TestCase):
    def refused(self, *arguments, **env):
        done = subprocess.run([sys.executable, ROOT / "scripts" / "profile", *arguments],
                              capture_output=True, text=True, env={**os.environ, **env})
        self.assertEqual(done.returncode, 2)
        return done.stderr

    def test_mistakes(self):
        self.assertIn("there is no kernel", self.refused("nobody", "decode"))
        self.assertIn("runs on a CPU", self.refused("fwd_generic_f32", "decode"))
        self.assertIn("known are", self.refused("fwd_simt_bf16_d64_q64", "nobody"))
        self.assertIn("has 1,", self.refused("fwd_simt_f16_d64_q64", "prefill-b1-s512#2"))
        self.assertIn("takes bf16", self.refused("fwd_simt_bf16_d64_q64", "prefill-b1-s512"))
        self.assertIn("up to head_dim 64", self.refused("fwd_simt_bf16_d64_q64", "decode"))

    @unittest.skipIf(os.path.exists("/usr/local/cuda/bin/ncu"), "ncu is installed in a fixed folder")
    def test_without_ncu_the_message_names_the_package(self):
        with tempfile.TemporaryDirectory() as empty:
            said = self.refused("fwd_simt_f16_d64_q64", "prefill-b1-s512", PATH=empty)
        self.assertIn("nsight-compute", said)


if __name__ == "__main__":
    unittest.main()
