"""scripts/lib/stages.py: lanes, needs, skips and the summary; and the small checks a stage uses."""
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
SCRIPTS = TREE / "scripts"
sys.path.insert(0, str(SCRIPTS / "lib"))
sys.dont_write_bytecode = True

import ctest_skips  # noqa: E402
import stages  # noqa: E402
from stages import Stage  # noqa: E402


def run(*given, **options):
    """(True where the run passed, its output)."""
    with tempfile.TemporaryDirectory() as logs:
        out = io.StringIO()
        passed = stages.Run(given, logs=logs, out=out, **options).run()
    return passed, out.getvalue()


class Stages(unittest.TestCase):
    def test_all_passed(self):
        passed, said = run(Stage("a", "echo one"), Stage("b", "echo two"))
        self.assertTrue(passed, said)
        self.assertRegex(said, r"(?m)^ +a \| one$")
        self.assertIn("2 passed, 0 failed, 0 did not run", said)
        self.assertIn("Everything ran.", said)

    def test_a_failure_does_not_stop_the_rest(self):
        passed, said = run(Stage("a", "false; echo not reached"), Stage("b", "echo reached"))
        self.assertFalse(passed)
        self.assertNotIn("not reached", said)
        self.assertIn("b | reached", said)
        self.assertIn("1 passed, 1 failed, 0 did not run", said)

    def test_the_exit_code_and_the_log_are_named(self):
        passed, said = run(Stage("a", "exit 3"))
        self.assertFalse(passed)
        self.assertRegex(said, r"a +FAILED +\d+ s +\d+ CPU s  exit 3, see .*a\.log")

    def test_a_failure_in_a_pipe_counts(self):
        self.assertFalse(run(Stage("a", "false | cat"))[0])

    def test_a_stage_whose_need_failed_does_not_run(self):
        passed, said = run(Stage("a", "false", lane="compile"), Stage("b", "echo ran", needs=("a",)),
                           Stage("c", "echo reached"))
        self.assertFalse(passed)
        self.assertNotIn("b | ran", said)
        self.assertIn("DID NOT RUN: b: it needs a, which is FAILED", said)
        self.assertIn("c | reached", said)

    def test_a_need_that_is_not_in_the_run_is_not_waited_for(self):
        self.assertTrue(run(Stage("b", "true", needs=("a",)))[0])

    def test_the_lanes_run_side_by_side(self):
        with tempfile.TemporaryDirectory() as folder:
            # Each waits for the other's file: one after the other, they would never end.
            def script(own, other):
                return f"touch {folder}/{own}; until [ -e {folder}/{other} ]; do sleep 0.02; done"
            passed, said = run(Stage("a", script(1, 2), lane="compile", limit_s=60),
                               Stage("b", script(2, 1), limit_s=60))
        self.assertTrue(passed, said)

    def test_within_a_lane_the_order_is_kept(self):
        passed, said = run(*(Stage(name, f"echo {name}") for name in "dbca"))
        self.assertTrue(passed)
        self.assertEqual([line.split()[-1] for line in said.splitlines() if " | " in line],
                         ["d", "b", "c", "a"])

    def test_a_limit_ends_a_stage_and_its_children(self):
        begin = time.monotonic()
        passed, said = run(Stage("a", "sleep 60 | cat", limit_s=1), Stage("b", "true"))
        self.assertFalse(passed)
        self.assertLess(time.monotonic() - begin, 30)
        self.assertIn("ended after its limit of 1 s", said)

    def test_progress_is_shown(self):
        self.addCleanup(setattr, stages, "PROGRESS_S", stages.PROGRESS_S)
        stages.PROGRESS_S = 0.3
        passed, said = run(Stage("a", "echo '[3/9] Building x.o'; sleep 2", lane="compile"))
        self.assertTrue(passed)
        self.assertRegex(said, r"(?m)^ +\d+ s  a \[3/9\]$")
        self.assertNotIn("Building", said)

    def test_cpu_seconds_are_those_of_the_stage_and_its_children(self):
        # Side by side, so that neither may be charged for the other.
        burn = "timeout 10 python3 -c 'import time\nwhile time.process_time() < 1.2: pass'"
        passed, said = run(Stage("a", f"{burn} | cat", lane="compile"), Stage("b", "sleep 2.5"))
        self.assertTrue(passed, said)
        self.assertRegex(said, r"(?m)^a +passed +\d+ s +[12] CPU s$")
        self.assertRegex(said, r"(?m)^b +passed +\d+ s +0 CPU s$")
        self.assertRegex(said, r"(?m)^total +\d+ s +[12] CPU s$")
        self.assertRegex(said, r"-- b: passed after \d+ s, 0 CPU s")

    def test_two_stages_of_one_name_are_refused(self):
        with self.assertRaises(AssertionError):
            stages.Run([Stage("a", ""), Stage("a", "")])


class Skips(unittest.TestCase):
    SKIP = Stage("a", "echo no nvcc; exit 77")
    PART = Stage("b", "echo 'NOT RUN: b.jax: jax is not installed'")

    def test_a_skip_is_listed_with_its_reason(self):
        passed, said = run(self.SKIP, self.PART)
        self.assertTrue(passed, said)
        self.assertRegex(said, r"a +skipped +\d+ s +\d+ CPU s  no nvcc")
        self.assertIn("DID NOT RUN: a: no nvcc\n", said)
        self.assertIn("DID NOT RUN: b.jax: jax is not installed\n", said)
        self.assertNotIn("Everything ran", said)

    def test_strict_runs_fail_on_a_skip(self):
        for stage, name in ((self.SKIP, "a"), (self.PART, "b.jax")):
            passed, said = run(stage, Stage("c", "true"), strict=True)
            self.assertFalse(passed, said)
            self.assertIn(f'ALLOW_SKIP="{name}"', said)

    def test_unless_it_is_allowed(self):
        passed, said = run(self.SKIP, self.PART, strict=True, allowed=["a", "b.jax"])
        self.assertTrue(passed, said)
        self.assertIn("DID NOT RUN: a: no nvcc (ALLOW_SKIP)", said)

    def test_nothing_but_skips_is_a_failure(self):
        self.assertFalse(run(self.SKIP)[0])

    def test_the_variable(self):
        self.addCleanup(os.environ.pop, "ALLOW_SKIP", None)
        os.environ["ALLOW_SKIP"] = "one, two three"
        self.assertLessEqual({"one", "two", "three", "four"}, stages.allowed_skips(["four"]))

    def test_skips_of_ctest(self):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as report:
            report.write('<testsuite><testcase name="good"><system-out>x</system-out></testcase>'
                         '<testcase name="t.jax"><skipped message="s"/><system-out>a\nno jax\n'
                         "</system-out></testcase></testsuite>")
            report.flush()
            self.assertEqual(ctest_skips.skips(report.name), [("t.jax", "no jax")])


class Selection(unittest.TestCase):
    TABLE = [Stage("a", ""), Stage("b", "")]

    def test_names(self):
        self.assertEqual([one.name for one in stages.select(self.TABLE, ["b"])], ["b"])
        self.assertEqual(stages.select(self.TABLE, []), self.TABLE)

    def test_an_unknown_name_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "there is no stage typo; there are: a b"):
            stages.select(self.TABLE, ["a", "typo"])

    def listed(self, *arguments, script="test"):
        done = subprocess.run([SCRIPTS / script, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return {line.split()[0] for line in done.stdout.splitlines()}

    def test_the_full_run_contains_the_usual_one_and_that_the_quick_one(self):
        usual, everything = self.listed("--list"), self.listed("--all", "--list")
        self.assertIn("build_cuda", everything)  # compiles all kernels, so also those of cuda_compile
        self.assertLess(usual - {"cuda_compile"}, everything)
        self.assertLess(self.listed("--quick", "--list"), usual)
        self.assertLessEqual({"asan", "tsan", "build_cuda", "wheel", "differential", "fuzz",
                              "fuzz_asan", "frameworks", "readme"}, everything - usual)
        self.assertIn("random", self.listed("--list", script="release_check"))

    def test_the_usual_run_compiles_a_kernel_of_every_template(self):
        patterns = runpy.run_path(str(SCRIPTS / "test"))["COMPILED_KERNELS"]
        rows = [row.split(", ") for row in re.findall(
            r"^FLASHCORE_KERNEL\((.*)\)", (TREE / "src/cuda/kernels.def").read_text(), re.MULTILINE)]
        chosen = [row for row in rows
                  if any(re.fullmatch(one, row[0]) for one in patterns)]
        for one in patterns:
            self.assertTrue(any(re.fullmatch(one, row[0]) for row in rows), one)

        def templates(kernels):
            """Op, family and inputs; for forward kernels warp_rows, which selects a mainloop."""
            return {(*row[1:4], row[0].endswith("_fused") if row[1] == "bwd" else row[10])
                    for row in kernels}
        # The stage `emulator` compiles the gradients of simt.
        self.assertEqual(templates(rows) - templates(chosen), {("bwd", "simt", "native", False)})

    def test_every_need_is_a_stage(self):
        done = subprocess.run([SCRIPTS / "test", "--all", "--list"], capture_output=True, text=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        for row in rows:
            self.assertLessEqual(set(row[2:]), {one[0] for one in rows})

    def test_help_has_examples(self):
        for script in ("test", "release_check"):
            done = subprocess.run([SCRIPTS / script, "--help"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0)
            self.assertIn("Examples:", done.stdout)
        self.assertEqual(subprocess.run([SCRIPTS / "test", "--nonsense"],
                                        stderr=subprocess.DEVNULL).returncode, 2)


class Helpers(unittest.TestCase):
    def test_quietly_shows_a_failure_only(self):
        passed, said = run(Stage("a", "quietly x.log sh -c 'echo the fault; exit 5'"))
        self.assertFalse(passed)
        self.assertIn("a | the fault", said)
        self.assertIn("exit 5", said)
        self.assertNotIn("chatter", run(Stage("a", "quietly x.log echo chatter"))[1])

    def test_progress_keeps_the_exit_code(self):
        passed, said = run(Stage("a", "progress x.log sh -c 'echo [1/2] one; echo bad; exit 4'"))
        self.assertFalse(passed)
        self.assertIn("exit 4", said)
        self.assertIn("a | bad", said)
        passed, said = run(Stage("a", "progress x.log sh -c 'echo [1/2] one; echo fine'"))
        self.assertTrue(passed)
        self.assertNotIn("fine", said)
        self.assertNotIn("[1/2]", said)

    def test_a_missing_command_is_named(self):
        passed, said = run(Stage("a", '"$(need_cli no_such_preset)" info'))
        self.assertFalse(passed)
        self.assertIn("build/no_such_preset/bin/flashcore is missing", said)


class BuildLog(unittest.TestCase):
    def check(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
            log.write(text)
            log.flush()
            return subprocess.run([SCRIPTS / "checks" / "build_log", log.name],
                                  stdout=subprocess.DEVNULL).returncode

    def test_verdicts(self):
        clean = "[1/2] Building CXX object warnings.cc.o\nptxas info    : Used 40 registers\n"
        self.assertEqual(self.check(clean), 0)
        self.assertEqual(self.check(clean + "a.cc:1:2: warning: unused variable\n"), 1)
        self.assertEqual(self.check(clean + "a.cu(3): warning #177-D: never referenced\n"), 1)
        self.assertEqual(self.check(clean + "ptxas warning : Registers are spilled\n"), 1)
        self.assertEqual(self.check(clean + "ptxas info    : (C7510) Potential Performance\n"), 1)


if __name__ == "__main__":
    unittest.main()
