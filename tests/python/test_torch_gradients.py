"""Gradients of flashcore.attention, compared with torch's math backend and with finite differences."""

import unittest

from torch_support import Case, on_every_device

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import flashcore
import flashcore.ops  # noqa: F401 (registers torch.ops.flashcore)

_op_plain = torch.ops.flashcore.attention.default
_op = torch.ops.flashcore.attention.options


@on_every_device
class Gradients(Case):
    def torch_math(self, q, k, v, mask=None, **options):
        """torch's math backend, in f64."""
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch_sdpa(q, k, v, attn_mask=mask, enable_gqa=True, **options)

    def compare(self, ours, theirs, inputs, factor=4.0):
        weight = self.draw(*ours.shape)
        (ours * weight.to(ours.dtype)).sum().backward()
        got = [one.grad.clone() for one in inputs]
        for one in inputs:
            one.grad = None
        wide = [one.detach().double().requires_grad_() for one in inputs]
        (theirs(*wide) * weight.to(ours.dtype).double()).sum().backward()
        for one, want in zip(got, wide):
            self.check(one, want.grad, factor=factor)

    def test_against_torch(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(str(dtype)):
                inputs = self.inputs(dtype, grad=True)
                self.compare(flashcore.attention(*inputs), self.torch_math, inputs)

    def test_causal_and_mask(self):
        inputs = self.inputs(q_len=9, grad=True)
        self.compare(flashcore.attention(*inputs, causal=True),
                     lambda *a: self.torch_math(*a, is_causal=True), inputs)
        mask = self.draw(1, 4, 9, 9) > -1
        mask[..., 0] = True
        for one in inputs:
            one.grad = None
        self.compare(flashcore.attention(*inputs, mask=mask),
                     lambda *a: self.torch_math(*a, mask=mask), inputs)

    def hidden_keys(self):
        """Options under which key 7 of 8 is hidden from every query, or from all but the last."""
        mask = torch.ones(1, 1, 6, 8, dtype=torch.bool, device=self.device)
        mask[..., 7] = False
        yield "seqused_k", dict(seqused_k=self.ints(7, 7)), 6
        yield "mask", dict(mask=mask), 6
        yield "causal", dict(causal=True), 5
        yield "softcap", dict(causal=True, softcap=2.0), 5

    def test_bias_of_the_largest_numbers(self):
        for dtype in (torch.float32, torch.bfloat16):
            limits = torch.finfo(dtype)
            inputs = self.inputs(dtype, q_len=6, grad=True)
            bias = torch.zeros(1, 1, 6, inputs[1].shape[2], dtype=dtype, device=inputs[0].device)
            bias[:, :, 1] = limits.min  # the lowest number for all keys of a row: the mean of V
            bias[:, :, 2, ::2] = limits.min
            bias[:, :, 3, 4] = limits.max
            with self.subTest(str(dtype)):
                self.compare(flashcore.attention(*inputs, bias=bias),
                             lambda *a: self.torch_math(*a, mask=bias.double()), inputs)

    def test_hidden_keys_do_not_affect_gradients(self):
        """NaN and infinities at a hidden key do not change the gradients of rows that do not see it."""
        for name, options, rows in self.hidden_keys():
            for bad in (float("nan"), float("inf")):
                with self.subTest(f"{name} {bad}"):
                    q, k, v = (one.detach() for one in self.inputs(q_len=6, kv_len=8))
                    grads = []
                    for value in (0.0, bad):
                        inputs = [one.clone() for one in (q, k, v)]
                        inputs[1][:, :, 7] = value
                        if name == "seqused_k":  # otherwise a non-finite V may affect `out`
                            inputs[2][:, :, 7] = value
                        inputs = [one.requires_grad_() for one in inputs]
                        out = flashcore.attention(*inputs, **options)
                        out[:, :, :rows].sum().backward()
                        grads.append([inputs[0].grad[:, :, :rows], inputs[1].grad[:, :, :7],
                                      inputs[2].grad[:, :, :7]])
                    if rows == 6:  # no row sees the key
                        for got, want in zip(grads[1], grads[0]):
                            self.assertTrue(torch.equal(got, want))
                    else:  # the last row sees it, with a zero gradient of `out`
                        self.assertTrue(torch.equal(grads[1][0], grads[0][0]))

    def test_rows_without_keys_do_not_affect_gradients(self):
        """Rows without keys have output 0 and contribute no gradient, whatever their values."""
        q, k, v = (one.detach() for one in self.inputs(q_len=9, kv_len=4))  # rows 0 to 4 see none
        grads = []
        for value in (1.0, float("nan")):
            inputs = [one.clone() for one in (q, k, v)]
            inputs[0][:, :, :5] = value
            inputs = [one.requires_grad_() for one in inputs]
            weight = torch.ones_like(q[..., :1])
            weight[:, :, :5] = value
            (flashcore.attention(*inputs, causal=True) * weight).sum().backward()
            grads.append([one.grad for one in inputs])
        for got, want in zip(grads[1], grads[0]):
            self.assertTrue(torch.equal(got, want))

    def test_ops_without_lse(self):
        for op in (_op_plain, _op):
            inputs = self.inputs(grad=True)
            self.compare(op(*inputs, causal=True),
                         lambda q, k, v: self.torch_math(q, k, v, mask=torch.ones(
                             5, 9, dtype=torch.bool, device=self.device).tril(4)), inputs)

    def test_only_requested_gradients(self):
        q, k, v = self.inputs()
        k.requires_grad_()
        flashcore.attention(q, k, v).sum().backward()
        self.assertIsNone(q.grad)
        self.assertTrue(bool(k.grad.abs().sum() > 0))

    def test_varlen(self):
        lengths = (3, 0, 6)
        total = sum(lengths)
        q, k, v = (self.draw(total, heads, 16, grad=True) for heads in (4, 2, 2))
        cu = self.ints(0, 3, 3, 9)
        ours = flashcore.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)

        def theirs(q, k, v):
            parts = [self.torch_math(*(one[begin:end].transpose(0, 1)[None] for one in (q, k, v)),
                                  is_causal=True)[0].transpose(0, 1)
                     for begin, end in ((0, 3), (3, 9))]
            return torch.cat(parts)

        self.compare(ours, theirs, (q, k, v))

    def test_refusals(self):
        q, k, v = self.inputs(grad=True)
        with self.assertRaisesRegex(ValueError, "out: given while an input requires grad"):
            flashcore.attention(q, k, v, out=torch.empty(2, 4, 5, 8, device=self.device))
        with self.assertRaisesRegex(ValueError, "out: requires grad"):
            flashcore.attention(q.detach(), k.detach(), v.detach(), out=self.draw(
                2, 4, 5, 8, grad=True))
        slopes = self.draw(4).abs().requires_grad_()
        out = flashcore.attention(q, k, v, alibi_slopes=slopes)
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes: requires grad"):
            out.sum().backward()
        pages = self.draw(6, 3, 2, 16, grad=True)
        out = flashcore.attention(q, pages, pages, block_table=self.ints(0, 1, 2, 3, 4, 5).view(2, 3))
        with self.assertRaisesRegex(NotImplementedError, "block_table: gradients through pages"):
            out.sum().backward()
        cache, used = (torch.zeros(2, 2, 20, 16, device=self.device), self.ints(0, 0))
        with self.assertRaisesRegex(ValueError, "k_new: requires grad"):
            flashcore.append(k, k.detach(), cache, cache.clone(), used)
        out = flashcore.attention(q, k, v)
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "no second derivative"):
            first.sum().backward()


class GradcheckF64(Case):
    """Compares every option with finite differences, on the CPU in f64. That takes two calls per element
    of each input, so the shapes are the smallest with more than one of everything."""

    SMALL = dict(q_heads=2, kv_heads=1, q_len=3, kv_len=4, head_dim=3, v_dim=2)

    def gradcheck(self, function, *inputs):
        self.assertTrue(torch.autograd.gradcheck(function, inputs))

    def test_options(self):
        inputs = self.inputs(torch.float64, grad=True, **self.SMALL)
        bias = self.draw(1, 2, 3, 4, dtype=torch.float64, grad=True)
        column = self.draw(2, 1, 3, 1, dtype=torch.float64, grad=True)
        slopes = self.draw(2).abs()
        for options in (dict(causal=True), dict(window=(1, 1)), dict(softcap=1.5),
                        dict(scale=-0.7), dict(alibi_slopes=slopes), dict(q_start=1, causal=True),
                        dict(k_start=1, causal=True), dict(seqused_k=self.ints(4, 3), causal=True),
                        dict(mask=torch.tensor([True, False, True, True]))):
            with self.subTest(str(sorted(options))):
                self.gradcheck(lambda *a: flashcore.attention(*a, return_lse=True, **options),
                               *inputs)
        for one in (bias, column):
            self.gradcheck(lambda q, k, v, b: flashcore.attention(q, k, v, bias=b, softcap=2.0),
                           *inputs, one)

    def test_rows_that_see_no_key(self):
        q, k, v = self.inputs(torch.float64, grad=True, **{**self.SMALL, "q_len": 4, "kv_len": 2})
        self.gradcheck(lambda *a: flashcore.attention(*a, causal=True), q, k, v)

    def test_layout_and_partial(self):
        q, k, v = (self.draw(1, 4, 2, 3, dtype=torch.float64, grad=True) for _ in range(3))
        self.gradcheck(lambda *a: flashcore.attention(*a, layout="bshd", causal=True), q, k, v)
        self.gradcheck(lambda *a: flashcore.attention(*a, partial=True), q, k, v)

    def test_varlen(self):
        q, k, v = (self.draw(5, 2, 4, dtype=torch.float64, grad=True) for _ in range(3))
        cu = self.ints(0, 2, 5)
        self.gradcheck(lambda *a: flashcore.attention(*a, cu_seqlens_q=cu, cu_seqlens_k=cu,
                                                      return_lse=True), q, k, v)

    def test_sinks(self):
        """Sinks are f32, too coarse for finite differences. Compares with autograd of the definition."""
        q, k, v = self.inputs(torch.float64, q_heads=2, grad=True)
        sinks = self.draw(2, grad=True)
        flashcore.attention(q, k, v, sinks=sinks).square().sum().backward()
        got = [one.grad.clone() for one in (q, sinks)]
        scores = q @ k.transpose(-1, -2) / 4
        extra = sinks.double()[None, :, None, None].expand(2, 2, 5, 1)
        p = torch.cat([scores, extra], -1).softmax(-1)[..., :9]
        want = torch.autograd.grad((p @ v).square().sum(), (q, sinks))
        self.check(got[0], want[0], factor=1e3)
        self.check(got[1], want[1])


@on_every_device
class PartsOfTheKeys(Case):
    """Gradients of some of the keys that a row sees, as in a step of a ring."""

    def test_sums_are_those_of_one_call(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            q, k, v = self.inputs(dtype, q_len=40, kv_len=50)
            sinks = self.draw(q.shape[1])
            out, lse = flashcore.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
            d_out, d_lse = self.draw(*out.shape).to(dtype), self.draw(*lse.shape)
            want = flashcore.attention_backward(d_out, q, k, v, out, lse, dlse=d_lse, causal=True,
                                                sinks=sinks, wanted=("q", "k", "v", "sinks"),
                                                grad_dtype="f32")
            sums = [torch.zeros_like(one) for one in want]
            for begin, end in ((0, 17), (17, 50)):
                keys = slice(begin, end)
                dq, dk, dv = flashcore.attention_backward(
                    d_out, q, k[:, :, keys], v[:, :, keys], out, lse, dlse=d_lse, causal=True, q_start=10,
                    k_start=begin, grad_dtype="f32", global_lse=True)
                self.assertEqual({one.dtype for one in (dq, dk, dv)}, {torch.float32})
                sums[0] += dq
                sums[1][:, :, keys], sums[2][:, :, keys] = dk, dv
            (sums[3],) = flashcore.attention_backward(
                d_out, q, k[:, :, :0], v[:, :, :0], out, lse, dlse=d_lse, sinks=sinks, wanted=("sinks",),
                global_lse=True)
            # Kernels that round dS to 16 bits round each part by itself.
            limit = 1e-5 if dtype is torch.float32 or self.device == "cpu" else 1e-2
            for got, one in zip(sums, want):
                self.assertLessEqual(float((got - one).abs().max() / one.abs().max()), limit)


if __name__ == "__main__":
    unittest.main()
