"""BlockMask: every constructor against its definition, and attention() with it."""
import sys
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: NumPy is not installed")
    sys.exit(77)

import flashcore
from flashcore import BlockMask

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

RANDOM = np.random.default_rng(5)


def call(mask, head_dim=16, kv_heads=2):
    batch, heads = max(mask.batch, 2), max(mask.heads, 4)
    shapes = ((batch, heads, mask.q_len), (batch, kv_heads, mask.kv_len), (batch, kv_heads, mask.kv_len))
    return [RANDOM.standard_normal((*shape, head_dim), dtype=np.float32) for shape in shapes]


class Patterns(unittest.TestCase):
    def check(self, mask, want):
        """Compares with a definition [q_len, kv_len] or [batch, heads, q_len, kv_len], and with the
        boolean mask in a call."""
        dense = mask.to_dense()
        self.assertEqual(dense.shape, (mask.batch, mask.heads, mask.q_len, mask.kv_len))
        self.assertTrue(np.array_equal(dense, np.broadcast_to(want, dense.shape)))
        q, k, v = call(mask)
        for options in ({}, {"causal": True, "return_lse": True}):
            made = flashcore.attention(q, k, v, mask=mask, **options)
            same = flashcore.attention(q, k, v, mask=dense, **options)
            for a, b in zip(made if options else [made], same if options else [same]):
                self.assertTrue(np.array_equal(a, b))
        self.assertAlmostEqual(mask.hidden_share + mask.visible_share + mask.mixed_share, 1.0)

    def test_documents(self):
        ids = np.repeat([0, 1, 2], [100, 30, 170])
        want = ids[:, None] == ids[None]
        self.check(BlockMask.documents([100, 30, 170]), want)
        self.check(BlockMask.documents(ids=ids.astype(np.int32), block=(16, 32)), want)
        self.check(BlockMask.documents(ids=ids, q_len=40), want[-40:])
        rows = BlockMask.documents([[100, 28], [64]])
        self.assertEqual((rows.batch, rows.kv_len), (2, 128))
        self.assertFalse(rows.to_dense()[1, 0, 64:].any())

    def test_prefix_lm(self):
        i, j = np.arange(200)[:, None], np.arange(250)[None]
        self.check(BlockMask.prefix_lm(90, 200, 250), (j < 90) | (j <= i + 50))
        want = np.stack([(j < n) | (j <= i + 50) for n in (10, 120)])[:, None]
        self.check(BlockMask.prefix_lm([10, 120], 200, 250), want)

    def test_sliding_window(self):
        i, j = np.arange(300)[:, None], np.arange(300)[None]
        want = ((j >= i - 40) & (j <= i)) | (j < 4) | (i < 4)
        self.check(BlockMask.sliding_window(300, (40, 0), 4), want)

    def test_tree(self):
        want = np.eye(5, dtype=bool)
        for child, parents in ((1, [0]), (2, [0]), (3, [1, 0]), (4, [2, 0])):
            want[child, parents] = True
        want = np.concatenate([np.ones((5, 300), bool), want], 1)
        self.check(BlockMask.tree([-1, 0, 0, 1, 2], 300), want)

    def test_dense_round_trip(self):
        dense = RANDOM.random((2, 4, 70, 130)) < 0.5
        self.check(BlockMask.from_dense(dense, block=(32, 64)), dense)
        self.check(BlockMask.from_dense(dense[0, 0].T), dense[0, 0].T)

    def test_bsr(self):
        want = np.zeros((200, 300), bool)
        want[:128, 128:256] = want[128:, :128] = want[128:, 256:] = True
        self.check(BlockMask.from_bsr([0, 1, 3], [1, 0, 2], 200, 300), want)

    def test_repr_and_explain(self):
        mask = BlockMask.documents([512] * 8)
        self.assertIn("87.5 % of the blocks hidden, 12.5 % visible, 0.0 % mixed", repr(mask))
        self.assertEqual(mask.nbytes, 4 * 32 * 32)
        text = flashcore.explain(*call(mask), mask=mask)
        self.assertIn("blocks of 128 x 128: 87.5 % hidden", text)
        self.assertIn("KV tiles skipped", text)

    def test_errors(self):
        mask = BlockMask.documents([100, 100])
        q, k, v = call(mask)
        with self.assertRaisesRegex(ValueError, "mask_blocks: q_blocks is 2; wanted 1"):
            flashcore.attention(q[:, :, :100], k, v, mask=mask)
        with self.assertRaisesRegex(ValueError, "power of two"):
            BlockMask.documents([100], block=(48, 128))
        with self.assertRaisesRegex(ValueError, "parent of token 0"):
            BlockMask.tree([0])
        with self.assertRaisesRegex(ValueError, "one of them"):
            BlockMask.documents()
        with self.assertRaisesRegex(TypeError, "wanted an integer"):
            BlockMask.documents([1.5])
        with self.assertRaisesRegex(ValueError, "columns: entry 0 is 7"):
            BlockMask.from_bsr([0, 1], [7], 100, 100)

    def test_backward(self):
        mask = BlockMask.documents([60, 40])
        q, k, v = call(mask)
        out, lse = flashcore.attention(q, k, v, mask=mask, return_lse=True)
        a = flashcore.attention_backward(np.ones_like(out), q, k, v, out, lse, mask=mask)
        b = flashcore.attention_backward(np.ones_like(out), q, k, v, out, lse, mask=mask.to_dense())
        for one, other in zip(a, b):
            self.assertTrue(np.array_equal(one, other))


@unittest.skipIf(torch is None, "torch is not installed")
class Torch(unittest.TestCase):
    def test_same_result_and_gradients_as_a_boolean_mask(self):
        mask = BlockMask.documents([60, 90])
        q, k, v = map(torch.from_numpy, call(mask))
        dense = mask.to_dense(q)
        self.assertEqual(dense.dtype, torch.bool)
        self.assertTrue(torch.equal(flashcore.attention(q, k, v, mask=mask, causal=True),
                                    flashcore.attention(q, k, v, mask=dense, causal=True)))
        grads = []
        for one in (mask, dense):
            leaf = q.clone().requires_grad_()
            flashcore.attention(leaf, k, v, mask=one).square().sum().backward()
            grads.append(leaf.grad)
        self.assertTrue(torch.equal(*grads))

    def test_dense_tensors_become_block_masks(self):
        dense = torch.rand(3, 40, 70) < 0.5
        self.assertTrue(torch.equal(BlockMask.from_dense(dense).to_dense(dense)[0], dense))

    def test_vmap_refuses_in_words(self):
        mask = BlockMask.documents([60, 40])
        q, k, v = (torch.from_numpy(one)[None] for one in call(mask))
        with self.assertRaisesRegex(NotImplementedError, "to_dense"):
            torch.vmap(lambda a, b, c: flashcore.attention(a, b, c, mask=mask))(q, k, v)


if __name__ == "__main__":
    unittest.main()
