"""The boundary to torch: writes that a gradient depends on, gradients that would be lost, invalid outputs,
negative views, tensors without memory."""

import unittest

from torch_support import Case, array, np, on_every_device, torch

import flashcore
from flashcore import Quantized


def negative(tensor):
    """A negative view with the same values: its memory holds the negated values."""
    return torch._neg_view(-tensor)


@on_every_device
class Writes(Case):
    """A write increases a tensor's version, so that torch refuses gradients that need the old values."""

    def check_version(self, tensor, call):
        before = tensor._version
        call()
        self.assertGreater(tensor._version, before)

    def test_every_tensor_that_is_written(self):
        q, k, v = self.inputs()
        out = self.draw(2, 4, 5, 8)
        self.check_version(out, lambda: flashcore.attention(q, k, v, out=out))
        self.check_version(out, lambda: flashcore.attention(q, k, v, out=out, causal=True, return_lse=True))
        self.check_version(out, lambda: flashcore.merge(*[[one] for one in flashcore.attention(
            q, k, v, partial=True)], out=out))
        codes = flashcore.quantize(k)
        self.check_version(out, lambda: flashcore.attention(q, codes, flashcore.quantize(v), out=out))
        wide = torch.empty_like(k)
        self.check_version(wide, lambda: flashcore.dequantize(codes, out=wide))
        used = self.ints(0, 0)
        new_k, new_v = k[:, :, :2], v[:, :, :2]
        for append in (flashcore.append, torch.ops.flashcore.append):
            caches = k.clone(), v.clone()
            for cache in caches:
                self.check_version(cache, lambda: append(new_k, new_v, *caches, used))
        caches = flashcore.quantize(k), flashcore.quantize(v)
        for cache in caches:
            self.check_version(cache.codes, lambda: flashcore.append(new_k, new_v, *caches, used))

    def test_a_gradient_that_needs_overwritten_values_raises(self):
        k, v = self.draw(1, 1, 4, 8), self.draw(1, 1, 4, 8)
        w = self.draw(1, 1, 4, 8, grad=True)
        new = self.draw(1, 1, 2, 8)
        for write in (lambda: flashcore.append(new, new, k, v, self.ints(1)),
                      lambda: flashcore.attention(v, v, v, out=k)):
            loss = (w * k).sum()
            write()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()

    def test_inference_tensors_have_no_version(self):
        with torch.inference_mode():
            q, k, v = self.inputs()
            flashcore.attention(q, k, v, out=self.draw(2, 4, 5, 8))
            flashcore.append(k[:, :, :2], v[:, :, :2], k.clone(), v.clone(), self.ints(0, 0))


class Gradients(Case):
    """A gradient is computed or refused, never lost."""

    def test_numpy_arrays_with_a_tensor_that_requires_grad(self):
        q, k, v = self.inputs(grad=True)
        want = torch.autograd.grad(flashcore.attention(q, k, v, causal=True).sum(), q)[0]
        fixed = array(v).astype(np.float32)
        fixed.flags.writeable = False
        other = array(k).astype(np.float32), array(v).astype(np.float32)
        got = flashcore.attention(q, *other, causal=True)
        self.check(torch.autograd.grad(got.sum(), q)[0], want)
        got = flashcore.attention(q, k, other[1], bias=np.zeros((5, 9), np.float32), causal=True)
        self.check(torch.autograd.grad(got.sum(), q)[0], want)
        got = flashcore.attention(q, k, fixed, causal=True)
        self.check(torch.autograd.grad(got.sum(), q)[0], want)
        with self.assertRaisesRegex(TypeError, "v: is a ndarray that torch cannot read"):
            flashcore.attention(q, k, np.array(["x"]))
        with self.assertRaisesRegex(ValueError, "k: requires grad"):
            flashcore.attention(array(q).astype(np.float32), k, v)
        with torch.no_grad():
            self.check(flashcore.attention(q, k, fixed), flashcore.attention(q, k, v))
            self.check(torch.from_numpy(flashcore.attention(array(q).astype(np.float32), k, v)),
                       flashcore.attention(q, k, v))

    def test_calls_without_gradients(self):
        q, k, v = self.inputs()
        out, lse = flashcore.attention(q, k, v, partial=True)
        wants = out.clone().requires_grad_()
        for name, call in (("outs.0.", lambda: flashcore.merge([wants], [lse])),
                           ("x", lambda: flashcore.quantize(wants)),
                           ("out", lambda: flashcore.merge([out], [lse], out=wants)),
                           ("x.scale", lambda: flashcore.dequantize(Quantized(
                               k.to(torch.int8), torch.ones(1, requires_grad=True)))),
                           ("k_new", lambda: torch.ops.flashcore.append(
                               k[:, :, :2].clone().requires_grad_(), v[:, :, :2], k.clone(), v.clone(),
                               self.ints(0, 0)))):
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"^{name}: requires grad"):
                call()


@on_every_device
class Outputs(Case):
    """Every path into the library checks `out` in the same way."""

    def paths(self):
        """(name, context, inputs) of the direct path and of the paths through torch's dispatcher."""
        q, k, v = self.inputs()
        yield "straight", torch.no_grad, (q, k, v)
        yield "autocast", lambda: torch.autocast(self.device, dtype=torch.bfloat16), (q, k, v)
        yield "negative", torch.no_grad, (negative(q), k, v)

    def test_mistakes(self):
        for path, context, inputs in self.paths():
            for out, words in ((torch.zeros(2, 4, 5, 8, dtype=torch.int32), "out: dtype is (i|int)32"),
                               (torch.zeros(2, 4, 5, 8, dtype=torch.float64), "out: dtype is "),
                               (torch.zeros(3, 2, 4, 5, 8), "out: (shape|ndim|rank) is"),
                               (torch.zeros(2, 4, 6, 8), "out: (shape|q_len) is"),
                               (torch.zeros(1, 4, 5, 8, device=self.device).expand(2, 4, 5, 8),
                                "out: its strides")):
                out = out.to(self.device)
                with self.subTest(f"{path} {words}"), context(), self.assertRaisesRegex(
                        ValueError, words):
                    flashcore.attention(*inputs, out=out)
                self.assertFalse(bool(out.any()))

    def test_values(self):
        for path, context, inputs in self.paths():
            want = flashcore.attention(*[one.resolve_neg() for one in inputs])
            tolerance = torch.bfloat16 if path == "autocast" else torch.float32
            for out in (torch.zeros_like(want), negative(torch.zeros_like(want))):
                with self.subTest(path), context():
                    self.assertIs(flashcore.attention(*inputs, out=out), out)
                self.check(out.resolve_neg(), want, tolerance)

    def test_a_numpy_array(self):
        if self.device != "cpu":
            self.skipTest("NumPy arrays are on the CPU")
        for path, context, inputs in self.paths():
            out = np.zeros((2, 4, 5, 8), np.float32)
            with context():
                self.assertIs(flashcore.attention(*inputs, out=out), out)
            self.assertTrue(out.any())


@on_every_device
class NegativeViews(Case):
    def test_every_call(self):
        q, k, v = self.inputs()
        bias, sinks = self.draw(2, 4, 5, 9), self.draw(4)
        self.check(flashcore.attention(q, k, v, bias=negative(bias), sinks=negative(sinks)),
                   flashcore.attention(q, k, v, bias=bias, sinks=sinks))
        out, lse = flashcore.attention(q, k, v, partial=True)
        self.check(flashcore.merge([negative(out)], [negative(lse)]), flashcore.merge([out], [lse]))
        self.check(flashcore.dequantize(flashcore.quantize(negative(k))),
                   flashcore.dequantize(flashcore.quantize(k)))
        codes, scale = (k * 9).to(torch.int8), torch.full((1,), 0.5, device=self.device)
        self.check(flashcore.dequantize(Quantized(negative(codes), negative(scale))),
                   flashcore.dequantize(Quantized(codes, scale)))
        want, got = [(k.clone(), v.clone()) for _ in range(2)]
        new = self.draw(2, 2, 2, 16), self.draw(2, 2, 2, 8)
        flashcore.append(*new, *want, self.ints(1, 0))
        flashcore.append(*map(negative, new), *got, negative(self.ints(1, 0)))
        for one, other in zip(want, got):
            self.assertTrue(torch.equal(one, other))
        with self.assertRaisesRegex(ValueError, "out: is a negative view"):
            flashcore.merge([out], [lse], out=negative(out))

    def test_with_numpy_arrays(self):
        if self.device != "cpu":
            self.skipTest("NumPy arrays are on the CPU")
        q, k, v = self.inputs()
        other = array(v).astype(np.float32)
        want = flashcore.attention(q, k, v)
        self.check(flashcore.attention(negative(q), k, other), want)
        self.check(flashcore.attention(q, negative(k), other), want)
        self.check(torch.from_numpy(flashcore.attention(q.numpy(), negative(k), v)), want)


class WithoutMemory(Case):
    def test_the_message_names_the_argument(self):
        import warnings
        q, k, v = self.inputs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            odd = {
                "is on meta": torch.empty(2, 2, 9, 16, device="meta"),
                "nested tensor": torch.nested.nested_tensor([torch.randn(2, 9, 16)] * 2),
                "nested tensor;": torch.nested.nested_tensor([torch.randn(2, 9, 16)] * 2,
                                                             layout=torch.jagged),
                "layout is torch.sparse_coo": k.to_sparse(),
            }
        for words, one in odd.items():
            for name, call in (("q", lambda: flashcore.attention(one, k, v)),
                               ("k", lambda: flashcore.attention(q, one, v)),
                               ("v", lambda: flashcore.attention(q, k, one)),
                               ("out", lambda: flashcore.attention(q, k, v, out=one)),
                               ("q", lambda: flashcore.explain(one, k, v)),
                               ("x", lambda: flashcore.quantize(one)),
                               ("x.codes", lambda: flashcore.dequantize(Quantized(one))),
                               (r"outs\[0\]", lambda: flashcore.merge([one], [k])),
                               ("k", lambda: flashcore.append(k, k, one, k, self.ints(0, 0))),
                               ("k_new", lambda: flashcore.append(one, k, k.clone(), k.clone(),
                                                                  self.ints(0, 0)))):
                with self.subTest(f"{name} {words}"), self.assertRaisesRegex(
                        NotImplementedError, f"^{name}: .*{words}"):
                    call()


class Numbers(Case):
    """Numbers are checked on the path through torch's dispatcher too."""

    def test_refusals(self):
        q, k, v = self.inputs(grad=True)
        for options, kind, words in (
                (dict(num_splits=2**32 + 3), ValueError, "num_splits is 4294967299"),
                (dict(num_splits=2**64), ValueError, "num_splits is"),
                (dict(window=(2**64, 0)), ValueError, "window_left is"),
                (dict(window=(1, 2, 3)), ValueError, "window is"),
                (dict(max_q_len=True), TypeError, "max_q_len is True"),
                (dict(scale=10**400), ValueError, "scale is"),
                (dict(q_start=2**31), ValueError, "q_start is 2147483648"),
                (dict(seqused_k=torch.zeros(2, dtype=torch.int64)), ValueError,
                 "seqused_k: dtype is int64; wanted i32")):
            with self.subTest(words), self.assertRaisesRegex(kind, words):
                flashcore.attention(q, k, v, **options)
        with self.assertRaisesRegex(ValueError, "num_splits is 4294967299"):
            torch.ops.flashcore.attention(q, k, v, num_splits=2**32 + 3)


class FlashAttnNames(Case):
    """Messages of the flash_attn functions use their argument names."""

    def test_refusals(self):
        from flashcore.flash_attn import flash_attn_func, flash_attn_with_kvcache
        q, cache = self.draw(2, 3, 2, 8), self.draw(2, 9, 2, 8)
        used = self.ints(4, 4)
        for words, call in (
                ("window_size is 3; wanted", lambda: flash_attn_func(q, q, q, window_size=3)),
                ("window_size is .1, 2, 3.", lambda: flash_attn_func(q, q, q, window_size=(1, 2, 3))),
                ("softmax_scale is nan", lambda: flash_attn_func(q, q, q, softmax_scale=float("nan"))),
                ("cache_seqlens is 4294967296", lambda: flash_attn_with_kvcache(
                    q, cache, cache, cache_seqlens=2**32)),
                ("cache_seqlens: dtype is int64; wanted i32", lambda: flash_attn_with_kvcache(
                    q, cache, cache, cache_seqlens=used.long())),
                ("k_cache: head_dim is 4, q has 8", lambda: flash_attn_with_kvcache(
                    q, cache[..., :4], cache, cache_seqlens=used)),
                ("k: kv_heads is 1, k_cache has 2", lambda: flash_attn_with_kvcache(
                    q, cache.clone(), cache.clone(), k=q[:, :, :1], v=q[:, :, :1],
                    cache_seqlens=used))):
            with self.subTest(words), self.assertRaisesRegex(ValueError, f"^{words}"):
                call()


@on_every_device
class UnownedRows(Case):
    def test_varlen(self):
        q, k = self.draw(8, 2, 8, grad=True), self.draw(6, 2, 8)
        options = dict(cu_seqlens_q=self.ints(2, 3, 5), cu_seqlens_k=self.ints(0, 3, 6))
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    out, lse = flashcore.attention(q, k, k, return_lse=True, **options)
                    rest = [0, 1, 5, 6, 7]
                    self.assertFalse(bool(out[rest].any()))
                    self.assertTrue(bool((lse[:, rest] == float("-inf")).all()))
                    self.assertTrue(bool(lse[:, 2:5].isfinite().all()))
        out = flashcore.attention(q, k, k, **options)
        grad, = torch.autograd.grad(out.sum(), q)
        self.assertFalse(bool(grad[rest].any()))


if __name__ == "__main__":
    unittest.main()
