"""flashcore.attention_backward on NumPy arrays, compared with finite differences of the definition."""

import unittest

try:
    import numpy as np
except ImportError:
    raise unittest.SkipTest("NumPy is not installed") from None

import flashcore
from dense_reference import one_sequence


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def loss(dout, dlse, q, k, v, **options):
    """sum(dout * out) + sum(dlse * lse) of a batch, from the definition in f64."""
    total = 0.0
    for b in range(q.shape[0]):
        out, lse = one_sequence(q[b], k[b], v[b], **options)
        total += float((dout[b] * out).sum())
        if dlse is not None:
            total += float((dlse[b] * lse).sum())
    return total


class Backward(unittest.TestCase):
    def inputs(self, dtype=np.float64, q_len=5, kv_len=7):
        return [draw(seed, 2, heads, length, 4).astype(dtype) for seed, heads, length in (
            (1, 4, q_len), (2, 2, kv_len), (3, 2, kv_len))]

    def check(self, wanted=("q", "k", "v"), dlse=None, **options):
        """Compares some elements of each gradient with a difference quotient."""
        q, k, v = self.inputs()
        out, lse = flashcore.attention(q, k, v, return_lse=True, **options)
        dout = draw(4, *out.shape)
        made = flashcore.attention_backward(dout, q, k, v, out, lse, dlse=dlse, wanted=wanted, **options)
        arrays = {"q": q, "k": k, "v": v, "bias": options.get("bias"), "sinks": options.get("sinks")}
        names = {"alibi_slopes": "slopes"}
        known = {names.get(name, name): one for name, one in options.items()}
        for name, got in zip(wanted, made):
            array = arrays[name]
            self.assertEqual((got.shape, got.dtype), (array.shape, array.dtype))
            step = 2.0 ** -9
            for index in np.random.default_rng(5).choice(array.size, min(6, array.size), False):
                at, before, sides = np.unravel_index(index, array.shape), None, []
                before = array[at]
                for offset in (step, -step, 2 * step, -2 * step):
                    array[at] = before + offset
                    sides.append(loss(dout, dlse, q, k, v, **known))
                array[at] = before
                want = (8 * (sides[0] - sides[1]) - (sides[2] - sides[3])) / (12 * step)
                self.assertAlmostEqual(float(got[at]), want, delta=2e-6 * (1 + abs(want)), msg=name)

    def test_options(self):
        self.check()
        self.check(causal=True, window=(3, -1))
        self.check(softcap=1.5, scale=0.7)
        self.check(dlse=draw(6, 2, 4, 5))
        self.check(alibi_slopes=np.abs(draw(7, 4)).astype(np.float32))
        self.check(mask=draw(8, 5, 7) > -0.5)

    def test_bias_and_sinks(self):
        sinks = (np.round(draw(9, 4) * 64) / 64).astype(np.float32)
        self.check(wanted=("sinks", "q"), sinks=sinks)
        for shape in ((5, 7), (4, 5, 7), (4, 1, 7), (5, 1)):
            with self.subTest(shape):
                self.check(wanted=("bias", "v"), bias=draw(10, *shape))

    def test_bshd_is_the_same_call(self):
        q, k, v = self.inputs(np.float32)
        out, lse = flashcore.attention(q, k, v, causal=True, return_lse=True)
        want = flashcore.attention_backward(out, q, k, v, out, lse, causal=True)
        swapped = [np.ascontiguousarray(one.swapaxes(1, 2)) for one in (out, q, k, v, out)]
        got = flashcore.attention_backward(*swapped, lse, causal=True, layout="bshd")
        for one, other in zip(got, want):
            np.testing.assert_array_equal(one.swapaxes(1, 2), other)

    def test_gradients_in_f32(self):
        """Rounded, they are the gradients in the inputs' dtype."""
        q, k, v = self.inputs(np.float16)
        bias, sinks = draw(5, 4, 5, 1).astype(np.float16), draw(6, 4).astype(np.float32)
        options = dict(bias=bias, sinks=sinks, wanted=("q", "k", "v", "bias", "sinks"))
        out, lse = flashcore.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
        wide = flashcore.attention_backward(out, q, k, v, out, lse, grad_dtype="f32", **options)
        self.assertEqual({one.dtype for one in wide}, {np.dtype(np.float32)})
        for one, want in zip(wide, flashcore.attention_backward(out, q, k, v, out, lse, **options)):
            np.testing.assert_array_equal(one.astype(want.dtype), want)
        q, k, v = self.inputs()
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        made = flashcore.attention_backward(out, q, k, v, out, lse, grad_dtype="f32")
        self.assertEqual({one.dtype for one in made}, {np.dtype(np.float64)})
        with self.assertRaisesRegex(ValueError, "grad_dtype is 'f16'; wanted one of f32"):
            flashcore.attention_backward(out, q, k, v, out, lse, grad_dtype="f16")

    def test_the_lse_of_more_keys(self):
        """Gradients of parts of the keys add up, also where a call of its own finds the sum again."""
        q, k, v = self.inputs()
        for scale in (0.5, 200.0):
            options = dict(scale=scale)
            out, lse = flashcore.attention(q, k, v, return_lse=True, **options)
            self.assertEqual(bool((abs(lse) > 128).any()), scale > 1)
            dout = draw(4, *out.shape)
            want = flashcore.attention_backward(dout, q, k, v, out, lse, **options)
            parts = [flashcore.attention_backward(dout, q, k[:, :, part], v[:, :, part], out, lse,
                                                  global_lse=True, **options)
                     for part in (slice(0, 3), slice(3, 7))]
            got = [parts[0][0] + parts[1][0], *(np.concatenate(pair, 2) for pair in
                                                zip(parts[0][1:], parts[1][1:]))]
            for one, other in zip(got, want):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9 * abs(other).max())
        with self.assertRaisesRegex(TypeError, "global_lse is 2; wanted True or False"):
            flashcore.attention_backward(dout, q, k, v, out, lse, global_lse=2)

    def test_refusals(self):
        q, k, v = self.inputs(np.float32)
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        with self.assertRaisesRegex(ValueError, "wanted has 'x'"):
            flashcore.attention_backward(out, q, k, v, out, lse, wanted=("x",))
        with self.assertRaisesRegex(ValueError, "wanted has 'bias', but the call has no bias"):
            flashcore.attention_backward(out, q, k, v, out, lse, wanted=("bias",))
        with self.assertRaisesRegex(ValueError, "dout: extent 2 is 4, out has 5"):
            flashcore.attention_backward(out[:, :, :4], q, k, v, out, lse)
        with self.assertRaisesRegex(NotImplementedError, "k: is a Quantized"):
            flashcore.attention_backward(out, q, flashcore.quantize(k), v, out, lse)
        pages = np.zeros((2, 1), np.int32)
        with self.assertRaisesRegex(NotImplementedError, "block_table: gradients through pages"):
            flashcore.attention_backward(out, q, k, v, out, lse, block_table=pages)

    def test_explain(self):
        q, k, v = self.inputs(np.float32)
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        text = flashcore.explain_backward(out, q, k, v, out, lse, wanted=("k",), causal=True)
        self.assertIn("gradients  dk\n", text)
        self.assertIn("kernel     bwd_", text)
        self.assertNotIn("lse  ", text)
        text = flashcore.explain_backward(out, q, k, v, out, lse, grad_dtype="f32", global_lse=True)
        self.assertIn("lse        taken as it is: it covers more keys than the call has\n", text)


if __name__ == "__main__":
    unittest.main()
