"""Conditions under which a sanitizer's result counts. A fake compute-sanitizer plays every outcome."""

import os
import stat
import tempfile
import unittest
from pathlib import Path

import gpu_check_sanitizers as sanitizers

# Fake tool. `injected`, `clean` and `check` are the shell commands for its injected fault, for a program
# without a fault, and for the checks.
_FAKE = """#!/bin/sh
for last; do :; done
case "$last" in
  memcheck|racecheck|initcheck|synccheck) {injected} ;;
  none) {clean} ;;
  *) {check} ;;
esac
"""
_FOUND = ("echo '========= COMPUTE-SANITIZER'; echo '========= Invalid __global__ write of size 4'; "
          "echo '========= ERROR SUMMARY: 3 errors'; exit 99")
_NOTHING = ("echo '========= COMPUTE-SANITIZER'; echo '{\"passed\": true,'; echo ' \"problems\": 63}'; "
            "echo '========= ERROR SUMMARY: 0 errors'")
_REFUSED = ("echo '========= COMPUTE-SANITIZER'; echo '========= Error: Device not supported'; "
            "exit 1")


class Verdicts(unittest.TestCase):
    def outcome(self, injected=_FOUND, clean=_NOTHING, check=_NOTHING, tool="memcheck", limit_s=20):
        with tempfile.TemporaryDirectory() as folder:
            fake = Path(folder) / "compute-sanitizer"
            fake.write_text(_FAKE.format(injected=injected, clean=clean, check=check))
            os.chmod(fake, stat.S_IRWXU)
            one = sanitizers.Sanitizer(tool, str(fake), "sanitizer_faults",
                                       {"check": ["flashcore", "check"]}, Path(folder), folder)
            return one.outcome(limit_s)

    def test_passed_only_after_the_proof(self):
        outcome = self.outcome()
        self.assertEqual(outcome.status, "passed", outcome.reason)
        self.assertTrue(outcome.details["proved_on_an_injected_fault"])
        self.assertEqual(outcome.details["check"], {"errors": 0, "problems": 63})

    def expect_not_run(self, words, **faults):
        outcome = self.outcome(**faults)
        self.assertEqual(outcome.status, "not run")
        self.assertIn(words, outcome.reason)

    def test_a_tool_that_finds_nothing_does_not_count(self):
        self.expect_not_run("did not find the fault", injected=_NOTHING)

    def test_a_tool_that_always_finds_errors_does_not_count(self):
        self.expect_not_run("in a program that has none", clean=_FOUND)

    def test_an_error_of_another_kind_proves_nothing(self):
        other = ("echo '========= Program hit error 999 on CUDA API call to cudaMalloc'; "
                 "echo '========= ERROR SUMMARY: 1 error'; exit 99")
        self.expect_not_run("found something else: Program hit error 999", injected=other)

    def test_a_machine_that_refuses(self):
        self.expect_not_run("Error: Device not supported", injected=_REFUSED)

    def test_a_tool_that_breaks_later(self):
        self.expect_not_run("Error: Device not supported", check=_REFUSED)
        self.expect_not_run("printed no summary", check="exit 0")

    def test_timeouts(self):
        self.expect_not_run("did not end within", check="sleep 30", limit_s=1.5)
        self.expect_not_run("did not end within", injected="sleep 30", limit_s=0.5)

    def test_errors_in_the_check_fail(self):
        outcome = self.outcome(check=_FOUND)
        self.assertEqual(outcome.status, "failed")
        self.assertIn("3 errors in check: Invalid __global__ write", outcome.reason)

    def test_a_check_that_fails_by_itself_fails(self):
        outcome = self.outcome(check=_NOTHING + "; exit 1")
        self.assertEqual(outcome.status, "failed")
        self.assertIn("exit code 1", outcome.reason)

    def test_racecheck_counts_hazards(self):
        found = ("echo '========= Error: Race reported between Write access and Read access'; "
                 "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)'; "
                 "exit 99")
        clean = "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'"
        outcome = self.outcome(injected=found, clean=clean, check=clean, tool="racecheck")
        self.assertEqual(outcome.status, "passed", outcome.reason)
        outcome = self.outcome(injected=found, clean=clean, check=found, tool="racecheck")
        self.assertEqual(outcome.status, "failed")

    def test_all_tools_at_once(self):
        class One:
            def __init__(self, tool):
                self.tool = tool

            def outcome(self, limit_s):
                return f"{self.tool} {limit_s}"

        self.assertEqual(sanitizers.run_all([One("a"), One("b")], 7),
                         {"sanitizer_a": "a 7", "sanitizer_b": "b 7"})


if __name__ == "__main__":
    unittest.main()
