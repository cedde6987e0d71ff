"""Injected faults in the instrumented program: each one is found, reported and replayable."""

import json
import os
import re
import shlex
import subprocess
import unittest

from flashcore_command import FAILED, PROGRAM, SOURCE, CommandTest, write_npy


# These break the synchronization of GPU kernels; tests/protocol finds them.
SYNCHRONISATION = range(19, 28)
GRADIENTS = range(31, 45)


def faults():
    with open(os.path.join(SOURCE, "src/core/fault.h")) as file:
        return [(int(number), name) for name, number in
                re.findall(r"^  (\w+) = (\d+),", file.read(), re.M)
                if number != "0" and int(number) not in SYNCHRONISATION]


class Injected(CommandTest):
    def broken(self, number):
        return {"FLASHCORE_FAULT": str(number)}

    def test_number_of_faults(self):
        self.assertGreaterEqual(len(faults()), 10)

    def test_passes_without_a_fault(self):
        self.call("check", "--device", "cpu", "--problems", 200, env=self.broken(0))

    def test_every_fault_is_caught(self):
        for number, name in faults():
            with self.subTest(name):
                deadline = ("--deadline", 3) if name == "never_ends" else ()
                op = "backward" if number in GRADIENTS else "forward"
                found = self.call_json("check", "--op", op, "--device", "cpu", "--problems", 2000,
                                       "--max-failures", 1, *deadline, code=FAILED,
                                       env=self.broken(number))
                self.assertFalse(found["passed"])
                self.assertGreater(found["failures"], 0)
                self.assertTrue(found["first_failure"])
                self.assertTrue(found["reports"][0]["reason"])

    def test_report(self):
        done = self.call("check", "--device", "cpu", "--problems", 60, "--kernel", "generic_f32",
                         code=FAILED, env=self.broken(1))
        report = done.stdout[done.stdout.index("FAILED"):]
        self.assertRegex(report, r"worst +(out|lse)\[b=\d+, h=\d+, i=\d+.*\]: got \S+, want \S+")
        self.assertRegex(report, r"errors +max \S+, mean \S+, relative \S+, bias \S+")
        self.assertRegex(report, r"over bound \d+ \(\S+ %\).*sign flips \d+")
        first = report[:report.index("replay")]
        self.assertEqual(first.count("  sample "), 5)
        self.assertLessEqual(done.stdout.count("replay "), 5)
        self.assertRegex(done.stdout, r"\d+ more failures are not shown")
        self.assertRegex(done.stdout, r"FAILED: 60 problems in \S+ s, \d+ failures\n\Z")

    def replay(self, number, *arguments):
        """Runs a check, then the replay command of its first report; both must report the same."""
        done = self.call("check", "--device", "cpu", *arguments, code=FAILED,
                         env=self.broken(number))
        line = re.search(r"^  replay +(.*)$", done.stdout, re.M)[1]
        words = shlex.split(line)
        self.assertEqual(words[0], PROGRAM)
        again = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300,
                               cwd=self.folder, env={**os.environ, **self.broken(number)})
        self.assertEqual(again.returncode, FAILED, again.stderr)
        self.assertIn("FAILED: 1 problem in", again.stdout)
        first = re.search(r"FAILED  problem.*?(?=  replay)", done.stdout, re.S)[0]
        self.assertIn(first, again.stdout)
        healthy = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300,
                                 cwd=self.folder, env={**os.environ, **self.broken(0)})
        self.assertEqual(healthy.returncode, 0, healthy.stdout)

    def test_replay_of_a_random_problem(self):
        self.replay(1, "--problems", 100, "--seed", 42)

    def test_replay_with_every_option(self):
        self.replay(10, "--problems", 200, "--sigma", 2, "--splits", 3, "--work", 200000,
                    "--threads", 2, "--kernel", "f32|f16")

    def test_replay_of_a_tuning_problem(self):
        self.replay(4, "--suite", "tuning", "--kernel", "generic")

    def test_replay_of_a_keyless_tiles_problem(self):
        self.replay(1, "--suite", "regressions", "--max-failures", 1)  # its other name

    def test_replay_of_a_regression_problem(self):
        self.replay(10, "--suite", "regression", "--case", "regression-split-kv")

    def test_regression_table_shows_a_double_count(self):
        """The fault that the Split-K cases were added for."""
        done = self.call("check", "--suite", "regression", "--case", "regression-split-kv", "--device",
                         "cpu", code=FAILED, env=self.broken(10))
        self.assertRegex(done.stdout, r"\(1,1,512,64\) .* FAILED")

    def test_wrong_results_are_not_timed(self):
        result = self.call_json("bench", "--case", "cpu-prefill-s512", "--device", "cpu", "--quiet",
                                code=FAILED, env=self.broken(13))
        self.assertEqual(result["rows"], [])
        self.assertEqual(len(result["failed"]), 3)
        self.assertIn("never written", result["failed"][0]["reason"])
        text = self.call("bench", "--case", "cpu-prefill-s512#1", "--device", "cpu", code=FAILED,
                         env=self.broken(13)).stdout
        self.assertIn("NOT TIMED, check failed", text)

    def stages(self, number, *arguments):
        """Returns {stage: report} of a run with fault `number`, and its first wrong stage."""
        result = self.call_json("run", "--shape", "2,4/2,40/300,16", "--device", "cpu", "--stage",
                                "all", *arguments, code=FAILED, env=self.broken(number))
        self.assertFalse(result["passed"])
        return {stage["stage"]: stage for stage in result["stages"]}, result["first_wrong"]

    def test_every_fault_shows_in_its_stages(self):
        """Runs scripts/checks/faults, which lists the stages of each fault."""
        done = subprocess.run([os.path.join(SOURCE, "scripts/checks/faults"), PROGRAM],
                              capture_output=True, text=True, timeout=900)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("0 seen in other stages than expected", done.stdout)

    def test_wrong_scale_shows_in_scores(self):
        stages, first = self.stages(3)
        self.assertEqual(first, "scores")
        self.assertTrue(stages["pv"]["passed"] and stages["combine"]["passed"])
        self.assertGreater(stages["scores"]["wrong"], 1000)
        self.assertGreater(stages["scores"]["worst_ratio"], 100)

    def test_missing_rescale_shows_in_probabilities(self):
        stages, first = self.stages(4)
        self.assertEqual(first, "probabilities")
        self.assertIn("carried from tile to tile", stages["scores"]["note"])
        self.assertEqual(stages["pv"]["worst"]["probe"], "P one key per query")

    def test_dropped_key_is_named(self):
        stages, _ = self.stages(5)
        self.assertEqual(stages["scores"]["worst"]["key"], 299)
        self.assertGreaterEqual(stages["scores"]["wrong"], 2 * 4 * 40)  # LSEs may be wrong too

    def test_wrong_lse_is_not_a_wrong_score(self):
        stages, _ = self.stages(11)
        self.assertIn("P is correct", stages["scores"]["note"])
        self.assertTrue(stages["probabilities"]["passed"])

    def test_double_count_shows_in_combine_only(self):
        stages, first = self.stages(10)
        self.assertEqual(first, "combine")
        self.assertEqual([name for name in stages if not stages[name]["passed"]], ["combine"])

    def test_text_names_the_worst_element(self):
        text = self.call("run", "--shape", "1,2,8/300,16", "--device", "cpu", "--stage", "all",
                         "--causal", code=FAILED, env=self.broken(1)).stdout
        self.assertRegex(text, r"(?m)^scores +WRONG +\d+ +\d+ ")
        self.assertRegex(text, r"worst +batch \d+, head \d+, row \d+, key \d+: got \S+, want")
        self.assertRegex(text, r"elements +\d+ of \d+ wrong; error/bound not finite")

    def test_trace_shows_the_first_wrong_tile(self):
        trace = self.call_json("run", "--shape", "1,2,8/300,16", "--sigma", 3, "--device", "cpu",
                               "--trace", "0,1,5", code=FAILED, env=self.broken(4))["trace"]
        ratios = [tile["worst_ratio"] for tile in trace["tiles"]]
        self.assertLess(ratios[0], 1)
        self.assertGreater(max(ratios), 1)

    def test_run_fails(self):
        result = self.call_json("run", "--shape", "1,1,8,8", "--device", "cpu", code=FAILED,
                                env=self.broken(13))
        self.assertFalse(result["passed"])
        self.assertNotIn("us", result)


if __name__ == "__main__":
    unittest.main()
