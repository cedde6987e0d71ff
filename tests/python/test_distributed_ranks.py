"""flashcore.distributed: every scheme on 3 and 4 gloo processes, against one process."""

import unittest

from distributed_support import Ranks
from distributed_values import Decode, Values


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


if __name__ == "__main__":
    unittest.main()
