"""flashcore.distributed: every scheme on 2 gloo processes, against one process."""

import unittest

from distributed_support import Ranks
from distributed_values import Decode, Values


class TwoRanks(Values, Decode, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(2)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()


if __name__ == "__main__":
    unittest.main()
