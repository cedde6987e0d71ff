"""quantize(), dequantize() and attention on 8-bit arrays of NumPy and, if installed, torch."""

import unittest

try:
    import numpy as np
except ImportError:
    raise unittest.SkipTest("NumPy is not installed")

import flashcore

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "byte": 448.0}
UNIT = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "int8": 0.5 / 127, "byte": 0.5 / 127}  # of the largest


def attend(q, k, v, scale=None):
    """The definition, in float64."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def rotation(dim):
    """The matrix of quantize(..., rotate=True): docs/numerics.md, "Rotating"."""
    order = dim & -dim
    hadamard = np.ones((1, 1))
    while len(hadamard) < order:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.array([(-1) ** bin(c & c >> 1).count("1") for c in range(dim)])
    return signs[:, None] * np.kron(np.eye(dim // order), hadamard / np.sqrt(order))


class Quantize(unittest.TestCase):
    def setUp(self):
        self.random = np.random.default_rng(7)

    def normal(self, *shape, dtype=np.float32):
        return self.random.standard_normal(shape).astype(dtype)

    def test_round_trip_error(self):
        for dtype in LARGEST:
            for per, block, shape in (("tensor", 0, (1,)), ("head", 0, (2, 3)),
                                      ("block", 4, (2, 3, 3))):
                with self.subTest(dtype=dtype, per=per):
                    x = self.normal(2, 3, 9, 16)
                    made = flashcore.quantize(x, dtype, per=per, block_rows=block)
                    self.assertEqual(made.scale.shape, shape)
                    self.assertEqual(made.codes.shape, x.shape)
                    back = flashcore.dequantize(made)
                    if dtype in ("int8", "byte"):
                        allowed = np.abs(x).max() * UNIT[dtype] * 1.001
                    else:
                        allowed = np.abs(x) * UNIT[dtype] * 1.001 + 1e-4
                    self.assertTrue((np.abs(back - x) <= allowed).all())
                    self.assertGreater(np.abs(back - x).max(), 0)

    def test_rotation_equals_the_documented_matrix(self):
        for dim in (16, 20, 96, 128):
            x = self.normal(2, 3, 9, dim)
            x[..., 3] *= 30
            want = x.astype(np.float64) @ rotation(dim)
            for dtype in LARGEST:
                for per, block in (("tensor", 0), ("head", 0), ("block", 4)):
                    with self.subTest(dim=dim, dtype=dtype, per=per):
                        made = flashcore.quantize(x, dtype, per=per, block_rows=block, rotate=True)
                        self.assertTrue(made.rotated)
                        if dtype in ("int8", "byte"):
                            allowed = np.abs(want).max() * UNIT[dtype] * 1.001
                        else:
                            allowed = np.abs(want) * UNIT[dtype] * 1.001 + 1e-3
                        got = flashcore.dequantize(made._replace(rotated=False))
                        self.assertTrue((np.abs(got - want) <= allowed).all())
                        back = flashcore.dequantize(made)
                        self.assertLess(np.abs(back - got @ rotation(dim).T).max(), 1e-4)

    def test_rotation_reduces_the_error_of_outliers(self):
        q, k = self.normal(1, 2, 20, 64), self.normal(1, 2, 30, 64)
        k[..., 7] *= 30
        scores = q @ k.swapaxes(2, 3)
        off = {}
        for rotate in (False, True):
            got = [flashcore.dequantize(flashcore.quantize(one, "int8", rotate=rotate)
                                        ._replace(rotated=False)) for one in (q, k)]
            off[rotate] = np.abs(got[0] @ got[1].swapaxes(2, 3) - scores).mean()
        self.assertLess(off[True], 0.5 * off[False])

    def test_attention_over_rotated_keys(self):
        q, k, v = self.normal(2, 4, 5, 32), self.normal(2, 2, 11, 32), self.normal(2, 2, 11, 16)
        q8, k8 = (flashcore.quantize(one, "int8", per="head", rotate=True) for one in (q, k))
        v8 = flashcore.quantize(v, "int8")
        out = np.empty((2, 4, 5, 16), np.float32)
        flashcore.attention(q8, k8, v8, out=out)
        want = attend(flashcore.dequantize(q8), flashcore.dequantize(k8), flashcore.dequantize(v8))
        self.assertLess(np.abs(out - want).max(), 1e-5)
        for arguments, word in (((q, k8, v8), "q: is not rotated, k is"),
                                ((q8, k, v8), "k: is not rotated, q is"),
                                ((q8, k8._replace(rotated=False), v8), "k: is not rotated, q is"),
                                ((q8, k8, flashcore.quantize(v, rotate=True)), "v: is rotated")):
            with self.assertRaisesRegex(ValueError, word):
                flashcore.attention(*arguments)
        by_hand = (q.astype(np.float64) @ rotation(32)).astype(np.float32)
        got = flashcore.attention(by_hand, k8._replace(rotated=False), v8)
        want = attend(q, flashcore.dequantize(k8), flashcore.dequantize(v8))
        self.assertLess(np.abs(got - want).max(), 1e-5)

    def test_counts_and_given_scales(self):
        x = np.array([[[[0.0, 200.0, -500.0, 1.0]]]], np.float16)
        made, beyond = flashcore.quantize(x, "int8", scale=np.ones(1, np.float32),
                                          return_saturated=True)
        self.assertEqual(made.codes.tolist(), [[[[0, 127, -127, 1]]]])
        self.assertEqual(beyond.tolist(), [2])

    def test_mistakes(self):
        x = self.normal(1, 1, 2, 2)
        for arguments, word in (({"dtype": "int4"}, "int4"), ({"per": "row"}, "row"),
                                ({"per": "block"}, "block_rows")):
            with self.assertRaisesRegex(ValueError, word):
                flashcore.quantize(x, **arguments)
        x[0, 0, 1, 0] = np.nan
        with self.assertRaisesRegex(ValueError, r"x\[0, 0, 1, 0\] is NaN"):
            flashcore.quantize(x, "byte")
        self.assertTrue(np.isnan(flashcore.dequantize(flashcore.quantize(x, "e5m2"))[0, 0, 1, 0]))
        with self.assertRaises(ValueError):
            flashcore.quantize(x.astype(np.float64), "e4m3")
        with self.assertRaisesRegex(ValueError, r"x\[0, 0, 1, 0\] is nan: it has no rotation"):
            flashcore.quantize(x, "int8", rotate=True)
        back = flashcore.dequantize(flashcore.quantize(x, "e4m3", rotate=True))
        self.assertEqual(np.isnan(back).tolist(), [[[[False] * 2, [True] * 2]]])
        with self.assertRaisesRegex(ValueError, "rotate takes at most 576"):
            flashcore.quantize(self.normal(1, 1, 1, 577), rotate=True)

    def test_attention_over_8_bit_keys(self):
        q, k, v = self.normal(2, 4, 5, 32), self.normal(2, 2, 11, 32), self.normal(2, 2, 11, 32)
        for dtype in LARGEST:
            for per, block in (("tensor", 0), ("head", 0), ("block", 4)):
                with self.subTest(dtype=dtype, per=per):
                    k8, v8 = (flashcore.quantize(one, dtype, per=per, block_rows=block)
                              for one in (k, v))
                    want = attend(q, flashcore.dequantize(k8), flashcore.dequantize(v8))
                    got, lse = flashcore.attention(q, k8, v8, return_lse=True)
                    self.assertEqual((got.dtype, lse.shape), (np.float32, (2, 4, 5)))
                    self.assertLess(np.abs(got - want).max(), 1e-5)
                    q8 = flashcore.quantize(q, dtype, per="head")
                    want = attend(flashcore.dequantize(q8), flashcore.dequantize(k8),
                                  flashcore.dequantize(v8))
                    got = flashcore.attention(q8, k8, v8)
                    self.assertEqual(got.dtype, np.float16)
                    self.assertLess(np.abs(got - want).max(), 2e-3)
                    wide = np.empty(got.shape, np.float32)
                    flashcore.attention(q8, k8, v8, out=wide)
                    self.assertLess(np.abs(wide - want).max(), 1e-5)

    def test_codes_without_scale_and_explain(self):
        q = self.normal(1, 2, 3, 16)
        k = flashcore.Quantized(self.random.integers(-3, 4, (1, 2, 5, 16), np.int8))
        self.assertLess(np.abs(flashcore.attention(q, k, k)
                               - attend(q, k.codes, k.codes)).max(), 1e-5)
        self.assertIn("q f32 k int8 v int8", flashcore.explain(q, k, k))
        self.assertLess(np.abs(flashcore.attention(q, k, k, causal=True)[0, 0, 0]
                               - attend(q, k.codes[:, :, :3], k.codes[:, :, :3])[0, 0, 0]).max(),
                        1e-5)

    def test_blocks_of_k_and_v_must_match(self):
        k = self.normal(1, 1, 8, 16)
        q8, k8, v8 = (flashcore.quantize(k, "int8", per="block", block_rows=rows)
                      for rows in (8, 2, 4))
        with self.assertRaisesRegex(ValueError, "block_rows is 4, k has 2"):
            flashcore.attention(q8, k8, v8)


class Torch(unittest.TestCase):
    def test_native_types(self):
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not installed")
        x = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(3))
        for dtype, native in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2),
                              ("int8", torch.int8)):
            made = flashcore.quantize(x, dtype)
            self.assertIs(made.codes.dtype, native)
            back = flashcore.dequantize(made)
            self.assertTrue(torch.equal(back, made.codes.float() * made.scale))
            if dtype != "int8":
                want = (x * (1 / made.scale)).to(native)
                self.assertTrue(torch.equal(made.codes.view(torch.uint8), want.view(torch.uint8)))
            again = flashcore.Quantized(made.codes, made.scale)  # the tensor has the dtype
            self.assertTrue(torch.equal(flashcore.attention(x, again, again),
                                        flashcore.attention(x, made, made)))

    def test_native_types_alone(self):
        """8-bit tensors without scales. The result is float16 unless `out` is given."""
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not installed")
        random = torch.Generator().manual_seed(3)
        halves = [torch.randn(1, 2, 6, 16, generator=random).half() for _ in range(2)]
        narrow = torch.randn(1, 2, 6, 8, generator=random)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            q, k, v = halves[0].to(dtype), halves[1].to(dtype), narrow.to(dtype)
            want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
            for made in (flashcore.attention(q, k, v), flashcore.attention(q, k, v),
                         flashcore.attention(q, k, v, out=torch.empty(1, 2, 6, 8))):
                self.assertLess(float((made.float() - want).abs().max()), 4e-3)
            self.assertIs(flashcore.attention(q, k, v).dtype, torch.float16)
            self.assertIs(flashcore.attention(q, k, k).dtype, torch.float16)
        self.assertIs(flashcore.attention(*halves, halves[1]).dtype, torch.float16)

    def test_gradients_are_refused(self):
        try:
            import torch
        except ImportError:
            self.skipTest("torch is not installed")
        x = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(3))
        made = flashcore.quantize(x, "int8")
        with self.assertRaisesRegex(ValueError, "q: requires grad; .* 8-bit"):
            flashcore.attention(x.clone().requires_grad_(), made, made)
        with torch.no_grad():
            flashcore.attention(x.clone().requires_grad_(), made, made)


class Append(unittest.TestCase):
    """append() into an 8-bit cache. tests/unit checks the values that the library writes."""

    def setUp(self):
        self.random = np.random.default_rng(3)
        self.new = self.random.standard_normal((2, 2, 3, 3, 16)).astype(np.float32)  # K and V
        self.used = np.array([4, 1], np.int32)

    def cache(self, dtype):
        """Two sequences with two heads and a capacity of eight keys, one scale for every four."""
        codes = np.full((2, 2, 8, 16), 128 if dtype == "byte" else 0,
                        {"int8": np.int8}.get(dtype, np.uint8))
        scale = np.linspace(0.01, 0.08, 8, dtype=np.float32).reshape(2, 2, 2)
        return flashcore.Quantized(codes, scale, dtype, 4)

    def test_new_rows_are_quantized(self):
        new_k, new_v = self.new[0][:, :2], self.new[1][:, :2]
        for dtype in LARGEST:
            k, v = self.cache(dtype), self.cache(dtype)
            flashcore.append(new_k, new_v, k, v, self.used)
            for cache, new in ((k, new_k), (v, new_v)):
                want = self.cache(dtype)
                for b, used in enumerate(self.used):
                    for h in range(2):
                        for i in range(3):
                            scale = cache.scale[b, h, (used + i) // 4].reshape(1)
                            row = flashcore.quantize(new[b, h, i], dtype, scale=scale)
                            want.codes[b, h, used + i] = row.codes
                self.assertEqual(cache.codes.tolist(), want.codes.tolist())

    def test_pages_and_quantized_rows(self):
        k, v = self.cache("int8"), self.cache("int8")
        pages = [one._replace(codes=np.zeros((4, 4, 2, 16), np.int8)) for one in (k, v)]
        table = np.array([[3, 1], [0, 2]], np.int32)
        new_k, new_v = self.new[0][:, :2], self.new[1][:, :2]
        flashcore.append(new_k, new_v, k, v, self.used)
        flashcore.append(new_k, new_v, *pages, self.used, block_table=table)
        for plain, paged in zip((k, v), pages):
            for b in range(2):
                rows = paged.codes[table[b]].reshape(8, 2, 16).swapaxes(0, 1)
                self.assertEqual(rows.tolist(), plain.codes[b].tolist())
        again, other = self.cache("int8"), self.cache("int8")
        part = k._replace(codes=np.stack([k.codes[b, :, used:used + 3]
                                          for b, used in enumerate(self.used)]))
        flashcore.append(part, part, again, other, self.used)
        self.assertEqual(again.codes.tolist(), k.codes.tolist())

    def test_a_rotated_cache_takes_rotated_rows(self):
        k, v = self.cache("int8")._replace(rotated=True), self.cache("int8")
        new_k, new_v = self.new[0][:, :2], self.new[1][:, :2]
        with self.assertRaisesRegex(ValueError, "k_new: is not rotated, k is; .*rotate=True"):
            flashcore.append(new_k, new_v, k, v, self.used)
        rotated, plain = (flashcore.quantize(new, "int8", scale=np.full(1, 0.01, np.float32),
                                             rotate=rotate)
                          for new, rotate in ((new_k, True), (new_v, False)))
        with self.assertRaisesRegex(ValueError, "v_new: is rotated, v is not"):
            flashcore.append(rotated, rotated, k, v, self.used)
        flashcore.append(rotated, plain, k, v, self.used)
        for b, used in enumerate(self.used):
            self.assertEqual(k.codes[b, :, used:used + 3].tolist(), rotated.codes[b].tolist())

    def test_mistakes(self):
        k, v = self.cache("int8"), self.cache("int8")
        new = self.new[0][:, :2]
        with self.assertRaisesRegex(ValueError, "both or neither"):
            flashcore.append(new, new, k, v.codes, self.used)
        with self.assertRaisesRegex(ValueError, "block_rows is 2, k has 4"):
            flashcore.append(new, new, k, v._replace(block_rows=2), self.used)
        new[1, 0, 2, 5] = np.nan
        with self.assertRaisesRegex(ValueError, "k_new: the row for key 3 of batch 1, head 0"):
            flashcore.append(new, new, k, v, self.used)
        self.assertFalse(k.codes.any())


class Gpu(unittest.TestCase):
    """The Python part of the calls. tests/gpu compares the results of the library."""

    def setUp(self):
        import torch_support
        if torch_support.NO_CUDA:
            self.skipTest(torch_support.NO_CUDA)
        self.torch = torch_support.torch
        self.x = self.torch.randn(2, 3, 40, 64, generator=self.torch.Generator().manual_seed(3))

    def test_the_same_bits_as_on_the_cpu(self):
        for dtype in LARGEST:
            for per, block in (("tensor", 0), ("head", 0), ("block", 16)):
                with self.subTest(dtype=dtype, per=per):
                    want = flashcore.quantize(self.x, dtype, per=per, block_rows=block)
                    got = flashcore.quantize(self.x.cuda(), dtype, per=per, block_rows=block,
                                             checked=True)
                    self.assertTrue(self.torch.equal(got.scale.cpu(), want.scale))
                    self.assertTrue(self.torch.equal(got.codes.cpu().view(self.torch.uint8),
                                                     want.codes.view(self.torch.uint8)))
                    self.assertTrue(self.torch.equal(flashcore.dequantize(got).cpu(),
                                                     flashcore.dequantize(want)))
                    out = flashcore.attention(self.x.cuda(), got, got)
                    self.assertLess((out.cpu() - flashcore.attention(self.x, want, want)).abs().max(),
                                    1e-5)

    def test_rotated_the_same_bits_as_on_the_cpu(self):
        want = flashcore.quantize(self.x, "int8", per="head", rotate=True)
        got = flashcore.quantize(self.x.cuda(), "int8", per="head", rotate=True)
        self.assertTrue(self.torch.equal(got.scale.cpu(), want.scale))
        self.assertTrue(self.torch.equal(got.codes.cpu(), want.codes))
        self.assertTrue(self.torch.equal(flashcore.dequantize(got).cpu(),
                                         flashcore.dequantize(want)))

    def test_a_nan_is_reported_by_checked_calls(self):
        self.x[1, 2, 3, 4] = float("nan")
        there = self.x.cuda()
        with self.assertRaisesRegex(ValueError, "NaN"):
            flashcore.quantize(there, "int8", checked=True)
        made = flashcore.quantize(there, "int8")
        self.assertEqual(made.codes[1, 2, 3, 4].item(), 0)
        flashcore.quantize(there.nan_to_num(), "int8", checked=True)  # the error does not persist
        flashcore.quantize(there, "e4m3", checked=True)


if __name__ == "__main__":
    unittest.main()
