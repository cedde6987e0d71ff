"""scripts/lib/stages.sh: a failing stage fails the run and stops none of the others; and the small
checks that decide whether a stage fails."""
import os
import subprocess
import tempfile
import unittest

TREE = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SCRIPTS = os.path.join(TREE, "scripts")


def bash(text, **environment):
    with tempfile.TemporaryDirectory() as logs:
        prologue = (f"set -uo pipefail; . {SCRIPTS}/lib/common.sh; LOGS={logs}; "
                    f". {SCRIPTS}/lib/stages.sh\n")
        done = subprocess.run(["bash", "-c", prologue + text], capture_output=True, text=True,
                              env={**os.environ, **environment})
    return done.returncode, done.stdout + done.stderr


class Stages(unittest.TestCase):
    def test_all_passed(self):
        code, said = bash("a() { echo one; }; b() { echo two; }; stage a a; stage b b; summary")
        self.assertEqual(code, 0, said)
        self.assertIn("2 passed, 0 failed, 0 skipped", said)

    def test_a_failure_does_not_stop_the_rest(self):
        code, said = bash("a() { false; echo not reached; }; b() { echo reached; }; "
                          "stage a a; stage b b; summary")
        self.assertEqual(code, 1, said)
        self.assertNotIn("not reached", said)
        self.assertIn("reached", said)
        self.assertIn("1 passed, 1 failed, 0 skipped", said)

    def test_exit_inside_a_stage(self):
        code, said = bash("a() { exit 3; }; b() { echo reached; }; stage a a; stage b b; summary")
        self.assertEqual(code, 1, said)
        self.assertIn("exit 3", said)
        self.assertIn("reached", said)

    def test_a_failure_in_a_pipe_counts(self):
        code, said = bash("a() { false | cat; }; stage a a; summary")
        self.assertEqual(code, 1, said)

    def test_a_skip_shows_its_reason(self):
        code, said = bash("a() { echo the reason; return 77; }; b() { :; }; "
                          "stage a a; stage b b; summary")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"a +skipped +\d+ s +the reason")

    def test_no_stage_at_all_is_a_failure(self):
        code, said = bash("a() { :; }; stage a a; summary", ONLY="no_such_stage")
        self.assertEqual(code, 1, said)

    def test_only_selects(self):
        code, said = bash("a() { false; }; b() { :; }; stage a a; stage b b; summary", ONLY="b")
        self.assertEqual(code, 0, said)

    def test_an_unknown_stage_is_a_failure(self):
        code, said = bash("a() { :; }; stage a a; summary", ONLY="a typo")
        self.assertEqual(code, 1, said)
        self.assertIn("there is no stage typo; there are: a", said)

    def test_quietly_shows_what_failed(self):
        code, said = bash("a() { quietly x.log sh -c 'echo the fault; exit 5'; echo no; }; "
                          "stage a a; summary")
        self.assertEqual(code, 1, said)
        self.assertIn("the fault", said)
        self.assertIn("exit 5", said)

    def test_quietly_hides_what_worked(self):
        code, said = bash("a() { quietly x.log echo chatter; }; stage a a; summary")
        self.assertEqual(code, 0, said)
        self.assertNotIn("chatter", said)

    def test_a_missing_command_is_named(self):
        code, said = bash('a() { "$(need_cli no_such_preset)" info; }; stage a a; summary')
        self.assertEqual(code, 1, said)
        self.assertIn("build/no_such_preset/bin/flashcore is missing", said)


class BuildLog(unittest.TestCase):
    def check(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
            log.write(text)
            log.flush()
            return subprocess.run([os.path.join(SCRIPTS, "checks", "build_log"), log.name],
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
