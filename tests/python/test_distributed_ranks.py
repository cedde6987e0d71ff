"""flashcore.distributed: every scheme on 3 and 4 gloo processes, against one process, and their failures."""

import unittest

from distributed_support import Ranks
from distributed_values import Decode, Values
from test_distributed_failures import MISTAKES, DeadRanks


class ThreeRanks(Values, Decode, unittest.TestCase):
    COUNT = 3

    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(cls.COUNT)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()


class FourRanks(ThreeRanks):
    COUNT = 4

    def test_ranks_that_disagree(self):
        for kind in ("heads", "batch", "scale", "node", "gradients", "wrong by itself"):
            with self.subTest(kind):
                for one in self.ranks.call("disagree", kind, 2):
                    self.assertIsInstance(one, ValueError)
                    self.assertEqual(str(one), MISTAKES[kind].replace("rank 1", "rank 2"))


class DeadRank(DeadRanks):
    def test_killed_in_an_exchange(self):
        self.check_exchange("ring", 1, "ring, ring step [12]")
        self.check_exchange("ring", 4, "ring, (ring step|dK and dV home)")
        self.check_exchange("gather", 3, "gather, (keys and values|dK and dV)")
        self.check_exchange("halo", 1, "halo, keys and values", window=(9, -1))
        self.check_exchange("ulysses", 1, "ulysses, q, k, v by heads")
        self.check_exchange("ulysses", 2, "ulysses, out by rows")
        self.check_exchange("ulysses", 3, "ulysses, (dO by heads|gradients by rows)")
        self.check_exchange("unshard", 1, "unshard, all-gather")
        for number in range(1, 5):
            self.check_exchange("2d", number, "2d, ", count=4, head_ranks=2)


if __name__ == "__main__":
    unittest.main()
