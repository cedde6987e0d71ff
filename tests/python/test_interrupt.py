"""Ctrl-C during a CPU call of many seconds: the call ends at once, and the next call is correct. Every case
runs in its own process, which gets the signal."""

import os
import subprocess
import sys
import textwrap
import unittest

try:
    import numpy  # noqa: F401: for the programs
except ImportError:
    raise unittest.SkipTest("numpy is not installed")
try:
    import torch_support  # noqa: F401: raises SkipTest if torch must not be used
    NO_TORCH = ""
except unittest.SkipTest as why:
    NO_TORCH = str(why)

needs_torch = unittest.skipIf(NO_TORCH, NO_TORCH)
FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "python")

# All keys share one row of memory, so the call is long and needs little memory. The signal comes 0.3 s
# after `long` begins. Each program prints the exception that ended the call, and after how many seconds.
PRELUDE = """
import os, signal, threading, time
import numpy as np
import flashcore

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
LENGTH = 1 << 24
q = np.ones((1, 1, 512, 64), np.float32)
k = np.broadcast_to(np.ones((1, 1, 1, 64), np.float32), (1, 1, LENGTH, 64))
small = np.random.default_rng(0).standard_normal((1, 2, 40, 16)).astype(np.float32)
want = flashcore.attention(small, small, small, causal=True)
sent = []

class Stop(Exception):
    pass

def send():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)

def interrupt(long, delay=0.3):
    timer = threading.Timer(delay, send)
    timer.start()
    try:
        long()
        timer.join()
    except (KeyboardInterrupt, Stop) as error:
        print(type(error).__name__, time.perf_counter() - sent[-1])
    assert np.array_equal(flashcore.attention(small, small, small, causal=True), want)
"""
# Two threads on every machine, so that the time is similar. Memory of results is only mapped when written.
WALKS = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
x = np.broadcast_to(np.ones((1, 1, 1, 64), np.float32), (1, 1, 1 << 23, 64))
few = flashcore.quantize(small)
values = flashcore.dequantize(few)
lse = np.zeros(small.shape[:3], np.float32)

def check_small():
    k, v = np.zeros((2, *small.shape), np.float32)
    flashcore.append(small, values, k, v, np.zeros(1, np.int32))
    assert np.array_equal(k, small) and np.array_equal(v, values)
    assert np.array_equal(flashcore.quantize(small).codes, few.codes)
    assert np.array_equal(flashcore.dequantize(few), values)
    assert np.array_equal(flashcore.merge([small], [lse]), small)
"""
TORCH = """
import torch
tq, tk = torch.from_numpy(q), torch.ones(1, 1, 1, 64).expand(1, 1, LENGTH, 64)
few = torch.from_numpy(small)
"""


class Interrupt(unittest.TestCase):
    def run_program(self, program):
        environment = {**os.environ, "PYTHONPATH": PACKAGE}
        return subprocess.run([sys.executable, "-c", PRELUDE + textwrap.dedent(program)], text=True,
                              capture_output=True, timeout=300, env=environment)

    def check(self, program, exception="KeyboardInterrupt", count=1):
        done = self.run_program(program)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), count, done.stdout)
        for line in lines:
            name, after = line.split()
            self.assertEqual(name, exception)
            self.assertLess(float(after), 1.0)

    def test_numpy(self):
        """Python describes the arrays of the first call, the library those of the second."""
        self.check("""
            interrupt(lambda: flashcore.attention(q, k, k))
            interrupt(lambda: flashcore.attention(q, k, k))
            interrupt(lambda: flashcore.attention(q, k, k, return_lse=True))
            """, count=3)

    def test_splits_and_given_out(self):
        self.check("""
            out = np.empty_like(q)
            for _ in range(2):
                interrupt(lambda: flashcore.attention(q, k, k, num_splits=8, out=out))
            """, count=2)

    def test_quantized(self):
        self.check("""
            codes = np.broadcast_to(np.ones((1, 1, 1, 64), np.int8), k.shape)
            one = flashcore.Quantized(codes, np.ones(1, np.float32))
            interrupt(lambda: flashcore.attention(q, one, one))
            """)

    def check_walk(self, program):
        """Checks a call that reads its arrays once: 1 to 3 s on two threads."""
        self.check(WALKS + textwrap.dedent(program) + "check_small()", count=2)

    def test_quantize(self):
        self.check_walk("""
            interrupt(lambda: flashcore.quantize(x, "int8"), 0.1)
            interrupt(lambda: flashcore.quantize(x, per="block", block_rows=1 << 30), 0.1)
            """)

    def test_dequantize(self):
        self.check_walk("""
            codes = np.broadcast_to(np.ones((1, 1, 1, 64), np.int8), x.shape)
            one = flashcore.Quantized(codes, np.ones(1, np.float32))
            interrupt(lambda: flashcore.dequantize(one), 0.1)
            interrupt(lambda: flashcore.dequantize(one._replace(rotated=True), "f16"), 0.1)
            """)

    def test_append(self):
        self.check_walk("""
            one = np.ones(1, np.float32)
            used = np.zeros(1, np.int32)
            k, v = (flashcore.Quantized(np.empty(x.shape, np.int8), one) for _ in range(2))
            interrupt(lambda: flashcore.append(x, x, k, v, used), 0.1)
            interrupt(lambda: flashcore.append(x, x, k, v, used), 0.1)
            """)

    def test_merge(self):
        self.check_walk("""
            one = np.broadcast_to(np.zeros((1, 1, 1), np.float32), x.shape[:3])
            interrupt(lambda: flashcore.merge([x] * 32, [one] * 32), 0.1)
            interrupt(lambda: flashcore.merge([x] * 32, [one] * 32, return_lse=True), 0.1)
            """)

    @needs_torch
    def test_torch(self):
        self.check(TORCH + textwrap.dedent("""
            with torch.no_grad():
                for _ in range(2):
                    interrupt(lambda: flashcore.attention(tq, tk, tk))
                for _ in range(2):
                    interrupt(lambda: torch.ops.flashcore.attention(tq, tk, tk))
                interrupt(lambda: flashcore.sdpa(tq, tk, tk))
            """), count=5)

    @needs_torch
    def test_gradients(self):
        """The forward pass, and the backward pass, which is a loop of short torch operations."""
        self.check(TORCH + textwrap.dedent("""
            tq.requires_grad_()
            interrupt(lambda: flashcore.attention(tq, tk, tk))
            x = torch.ones(1, 1, 16384, 64, requires_grad=True)
            out = flashcore.attention(x, x, x)
            interrupt(lambda: out.sum().backward())
            """), count=2)

    def test_another_signal_handler(self):
        """The handler may call FlashCore. Its exception ends the call; without one the call continues."""
        self.check("""
            calls = []

            def handler(number, frame):
                again = flashcore.attention(small, small, small, causal=True)
                assert np.array_equal(again, want)
                calls.append(number)
                if len(calls) == 3:
                    sent[:] = [time.perf_counter()]
                    raise Stop

            signal.signal(signal.SIGINT, handler)
            for delay in (0.2, 0.4):
                threading.Timer(delay, send).start()
            interrupt(lambda: flashcore.attention(q, k, k), 0.6)
            assert len(calls) == 3
            """, exception="Stop")

    def test_a_call_inside_a_handler_gives_correct_results(self):
        done = self.run_program("""
            draw = np.random.default_rng(1).standard_normal
            keys = 4096 * len(os.sched_getaffinity(0))
            q, k = (draw((1, *shape, 64), np.float32) for shape in ((8, 1024), (1, keys)))
            alone = flashcore.attention(q, k, k)
            calls = []

            def handler(number, frame):
                calls.append(np.array_equal(flashcore.attention(small, small, small), plain))

            plain = flashcore.attention(small, small, small)
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            both = flashcore.attention(q, k, k)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert np.array_equal(both, alone)
            assert len(calls) > 2 and all(calls), calls
            """)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_other_threads_are_not_disturbed(self):
        """The main thread gets the signal while another one computes."""
        done = self.run_program("""
            x = np.random.default_rng(1).standard_normal((1, 8, 4096, 64)).astype(np.float32)
            alone = flashcore.attention(x, x, x)
            made = []
            thread = threading.Thread(target=lambda: made.append(flashcore.attention(x, x, x)))
            thread.start()
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
                raise SystemExit("no signal came")
            except KeyboardInterrupt:
                assert not made
            thread.join()
            assert np.array_equal(made[0], alone)
            """)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
