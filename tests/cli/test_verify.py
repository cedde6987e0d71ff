"""flashcore verify: our kernels, a library, and libraries that misbehave."""

import json
import os
import re
import unittest

from flashcore_command import COULD_NOT_RUN, FAILED, SANITIZED, SOURCE, CommandTest

ME = os.environ["FLASHCORE_VERIFY_ME"]
FAULTS = os.environ["FLASHCORE_VERIFY_FAULTS"]
NEVER_ENDS = os.environ["FLASHCORE_VERIFY_NEVER_ENDS"]


class VerifyTest(CommandTest):
    def verdict(self, library, symbol, *more, code=FAILED):
        found = self.call_json("verify", "--lib", library, "--symbol", symbol, "--quick", *more,
                               code=code)
        return found["reports"][0]

    def test_our_kernel_is_correct(self):
        kernel = "^fwd_generic_f32$"
        done = self.call("verify", "--kernel", kernel, "--device", "cpu", "--quick", "--quiet")
        self.assertRegex(done.stdout, r"fwd_generic_f32 +f32 +correct")

    def test_every_8_bit_dtype(self):
        for dtype in ("e4m3", "e5m2", "int8", "byte"):
            found = self.call_json("verify", "--kernel", "^fwd_generic_f16$", "--device", "cpu", "--dtype",
                                   dtype, "--only", "scales", "--quick")
            self.assertEqual([report["dtype"] for report in found["reports"]], [dtype])

    def test_example_is_correct(self):
        report = self.verdict(ME, "attention", code=0)
        self.assertTrue(report["ok"])
        self.assertIsNone(report["stage"])
        probes = {probe["name"]: probe["status"] for probe in report["probes"]}
        self.assertEqual(probes["grad_ds"], "passed")
        self.assertEqual(probes["grad_softcap"], "not probed")
        self.assertNotIn("the backward pass", report["not_probed"])

    def test_library_without_a_backward(self):
        report = self.verdict(FAULTS, "talks", code=0)
        self.assertIn("the backward pass", report["not_probed"])
        self.assertNotIn("grad_ds", [probe["name"] for probe in report["probes"]])

    def test_our_backward_kernel_is_correct(self):
        done = self.call("verify", "--op", "backward", "--kernel", "^bwd_generic_f32$", "--device", "cpu",
                         "--quick", "--quiet")
        self.assertRegex(done.stdout, r"bwd_generic_f32 +f32 +correct")

    def test_wrong_backward_of_a_library(self):
        report = self.verdict(FAULTS, "doubles_dq")
        self.assertEqual(report["stage"], "scale")
        self.assertIn("dk shows the correct dS", report["detail"])
        command = report["reproducer"].split()
        again = self.call(*command[1:], "--quiet", code=FAILED)
        self.assertIn("first at stage scale", again.stdout)

    def test_crash_of_a_backward(self):
        report = self.verdict(FAULTS, "backward_crashes")
        self.assertEqual(report["stage"], "bounds")
        self.assertIn("SIGSEGV", report["detail"])

    def test_split_fault_is_in_combine(self):
        page = self.path("report.html")
        report = self.verdict(ME, "split_attention", "--html", page)
        self.assertEqual(report["stage"], "combine")
        self.assertRegex(report["detail"], "splits")
        with open(page, encoding="utf-8") as file:
            text = file.read()
        self.assertNotRegex(text, r"(src|href)=")  # loads nothing
        data = re.search(r'id="report">(.*?)</script>', text, re.DOTALL).group(1)
        self.assertEqual(json.loads(data)["stage"], "combine")

    def test_reproducer(self):
        report = self.verdict(ME, "split_attention")
        command = report["reproducer"].split()
        self.assertEqual(command[0], "flashcore")
        again = self.call(*command[1:], "--quiet", code=FAILED)
        self.assertIn("first at stage combine", again.stdout)

    def test_crash(self):
        report = self.verdict(FAULTS, "crashes")
        self.assertEqual(report["stage"], "bounds")
        self.assertIn("SIGSEGV", report["detail"])

    def test_hang(self):
        report = self.verdict(FAULTS, "hangs", "--deadline", "1")
        self.assertIn("did not return within 1 s", report["detail"])

    def test_exit(self):
        report = self.verdict(FAULTS, "exits")
        self.assertIn("exit code 3", " ".join([report["detail"], *report["capabilities"]]))

    def test_abort(self):
        self.assertIn("SIGABRT", self.verdict(FAULTS, "aborts")["detail"])

    def test_stack_overflow(self):
        report = self.verdict(FAULTS, "overflows_its_stack")
        self.assertIn("SIGSEGV", report["detail"])

    def test_its_output_is_not_in_the_report(self):
        report = self.verdict(FAULTS, "talks", code=0)  # --json: standard output was parsed
        self.assertTrue(report["ok"])

    def test_closes_its_files(self):
        report = self.verdict(FAULTS, "closes_everything")
        self.assertIn("the call ended its process", report["detail"])

    def test_writes_over_an_input(self):
        report = self.verdict(FAULTS, "zeroes_its_inputs")
        self.assertEqual(report["stage"], "bounds")
        self.assertIn("at v, 0 elements from its start", report["detail"])

    def test_process_that_never_ends(self):
        self.assertTrue(self.verdict(NEVER_ENDS, "attends", code=0)["ok"])

    def test_far_write(self):
        report = self.call("verify", "--lib", FAULTS, "--symbol", "writes_far_away", "--quick",
                           code=COULD_NOT_RUN)
        self.assertIn("SIGSEGV", report.stderr)

    def test_near_write(self):
        report = self.verdict(FAULTS, "writes_past_the_end")
        self.assertEqual(report["stage"], "bounds")
        self.assertIn("out, 1 elements past its end", report["detail"])

    def test_refusals(self):
        self.refuse("verify", "--lib", FAULTS, "--symbol", "refuses_everything", about="not today")
        self.refuse("verify", "--lib", ME, "--symbol", "nothing", about="no function nothing")
        self.refuse("verify", "--lib", "./none.so", "--symbol", "attention", about="none.so")
        self.refuse("verify", "--lib", ME, about="belong together")
        self.refuse("verify", "--lib", ME, "--symbol", "attention", "--op", "backward", about="--op")
        self.refuse("verify", "--only", "nothing", "--kernel", "generic_f32", about="wanted one of")


class TutorialTest(CommandTest):
    def test_commands_print_the_shown_verdicts(self):
        with open(os.path.join(SOURCE, "docs", "verify.md"), encoding="utf-8") as file:
            tutorial = file.read().split("## Tutorial")[1].split("\n## ")[0]
        commands = re.findall(r"^    \$ flashcore (.*)$", tutorial, re.MULTILINE)
        verdicts = re.findall(r"^    \S+ \(f32\): (.*)$", tutorial, re.MULTILINE)
        self.assertEqual(len(commands), 3)
        self.assertEqual(len(verdicts), 3)
        for command, verdict in zip(commands, verdicts):
            arguments = command.replace("./libverify_me.so", ME).split()
            done = self.call(*arguments, "--quiet", code=0 if "correct" in verdict else FAILED)
            self.assertIn(f"(f32): {verdict}", done.stdout)


if SANITIZED:  # the child would load a library without the sanitizer's runtime
    del VerifyTest, TutorialTest

if __name__ == "__main__":
    unittest.main()
