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

    def test_cannot_be_run(self):
        def broken(q, k, v):
            raise KeyError("nothing works")

        with self.assertRaisesRegex(RuntimeError, "nothing works"):
            flashcore.verify(broken)


@unittest.skipUnless(HAVE_TORCH, "torch is not installed")
class TorchTest(unittest.TestCase):
    def test_sdpa_is_correct(self):
        from torch.nn.functional import scaled_dot_product_attention

        for dtype in ("float32", "float16", "bfloat16"):
            report = flashcore.verify(scaled_dot_product_attention, dtype=dtype, quick=True)
            self.assertTrue(report.ok, str(report))
            self.assertTrue(any("top-left" in line for line in report.conventions))

    def test_sdpa_backends_are_correct(self):
        from flashcore._torch import verify

        for name, report in verify.verify_backends("cpu", quick=True):
            self.assertTrue(report.ok, f"{name}\n{report}")


if __name__ == "__main__":
    unittest.main()
