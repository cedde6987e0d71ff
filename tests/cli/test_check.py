import json
import os
import re
import signal
import subprocess
import time
import unittest

from flashcore_command import FAILED, INTERRUPTED, PROGRAM, SANITIZED, CommandTest

PROBLEMS = 40 if SANITIZED else 160


class Check(CommandTest):
    def test_text(self):
        text = self.call("check", "--device", "cpu", "--problems", PROBLEMS).stdout
        self.assertRegex(text, r"fwd_generic_f32 +\d+ +0 ")
        self.assertRegex(text, r"pairs +\d+ of \d+ pairs of compatible options")
        self.assertRegex(text, r"tile edges +\d+ of \d+")
        self.assertRegex(text, r"kernels +\d+, each with \d+ problems or more")
        self.assertRegex(text, rf"passed: {PROBLEMS} problems in \S+ s, 0 failures\n\Z")

    def test_json(self):
        found = self.call_json("check", "--device", "cpu", "--problems", PROBLEMS)
        self.assertIs(found["passed"], True)
        self.assertIs(found["complete"], True)
        self.assertEqual(found["problems"], PROBLEMS)
        self.assertEqual(found["failures"], 0)
        self.assertEqual(sum(k["problems"] for k in found["kernels"].values()), PROBLEMS)
        counts = [k["problems"] for k in found["kernels"].values()]
        self.assertLessEqual(max(counts) - min(counts), 1)
        self.assertEqual(found["coverage"]["fewest_per_kernel"], min(counts))
        for part in ("options", "pairs", "tile_edges"):
            covered = found["coverage"][part]
            self.assertEqual(covered["covered"] + len(covered["missing"]), covered["possible"])
            self.assertGreater(covered["covered"], 0)
        self.assertEqual(found["reports"], [])

    def test_gradients(self):
        found = self.call_json("check", "--op", "backward", "--device", "cpu", "--problems", PROBLEMS)
        self.assertIs(found["passed"], True, found["reports"])
        self.assertEqual({kernel[:4] for kernel in found["kernels"]}, {"bwd_"})
        self.assertEqual(sum(k["problems"] for k in found["kernels"].values()), PROBLEMS)
        self.refuse("check", "--op", "backward", "--suite", "tuning", about="random problems only")

    def test_jobs_do_not_change_the_result(self):
        one, three = (self.call_json("check", "--device", "cpu", "--problems", 48, "--jobs", jobs,
                                     "--seed", 5) for jobs in (1, 3))
        self.assertEqual(one["kernels"], three["kernels"])
        self.assertEqual(one["coverage"], three["coverage"])
        other = self.call_json("check", "--device", "cpu", "--problems", 48, "--seed", 6)
        self.assertNotEqual(one["kernels"], other["kernels"])

    def test_index_repeats_a_problem(self):
        arguments = ("check", "--device", "cpu", "--kernel", "^fwd_generic_f32$")
        whole = self.call_json(*arguments, "--problems", 20)["kernels"]["fwd_generic_f32"]
        again = self.call_json(*arguments, "--index", whole["worst_index"])
        self.assertEqual(again["problems"], 1)
        self.assertEqual(again["kernels"]["fwd_generic_f32"]["worst_ratio"],
                         whole["worst_ratio"])

    def test_kernel_sigma_splits_and_work(self):
        found = self.call_json("check", "--device", "cpu", "--kernel", "generic_(f32|f64)",
                               "--problems", 30, "--sigma", 0.01, "--splits", 3, "--work", 100000,
                               "--threads", 2)
        self.assertEqual(set(found["kernels"]), {"fwd_generic_f32", "fwd_generic_f64"})
        self.assertNotIn("splits", found["coverage"]["options"]["missing"])

    def test_require_coverage(self):
        done = self.call("check", "--device", "cpu", "--problems", 8, "--require-coverage", 200,
                         code=FAILED)
        self.assertIn("200 are required", done.stdout)
        found = self.call_json("check", "--device", "cpu", "--problems", 40, "--require-coverage", 1,
                               code=FAILED)
        self.assertIn("not covered: ", found["coverage"]["lacking"])
        self.assertEqual(found["failures"], 0)

    def test_tuning(self):
        found = self.call_json("check", "--suite", "tuning", "--device", "cpu", "--kernel",
                               "generic_f32")
        self.assertEqual(found["problems"], 4 * 20)
        self.assertTrue(found["passed"])
        one = self.call_json("check", "--suite", "tuning", "--device", "cpu", "--kernel",
                             "generic_f32", "--index", 79)
        self.assertEqual(one["problems"], 1)
        self.refuse("check", "--suite", "tuning", "--device", "cpu", "--kernel", "generic_f32",
                    "--index", 80, "--json", about="problems 0 to 79")

    def test_cases_by_name(self):
        found = self.call_json("check", "--case", "regression-one-tile", "--device", "cpu")
        self.assertEqual(len(found["cases"]), 2)
        found = self.call_json("check", "--case", "simt-small", "--device", "cpu", "--kernel",
                               "generic")
        self.assertEqual(set(found["kernels"]), {"fwd_generic_f16"})

    def test_blocks(self):
        self.refuse("check", "--device", "cpu", "--blocks", "1,2", about="--device cuda")
        for bad in ("-1", "70000", "1,x", "1,,2"):
            self.refuse("check", "--device", "cpu", f"--blocks={bad}", about="--blocks")

    def test_keyless_tiles(self):
        found = self.call_json("check", "--suite", "keyless-tiles", "--device", "cpu", "--index", 0)
        self.assertEqual(found["problems"], 1)
        self.assertTrue(found["passed"])
        self.refuse("check", "--suite", "keyless-tiles", "--device", "cpu", "--index", 44, "--json",
                    about="problems 0 to 43")

    def test_cpu_kernels_have_no_work_lists(self):
        found = self.call_json("check", "--device", "cpu", "--problems", 8)
        self.assertEqual(found["coverage"]["work_lists"],
                         {"covered": 0, "possible": 0, "missing": []})
        text = self.call("check", "--device", "cpu", "--problems", 8).stdout
        self.assertNotIn("work lists", text)

    def test_refusals(self):
        self.refuse("check", "--suite", "nope", about="known: anchors, regression, cpu, serving, simt")
        self.refuse("check", "--case", "nope", about="known: ")
        self.refuse("check", "--kernel", "nope", about="info --kernels")
        self.refuse("check", "--problems", "0", about="--problems")
        self.refuse("check", "--index", "1", "--suite", "all", about="--suite random")

    def test_plan_for(self):
        found = self.call_json("check", "--plan-for", "cpu-generic", "--problems", 20)
        self.assertEqual(set(found["kernels"]),
                         {f"fwd_generic_{dtype}" for dtype in ("f32", "f16", "bf16", "f64")})
        self.refuse("check", "--plan-for", "h900", about="wanted cpu, h200")

    def test_time_limit(self):
        found = self.call_json("check", "--device", "cpu", "--problems", 10**9, "--time-limit", 1)
        self.assertTrue(found["passed"])
        self.assertFalse(found["complete"])
        self.assertGreater(found["problems"], 0)
        self.assertEqual(found["stopped"], "the time limit of 1 s was reached")


class Blocks(CommandTest):
    """Facts are counted from the plans that were launched."""
    CHECK = ("check", "--device", "cuda", "--kernel", "^fwd_sm90_f16_d64_q128$", "--problems", 200)

    def setUp(self):
        super().setUp()
        devices = self.call_json("info")["cuda"]["devices"]
        if not any(d.get("compute_capability") == 90 for d in devices):
            self.skipTest("there is no Hopper GPU")

    def test_one_cta_covers_every_work_list(self):
        found = self.call_json(*self.CHECK, "--blocks", 1)
        self.assertEqual(found["blocks"], [1])
        self.assertEqual(found["coverage"]["work_lists"],
                         {"covered": 4, "possible": 4, "missing": []})

    def test_sequences_are_unknown_with_all_ctas(self):
        found = self.call_json(*self.CHECK, "--blocks", 0)
        missing = found["coverage"]["work_lists"]["missing"]
        for fact in ("tiles without keys between tiles with keys",
                     "three tiles without keys after one with keys"):
            self.assertIn(f"fwd_sm90_f16_d64_q128 {fact}", missing)


class RegressionSuite(CommandTest):
    CASES = ("regression-b1-s512", "regression-one-tile", "regression-h4-s128", "regression-split-kv")

    def test_table(self):
        names = [part for name in self.CASES for part in ("--case", name)]
        text = self.call("check", "--suite", "regression", "--device", "cpu", *names).stdout
        table = text[text.index("earlier "):text.index("\n\n", text.index("earlier "))]
        rows = table.splitlines()
        self.assertEqual(len(rows), 1 + 1 + 2 + 1 + 7)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)
        self.assertIn("4.28; 0.45", rows[1])
        self.assertTrue(all(row.endswith("ok") for row in rows[1:]), table)
        self.assertRegex(table, r"\(1,1,65,64\) +causal +NaN; 0.19-0.23 +\S+e-0\d ")
        self.assertIn("8-bit inputs", text)

    def test_the_old_name_of_the_suite(self):
        found = self.call_json("check", "--suite", "lineage", "--device", "cpu", "--case",
                               "regression-one-tile")
        self.assertEqual([case["suite"] for case in found["cases"]], ["regression"] * 2)
        planned = [self.call_json("explain", "--suite", name, "--plan-for", "h200")
                   for name in ("lineage", "regression")]
        self.assertEqual(*planned)

    def test_cases_of_the_working_directory(self):
        os.mkdir(self.path("bench"))
        case = {"kind": "fwd", "suite": "mine", "name": "tiny", "dtype": "f16", "batch": 1,
                "q_heads": 2, "kv_heads": 1, "q_len": 3, "kv_len": 5, "head_dim": 8,
                "causal": False, "cold_l2": False}
        with open(self.path("bench/cases.json"), "w", encoding="utf-8") as file:
            json.dump({"cases": [case]}, file)
        for selection in (("--suite", "mine"), ("--case", "tiny")):
            found = self.call_json("check", *selection, "--device", "cpu")
            self.assertEqual([case["kv_len"] for case in found["cases"]], [5])

    def test_numbers(self):
        found = self.call_json("check", "--suite", "regression", "--device", "cpu", "--case",
                               "regression-split-kv")
        self.assertEqual([case["q_len"] for case in found["cases"]],
                         [64, 65, 128, 192, 256, 512, 4])
        for case in found["cases"]:
            self.assertLess(case["errors"]["f16"], 5e-3)
            self.assertLess(case["errors"]["bf16"], 5e-2)
            self.assertLess(case["errors"]["f32"], 1e-5)
        self.assertGreater(found["cases"][5]["splits"], 1)


class Interrupted(CommandTest):
    def interrupt(self, signal_number, *arguments):
        """Starts a check that would run for ever and stops it after two seconds."""
        process = subprocess.Popen([PROGRAM, "check", "--device", "cpu", "--problems", "1000000000",
                                    *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env={**os.environ})
        time.sleep(2)
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def test_prints_the_results_so_far(self):
        code, out, _ = self.interrupt(signal.SIGINT)
        self.assertEqual(code, INTERRUPTED)
        done = re.search(r"passed: (\d+) problems in .*; (\d+) of 1000000000 done, interrupted\n\Z",
                         out)
        self.assertTrue(done, out)
        self.assertGreater(int(done[1]), 0)
        self.assertIn("coverage", out)

    def test_json(self):
        code, out, _ = self.interrupt(signal.SIGINT, "--json")
        self.assertEqual(code, INTERRUPTED)
        found = json.loads(out)
        self.assertEqual(found["stopped"], "interrupted")
        self.assertGreater(found["problems"], 0)

    def test_terminated(self):
        code, out, _ = self.interrupt(signal.SIGTERM)
        self.assertEqual(code, 128 + signal.SIGTERM)
        self.assertIn("interrupted", out)


if __name__ == "__main__":
    unittest.main()
