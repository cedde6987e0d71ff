"""The stage runner of scripts/gpu_check with small commands instead of the real ones: time limits,
results after each stage, conditions for passing."""

import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

import gpu_check_bench
import gpu_check_faults
import gpu_check_plan
import gpu_check_stages as stages
from gpu_check_context import Context
from gpu_check_runner import Command, Outcome, Report, Runner, Stage
from flashcore.bench import results
from support import case

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


class WithFolder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def run_command(self, script, limit_s=20):
        return Command(["sh", "-c", script], self.folder / "one.log", self.folder).wait(limit_s)


class Commands(WithFolder):
    def test_output_and_exit_code(self):
        done = self.run_command("echo words; echo noise >&2; exit 3")
        self.assertEqual((done.code, done.timed_out, done.output), (3, False, "words\n"))
        self.assertEqual(done.log.read_text(), "noise\n")
        self.assertEqual(done.failure("it"), "it ended with exit code 3; see one.log")
        self.assertIn("noise", done.last_lines())

    def test_a_time_limit_ends_the_children_too(self):
        begin = time.monotonic()
        done = self.run_command("echo begun; sleep 60 & echo $!; wait", 0.5)
        self.assertLess(time.monotonic() - begin, 10)
        self.assertTrue(done.timed_out)
        self.assertIsNone(done.code)
        self.assertIn("did not end within", done.failure("it"))
        begun, pid = done.output.split()  # output before the end is kept
        self.assertEqual(begun, "begun")
        deadline = time.monotonic() + 5
        while alive(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(alive(int(pid)))

    def test_a_command_that_ignores_sigterm_is_killed(self):
        done = self.run_command("trap '' TERM; while :; do sleep 0.1; done", 0.3)
        self.assertTrue(done.timed_out)

    def test_children_in_other_process_groups_end_too(self):
        script = ("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                  "if os.fork() == 0: os.setpgid(0, 0)\n"
                  "print(os.getpid(), flush=True); time.sleep(60)")
        done = Command([sys.executable, "-c", script], self.folder / "x.log", self.folder).wait(1)
        self.assertTrue(done.timed_out)
        pids = [int(word) for word in done.output.split()]
        self.assertEqual(len(pids), 2)
        deadline = time.monotonic() + 5
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(any(map(alive, pids)))

    def test_a_missing_program(self):
        done = Command(["/no/such/program"], self.folder / "x.log", self.folder).wait(5)
        self.assertIsNone(done.code)
        self.assertIn("/no/such/program", done.last_lines())

    def test_end_all_ends_every_command(self):
        command = Command(["sleep", "60"], self.folder / "x.log", self.folder)
        Command.end_all()
        self.assertIsNotNone(command._process.poll())


class WithRunner(WithFolder):
    def runner(self, time_limit_s=60):
        self.path = self.folder / "results" / "h200.json"
        header = {"fingerprint": "0123456789abcdef", "gpu": "NVIDIA H200", "driver": "1",
                  "cuda": "1", "torch": "1", "cudnn": "1", "date": "d", "command": "c"}
        self.said = []
        return Runner(Report(self.path, header), time_limit_s, self.said.append)

    def written(self):
        return json.loads(self.path.read_text())


class Stages(WithRunner):
    def test_each_result_is_written_before_the_next_stage(self):
        runner = self.runner()
        seen = []
        runner.run(Stage("one", 5, lambda limit: Outcome("passed", "", {"count": 3})))

        def second(limit):
            seen.append(self.written()["stages"])
            return Outcome("failed", "it broke")

        runner.run(Stage("two", 5, second))
        self.assertEqual(list(seen[0]), ["one"])
        self.assertEqual(seen[0]["one"]["details"], {"count": 3})
        stage = self.written()["stages"]["two"]
        self.assertEqual((stage["status"], stage["reason"]), ("failed", "it broke"))
        self.assertEqual(results.problems_of(self.written()), [])
        self.assertFalse(runner.ok())
        self.assertIn("it broke", runner.summary())

    def test_a_broken_stage_does_not_stop_the_others(self):
        runner = self.runner()

        def broken(limit):
            raise RuntimeError("surprise")

        runner.run(Stage("broken", 5, broken))
        runner.run(Stage("next", 5, lambda limit: Outcome("passed")))
        found = self.written()["stages"]
        self.assertEqual(found["broken"]["status"], "failed")
        self.assertIn("surprise", found["broken"]["reason"])
        self.assertEqual(found["next"]["status"], "passed")

    def test_limits(self):
        runner = self.runner(time_limit_s=1.5)
        limits = []
        runner.run(Stage("own", 1, lambda limit: limits.append(limit) or Outcome("passed")))
        runner.run(Stage("total", 100, lambda limit: limits.append(limit) or time.sleep(1.6)
                         or Outcome("passed")))
        runner.run(Stage("late", 100, lambda limit: self.fail("must not run")))
        self.assertEqual(limits[0], 1)
        self.assertLess(limits[1], 1.51)
        self.assertEqual(self.written()["stages"]["late"]["status"], "timed out")
        self.assertFalse(runner.ok())

    def test_an_interrupt_is_recorded(self):
        runner = self.runner()

        def interrupted(limit):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            runner.run(Stage("one", 5, interrupted))
        self.assertEqual(self.written()["stages"]["one"]["reason"], "interrupted")

    def test_not_run_passes_only_if_the_stage_may_be_missing(self):
        group = {"sanitizer_a": Outcome("passed"), "sanitizer_b": Outcome("not run", "refused")}
        for may_be_missing, ok in ((True, True), (False, False)):
            runner = self.runner()
            runner.run(Stage("sanitizers", 5, lambda limit: group, may_be_missing))
            self.assertEqual(runner.ok(), ok)
            self.assertEqual(self.written()["stages"]["sanitizer_b"]["status"], "not run")
        runner = self.runner()
        runner.run(Stage("sanitizers", 5, lambda limit: {"a": Outcome("failed", "x")}, True))
        self.assertFalse(runner.ok())

    def test_a_run_without_stages_fails(self):
        self.assertFalse(self.runner().ok())

    def test_an_earlier_result_is_kept_on_request(self):
        runner = self.runner()
        runner.run(Stage("build", 5, lambda limit: Outcome("passed")))
        report = Report(self.path, {"date": "later"}, keep=self.written())
        report.add("bench", Outcome("passed"), 1.0)
        self.assertEqual(list(self.written()["stages"]), ["build", "bench"])
        self.assertEqual(self.written()["date"], "later")


class Verdicts(WithFolder):
    def judge(self, result, code=0, least=10):
        return stages.judge_check(
            self.run_command(f"echo '{json.dumps(result)}'; exit {code}"), least)

    def test_a_check(self):
        good = {"passed": True, "problems": 20, "failures": 0, "kernels": {
            "a": {"problems": 15}, "b": {"problems": 5}}, "coverage": {"pairs": {"missing": list("abcdefghijk")}}}
        outcome = self.judge(good)
        self.assertEqual(outcome.details["coverage"]["pairs"]["missing"][-2:],
                         ["h", "and 3 more"])
        self.assertEqual(outcome.status, "passed")
        self.assertEqual(outcome.details["fewest_problems_of_a_kernel"], 5)
        self.assertEqual(self.judge({**good, "failures": 1}).status, "failed")
        self.assertEqual(self.judge({**good, "passed": False}).status, "failed")
        self.assertEqual(self.judge(good, code=1).status, "failed")
        report = {"replay": "/some/where/build/cuda/bin/flashcore check --index 3", "kernel": "k"}
        failed = self.judge({**good, "failures": 1, "reports": [report]})
        self.assertEqual(failed.details["first_report"]["replay"],
                         "build/cuda/bin/flashcore check --index 3")
        for planned, status in ((20, "passed"), (21, "timed out")):  # a suite must run completely
            self.assertEqual(self.judge({**good, "planned": planned}, least=None).status, status)
        few = self.judge(good, least=21)
        self.assertEqual(few.status, "timed out")
        self.assertIn("20 problems", few.reason)

    def test_a_test_that_hangs_is_reported(self):
        report = self.folder / "tests.xml"
        report.write_text('<testsuite tests="3"><testcase name="A.Spins" status="fail"/></testsuite>')
        done = self.run_command(r"printf 'The following tests FAILED:\n\t  1 - A.Spins (Timeout)\n"
                                r"\t 12 - B.Wrong (Failed)\n'; exit 8")
        outcome = stages.judge_tests(done, report)
        self.assertEqual(outcome.status, "failed")
        self.assertRegex(outcome.reason, r"^hung: A\.Spins; ctest ended with exit code 8")
        self.assertEqual(outcome.details["failed"], {"A.Spins": "Timeout", "B.Wrong": "Failed"})
        self.assertEqual(stages.judge_tests(self.run_command("exit 0"), report).status, "passed")

    def test_parts_of_the_coverage_can_be_required(self):
        good = {"passed": True, "problems": 20, "failures": 0, "kernels": {},
                "coverage": {"tile_edges": {"missing": []}, "pairs": {"missing": ["a+b"]}}}
        done = self.run_command(f"echo '{json.dumps(good)}'")
        self.assertEqual(stages.judge_check(done, 1, ("tile_edges",)).status, "passed")
        for parts in (("tile_edges", "pairs"), ("work_lists",)):
            outcome = stages.judge_check(done, 1, parts)
            self.assertEqual(outcome.status, "failed")
            self.assertIn(parts[-1], outcome.reason)

    def test_a_kernel_that_never_ends(self):
        def judge(result, named, code=1, problems=24):
            words = "".join(f"echo 'flashcore: random/{index}: kernel k: it did not end within 5 s; "
                            "its process was killed' >&2; " for index in named)
            return gpu_check_faults.judge_deadline(
                self.run_command(f"{words} echo '{json.dumps(result)}'; exit {code}"), problems)

        report = {"reason": "it did not end within 5 s", "hung": True}
        good = {"problems": 24, "failures": 2, "reports": [report] * 2}
        self.assertEqual(judge(good, [3, 7]).status, "passed")
        self.assertEqual(judge(good, [3, 7]).details["hung"], ["random/3", "random/7"])
        self.assertIn("not reported", judge({**good, "failures": 0, "reports": []}, [], 0).reason)
        self.assertIn("1 named", judge(good, [3]).reason)
        self.assertIn("2 named", judge({**good, "failures": 1}, [3, 3]).reason)
        self.assertIn("wrong", judge({**good, "reports": [report, {"reason": "wrong"}]}, [3, 7]).reason)
        self.assertIn("did not continue", judge({**good, "problems": 4}, [3, 7]).reason)
        self.assertIn("did not continue", judge(good, [3, 7], problems=2).reason)
        self.assertEqual(gpu_check_faults.judge_deadline(self.run_command("sleep 30", 0.2), 24).reason[:6],
                         "hung: ")

    def test_every_kernel_can_be_required(self):
        good = {"passed": True, "problems": 20, "failures": 0, "kernels": {"a": {"problems": 20}, "b": {"problems": 0}}}
        done = self.run_command(f"echo '{json.dumps(good)}'")
        self.assertEqual(stages.judge_check(done, 1, (), ("a",)).status, "passed")
        for name in ("b", "c"):
            outcome = stages.judge_check(done, 1, (), ("a", name))
            self.assertEqual((outcome.status, outcome.reason), ("failed", f"no problem ran on {name}"))

    def test_faults_of_a_family(self):
        def judge(text, code=0):
            return gpu_check_faults.judge_faults(self.run_command(f"printf '{text}'; exit {code}"), "sm80")

        good = judge(" 1  causal_off_by_one      caught after 3 problems     words\\n")
        self.assertEqual((good.status, good.details["caught"]), ("passed", {"causal_off_by_one": "after 3 problems"}))
        self.assertEqual(judge(" 1  causal_off_by_one      MISSED passed 9 problems    words\\n", 1).status, "failed")
        self.assertIn("no injected fault", judge("").reason)

    def test_a_check_without_json(self):
        self.assertEqual(stages.judge_check(self.run_command("echo hello"), 1).status, "failed")
        self.assertEqual(stages.judge_check(self.run_command("exit 2"), 1).status, "failed")
        done = self.run_command("sleep 30", 0.2)
        outcome = stages.judge_check(done, 1)
        self.assertEqual(outcome.status, "failed")
        self.assertRegex(outcome.reason, r"^hung: flashcore check did not end within \d+ s; see ")
        # A command that prints its result after SIGTERM fails too.
        done = self.run_command("trap 'echo \"{\\\"passed\\\": true, \\\"failures\\\": 0, "
                                "\\\"problems\\\": 5}\"; exit 0' TERM; sleep 30 & wait", 0.2)
        self.assertEqual(json.loads(done.output)["problems"], 5)
        self.assertRegex(stages.judge_check(done, 1).reason, "^hung: ")

    def test_python_tests(self):
        """A run fails if its tests were skipped for lack of a GPU."""
        def judge(*lines, code=0):
            words = "; ".join(f"echo '{line}'" for line in lines)
            return stages.judge_python(self.run_command(f"{words}; exit {code}"))

        good = judge("3 tests skipped: ml_dtypes is not installed",
                     "200 tests run, 0 failed; NOT TESTED: cupy (cupy is not installed)")
        self.assertEqual((good.status, good.details["tests"]), ("passed", 200))
        self.assertIn("cupy", good.details["not_tested"])
        self.assertEqual(judge("200 tests run, 1 failed", code=1).status, "failed")
        self.assertEqual(judge("hello").status, "failed")
        idle = judge("60 tests skipped: torch finds no GPU", "100 tests run, 0 failed")
        self.assertEqual((idle.status, idle.reason), ("failed", "60 tests skipped: torch finds no GPU"))

    def bench(self, measured, script="exit 0"):
        output = self.folder / "bench.json"
        if measured is not None:
            results.write(output, measured)
        header = {"gpu": "NVIDIA H200", "fingerprint": "0" * 16}
        report = Report(self.folder / "h200.json", header)
        outcome = gpu_check_bench.take_rows(report, output, self.run_command(script, 0.5))
        report.save()
        return outcome, json.loads((self.folder / "h200.json").read_text())

    def test_a_bench_that_times_out_keeps_its_rows(self):
        outcome, written = self.bench({"rows": [{"name": "a", "us": 1.0}]}, "sleep 30")
        self.assertEqual((outcome.status, outcome.reason[:6]), ("failed", "hung: "))
        self.assertEqual(written["rows"], [{"name": "a", "us": 1.0}])

    def test_stages_add_rows_and_peers_to_each_other(self):
        report = Report(self.folder / "h200.json", {"gpu": "NVIDIA H200"})
        done = self.run_command("exit 0")
        for measured in ({"rows": [{"name": "a", "us": 1.0}], "peers": {"fa2": "2", "eff": "2"}, "skipped": [
                {"name": "c", "reason": "no kernel"}]},
                         {"rows": [{"name": "b", "us": 2.0}], "peers": {"fa3": "3", "fa2": "2.1"}},
                         {"rows": [{"name": "a", "us": 3.0}, {"name": "c", "us": 4.0}]}):
            results.write(self.folder / "bench.json", measured)
            gpu_check_bench.take_rows(report, self.folder / "bench.json", done)
        self.assertEqual([(row["name"], row["us"]) for row in report.result["rows"]],
                         [("a", 3.0), ("b", 2.0), ("c", 4.0)])
        self.assertEqual((report.result["peers"], report.result["skipped"]),
                         ({"fa2": "2.1", "eff": "2", "fa3": "3"}, []))

    def test_a_bench_without_rows_or_with_missing_cases_fails(self):
        self.assertEqual(self.bench(None)[0].status, "failed")
        outcome, _ = self.bench({"rows": [{"name": "a", "us": 1.0}], "skipped": [
            {"name": "b", "reason": "the time limit of 5 s was over"}, {"name": "c", "reason": "f8"}]})
        self.assertEqual(outcome.status, "timed out")
        self.assertIn("1 cases", outcome.reason)

    def test_targets(self):
        targets = {"gpu": "NVIDIA H200", "targets": [{"name": "tiny", "peer": "fa2", "time_share": 1.0}]}
        said = []

        def bench(us, excused=()):
            row = {**case().fields(), "us": us, "ratios": {"fa2": us / 10.0}}
            output = self.folder / "bench.json"
            results.write(output, {"rows": [row]})
            report = Report(self.folder / "h200.json", {"gpu": "NVIDIA H200"})
            done = self.run_command("exit 0")
            outcome = gpu_check_bench.take_rows(report, output, done, targets, excused, said.append)
            return outcome, report.result["rows"][0]["target"]

        outcome, target = bench(8.0)
        self.assertEqual(outcome.status, "passed")
        self.assertEqual(outcome.details["targets"]["passed"], 1)
        self.assertEqual(target, {"target_us": 10.0, "ratio": 1.25})
        self.assertIn("| tiny 1,2/1,5x9,8 f32 | 8 |  | 10 |", said[-1])
        outcome, _ = bench(10.4)  # short, but within the tolerance
        self.assertEqual(outcome.status, "passed")
        self.assertIn("tiny 1,2/1,5x9,8 f32", outcome.details["targets"]["short"])
        outcome, target = bench(12.5)
        self.assertEqual(outcome.status, "failed")
        self.assertIn("tiny 1,2/1,5x9,8 f32 at 0.80: 1.25 of the time of fa2, wanted 1", outcome.reason)
        self.assertAlmostEqual(target["ratio"], 0.8)
        self.assertEqual(bench(12.5, {"tiny"})[0].status, "passed")


class Script(WithFolder):
    def test_stages_by_name(self):
        script = load_script()
        known = [Stage("a", 1, None), Stage("b", 1, None)]
        self.assertEqual([one.name for one in script.choose(known, [])], ["a", "b"])
        self.assertEqual([one.name for one in script.choose(known, ["b"])], ["b"])
        with self.assertRaisesRegex(ValueError, "known are a, b"):
            script.choose(known, ["c"])

    def test_resume_skips_stages_that_passed(self):
        script = load_script()
        known = [Stage(name, 1, None) for name in ("environment", "build", "tests", "check", "new")]
        known.append(Stage("group", 1, None, results=("group_a", "group_b")))
        recorded = {"environment": {"status": "passed"}, "build": {"status": "passed"},
                    "tests": {"status": "passed"}, "check": {"status": "failed"},
                    "group_a": {"status": "passed"}, "group_b": {"status": "not run"}}

        def left(fresh):
            return [one.name for one in script.without_passed(known, recorded, fresh)]

        self.assertEqual(left(True), ["environment", "check", "new", "group"])
        self.assertEqual(left(False), ["environment", "build", "check", "new", "group"])
        recorded["group_b"]["status"] = "passed"
        self.assertEqual(left(True), ["environment", "check", "new"])

    def test_resume_uses_only_results_of_the_same_sources(self):
        script = load_script()
        options = script.parse_arguments(["--resume", "--results", str(self.folder)])
        machine = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "1", "clocks": {}}
        fingerprint = script.library.tree_fingerprint(ROOT)
        for recorded, kept in ((fingerprint, ["build"]), ("0" * 16, [])):
            results.write(self.folder / "h200.json", {
                "fingerprint": recorded, "gpu": "NVIDIA H200",
                "stages": {"build": {"status": "passed"}}, "rows": []})
            report = script.make_report(options, machine, "gpu_check")
            self.assertEqual(list(report.result["stages"]), kept)

    def test_without_a_gpu_the_message_says_so(self):
        env = {**os.environ, "PATH": str(self.folder)}  # no nvidia-smi there
        command = Command([sys.executable, ROOT / "scripts" / "gpu_check", "--results",
                           self.folder / "results"], self.folder / "x.log", self.folder, env)
        done = command.wait(60)
        self.assertEqual(done.code, 2)
        self.assertIn("no GPU", done.last_lines())
        self.assertFalse((self.folder / "results").exists())

    def test_limits_fit_the_total(self):
        script = load_script()
        options = script.parse_arguments(["--jobs", "1"])
        listed = gpu_check_plan.all_stages(Context(ROOT, options))
        self.assertEqual(len({one.name for one in listed}), len(listed))
        self.assertTrue(all(0 < one.limit_s <= 8 * 60 for one in listed))
        self.assertEqual(options.time_limit, 25 * 60)
        self.assertEqual([one.name for one in listed if one.may_be_missing],
                         ["python", "sanitizers"])
        options = script.parse_arguments(["--long"])
        long = gpu_check_plan.all_stages(Context(ROOT, options))
        self.assertEqual([one.name for one in long], [one.name for one in listed])
        self.assertTrue(all(one.limit_s > other.limit_s for one, other in zip(long, listed)))
        self.assertGreater(options.time_limit, 25 * 60)

    def test_the_list_shows_limits(self):
        done = Command([sys.executable, ROOT / "scripts" / "gpu_check", "--list"],
                       self.folder / "x.log", self.folder).wait(60)
        self.assertRegex(done.output, r"(?m)^check_blocks_sm90 +at most +150 s$")
        self.assertRegex(done.output, r"(?m)^bench_options +at most +120 s, alone$")
        self.assertRegex(done.output, r"(?m)^all together +at most +1500 s$")


if __name__ == "__main__":
    unittest.main()
