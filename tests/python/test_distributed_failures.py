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
    "causal": "rank 1: causal is False, rank 0 has True; all ranks must pass the same",
    "scale": "rank 1: scale is 0.5, rank 0 has 0.25; all ranks must pass the same",
    "layout": "rank 1: layout is bshd, rank 0 has bhsd; all ranks must pass the same",
    "sharding": "rank 1: sharding is zigzag, rank 0 has contiguous; all ranks must pass the same",
    "reproducibility": "rank 1: reproducibility is batch_invariant, rank 0 has deterministic; all ranks must "
                       "pass the same",
    "sinks": "rank 1: sinks given: True, rank 0 has False; all ranks must pass the same",
    "batch": "rank 1: q has 2 sequences, rank 0 has 1; all ranks must pass the same",
    "head dim": "rank 1: q has 8 entries per head, rank 0 has 16; all ranks must pass the same",
    "value dim": "rank 1: v has 16 entries per head, rank 0 has 8; all ranks must pass the same",
    "node": "rank 1: node is 2, rank 0 has 1; all ranks must pass the same",
    "head_ranks": "rank 1: head_ranks is 2, rank 0 has 0; all ranks must pass the same",
    "gradients": "rank 1: gradients wanted: True, rank 0 has False; all ranks must pass the same",
    "wrong by itself": "rank 1: k: has 3 dimensions; wanted [batch, heads, rows, dim]",
    "wrong type": "rank 1: q: is a ndarray; wanted a torch.Tensor",
    "zigzag": "q: rank 0: has 6 rows; zigzag placement of 10 rows on 2 ranks gives it 5. Make the shards "
              'with flashcore.distributed.shard, or pass sharding="contiguous"',
    "length of documents": "cu_seqlens: ends with 5; the ranks have 12 rows of q together",
    "another call": "rank 1: calls unshard, rank 0 has attention; all ranks must pass the same",
}

DECODE_MISTAKES = {
    "lengths": "rank 1: seqused_k is another list, with hash ",
    "lengths shape": "rank 1: seqused_k: is int32 (1,); wanted int32 (2,), one length for each sequence",
    "negative length": "rank 1: seqused_k: has -1; wanted 0 or more",
    "dims": "rank 1: k_cache: has 3 dimensions; wanted 4",
    "type": "rank 1: q: is a ndarray; wanted a torch.Tensor",
    "dtype": "rank 1: k_cache: dtype is bf16",
    "head dim": "rank 1: k_cache: ",
    "heads": "rank 1: k_cache has 4 heads, rank 0 has 2; all ranks must pass the same",
    "batch": "rank 1: k_cache: ",
    "value dim": "rank 1: v_cache has 16 entries per head, rank 0 has 8; all ranks must pass the same",
    "capacity": "rank 1: k_cache: holds 2 keys of a sequence; this rank's part of seqused_k has 3",
    "sinks": "rank 1: sinks: wanted float32 [4] on cpu, one for each query head",
    "sinks dtype": "rank 1: sinks: wanted float32 [4] on cpu, one for each query head",
    "sinks given": "rank 1: sinks given: False, rank 0 has True; all ranks must pass the same",
    "pages": "rank 1: block_table: ",
    "page": "rank 1: block_table[0, 0] is 4; ",
    "scale": "rank 1: scale is 0.5, rank 0 has 0.25; all ranks must pass the same",
    "softcap": "rank 1: softcap is 2.0, rank 0 has 0.0; all ranks must pass the same",
    "interleave": "rank 1: interleave is 2, rank 0 has 1; all ranks must pass the same",
    "combine": "rank 1: combine is all_to_all, rank 0 has all_gather; all ranks must pass the same",
    "reproducibility": "rank 1: reproducibility is batch_invariant, rank 0 has deterministic; all ranks",
}

UNSHARD_MISTAKES = {
    "gradient": "rank 1: x: requires grad, and unshard() has no gradient; ",
    "dim": "rank 1: dim is 5; x has 2 dimensions",
    "sharding": "rank 1: sharding is 'zig'; wanted one of zigzag, contiguous",
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
        self.check_table("decode_disagree", DECODE_MISTAKES)

    def test_unshard(self):
        self.check_table("unshard_disagree", UNSHARD_MISTAKES)

    def check_table(self, function, mistakes):
        """Every rank gets the same error, which starts with these words."""
        for kind, wanted in mistakes.items():
            with self.subTest(kind):
                found = self.ranks.call(function, kind, 1)
                self.assertEqual(str(found[0])[:len(wanted)], wanted)
                self.same_error(found, str(found[0]))

    def test_the_group_still_works(self):
        self.ranks.call("disagree", "heads", 1)
        self.assertEqual(self.ranks.results("uneven", (2, 3)), [True, True])


class DeadRanks(unittest.TestCase):
    TIMEOUT = 4.0

    def check(self, name, *arguments, says, ended=(), count=3):
        ranks = Ranks(count, timeout=self.TIMEOUT)
        try:
            ranks.results("uneven", (1,) * count)  # all connections exist
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

    def check_exchange(self, scheme, number, says, count=3, **options):
        with self.subTest(f"{scheme} {number}"):
            self.check("die_at", 1, scheme, number, options, says=says, ended=(1,), count=count)


class DeadRank(DeadRanks):
    def test_killed_before_the_call(self):
        self.check("die", 1, "forward", says="header: the exchange", ended=(1,))

    def test_killed_before_backward(self):
        self.check("die", 1, "backward", says="ring, (ring step|dK and dV home)", ended=(1,))

    def test_killed_in_an_exchange(self):
        self.check_exchange("ring", 2, "ring, ring step [12]")
        self.check_exchange("gather", 1, "gather, keys and values")
        self.check_exchange("decode", 1, "decode, out and lse")

    def test_late(self):
        self.check("late", 2, self.TIMEOUT + 2, says="header: the exchange", ended=(2,))


if __name__ == "__main__":
    unittest.main()
