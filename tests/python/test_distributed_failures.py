"""flashcore.distributed: ranks that disagree raise one error, and a rank that ends or hangs leaves the
others with the engine's error, not hanging."""

import unittest

from distributed_support import Ranks, elapsed

MISTAKES = {
    "heads": "rank 1: k has 4 heads, rank 0 has 2; all ranks must pass the same",
    "dtype": "rank 1: q has dtype bfloat16, rank 0 has float32; all ranks must pass the same",
    "scheme": "rank 1: scheme is gather, rank 0 has ring; all ranks must pass the same",
    "softcap": "rank 1: softcap is 1.5, rank 0 has 0.0; all ranks must pass the same",
    "window": "rank 1: window's left side is 3, rank 0 has -1; all ranks must pass the same",
    "value rows": "rank 1: v has 5 rows, k has 6; they must match",
    "gradients": "rank 1: gradients wanted: True, rank 0 has False; all ranks must pass the same",
    "wrong by itself": "rank 1: k: has 3 dimensions; wanted [batch, heads, rows, dim]",
    "wrong type": "rank 1: q: is a ndarray; wanted a torch.Tensor",
    "zigzag": "q: rank 0: has 6 rows; zigzag placement of 10 rows on 2 ranks gives it 5. Make the shards "
              'with flashcore.distributed.shard, or pass sharding="contiguous"',
    "length of documents": "cu_seqlens: ends with 5; the ranks have 12 rows of q together",
    "another call": "rank 1: calls unshard, rank 0 has attention; all ranks must pass the same",
}


class Disagreement(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(2)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()

    def same_error(self, found, wanted):
        for one in found:
            self.assertIsInstance(one, ValueError)
            self.assertEqual(str(one), wanted)

    def test_every_rank_raises_the_same_error(self):
        for kind, wanted in MISTAKES.items():
            with self.subTest(kind):
                self.same_error(self.ranks.call("disagree", kind, 1), wanted)

    def test_documents(self):
        found = self.ranks.call("disagree", "documents", 1)
        self.assertRegex(str(found[0]), "^rank 1: cu_seqlens is another list, with hash [0-9a-f]{8}, rank 0 "
                                        "has [0-9a-f]{8}; all ranks must pass the same$")
        self.same_error(found, str(found[0]))

    def test_decode(self):
        found = self.ranks.call("decode_disagree", 1)
        self.assertRegex(str(found[0]), "^rank 1: seqused_k is another list")
        self.same_error(found, str(found[0]))

    def test_the_group_still_works(self):
        self.ranks.call("disagree", "heads", 1)
        self.assertEqual(self.ranks.results("uneven", (2, 3)), [True, True])


class DeadRank(unittest.TestCase):
    TIMEOUT = 4.0

    def check(self, name, *arguments, says, ended=()):
        ranks = Ranks(3, timeout=self.TIMEOUT)
        try:
            ranks.results("uneven", (1, 1, 1))  # all connections exist
            found, seconds = elapsed(lambda: ranks.call(name, *arguments))
        finally:
            ranks.close()
        self.assertLess(seconds, self.TIMEOUT + 15)  # a busy machine
        errors = [one for i, one in enumerate(found) if i not in ended]
        self.assertTrue(errors)
        for one in errors:
            self.assertIsInstance(one, RuntimeError)
            self.assertIn("A rank ended or did not answer", str(one))
            self.assertRegex(str(one), says)
            self.assertIn("torch says: ", str(one))
        return found

    def test_killed_before_the_call(self):
        self.check("die", 1, "forward", says="header: the exchange", ended=(1,))

    def test_killed_before_backward(self):
        self.check("die", 1, "backward", says="ring, (ring step|dK and dV home)", ended=(1,))

    def test_late(self):
        self.check("late", 2, self.TIMEOUT + 2, says="header: the exchange", ended=(2,))


if __name__ == "__main__":
    unittest.main()
