"""The plan of scripts/gpu_check: stages that run side by side, and whether all of them end in time."""

import signal
import threading
import time
import unittest

import gpu_check_plan
from gpu_check_context import Context
from gpu_check_runner import Command, Outcome, Stage, waves
from test_gpu_check import ROOT, WithRunner, load_script

# Measured on an H200 with 16 cores, sources 74d5a9eda558eab1. `sanitizers` has the time of its slowest tool.
SECONDS = {
    "environment": 11.7, "build": 160.0, "host": 1.1, "bench_cpu": 11.9, "bench": 98.0, "bench_options": 20.6,
    "bench_gradients": 27.3, "tests": 125.6, "verify": 126.3, "verify_backward": 30.3, "check": 28.6,
    "check_backward": 62.0, "check_backward_tensor_cores": 75.9, "check_tensor_cores": 79.2, "check_hopper": 81.5,
    "faults": 237.1, "keyless_tiles": 106.0, "check_blocks_sm90": 43.5, "check_blocks_sm90_e4m3": 57.6,
    "check_regression": 5.5, "check_tuning": 14.5, "check_as_l4": 4.0, "check_as_a100": 3.9, "check_cpu": 6.1,
    "verify_torch": 117.8, "deadline": 75.2, "sanitizers": 142.4,
}


class SideBySide(WithRunner):
    def test_waves(self):
        listed = [Stage(name, 1, None, alone=name.isupper()) for name in "ABcdEfg"]
        self.assertEqual(["".join(one.name for one in wave) for wave in waves(listed)], ["A", "B", "cd", "E", "fg"])

    def test_stages_side_by_side(self):
        """Two lanes: both of the first stages run at a time, and the third begins when one of them ends."""
        runner, seen = self.runner(), []
        both = threading.Barrier(2)

        def meets(limit):
            both.wait(10)
            seen.append("met")
            return Outcome("passed")

        def fails(limit):
            seen.append("third")
            return Outcome("failed", "it broke")

        runner.run_side_by_side([Stage("a", 5, meets), Stage("b", 5, meets), Stage("c", 5, fails)], 2)
        self.assertEqual(sorted(seen), ["met", "met", "third"])
        self.assertEqual({name: one["status"] for name, one in self.written()["stages"].items()},
                         {"a": "passed", "b": "passed", "c": "failed"})
        self.assertFalse(runner.ok())

    def test_an_interrupt_ends_them(self):
        """Their commands end, also one that a stage starts afterwards; queued stages do not begin."""
        runner, begin = self.runner(), time.monotonic()

        def waits(limit):
            for number in range(2):
                Command(["sleep", "60"], self.folder / f"{number}.log", self.folder).wait(limit)
            return Outcome("passed")

        main = threading.main_thread().ident
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            runner.run_side_by_side([Stage("one", 60, waits), Stage("two", 60, waits),
                                     Stage("never", 60, lambda limit: self.fail("must not run"))], 2)
        self.assertLess(time.monotonic() - begin, 20)
        self.assertEqual({name: one["reason"] for name, one in self.written()["stages"].items()},
                         {"one": "interrupted", "two": "interrupted"})


class Plan(unittest.TestCase):
    def test_the_plan_ends_in_time(self):
        """With seconds measured on an H200, where all stages but the first ran four at a time, and the limits
        of other stages."""
        script = load_script()
        options = script.parse_arguments(["--jobs", "16"])
        now = 0.0
        for wave in waves(gpu_check_plan.all_stages(Context(ROOT, options))):
            lanes = [now] * gpu_check_plan.LANES
            for stage in wave:
                lanes.sort()
                lanes[0] += SECONDS.get(stage.name, stage.limit_s)
            now = max(lanes)
        self.assertLess(now, options.time_limit)
        self.assertGreater(now, 600)

    def test_gradients_are_checked_on_every_kernel(self):
        options = load_script().parse_arguments(["--jobs", "1"])
        names = [one.name for one in gpu_check_plan.all_stages(Context(ROOT, options))]
        for name in ("check_backward", "verify", "bench_gradients", "faults"):
            self.assertIn(name, names)
        self.assertEqual("check_backward_tensor_cores" in names, bool(gpu_check_plan.gradient_kernels("bwd_sm")))
        self.assertIn("bwd_simt_bf16_d128", gpu_check_plan.gradient_kernels())


if __name__ == "__main__":
    unittest.main()
