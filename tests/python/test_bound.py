"""The error bound: correct results pass at every scale of the inputs, wrong results fail."""

import copy
import json
import math
import os
import subprocess
import unittest
from pathlib import Path

from flashcore.bench import cut_sums, reference as bench_reference, tolerance
from support import Drawn, case, reference, rounded

try:
    import torch
except ImportError:
    torch = None


def judge(one, rows, got, lse=None):
    arithmetic = tolerance.arithmetic_of(one.dtype, tolerance.probability_dtype("cpu", one.dtype))
    return tolerance.compare(rows, got, lse, one.head_dim, arithmetic, one.dtype)


class Accepts(unittest.TestCase):
    def test_the_rounded_reference(self):
        for dtype in ("f64", "f32", "f16", "bf16"):
            for sigma in (0.01, 1.0, 10.0):
                one = case(dtype=dtype, causal=True)
                rows = reference(one, sigma)
                verdict = judge(one, rows, rounded(rows, dtype), [row.lse for row in rows])
                self.assertTrue(verdict.ok, f"{dtype} {sigma}: {verdict}")
                self.assertEqual(verdict.elements, len(rows) * one.head_dim)


class Rejects(unittest.TestCase):
    def setUp(self):
        self.case = case(kv_len=64)
        self.rows = reference(self.case)
        self.good = rounded(self.rows, "f32")

    def expect(self, got, reason, lse=None):
        verdict = judge(self.case, self.rows, got, lse)
        self.assertFalse(verdict.ok)
        self.assertIn(reason, verdict.reason)
        return verdict

    def test_nan_and_infinity(self):
        for bad in (math.nan, math.inf, -math.inf):
            got = copy.deepcopy(self.good)
            got[3][2] = bad
            verdict = self.expect(got, "non-finite")
            self.assertIn("i=3, c=2", verdict.worst)

    def test_a_scaled_result(self):
        self.expect([[1.001 * x for x in row] for row in self.good], "exceed")

    def test_zeros(self):
        self.expect([[0.0] * len(row) for row in self.good], "exceed")

    def test_one_wrong_element(self):
        got = copy.deepcopy(self.good)
        got[-1][-1] += 1e-4
        self.expect(got, "exceed")

    def test_two_heads_exchanged(self):
        half = len(self.good) // 2
        self.expect(self.good[half:] + self.good[:half], "exceed")

    def test_small_errors_of_one_sign_everywhere(self):
        arithmetic = tolerance.arithmetic_of("f32", "f32")
        got = [[x + 0.9 * tolerance.out_bound(row, c, 8, arithmetic) for c, x in enumerate(row.out)]
               for row in self.rows]
        self.expect(got, "a head's error as a whole")

    def test_lse_in_another_base(self):
        self.expect(self.good, "exceed", [row.lse / math.log(2) for row in self.rows])
        self.expect(self.good, "non-finite", [math.nan] * len(self.rows))

    def test_a_dropped_key_of_2048(self):
        one = case(q_heads=1, q_len=1, kv_len=2048, head_dim=16)
        drawn = Drawn(one)
        rows = bench_reference.plain_rows(one, drawn.q, drawn.k, drawn.v, [(0, 0, 0)])
        fewer = case(q_heads=1, q_len=1, kv_len=2047, head_dim=16)
        dropped = bench_reference.plain_rows(fewer, drawn.q, drawn.k, drawn.v, [(0, 0, 0)])
        self.assertTrue(judge(one, rows, rounded(rows, "f32")).ok)
        self.assertFalse(judge(one, rows, rounded(dropped, "f32")).ok)

    def test_an_empty_result(self):
        self.assertFalse(judge(self.case, [], []).ok)


class Bound(unittest.TestCase):
    def test_by_hand(self):
        """One element with round numbers, against the formula of docs/numerics.md."""
        row = tolerance.ReferenceRow(0, 0, 0, out=[0.5], lse=3.0, magnitude=2.0,
                                  largest_product=1.0, largest_cut=99.0, spread=[0.25],
                                  deviation=[0.125],
                                  v_mass=[10.0], kv_len=16)
        u = 2.0**-24
        a = tolerance.arithmetic_of("f16", "f32")
        want = (2 * 2.0**-11 * 0.5 + 4 * (u + 4 * u) * 0.5 + u * (4 + 8) * 2.0 * 0.125 + 2.0**-24
                + 10 * 2.0**-126)
        self.assertAlmostEqual(tolerance.out_bound(row, 0, 64, a) / want, 1, delta=1e-12)
        lse = 2e-6 + u * (4 + 12 * 2.0 + 6.0)
        self.assertAlmostEqual(tolerance.lse_bound(row, 64, a) / lse, 1, delta=1e-12)

    def test_tensor_cores_cut_sums(self):
        """If they may cut more than the walk of roundings, the bound grows with it."""
        def bound(largest_cut, probability):
            row = tolerance.ReferenceRow(0, 0, 0, out=[0.5], lse=3.0, magnitude=2.0,
                                      largest_product=1.0, largest_cut=largest_cut, spread=[0.25],
                                      deviation=[0.125], v_mass=[10.0], kv_len=16)
            return tolerance.lse_bound(row, 256, tolerance.arithmetic_of("f16", probability))
        self.assertEqual(bound(99.0, "f32"), bound(0.0, "f32"))
        self.assertEqual(bound(31.0, "f16"), bound(0.0, "f16"))
        for probability in ("f16", "bf16"):
            more = bound(99.0, probability) - bound(0.0, probability)
            self.assertAlmostEqual(more / (2.0**-24 * (99 - 16 * 2)), 1, delta=1e-9)

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_what_tensor_cores_cut_by_hand(self):
        """The cases of tests/unit/verify/cut_sums_test.cc."""
        def units(q, key, dtype="bf16"):
            def tensor(values):
                return torch.tensor(values, dtype=torch.float64)
            return cut_sums.largest_cut(torch, tensor(q), tensor([key, [0.0] * len(q)]), dtype, dtype)
        small = 2.0**-30
        self.assertEqual(units([3.0, 0.0, 0.0], [5.0, 1.0, 7.0]), 16)
        self.assertEqual(units([1.0, 1.0], [1.0, 1.0]), 4)
        self.assertEqual(units([1.0, small], [1.0, 1.0]), 2 + 2.0**-6)
        self.assertEqual(units([1.0, -small, 4 * small], [1.0] * 3), 2 + 2.0**-4)
        self.assertEqual(units([2.0**-24] * 2, [64.0, 2.0**-10], "f16"), 2.0**-17 + 2.0**-10)
        self.assertEqual(units([2.0**-24] * 2, [64.0, 2.0**-10]), 2.0**-17)
        self.assertEqual(units([small] * 8 + [1.0], [1.0] * 9), 8 * 2.0**-6 + 2 * 2.0**-27 + 3 - 2.0**-26)

    def test_the_table_agrees_with_the_kernel_list(self):
        command = Path(os.environ.get("FLASHCORE_LIBRARY", "")).parent / "bin" / "flashcore"
        if not command.is_file():
            self.skipTest("FLASHCORE_LIBRARY has no bin/flashcore next to it")
        listed = json.loads(subprocess.run([command, "info", "--kernels", "--json"], check=True, text=True,
                                           stdout=subprocess.PIPE).stdout)["kernels"]
        self.assertEqual({kernel["family"] for kernel in listed}, set(tolerance._PROBABILITY_DTYPES))
        for kernel in listed:
            self.assertEqual(tolerance.probability_dtype(kernel["family"], kernel["dtype"],
                                                         kernel["id"]),
                             kernel["probability_dtype"], kernel["id"])

    def test_tensor_cores_store_p_in_the_inputs_format(self):
        self.assertEqual(tolerance.probability_dtype("simt", "bf16"), "f32")
        self.assertEqual(tolerance.probability_dtype("cpu", "f64"), "f64")
        self.assertEqual(tolerance.probability_dtype("cpu", "bf16", "fwd_avx512_bf16"), "f32")
        self.assertEqual(tolerance.probability_dtype("cpu", "bf16", "fwd_amx_bf16"), "bf16")
        self.assertEqual(tolerance.probability_dtype("cpu", "f16", "fwd_amx_f16"), "f32")
        self.assertEqual(tolerance.probability_dtype("sm90", "bf16"), "bf16")
        self.assertEqual(tolerance.probability_dtype("sm80_8bit", "bf16"), "f16")
        self.assertEqual(tolerance.probability_dtype("sm90_e4m3", "bf16"), "e4m3")


if __name__ == "__main__":
    unittest.main()
