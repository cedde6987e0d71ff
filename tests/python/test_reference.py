"""The reference rows: hand-computed values, agreement of both implementations, choice of rows."""

import math
import unittest

from flashcore.bench import reference
from flashcore.bench.cpu import decode, encode
from support import Drawn, case

try:
    import torch
except ImportError:
    torch = None


class Values(unittest.TestCase):
    def test_by_hand(self):
        """Scores ln 1 and ln 3: weights 1/4 and 3/4."""
        one = case(q_heads=1, q_len=1, kv_len=2, head_dim=1)
        rows = reference.plain_rows(one, lambda *_: [1.0], lambda b, h, j: [[0.0, math.log(3)][j]],
                                     lambda b, h, j: [[4.0, 8.0][j]], [(0, 0, 0)])
        row = rows[0]
        self.assertAlmostEqual(row.out[0], 7.0, delta=1e-12)
        self.assertAlmostEqual(row.lse, math.log(4), delta=1e-12)
        self.assertAlmostEqual(row.magnitude, math.log(3), delta=1e-12)
        self.assertAlmostEqual(row.spread[0], math.hypot(1, 6), delta=1e-12)
        self.assertAlmostEqual(row.deviation[0], 0.25 * 3 + 0.75 * 1, delta=1e-12)
        self.assertAlmostEqual(row.v_mass[0], 12 / (4 / 3), delta=1e-12)

    def test_causal_is_bottom_right(self):
        one = case(causal=True, q_len=3, kv_len=5)
        self.assertEqual([one.visible_end(0, i) for i in range(3)], [3, 4, 5])
        self.assertEqual(one.visible_pairs(), 12)

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_torch_agrees_with_plain_python(self):
        for causal in (False, True):
            one = case(batch=2, q_heads=4, kv_heads=2, q_len=6, kv_len=11, causal=causal)
            drawn = Drawn(one)

            def tensor(row, heads, length):
                return torch.tensor([[[row(b, h, i) for i in range(length)] for h in range(heads)]
                                     for b in range(one.batch)])

            rows = reference.sample_rows(one)
            plain = reference.plain_rows(one, drawn.q, drawn.k, drawn.v, rows)
            by_torch = reference.torch_rows(
                torch, one, tensor(drawn.q, 4, 6), tensor(drawn.k, 2, 11), tensor(drawn.v, 2, 11),
                rows)
            for a, b in zip(plain, by_torch):
                self.assertEqual((a.b, a.h, a.i, a.kv_len), (b.b, b.h, b.i, b.kv_len))
                for name in ("lse", "magnitude"):
                    self.assertAlmostEqual(getattr(a, name), getattr(b, name), delta=1e-12)
                for name in ("out", "spread", "deviation", "v_mass"):
                    for x, y in zip(getattr(a, name), getattr(b, name)):
                        self.assertAlmostEqual(x, y, delta=1e-12)


class Rows(unittest.TestCase):
    def test_first_and_last_rows_are_always_included(self):
        one = case(batch=3, q_heads=8, kv_heads=8, q_len=1000)
        rows = reference.sample_rows(one)
        self.assertEqual(len(rows), 64)
        self.assertEqual(len(set(rows)), 64)
        self.assertEqual((rows[0], rows[-1]), ((0, 0, 0), (2, 7, 999)))
        self.assertNotEqual(rows, reference.sample_rows(one, seed=2))

    def test_small_problems_are_computed_completely(self):
        one = case(q_len=3)
        self.assertEqual(reference.sample_rows(one),
                         [(0, h, i) for h in range(2) for i in range(3)])


class Formats(unittest.TestCase):
    def test_round_trips(self):
        values = [0.0, -0.0, 1.0, -2.5, 65504.0, 2.0**-14]
        for dtype in ("f64", "f32", "f16"):
            self.assertEqual(decode(encode(values, dtype), dtype), values)
        self.assertEqual(decode(encode([1.0, -2.5, 2.0**100], "bf16"), "bf16"),
                         [1.0, -2.5, 2.0**100])

    def test_bf16_rounds_to_even(self):
        unit = 2.0**-8  # half the spacing at 1
        self.assertEqual(decode(encode([1 + unit, 1 + 3 * unit, 1 + 1.01 * unit], "bf16"), "bf16"),
                         [1.0, 1 + 4 * unit, 1 + 2 * unit])

    def test_nan_stays_nan(self):
        for dtype in ("f64", "f32", "f16", "bf16"):
            self.assertTrue(math.isnan(decode(encode([math.nan], dtype), dtype)[0]), dtype)


if __name__ == "__main__":
    unittest.main()
