"""flashcore.attention on torch tensors: values, options, shapes, refusals."""

import unittest
from unittest import mock

from torch_support import NO_CUDA, Case, on_every_device

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import flashcore
from flashcore._core import arrays, call_cache
import flashcore.ops  # noqa: F401 (registers torch.ops.flashcore)

_op = torch.ops.flashcore.attention.default
_HALVES = (torch.float32, torch.float16, torch.bfloat16)


@on_every_device
class Values(Case):
    def test_types(self):
        kinds = _HALVES if self.device == "cuda" else (torch.float64, *_HALVES)
        for dtype in kinds:
            with self.subTest(str(dtype)):
                q, k, v = self.inputs(dtype)
                out, lse = flashcore.attention(q, k, v, causal=True, return_lse=True)
                want, want_lse = self.expected(q, k, v, causal=True)
                self.check(out, want)
                self.check(lse, want_lse)
                self.assertEqual((out.dtype, out.device, lse.device), (dtype, q.device, q.device))

    def test_options_on_both_paths(self):
        """Options on the direct path to the library, and through the op."""
        q, k, v = self.inputs()
        mask = self.draw(2, 1, 5, 9) > -0.5
        bias = self.draw(1, 4, 5, 9)
        for options, expected in (
                (dict(causal=True, q_start=0), dict(causal=True, q_start=[0])),
                (dict(window=(3, 0), softcap=2.0, scale=0.5),) * 2,
                (dict(mask=mask),) * 2,
                (dict(bias=bias), dict(bias=bias.expand(2, 4, 5, 9))),
                (dict(seqused_k=self.ints(9, 4)), dict(used=[9, 4])),
                (dict(sinks=(sinks := self.draw(4))), dict(sinks=sinks)),
                (dict(num_splits=2, causal=True), dict(causal=True)),
                (dict(reproducibility="batch_invariant"), {})):
            with self.subTest(str(sorted(options))):
                want = self.expected(q, k, v, **expected)[0]
                self.check(flashcore.attention(q, k, v, **options), want)
                torch.compiler.reset()  # torch keeps at most eight programs of a function
                through_op = torch.compile(lambda *a: flashcore.attention(*a, **options),
                                           fullgraph=True, backend="eager")(q, k, v)
                self.check(through_op, want)

    def test_without_the_dlpack_exchange_api(self):
        """A torch version without the API."""
        q, k, v = self.inputs()
        want = flashcore.attention(q, k, v, causal=True, seqused_k=self.ints(9, 4))
        adapter = arrays.adapter_of("q", q)
        with mock.patch.object(adapter, "reader", None), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            got = flashcore.attention(q, k, v, causal=True, seqused_k=self.ints(9, 4))
            wide = flashcore.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                       layout="bshd", causal=True, seqused_k=self.ints(9, 4))
        self.assertTrue(torch.equal(got, want))
        self.assertTrue(torch.equal(wide.transpose(1, 2), want))

    def test_arrays_of_two_frameworks(self):
        if self.device == "cuda":
            self.skipTest("NumPy arrays are on the CPU")
        q, k, v = self.inputs()
        want = flashcore.attention(q, k, v)
        for _ in range(2):  # the second call reuses the prepared call of the first
            self.assertTrue(torch.equal(flashcore.attention(q, k.numpy(), v), want))
            self.assertTrue(torch.equal(flashcore.attention(q, k, v), want))

    def test_strides_and_parameters(self):
        q, k, v = self.inputs()
        want = self.expected(q, k, v)[0]
        swapped = [one.transpose(1, 2).contiguous() for one in (q, k, v)]
        self.check(flashcore.attention(*(one.transpose(1, 2) for one in swapped)), want)
        self.check(flashcore.attention(*swapped, layout="bshd").transpose(1, 2), want)
        with torch.no_grad():
            self.check(flashcore.attention(torch.nn.Parameter(q), k, v), want)

    def test_out(self):
        q, k, v = self.inputs()
        out = torch.full((2, 4, 5, 8), float("nan"), device=self.device)
        self.assertIs(flashcore.attention(q, k, v, out=out), out)
        self.check(out, self.expected(q, k, v)[0])

    def test_pages_and_append(self):
        q, k, v = self.inputs(kv_len=12, v_dim=16)
        table = self.ints(*range(5, -1, -1)).reshape(2, 3)
        pages = [torch.full((6, 4, 2, 16), float("nan"), device=self.device) for _ in range(2)]
        used = self.ints(0, 0)
        for begin, end in ((0, 5), (5, 6), (6, 12)):
            flashcore.append(k[:, :, begin:end], v[:, :, begin:end], *pages, used, block_table=table)
            used += end - begin
        out = flashcore.attention(q, *pages, block_table=table, seqused_k=used, causal=True)
        self.check(out, self.expected(q, k, v, causal=True)[0])

    def test_merge(self):
        q, k, v = self.inputs(torch.float16)
        parts = [flashcore.attention(q, k[:, :, one], v[:, :, one], partial=True)
                 for one in (slice(0, 4), slice(4, 9))]
        out = torch.empty(2, 4, 5, 8, dtype=torch.float16, device=self.device)
        merged, lse = flashcore.merge(*zip(*parts), out=out, return_lse=True)
        self.assertIs(merged, out)
        want, want_lse = self.expected(q, k, v)
        self.check(out, want)
        self.check(lse, want_lse)

    def test_negative_views(self):
        """The memory of a negative view holds the negated values."""
        q, k, v = self.inputs()
        seen = torch.complex(q, q + 1).conj().imag
        bias = torch.complex(self.draw(2, 4, 5, 9), self.draw(2, 4, 5, 9)).conj().imag
        self.assertTrue(seen.is_neg() and bias.is_neg())
        for call in (flashcore.attention, _op):
            self.check(call(seen, k, v), self.expected(-(q + 1), k, v)[0])
        self.check(flashcore.attention(q, k, v, bias=bias), self.expected(
            q, k, v, bias=bias.resolve_neg())[0])

    def test_zero_sizes(self):
        q, k, v = self.inputs()
        for inputs, shape in (((q[:0], k[:0], v[:0]), (0, 4, 5, 8)),
                              ((q[:, :, :0], k, v), (2, 4, 0, 8)),
                              ((q[:, :0], k[:, :0], v[:, :0]), (2, 0, 5, 8)),
                              ((q, k[:, :, :0], v[:, :, :0]), (2, 4, 5, 8))):
            with self.subTest(str(shape)):
                out, lse = flashcore.attention(*inputs, return_lse=True)
                self.assertEqual((out.shape, lse.shape), (shape, shape[:3]))
        self.assertEqual(float(out.abs().max()), 0)
        self.assertTrue(bool((lse == -float("inf")).all()))

    def test_widths_that_change_between_calls(self):
        """A call prepared for one shape serves others."""
        for head_dim, v_dim in ((16, 16), (16, 8), (8, 16), (16, 16)):
            q, k, v = self.inputs(head_dim=head_dim, v_dim=v_dim)
            self.check(flashcore.attention(q, k, v), self.expected(q, k, v)[0])

    def test_numbers_in_arrays(self):
        q, k, v = self.inputs()
        scale = torch.tensor(0.25)
        want = flashcore.attention(q, k, v, scale=0.25, window=(3, 0))
        for _ in range(2):
            got = flashcore.attention(q, k, v, scale=scale, window=torch.tensor([3, 0]))
            self.assertTrue(torch.equal(got, want))
            scale.mul_(2)  # the array is read at every call
            want = flashcore.attention(q, k, v, scale=0.5, window=(3, 0))
        with self.assertRaisesRegex(ValueError, "scale: requires grad"):
            flashcore.attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True))
        want = flashcore.attention(q, k, v, q_start=0, causal=True)
        start = torch.tensor(0, dtype=torch.int32, device=self.device)
        self.assertTrue(torch.equal(flashcore.attention(q, k, v, q_start=start, causal=True), want))
        with self.assertRaisesRegex(ValueError, "q_start is 2147483648; wanted a number of 32 bits"):
            flashcore.attention(q, k, v, q_start=2**31)

    def test_many_numbers_do_not_fill_the_memory(self):
        q, k, v = self.inputs()
        adapter = arrays.adapter_of("q", q)
        with mock.patch("flashcore._torch.arrays._MAX_NUMBERS", 8):
            for start in range(20):
                flashcore.attention(q, k, v, q_start=start)
        self.assertLessEqual(len(adapter._numbers), 8)

    def test_modes(self):
        q, k, v = self.inputs()
        want = flashcore.attention(q, k, v)
        with torch.inference_mode():
            got = flashcore.attention(q, k, v)
            self.assertTrue(got.is_inference() and torch.equal(got, want))
        torch.use_deterministic_algorithms(True)
        try:
            inputs = self.inputs(grad=True)
            flashcore.attention(*inputs).sum().backward()
            self.assertTrue(torch.equal(flashcore.attention(q, k, v), want))
        finally:
            torch.use_deterministic_algorithms(False)

    def test_tensors_without_memory(self):
        q, k, v = self.inputs()
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(one) for one in (q, k, v)]
        out, lse = flashcore.attention(*fakes, return_lse=True)
        self.assertIsInstance(out, FakeTensor)
        self.assertEqual((out.shape, lse.shape, out.device), ((2, 4, 5, 8), (2, 4, 5), q.device))

    def test_subclasses_keep_their_type(self):
        class Named(torch.Tensor):
            pass

        q, k, v = self.inputs()
        out = flashcore.attention(q.as_subclass(Named), k, v)
        self.assertIsInstance(out, Named)
        self.assertTrue(torch.equal(out.as_subclass(torch.Tensor), flashcore.attention(q, k, v)))

    def test_checked(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(ValueError, "seqused_k"):
            flashcore.attention(q, k, v, seqused_k=self.ints(9, 77), checked=True)


class Reasons(unittest.TestCase):
    def test_the_reason_for_skipping_cuda_is_printed(self):
        self.assertEqual(bool(NO_CUDA), not (torch.cuda.is_available()
                                             and flashcore.load().cuda_device_count()[0] > 0))


if __name__ == "__main__":
    unittest.main()
