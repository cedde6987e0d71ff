"""flashcore.verify(): correct functions pass, wrong functions are reported with their stage."""

import importlib.util
import json
import os
import tempfile
import unittest

import flashcore

HAVE_NUMPY = importlib.util.find_spec("numpy") is not None
HAVE_TORCH = HAVE_NUMPY and importlib.util.find_spec("torch") is not None

if HAVE_NUMPY:
    import numpy as np


def attention(q, k, v, *, causal=False, scale=None, return_lse=False, scale_factor=1.0, shift=0):
    """Attention in NumPy, bottom-right causal. scale_factor and shift inject faults."""
    if k.shape[1] != q.shape[1]:
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (q.astype("f8") @ k.astype("f8").transpose(0, 1, 3, 2)) * scale * scale_factor
    m, n = s.shape[-2:]
    if causal:
        s = np.where(np.arange(n) <= np.arange(m)[:, None] + n - m + shift, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    out = np.divide(p, total, out=np.zeros_like(p), where=total > 0) @ v.astype("f8")
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = out.astype(q.dtype)
    return (out, lse.astype("f4")) if return_lse else out


def attention_backward(q, k, v, out, lse, dout, *, dlse=None, causal=False, scale=None, dq_factor=1.0,
                       delta_factor=1.0):
    """The gradients of attention(). dq_factor and delta_factor inject faults."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, out, dout = (x.astype("f8") for x in (q, k, v, out, dout))
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    s = (q @ wide_k.transpose(0, 1, 3, 2)) * scale
    m, n = s.shape[-2:]
    visible = np.arange(n) <= (np.arange(m)[:, None] + n - m if causal else n)
    finite = np.where(np.isfinite(lse), lse, 0).astype("f8")[..., None]
    p = np.exp(np.where(visible, s - finite, -np.inf))
    delta = (dout * out).sum(-1) * delta_factor - (0 if dlse is None else dlse)
    ds = p * (dout @ wide_v.transpose(0, 1, 3, 2) - delta[..., None])

    def of_kv_heads(x):
        return x.reshape(k.shape[0], k.shape[1], group, n, -1).sum(2)

    dk = of_kv_heads(ds.transpose(0, 1, 3, 2) @ q) * scale
    dv = of_kv_heads(p.transpose(0, 1, 3, 2) @ dout)
    return ds @ wide_k * scale * dq_factor, dk, dv


@unittest.skipUnless(HAVE_NUMPY, "NumPy is not installed")
class NumpyTest(unittest.TestCase):
    def test_correct(self):
        for dtype in ("float32", "float16"):
            report = flashcore.verify(attention, dtype=dtype, quick=True)
            self.assertTrue(report.ok, str(report))
            self.assertIsNone(report.stage)
            self.assertEqual(report.reproducer, "")
            self.assertIn("the backward pass", report.not_probed)
            self.assertTrue(any("lse: yes" in line for line in report.capabilities))

    def test_wrong_scale(self):
        def wrong(q, k, v, *, causal=False, scale=None):
            return attention(q, k, v, causal=causal, scale=scale, scale_factor=1.4427)

        report = flashcore.verify(wrong, quick=True)
        self.assertEqual(report.stage, "scale")
        self.assertIn("log2(e)", report.detail)
        self.assertIn('only="scores"', report.reproducer)
        self.assertEqual(json.loads(report.to_json())["stage"], "scale")
        self.assertIn("failed", [probe.status for probe in report.probes])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "report.html")
            report.to_html(path)
            with open(path, encoding="utf-8") as page:
                self.assertIn("wrong, first at stage scale", page.read())

    def test_wrong_mask(self):
        def wrong(q, k, v, *, causal=False):
            return attention(q, k, v, causal=causal, shift=1)

        report = flashcore.verify(wrong, quick=True)
        self.assertEqual(report.stage, "mask")
        self.assertTrue(any("scale: no" in line for line in report.capabilities))

    def test_other_layout(self):
        def rows_first(q, k, v, *, causal=False):
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
            return attention(q, k, v, causal=causal).transpose(0, 2, 1, 3)

        self.assertTrue(flashcore.verify(rows_first, layout="bshd", quick=True).ok)
        self.assertFalse(flashcore.verify(rows_first, layout="bhsd", quick=True).ok)

    def test_declared(self):
        report = flashcore.verify(attention, quick=True, supports={"gqa": False, "head_dims": [40]})
        self.assertTrue(report.ok, str(report))
        self.assertIn("head dims: 40 (declared)", report.capabilities)
        with self.assertRaisesRegex(ValueError, "nonsense"):
            flashcore.verify(attention, supports={"nonsense": True})

    def test_raises(self):
        def raises(q, k, v, *, causal=False):
            if k.shape[2] % 16 == 1 and k.shape[2] > 16:
                raise IndexError("out of range")
            return attention(q, k, v, causal=causal)

        report = flashcore.verify(raises, quick=True)
        self.assertEqual(report.stage, "tail")
        self.assertIn("IndexError: out of range", report.detail)

    def test_wrong_shape(self):
        def rows_first(q, k, v, *, causal=False):
            return attention(q, k, v, causal=causal).transpose(0, 2, 1, 3)

        def lse_rows_first(q, k, v, *, causal=False, return_lse=False):
            result = attention(q, k, v, causal=causal, return_lse=return_lse)
            return (result[0], result[1].transpose(0, 2, 1)) if return_lse else result

        report = flashcore.verify(rows_first, quick=True)
        self.assertEqual(report.stage, "layout")
        self.assertIn("the output's shape is (1, 5, 1, 64); wanted (1, 1, 5, 64)", report.detail)
        report = flashcore.verify(lse_rows_first, quick=True)
        self.assertEqual(report.stage, "lse")
        self.assertIn("the LSE's shape", report.detail)

    def test_narrower_output(self):
        def narrow(q, k, v, *, causal=False):
            return attention(q, k, v, causal=causal).astype("f2")

        self.assertEqual(flashcore.verify(narrow, quick=True).stage, "precision")
        self.assertTrue(flashcore.verify(narrow, quick=True, out_dtype="float16").ok)

    def test_wider_output(self):
        def wide(q, k, v, *, causal=False):
            return attention(q.astype("f4"), k.astype("f4"), v.astype("f4"), causal=causal)

        self.assertTrue(flashcore.verify(wide, dtype="float16", quick=True).ok)

    def test_changes_its_inputs(self):
        def in_place(q, k, v, *, causal=False):
            q *= np.float32(q.shape[-1] ** -0.5)
            return attention(q, k, v, causal=causal, scale=1.0)

        report = flashcore.verify(in_place, quick=True)
        self.assertEqual(report.stage, "bounds")
        self.assertIn("outside the outputs: at q", report.detail)

    def test_returns_a_view(self):
        kept = {}

        def view(q, k, v, *, causal=False):
            out = attention(q, k, v, causal=causal)
            kept[out.shape] = np.asfortranarray(out)
            return kept[out.shape][::1]

        self.assertTrue(flashcore.verify(view, quick=True).ok)

    def test_returns_nothing(self):
        with self.assertRaisesRegex(RuntimeError, "it returned None"):
            flashcore.verify(lambda q, k, v: None)

    def test_options_that_any_function_takes(self):
        def ignores(q, k, v, *, causal=False, scale=None, **options):
            return attention(q, k, v, causal=causal, scale=scale)

        report = flashcore.verify(ignores, quick=True)
        self.assertTrue(report.ok, str(report))
        self.assertTrue(any(line.startswith("window: no") for line in report.capabilities))
        report = flashcore.verify(ignores, quick=True, supports={"window": True})
        self.assertEqual(report.stage, "mask")

    def test_correct_backward(self):
        for dtype in ("float32", "float16"):
            report = flashcore.verify(attention, backward=attention_backward, dtype=dtype, quick=True)
            self.assertTrue(report.ok, str(report))
            self.assertIn("dlse: yes", report.capabilities)
            self.assertIn("passed", [p.status for p in report.probes if p.name == "grad_dlse"])

    def test_own_backward_is_correct(self):
        report = flashcore.verify(flashcore.attention, backward=flashcore.attention_backward, quick=True,
                                  supports={"deterministic": True}, library=None)
        self.assertTrue(report.ok, str(report))
        self.assertFalse([p for p in report.probes if p.status == "not probed" and
                          p.name.startswith("grad_")], str(report))

    def test_wrong_backward(self):
        def without_delta(q, k, v, out, lse, dout, *, causal=False):
            return attention_backward(q, k, v, out, lse, dout, causal=causal, delta_factor=0)

        report = flashcore.verify(attention, backward=without_delta, quick=True)
        self.assertEqual(report.stage, "delta")
        self.assertIn("it is not subtracted", report.detail)
        self.assertIn("backward=without_delta", report.reproducer)

        def wrong_dq(dout, q, k, v, out, lse, causal=False):  # another order: found by name
            return attention_backward(q, k, v, out, lse, dout, causal=causal, dq_factor=-1)

        self.assertEqual(flashcore.verify(attention, backward=wrong_dq, quick=True).stage, "dq")

    def test_misshapen_gradient(self):
        def rows_first(q, k, v, out, lse, dout):
            dq, dk, dv = attention_backward(q, k, v, out, lse, dout)
            return dq.transpose(0, 2, 1, 3), dk, dv

        report = flashcore.verify(attention, backward=rows_first, quick=True)
        self.assertEqual(report.stage, "layout")
        self.assertIn("dq's shape is", report.detail)

    def test_backward_that_cannot_be_used(self):
        with self.assertRaisesRegex(TypeError, "backward is 3"):
            flashcore.verify(attention, backward=3)

    def test_cannot_be_run(self):
        def broken(q, k, v):
            raise KeyError("nothing works")

        with self.assertRaisesRegex(RuntimeError, "nothing works"):
            flashcore.verify(broken)


@unittest.skipUnless(HAVE_TORCH, "torch is not installed")
class TorchTest(unittest.TestCase):
    def test_sdpa_is_correct(self):
        from torch.nn.functional import scaled_dot_product_attention

        # The backend that torch takes by itself. The next test has each backend in each dtype.
        report = flashcore.verify(scaled_dot_product_attention, dtype="float16", quick=True)
        self.assertTrue(report.ok, str(report))
        self.assertTrue(any("top-left" in line for line in report.conventions))

    def test_sdpa_backends_are_correct(self):
        from flashcore._torch import verify

        for name, report in verify.verify_backends("cpu", quick=True):
            self.assertTrue(report.ok, f"{name}\n{report}")

    def test_gradients_of_sdpa_backends_are_correct(self):
        from flashcore._torch import verify

        for backend in ("MATH", "FLASH_ATTENTION"):
            for dtype in ("float32", "bfloat16"):
                for probe in ("grad_dv", "grad_ds", "grad_random"):  # all of them take a minute
                    report = flashcore.verify(verify._attention(backend), backward=True, dtype=dtype,
                                              framework="torch", quick=True, only=probe)
                    self.assertTrue(report.ok, f"{backend} {dtype}\n{report}")
                    ran = [p.status for p in report.probes if p.name == probe]
                    self.assertEqual(ran, ["passed"], f"{backend} {dtype}\n{report}")

    def test_wrong_autograd(self):
        import torch

        class Attention(torch.autograd.Function):
            @staticmethod
            def forward(context, q, k, v):
                p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
                context.save_for_backward(q, k, v, p)
                return p @ v

            @staticmethod
            def backward(context, dout):
                q, k, v, p = context.saved_tensors
                dp = dout @ v.mT
                ds = p * (dp - (dp * p).sum(-1, keepdim=True))
                return ds @ k, ds.mT @ q * q.shape[-1] ** -0.5, p.mT @ dout  # no scale in dq

        def attention_of_torch(q, k, v):
            return Attention.apply(q, k, v)

        report = flashcore.verify(attention_of_torch, backward=True, quick=True)
        self.assertEqual(report.stage, "scale")
        self.assertIn("the scale is missing", report.detail)


if __name__ == "__main__":
    unittest.main()
