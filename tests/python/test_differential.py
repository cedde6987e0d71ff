"""The differential suite finds a slightly wrong function and a missing case. The suite itself runs in
make test-all: tests/differential/run.py."""

import contextlib
import io
import os
import sys
import unittest

from torch_support import torch

try:
    import expecttest  # noqa: F401: torch's samples need it
except ImportError:
    raise unittest.SkipTest("expecttest is not installed")

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "differential"))

import common
import opinfo

import flashcore


def findings(function):
    return opinfo.compare(function, (torch.float32,)).findings


def scaled(share):
    """sdpa with a wrong scale."""
    def sdpa(query, *others, **options):
        return flashcore.sdpa(query * share, *others, **options)
    return sdpa


class Faults(unittest.TestCase):
    def test_a_correct_function_has_no_findings(self):
        self.assertEqual(findings(flashcore.sdpa), [])

    def test_a_scale_that_is_off_by_a_hundredth(self):
        self.assertGreater(len(findings(scaled(1.01))), 20)

    def test_a_wrong_gradient(self):
        """Correct results, and a gradient that is off by a hundredth."""
        class Off(torch.autograd.Function):
            @staticmethod
            def forward(context, one):
                return one.clone()

            @staticmethod
            def backward(context, gradient):
                return gradient * 1.01

        def sdpa(query, *others, **options):
            return flashcore.sdpa(Off.apply(query), *others, **options)

        found = [one for one in findings(sdpa) if one.startswith("gradients of")]
        self.assertEqual(len(found), 13, found)

    def test_a_call_that_should_be_refused(self):
        def sdpa(*arguments, dropout_p=0.0, **options):
            return flashcore.sdpa(*arguments, **options)

        self.assertTrue(any("dropout was taken" in one for one in findings(sdpa)))

    def test_a_count_that_drops(self):
        tally = common.Tally("example", {"forward": 2})
        tally.right("forward")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(tally.finish(), 1)
        self.assertIn("forward: 1 right results; there were 2 or more", said.getvalue())

    def test_nan_is_wrong(self):
        tally = common.Tally("example", {})
        tally.judge("forward", "one", float("nan"), 1.0)
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(tally.finish(), 1)


class Onnx(unittest.TestCase):
    def test_a_mask_that_is_off_by_one(self):
        try:
            import onnx_call
            import onnx_cases
        except ImportError as missing:
            self.skipTest(f"{missing.name} is not installed")

        def attention(*arguments, q_start=None, **options):
            start = {} if q_start is None else {"q_start": q_start + 1}
            return flashcore.attention(*arguments, **start, **options)

        names = ("test_attention_4d", "test_attention_4d_causal")
        tally = onnx_cases.compare(lambda *case: onnx_call.attend(*case, attention), names)
        self.assertEqual(tally.counts["Y"], 1)
        self.assertEqual([one.partition(":")[0] for one in tally.findings], ["test_attention_4d_causal"])


if __name__ == "__main__":
    unittest.main()
