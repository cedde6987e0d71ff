"""flashcore.distributed: every scheme on 2 gloo processes, against one process."""

import unittest

import distributed_bounds as bounds
from distributed_support import Ranks
from distributed_values import Decode, Values, expected, limits_of


class TwoRanks(Values, Decode, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(2)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()


class Bounds(unittest.TestCase):
    """The bounds reject small errors of every result."""

    def test_wrong_results(self):
        for dtype, share in (("float32", 1e-4), ("bfloat16", 0.05)):
            case = dict(scheme="ring", length=29, heads=(4, 2), causal=True, sinks=True, softcap=3.0,
                        documents=[0, 9, 29], dtype=dtype)
            want = expected(case)
            limits = limits_of(case, want)
            self.assertEqual(set(limits), {"out", "lse", "dq", "dk", "dv", "dsinks"})
            for name, one in want.items():
                self.assertIsNone(bounds.fault(one, one, limits[name]))
                self.assertRegex(bounds.fault(one * (1 + 2 * share), one, limits[name]), "of the bound", name)
                wrong = one.copy()
                wrong.flat[one.size // 2] += share * abs(one).max() * 4
                self.assertRegex(bounds.fault(wrong, one, limits[name]), "of the bound", name)
                wrong.flat[0] = float("nan")
                self.assertRegex(bounds.fault(wrong, one, limits[name]), "other non-finite values")


if __name__ == "__main__":
    unittest.main()
