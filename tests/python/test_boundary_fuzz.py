"""A short run of boundary_fuzz.py, and tests of its reports. scripts/fuzz runs it for longer."""

import subprocess
import sys
import unittest

try:
    import numpy  # noqa: F401: its children need it
except ImportError:
    raise unittest.SkipTest("NumPy is not installed")

import boundary_fuzz

SECONDS = (4, 30, 90)  # a busy machine gets a longer run


class Fuzz(unittest.TestCase):
    def test_no_call_fails(self):
        for seconds in SECONDS:
            done, findings = boundary_fuzz.run(seconds, 1)
            if findings or done > 100:
                break
        self.assertEqual(findings, [], "\n".join(findings))
        self.assertGreater(done, 100)

    def test_a_failure_is_found_and_minimized(self):
        seen = []

        def check(choose, number):
            drawn = choose.randrange(1000)
            if drawn > 500:
                seen.append(drawn)
                raise boundary_fuzz.BrokenPromise

        with self.assertRaises(boundary_fuzz.BrokenPromise):
            boundary_fuzz.each_case(1, 0, check)
        if boundary_fuzz.hypothesis is not None:
            self.assertEqual(seen[-1], 501)

    def test_a_case_can_be_replayed(self):
        """A case is the same in every process, also if the cases before it are drawn but not run."""
        for first in (0, boundary_fuzz.BATCH):  # Hypothesis's and random.Random's
            with self.subTest(first=first):
                self.replay_from(first)

    def replay_from(self, first):
        lines = []
        boundary_fuzz.each_case(1, first, lambda choose, number: boundary_fuzz.run_case(
            choose, number, None, lines.append), count=40)
        chosen = int(lines[33].partition(":")[0])  # Hypothesis abandons some cases before the call
        again = []
        boundary_fuzz.each_case(1, first, lambda choose, number: boundary_fuzz.run_case(
            choose, number, None, again.append, really=number == chosen), count=40)
        self.assertEqual(again, [lines[33]])

    def test_report(self):
        lines = ["0: f(1)", "1: f(2)", "WRONG raised E: x", "2: f(1)", "WRONG raised E: y"]
        self.assertEqual(boundary_fuzz.findings_of(lines, 4, 2000), [
            "raised E: x\n    --seed 4 --first 2000 --case 1: f(2)\n    smallest: raised E: y: 2: f(1)"])
        self.assertEqual(boundary_fuzz.findings_of(lines[:2], 4, 0), [])

    def test_a_read_past_the_end_is_found(self):
        """There are guard pages before and after an array."""
        for at_start, index in ((False, "size"), (True, "-1")):
            program = ("import sys, ctypes; sys.path.insert(0, sys.argv[1]); import guarded; "
                       f"one = guarded.empty((3, 5), 'f4', at_start={at_start}); size = one.nbytes; "
                       "one[...] = 1; print('fine', flush=True); "
                       f"ctypes.c_char.from_address(one.ctypes.data + ({index})).value")
            done = subprocess.run([sys.executable, "-c", program, boundary_fuzz.FOLDER],
                                  capture_output=True, text=True)
            self.assertEqual((done.stdout, done.returncode), ("fine\n", -11), done.stderr)


if __name__ == "__main__":
    unittest.main()
