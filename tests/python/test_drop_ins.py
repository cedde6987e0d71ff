"""flashcore.sdpa, flashcore.flash_attn and FlashCore as torch's flash backend, each compared with the
function that it replaces."""

import doctest
import inspect
import unittest
import warnings

from torch_support import Case, on_every_device

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import flashcore
import flashcore._torch.sdpa
from flashcore import flash_attn
from flashcore.integrations import torch_sdpa as integration


_RESTORE = getattr(torch.nn.attention, "restore_flash_attention_impl", None)


def math(*arguments, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch_sdpa(*arguments, **options)


@on_every_device
class Sdpa(Case):
    def same(self, *arguments, **options):
        def wide(one):
            return one.double() if torch.is_tensor(one) and one.is_floating_point() else one

        self.check(flashcore.sdpa(*arguments, **options),
                   math(*map(wide, arguments),
                        **{name: wide(one) for name, one in options.items()}))

    def test_signature(self):
        """Names, order and defaults are those of torch's documentation."""
        self.assertEqual(
            [(one.name, one.default) for one in inspect.signature(flashcore.sdpa).parameters.values()
             if one.default is not one.empty],
            [("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None),
             ("enable_gqa", False)])

    def test_causal_is_top_left(self):
        for q_len, kv_len in ((5, 9), (9, 5), (7, 7), (1, 4)):
            with self.subTest(f"{q_len} {kv_len}"):
                q, k, v = self.inputs(q_heads=2, q_len=q_len, kv_len=kv_len)
                self.same(q, k, v, is_causal=True)
        q, k, v = self.inputs(q_heads=2)
        bottom_right = flashcore.attention(q, k, v, causal=True)
        self.assertFalse(torch.allclose(flashcore.sdpa(q, k, v, is_causal=True), bottom_right))

    def test_masks(self):
        q, k, v = self.inputs(q_heads=2)
        for shape in ((5, 9), (2, 1, 5, 9), (1, 2, 5, 9), (2, 1, 1, 9)):
            mask = self.draw(*shape) > -0.7
            mask[..., 0] = True
            self.same(q, k, v, mask)
            self.same(q, k, v, attn_mask=self.draw(*shape))
        hidden = torch.zeros(5, 9, device=self.device).masked_fill(
            torch.ones(5, 9, device=self.device, dtype=torch.bool).tril() == 0, float("-inf"))
        self.same(q, k, v, attn_mask=hidden)

    def test_a_row_without_keys_is_zero(self):
        q, k, v = self.inputs(q_heads=2)
        mask = torch.ones(5, 9, dtype=torch.bool, device=self.device)
        mask[2] = False
        self.assertTrue(bool((flashcore.sdpa(q, k, v, mask)[:, :, 2] == 0).all()))

    def test_shapes(self):
        q, k, v = self.inputs(q_heads=2)
        self.same(q[:, 0], k[:, 0], v[:, 0], is_causal=True)
        self.same(q[0, 0], k[0, 0], v[0, 0])
        mask = self.draw(2, 5, 9) > -1
        mask[..., 0] = True
        self.same(q[:, 0], k[:, 0], v[:, 0], mask)
        five = [one.unflatten(0, (2, 1)) for one in (q, k, v)]
        self.same(*five)

    def test_gqa_and_scale(self):
        q, k, v = self.inputs()
        self.same(q, k, v, enable_gqa=True, scale=0.2)
        with self.assertRaisesRegex(ValueError, "key: has 2 heads, query has 4.*enable_gqa"):
            flashcore.sdpa(q, k, v)

    def test_refusals(self):
        q, k, v = self.inputs(q_heads=2)
        with self.assertRaisesRegex(NotImplementedError, "dropout_p is 0.1"):
            flashcore.sdpa(q, k, v, dropout_p=0.1)
        with self.assertRaisesRegex(ValueError, "together with is_causal"):
            flashcore.sdpa(q, k, v, self.draw(5, 9) > 0, is_causal=True)


@on_every_device
class FlashAttn(Case):
    """[batch, len, heads, dim]; causal is aligned bottom-right."""

    def swapped(self, *tensors):
        return [one.transpose(1, 2) for one in tensors]

    def test_order_of_arguments(self):
        orders = {
            "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes "
                               "deterministic return_attn_probs",
            "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
                                      "dropout_p softmax_scale causal window_size softcap "
                                      "alibi_slopes deterministic return_attn_probs block_table",
            "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
                                       "cache_batch_idx cache_leftpad block_table softmax_scale "
                                       "causal window_size softcap rotary_interleaved alibi_slopes "
                                       "num_splits return_softmax_lse"}
        for name, order in orders.items():
            found = inspect.signature(getattr(flash_attn, name)).parameters
            self.assertEqual(list(found), order.split())

    def test_func(self):
        q, k, v = self.inputs()
        slopes = self.draw(4).abs()
        for options, expected in (
                (dict(causal=True), dict(causal=True)),
                (dict(softmax_scale=0.3, softcap=2.0), dict(scale=0.3, softcap=2.0)),
                (dict(window_size=(2, 1)), dict(window=(2, 1))),
                (dict(alibi_slopes=slopes, causal=True), dict(slopes=slopes, causal=True)),
                (dict(deterministic=True), {})):
            with self.subTest(str(sorted(options))):
                out, lse, nothing = flash_attn.flash_attn_func(
                    *self.swapped(q, k, v), return_attn_probs=True, **options)
                want, want_lse = self.expected(q, k, v, **expected)
                self.check(out.transpose(1, 2), want)
                self.check(lse, want_lse)
                self.assertIsNone(nothing)

    def test_gradients(self):
        q, k, v = (self.draw(1, 6, 2, 8, grad=True) for _ in range(3))
        flash_attn.flash_attn_func(q, k, v, causal=True).square().sum().backward()
        got = q.grad.clone()
        math(*self.swapped(q, k, v), is_causal=True).square().sum().backward()
        self.check(got, q.grad - got, factor=4)

    def test_varlen(self):
        cu_q, cu_k = self.ints(0, 2, 7), self.ints(0, 6, 11)
        q, k, v = self.draw(7, 4, 16), self.draw(11, 2, 16), self.draw(11, 2, 16)
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True,
                                                        return_attn_probs=True)
        for rows, keys in ((slice(0, 2), slice(0, 6)), (slice(2, 7), slice(6, 11))):
            want, want_lse = self.expected(*(one.transpose(0, 1)[None] for one in
                                             (q[rows], k[keys], v[keys])), causal=True)
            self.check(out[rows].transpose(0, 1)[None], want)
            self.check(lse[None, :, rows], want_lse)
        pages = [torch.full((4, 4, 2, 16), float("nan"), device=self.device) for _ in range(2)]
        table = self.ints(3, 1, 0, 2).view(2, 2)
        for memory, packed in zip(pages, (k, v)):
            memory[3], memory[1, :2] = packed[:4], packed[4:6]
            memory[0], memory[2, :1] = packed[6:10], packed[10:]
        paged = flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 5, 6, causal=True,
                                                  block_table=table)
        self.check(paged, out)

    def test_with_kvcache(self):
        q, k, v = self.inputs(q_len=2, kv_len=9, v_dim=16)
        caches = [torch.zeros(2, 12, 2, 16, device=self.device) for _ in range(2)]
        lengths = self.ints(7, 3)
        for cache, one in zip(caches, (k, v)):
            for b, length in enumerate((7, 3)):
                cache[b, :length] = one[b, :, :length].transpose(0, 1)
        new = [torch.stack([one[b, :, length:length + 2] for b, length in enumerate((7, 3))])
               for one in (k, v)]
        out, lse = flash_attn.flash_attn_with_kvcache(
            q.transpose(1, 2), *caches, *self.swapped(*new), cache_seqlens=lengths, causal=True,
            return_softmax_lse=True)
        want, want_lse = self.expected(q, k, v, used=[9, 5], causal=True)
        self.check(out.transpose(1, 2), want)
        self.check(lse, want_lse)
        again = flash_attn.flash_attn_with_kvcache(q[:1].transpose(1, 2), caches[0][:1],
                                                   caches[1][:1], cache_seqlens=9, causal=True)
        self.check(again, out[:1])

    def test_unsupported_arguments_raise(self):
        q, k, v = self.swapped(*self.inputs())
        with self.assertRaisesRegex(NotImplementedError, "dropout_p is 0.5"):
            flash_attn.flash_attn_func(q, k, v, 0.5)
        cos = self.draw(9, 8)
        for name, value in (("rotary_cos", cos), ("rotary_sin", cos), ("rotary_interleaved", False),
                            ("cache_batch_idx", self.ints(0, 1)), ("cache_leftpad", self.ints(0, 1))):
            with self.subTest(name), self.assertRaisesRegex(NotImplementedError, f"{name}: is given"):
                flash_attn.flash_attn_with_kvcache(q, k, v, **{name: value})
        with self.assertRaisesRegex(ValueError, "cache_seqlens: not given"):
            flash_attn.flash_attn_with_kvcache(q, k, v, k, v)
        with self.assertRaisesRegex(ValueError, "only one of them"):
            flash_attn.flash_attn_with_kvcache(q, k, v, k)


@unittest.skipUnless(hasattr(torch.nn.attention, "register_flash_attention_impl"),
                     f"torch {torch.__version__} cannot replace its attention")
@on_every_device
class TorchsOwn(Case):
    """activate_flash_attention_impl("flashcore") replaces the backend of F.scaled_dot_product_attention."""

    def setUp(self):
        super().setUp()
        integration.register()
        self.assertIn("flashcore", torch.nn.attention.list_flash_attention_impls())
        if _RESTORE is None:  # torch 2.10 can activate, but not restore
            self.addCleanup(integration._Handle().remove)
        else:
            torch.nn.attention.activate_flash_attention_impl("flashcore")
            self.addCleanup(_RESTORE)

    def inputs(self, **options):
        dtype = torch.float16 if self.device == "cuda" else torch.float32
        return super().inputs(dtype, v_dim=16, **options)

    def flash(self, *arguments, **options):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return torch_sdpa(*arguments, **options)

    def counted(self, function):
        """(result, number of calls of FlashCore)."""
        calls = []
        original = integration.attention

        def counting(*arguments, **options):
            calls.append(arguments)
            return original(*arguments, **options)

        integration.attention = counting
        try:
            return function(), len(calls)
        finally:
            integration.attention = original

    def test_an_unmodified_model(self):
        q, k, v = self.inputs(q_heads=2, q_len=9)
        out, calls = self.counted(lambda: self.flash(q, k, v, is_causal=True))
        self.assertEqual(calls, 1)
        self.check(out, self.expected(q, k, v, causal=True)[0])
        dtype = q.dtype
        layer = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=self.device, dtype=dtype)
        x = self.draw(2, 7, 32, dtype=dtype)
        # By default torch prefers cuDNN to its flash backend on some GPUs.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            got, calls = self.counted(lambda: layer(x, x, x, need_weights=False)[0])
        self.assertEqual(calls, 1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            want = layer.double()(*(x.double(),) * 3, need_weights=False)[0]
        self.check(got, want, factor=4)

    def test_gradients(self):
        inputs = self.inputs(q_heads=2, q_len=9, grad=True)
        out, calls = self.counted(lambda: self.flash(*inputs, is_causal=True))
        self.assertEqual(calls, 1)
        out.square().sum().backward()
        wide = [one.detach().double().requires_grad_() for one in inputs]
        math(*wide, is_causal=True).square().sum().backward()
        for one, want in zip(inputs, wide):
            self.check(one.grad, want.grad, factor=8)

    def test_masks_of_the_cpu_backend(self):
        if self.device == "cuda":
            self.skipTest("torch's flash backend takes no mask on CUDA")
        q, k, v = self.inputs(q_heads=2)
        for mask in (self.draw(5, 9), self.draw(2, 1, 5, 9) > -1):
            out, calls = self.counted(lambda: self.flash(q, k, v, attn_mask=mask))
            self.assertEqual(calls, 1)
            self.check(out, math(q.double(), k.double(), v.double(), attn_mask=mask.double()
                                 if mask.is_floating_point() else mask))

    @unittest.skipIf(_RESTORE is None, f"torch {torch.__version__} cannot restore its attention")
    def test_restored(self):
        _RESTORE()
        q, k, v = self.inputs(q_heads=2, q_len=9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out, calls = self.counted(lambda: self.flash(q, k, v, is_causal=True))
        self.assertEqual(calls, 0)
        self.check(out, self.expected(q, k, v, causal=True)[0])
        integration._Handle().remove()  # a second time, as the registry does

    def test_compiled(self):
        torch._dynamo.reset()
        q, k, v = self.inputs(q_heads=2, q_len=9, grad=True)
        compiled = torch.compile(lambda *a: torch_sdpa(*a, is_causal=True), fullgraph=True,
                                 backend="aot_eager")
        self.check(compiled(q, k, v), self.expected(q, k, v, causal=True)[0])


def load_tests(loader, tests, pattern):
    tests.addTests(doctest.DocTestSuite(flashcore._torch.sdpa))
    return tests


if __name__ == "__main__":
    unittest.main()
