"""Kernels that never end (injected fault never_ends) are reported and counted, and the run continues."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import unittest
from pathlib import Path

from flashcore_command import FAILED, INTERRUPTED, PROGRAM, CommandTest

NEVER_ENDS = {"FLASHCORE_FAULT": "30"}
CHECK = ("check", "--device", "cpu", "--kernel", "^fwd_generic_f32$", "--quiet")


def spins(problem):
    """True if the injected fault makes this problem (as the reports write it) spin."""
    return int(re.search(r" q(\d+) ", problem)[1]) % 7 == 3


def children(pid):
    """Returns the child processes of this one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Check(CommandTest):
    def hung_in(self, done):
        """Returns {index: replay command} of the problems reported as hung."""
        rows = re.findall(r"^flashcore: random/(\d+): kernel fwd_generic_f32: it did not end within "
                          r"\S+ s; its process was killed\n  (.*)\n  replay +(.*)$", done.stderr, re.M)
        self.assertTrue(all(spins(problem) for _, problem, _ in rows), done.stderr)
        return {int(index): replay for index, _, replay in rows}

    def test_every_problem_counts_once(self):
        problems = 24
        arguments = (*CHECK, "--problems", problems)
        for jobs in (1, 3):
            done = self.call(*arguments, "--jobs", jobs, "--deadline", 1, "--json", code=FAILED,
                             env=NEVER_ENDS)
            found = json.loads(done.stdout)
            hung = self.hung_in(done)
            self.assertGreater(len(hung), 2)
            self.assertEqual((found["problems"], found["failures"]), (problems, len(hung)))
            self.assertTrue(found["complete"])
            self.assertEqual(found["first_failure"], {"suite": "random", "index": min(hung)})
            self.assertTrue(all(report["hung"] for report in found["reports"]))
            self.assertEqual(found["coverage"]["fewest_per_kernel"], problems - len(hung))
            # Without the fault, a run that skips the hung problems finds the same.
            healthy = [self.call_json(*CHECK, "--index", index) for index in range(problems)
                       if index not in hung]
            tally = found["kernels"]["fwd_generic_f32"]
            self.assertEqual(tally["worst_ratio"], max(
                one["kernels"]["fwd_generic_f32"]["worst_ratio"] for one in healthy))
            for part in ("options", "pairs", "tile_edges"):
                missing = set.intersection(*(set(one["coverage"][part]["missing"])
                                             for one in healthy))
                self.assertEqual(set(found["coverage"][part]["missing"]), missing)

    def test_text(self):
        done = self.call(*CHECK, "--problems", 9, "--jobs", 2, "--deadline", 1, code=FAILED,
                         env=NEVER_ENDS)
        hung = self.hung_in(done)
        self.assertEqual(done.stdout.count("1 kernel on "), 1)
        self.assertEqual(sorted(map(int, re.findall(r"^FAILED  problem (\d+) of suite random, ",
                                                    done.stdout, re.M))), sorted(hung))
        self.assertIn("  it did not end within 1 s; its process was killed\n  replay ", done.stdout)
        self.assertRegex(done.stdout, rf"FAILED: 9 problems in \S+ s, {len(hung)} failures\n\Z")
        # The replay command repeats the hang.
        index, replay = min(hung.items())
        again = subprocess.run(shlex.split(replay), capture_output=True, text=True, timeout=60,
                               env={**os.environ, **NEVER_ENDS})
        self.assertEqual(again.returncode, FAILED)
        self.assertEqual(list(self.hung_in(again)), [index])

    def test_max_failures_and_time_limit(self):
        begin = time.monotonic()
        found = self.call_json(*CHECK, "--problems", 1000, "--jobs", 3, "--deadline", 1,
                               "--max-failures", 1, code=FAILED, env=NEVER_ENDS)
        self.assertEqual(found["failures"], 1)
        found = self.call_json(*CHECK, "--problems", 10**6, "--jobs", 1, "--deadline", 1,
                               "--time-limit", 2, code=FAILED, env=NEVER_ENDS)
        self.assertEqual(found["stopped"], "the time limit of 2 s was reached")
        self.assertFalse(found["complete"])
        self.assertLess(time.monotonic() - begin, 30)

    def test_list_suite_without_a_hang(self):
        found = self.call_json("check", "--suite", "tuning", "--device", "cpu", "--kernel",
                               "^fwd_generic_f32$", "--deadline", 1, "--max-failures", 1)
        self.assertEqual(found["problems"], 80)  # rows at the edges of 64-row tiles: none spins

    def test_no_worker_without_a_deadline(self):
        process = subprocess.Popen([PROGRAM, *CHECK, "--problems", "1000000000"],
                                   stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        self.assertEqual(children(process.pid), [])
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


class BenchAndRun(CommandTest):
    # The fourth of the seven cases has 192 queries and hangs.
    CASES = ("--device", "cpu", "--case", "regression-split-kv", "--deadline", 3, "--samples", 3)

    def test_bench_continues_after_a_hang(self):
        output = self.path("new.json")
        found = self.call_json("bench", *self.CASES, "--quiet", "--output", output, code=FAILED,
                               env=NEVER_ENDS)
        self.assertEqual([row["q_len"] for row in found["rows"]], [64, 65, 128, 256, 512, 4])
        (failed,) = found["failed"]
        self.assertEqual((failed["q_len"], failed["hung"]), (192, True))
        self.assertIn("did not end within 3 s", failed["reason"])
        self.assertIn("regression-split-kv#4", failed["replay"])
        with open(output) as file:
            written = json.load(file)
        self.assertEqual(written["rows"], found["rows"])
        self.assertEqual(written["failed"], found["failed"])
        text = self.call("bench", *self.CASES, code=FAILED, env=NEVER_ENDS).stdout
        self.assertEqual(len(re.findall("^regression-split-kv ", text, re.M)), 7)
        self.assertEqual(text.count("NOT TIMED: it did not end within 3 s"), 1)
        self.assertEqual(text.count("samples per row"), 1)

    def test_bench_without_a_hang(self):
        found = self.call_json("bench", *self.CASES, "--quiet")
        self.assertEqual((len(found["rows"]), found["failed"], found["complete"]), (7, [], True))
        self.assertIn("host_us", found)

    def test_run_continues_after_a_hang(self):
        found = self.call_json("run", *self.CASES, code=FAILED, env=NEVER_ENDS)
        self.assertEqual([one.get("hung", False) for one in found["results"]],
                         [False] * 3 + [True] + [False] * 3)
        self.assertEqual([one["passed"] for one in found["results"]], [True] * 3 + [False] + [True] * 3)

    def test_run_prints_the_replay_command(self):
        done = self.call("run", "--device", "cpu", "--shape", "1,2,10,16", "--deadline", 1, code=FAILED,
                         env=NEVER_ENDS)
        self.assertIn("FAILED: it did not end within 1 s; its process was killed", done.stdout)
        replay = re.search("^  replay +(.*)$", done.stderr, re.M)[1]
        self.assertEqual(shlex.split(replay)[1:], ["run", "--device", "cpu", "--shape", "1,2,10,16",
                                                   "--deadline", "1"])
        self.assertIn("q_len 10", done.stderr)

    def test_stages(self):
        found = self.call_json("run", "--device", "cpu", "--shape", "1,2,10,16", "--stage", "all",
                               "--deadline", 1, code=FAILED, env=NEVER_ENDS)
        self.assertTrue(found["hung"])


class Verify(CommandTest):
    def test_verify_continues_after_a_hang(self):
        found = self.call_json("verify", "--device", "cpu", "--kernel", "^fwd_generic_f(16|32)$",
                               "--dtype", "f16", "--dtype", "f32", "--quick", "--deadline", 1,
                               "--quiet", code=FAILED, env=NEVER_ENDS)
        self.assertEqual([one["name"] for one in found["reports"]],
                         ["fwd_generic_f32", "fwd_generic_f16"])
        for report in found["reports"]:
            self.assertFalse(report["ok"])
            self.assertEqual(report["detail"], "it did not return within 1 s; its process was killed")
            self.assertEqual(int(re.search(r"q_len (\d+)", json.dumps(report))[1]) % 7, 3)
            self.assertIn("--deadline 1", report["reproducer"])

    def test_child_process_makes_the_same_calls(self):
        arguments = ("verify", "--device", "cpu", "--kernel", "^fwd_generic_f32$", "--quick")
        calls = [re.search(r"correct +(\d+) calls", self.call(*arguments, "--deadline", limit).stdout)[1]
                 for limit in (0, 20)]
        self.assertEqual(calls[0], calls[1])


class Interrupted(CommandTest):
    def start(self, *arguments, env=NEVER_ENDS):
        process = subprocess.Popen([PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 20
        while not children(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        return process

    def gone(self, pids):
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def test_interrupt_prints_the_results_so_far(self):
        process = self.start(*CHECK, "--problems", 40, "--jobs", 2, "--deadline", 100)
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        out, err = process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 15)
        self.assertEqual(process.returncode, INTERRUPTED)
        self.assertRegex(out, r"\d+ of 40 done, interrupted\n\Z")
        self.assertEqual(out.count("1 kernel on "), 1)
        self.assertRegex(err, r"random/\d+: kernel fwd_generic_f32: had not ended after")
        self.assertTrue(self.gone(workers))

    def test_interrupt_ends_the_child_of_verify(self):
        process = self.start("verify", "--device", "cpu", "--kernel", "^fwd_generic_f(16|32)$", "--quick",
                             "--deadline", 100)
        workers = children(process.pid)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 15)
        self.assertEqual(process.returncode, INTERRUPTED)
        self.assertIn("interrupted; 0 reports so far", err)
        self.assertTrue(self.gone(workers))

    def test_worker_ends_with_its_supervisor(self):
        process = self.start(*CHECK, "--problems", 40, "--deadline", 100)
        workers = children(process.pid)
        self.assertEqual(len(workers), 1)
        process.kill()
        process.communicate(timeout=20)
        self.assertTrue(self.gone(workers))

    def test_crash_that_does_not_repeat_counts_as_a_failure(self):
        """The worker is killed while several problems run; each one passes alone."""
        process = self.start(*CHECK, "--problems", 3000, "--jobs", 3, "--deadline", 100, "--json",
                             env={})
        os.kill(children(process.pid)[0], signal.SIGSEGV)
        out, err = process.communicate(timeout=200)
        self.assertEqual(process.returncode, FAILED, err)
        found = json.loads(out)
        self.assertEqual((found["problems"], found["failures"]), (3000, 1))
        self.assertRegex(found["reports"][0]["reason"],
                         r"its process ended by SIGSEGV .* while \d other problems? ran; "
                         r"it ended when run alone")

    def test_new_worker_keeps_earlier_failures(self):
        arguments = (*CHECK, "--problems", 2000, "--jobs", 2, "--deadline", 100)
        env = {"FLASHCORE_FAULT": "1"}
        process = self.start(*arguments, env=env)
        os.kill(children(process.pid)[0], signal.SIGSEGV)
        text, _ = process.communicate(timeout=200)
        self.assertEqual(text.count("  replay "), 5)  # each one is printed once
        self.assertEqual(len(re.findall(r"^  worst  ", text, re.M)), 5)
        process = self.start(*arguments, "--json", env=env)
        os.kill(children(process.pid)[0], signal.SIGSEGV)
        found = json.loads(process.communicate(timeout=200)[0])
        self.assertTrue(all(one["comparison"]["over_bound"] for one in found["reports"]))
        whole = self.call_json(*arguments, code=FAILED, env=env)
        self.assertIn(found["failures"] - whole["failures"], (0, 1))  # 1: the suspect itself passes
        self.assertEqual(found["first_failure"], whole["first_failure"])


if __name__ == "__main__":
    unittest.main()
