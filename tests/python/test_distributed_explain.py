"""flashcore.distributed: the choice of a scheme, and predict(), which needs no process group."""

import unittest

import torch_support  # noqa: F401 (skips without torch)

import flashcore.distributed as fcd
from flashcore.distributed import costs
from flashcore.distributed.costs import choose

MODEL = dict(q_heads=64, kv_heads=8, head_dim=128)


class Choice(unittest.TestCase):
    def choose(self, scheme="auto", **given):
        options = dict(ranks=8, node=8, q_heads=64, kv_heads=8, documents=1, reach=(-1, 0))
        return choose(scheme, **{**options, **given})[:2]

    def test_auto(self):
        self.assertEqual(self.choose(), ("ulysses", 8))
        self.assertEqual(self.choose(ranks=64), ("2d", 8))
        self.assertEqual(self.choose(ranks=3), ("ring", 1))
        self.assertEqual(self.choose(ranks=16, kv_heads=1), ("ring", 1))
        self.assertEqual(self.choose(documents=5), ("gather", 1))
        self.assertEqual(self.choose(reach=(128, 0)), ("halo", 1))
        self.assertEqual(self.choose(ranks=1), ("gather", 1))

    def test_given_schemes_that_do_not_fit(self):
        with self.assertRaisesRegex(ValueError, "3 ranks cannot divide 64 query heads and 8 KV heads"):
            self.choose("ulysses", ranks=3)
        with self.assertRaisesRegex(ValueError, "needs a window"):
            self.choose("halo")
        with self.assertRaisesRegex(ValueError, "head_ranks is 3; wanted a divisor of the 8 ranks"):
            self.choose("2d", head_ranks=3)


class Model(unittest.TestCase):
    def test_a_million_tokens(self):
        """Work, bytes and the time over the work's own time, by hand from docs/distributed.md."""
        plan = fcd.predict(1 << 20, ranks=64, scheme="ring", **MODEL)
        n = (1 << 20) // 64
        self.assertEqual(plan.forward.bytes, (63 * n * 4096,) * 64)
        self.assertEqual(plan.backward.bytes, (63 * n * 4096 + 64 * n * 8192,) * 64)
        self.assertAlmostEqual(plan.forward.work, 2 * 64 * 128 * (1 << 20) ** 2 / 64 / 650e12, delta=1e-4)
        for ranks, slower in ((8, 1.0), (256, 1.0), (512, 1.77), (1024, 3.93)):
            plan = fcd.predict(1 << 20, ranks=ranks, scheme="ring", **MODEL)
            self.assertAlmostEqual(plan.forward.total / plan.forward.work, slower, delta=0.02)
        plan = fcd.predict(1 << 20, ranks=1024, **MODEL)
        self.assertEqual((plan.scheme, plan.job.head_ranks), ("2d", 8))
        self.assertLess(plan.forward.total / plan.forward.work, 1.02)

    def test_links(self):
        slow, fast = (fcd.predict(1 << 17, ranks=8, scheme="ring", link=link, **MODEL)
                      for link in (1e8, "nvlink"))
        self.assertLess(slow.forward.hidden, 0.5)
        self.assertEqual(fast.forward.hidden, 1.0)
        own = costs.Link(450e9, 10e-6)
        self.assertEqual(fcd.predict(1 << 17, ranks=8, scheme="ring", link=own, **MODEL), fast)
        with self.assertRaisesRegex(ValueError, "link is 'string'; wanted one of nvlink, pcie"):
            fcd.predict(64, ranks=2, link="string", **MODEL)
        with self.assertRaisesRegex(ValueError, "device is 'abacus'; wanted one of h200"):
            fcd.predict(64, ranks=2, device="abacus", **MODEL)

    def test_decode(self):
        """Bytes and work by hand: 8 sequences, 32 heads of 128 and an LSE, in f32, to 7 others."""
        cache = dict(q_heads=32, kv_heads=8, head_dim=128, batch=8, decode=True)
        plan = fcd.predict(65536, ranks=8, **cache)
        self.assertEqual((plan.scheme, plan.forward.bytes), ("decode", (7 * 8 * 32 * 129 * 4,) * 8))
        self.assertAlmostEqual(plan.forward.work, 8 * 8192 * 8 * 256 * 2 / 4.8e12)
        self.assertEqual((plan.forward.hidden, sum(plan.backward.bytes)), (0, 0))
        self.assertIn("each rank gets the whole result", plan.reason)
        for part in ("scheme    decode, 8 ranks\n", "8,192 on rank 0, of 65,536", "out and lse: 924,672 bytes"):
            self.assertIn(part, str(plan))
        less = fcd.predict(65536, ranks=8, combine="all_to_all", q_len=3, **cache)
        self.assertEqual(less.forward.bytes[0], 7 * 8 * 4 * 3 * 129 * 4)
        uneven = fcd.predict(10, ranks=2, interleave=4, **cache)
        self.assertEqual([uneven.job.k_rows(r) for r in range(2)], [6, 4])
        with self.assertRaisesRegex(ValueError, "by_heads: 3 ranks cannot divide 32 heads"):
            fcd.predict(64, ranks=3, combine="all_to_all", **cache)
        with self.assertRaisesRegex(ValueError, "decode has none of them"):
            fcd.predict(64, ranks=2, window=(3, -1), **cache)

    def test_text(self):
        text = str(fcd.predict(1 << 17, ranks=8, scheme="ring", **MODEL))
        for part in ("scheme    ring, zigzag, 8 ranks", "reason    given by the caller",
                     "7 x ring step: 67,108,864 bytes", "100% of them hidden", "not measured"):
            self.assertIn(part, text)
        self.assertLess(len(text.splitlines()), 15)


if __name__ == "__main__":
    unittest.main()
