"""flashcore.attention on torch tensors: values, gradients, torch.compile, autocast, vmap, graphs."""

import os
import shutil
import subprocess
import sys
import unittest
import warnings
from unittest import mock

from torch_support import NO_CUDA, Case, needs_cuda, on_every_device

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import flashcore
from flashcore import _arrays, _prepared, _torch_backward
import flashcore.ops  # noqa: F401 (registers torch.ops.flashcore)

_op = torch.ops.flashcore.attention.default
_op_lse = torch.ops.flashcore.attention_lse.default
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

    def test_options_through_both_ways(self):
        """Straight to the library, and through the op."""
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
                torch.compiler.reset()  # each is another program; torch keeps eight of a function
                through_op = torch.compile(lambda *a: flashcore.attention(*a, **options),
                                           fullgraph=True, backend="eager")(q, k, v)
                self.check(through_op, want)

    def test_without_dlpack_s_exchange_api(self):
        """As with a torch that has none."""
        q, k, v = self.inputs()
        want = flashcore.attention(q, k, v, causal=True, seqused_k=self.ints(9, 4))
        kind = _arrays.kind_of("q", q)
        with mock.patch.object(kind, "reader", None), \
                mock.patch.object(_prepared.thread_state, "calls", {}):
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
        for _ in range(2):  # the second time in the call that the first has prepared
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
        """Their memory holds the opposite of their values."""
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
            scale.mul_(2)  # it is read at every call
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
        kind = _arrays.kind_of("q", q)
        with mock.patch("flashcore._torch_arrays._MAX_NUMBERS", 8):
            for start in range(20):
                flashcore.attention(q, k, v, q_start=start)
        self.assertLessEqual(len(kind._numbers), 8)

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


@on_every_device
class Gradients(Case):
    def torch_s(self, q, k, v, mask=None, **options):
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
        for dtype in _HALVES:
            with self.subTest(str(dtype)):
                inputs = self.inputs(dtype, grad=True)
                self.compare(flashcore.attention(*inputs), self.torch_s, inputs)

    def test_causal_and_mask(self):
        inputs = self.inputs(q_len=9, grad=True)
        self.compare(flashcore.attention(*inputs, causal=True),
                     lambda *a: self.torch_s(*a, is_causal=True), inputs)
        mask = self.draw(1, 4, 9, 9) > -1
        mask[..., 0] = True
        for one in inputs:
            one.grad = None
        self.compare(flashcore.attention(*inputs, mask=mask),
                     lambda *a: self.torch_s(*a, mask=mask), inputs)

    def test_blocks_of_rows(self):
        """Several blocks give what one gives."""
        inputs = self.inputs(q_len=40, kv_len=50, grad=True)
        flashcore.attention(*inputs, causal=True).sum().backward()
        whole = [one.grad.clone() for one in inputs]
        before, _torch_backward._BLOCK_ELEMENTS = _torch_backward._BLOCK_ELEMENTS, 3 * 8 * 50
        try:
            for one in inputs:
                one.grad = None
            flashcore.attention(*inputs, causal=True).sum().backward()
        finally:
            _torch_backward._BLOCK_ELEMENTS = before
        for one, want in zip(inputs, whole):
            self.check(one.grad, want)

    def test_memory_grows_with_the_length(self):
        """No tensor of the backward is larger than a block, however long the sequence."""
        largest = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                made = function(*args, **(kwargs or {}))
                if isinstance(made, torch.Tensor):
                    largest.append(made.numel())
                return made

        length = 4096
        q, k, v = (self.draw(1, 1, length, 8) for _ in range(3))
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        with Watch():
            _torch_backward.backward(
                out, None, q, k, v, out, lse, causal=False, window_left=-1, window_right=-1,
                scale=None, softcap=0.0, layout="bhsd", partial=False,
                wanted=[True, True, True, False, False])
        self.assertGreater(length * length, _torch_backward._BLOCK_ELEMENTS)
        self.assertLessEqual(max(largest), _torch_backward._BLOCK_ELEMENTS)

    def test_of_the_op_that_has_no_lse(self):
        inputs = self.inputs(grad=True)
        self.compare(_op(*inputs, causal=True),
                     lambda q, k, v: self.torch_s(q, k, v, mask=torch.ones(
                         5, 9, dtype=torch.bool, device=self.device).tril(4)), inputs)

    def test_only_what_is_asked_for(self):
        q, k, v = self.inputs()
        k.requires_grad_()
        flashcore.attention(q, k, v).sum().backward()
        self.assertIsNone(q.grad)
        self.assertTrue(bool(k.grad.abs().sum() > 0))

    def test_packed(self):
        lengths = (3, 0, 6)
        total = sum(lengths)
        q, k, v = (self.draw(total, heads, 16, grad=True) for heads in (4, 2, 2))
        cu = self.ints(0, 3, 3, 9)
        ours = flashcore.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)

        def theirs(q, k, v):
            parts = [self.torch_s(*(one[begin:end].transpose(0, 1)[None] for one in (q, k, v)),
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
    """Every option by finite differences, on the CPU, where f64 is."""

    def gradcheck(self, function, *inputs):
        self.assertTrue(torch.autograd.gradcheck(function, inputs))

    def test_options(self):
        inputs = self.inputs(torch.float64, grad=True)
        bias = self.draw(1, 4, 5, 9, dtype=torch.float64, grad=True)
        column = self.draw(2, 1, 5, 1, dtype=torch.float64, grad=True)
        slopes = self.draw(4).abs()
        for options in (dict(causal=True), dict(window=(3, 1)), dict(softcap=1.5),
                        dict(scale=-0.7), dict(alibi_slopes=slopes), dict(q_start=2, causal=True),
                        dict(k_start=1, causal=True), dict(seqused_k=self.ints(9, 5), causal=True),
                        dict(mask=self.draw(9) > -0.5)):
            with self.subTest(str(sorted(options))):
                self.gradcheck(lambda *a: flashcore.attention(*a, return_lse=True, **options),
                               *inputs)
        for one in (bias, column):
            self.gradcheck(lambda q, k, v, b: flashcore.attention(q, k, v, bias=b, softcap=2.0),
                           *inputs, one)

    def test_rows_that_see_nothing(self):
        q, k, v = self.inputs(torch.float64, q_len=4, kv_len=2, grad=True)
        self.gradcheck(lambda *a: flashcore.attention(*a, causal=True), q, k, v)

    def test_layout_and_partial(self):
        q, k, v = (self.draw(1, 5, 2, 8, dtype=torch.float64, grad=True) for _ in range(3))
        self.gradcheck(lambda *a: flashcore.attention(*a, layout="bshd", causal=True), q, k, v)
        self.gradcheck(lambda *a: flashcore.attention(*a, partial=True), q, k, v)

    def test_packed(self):
        q, k, v = (self.draw(5, 2, 4, dtype=torch.float64, grad=True) for _ in range(3))
        cu = self.ints(0, 2, 5)
        self.gradcheck(lambda *a: flashcore.attention(*a, cu_seqlens_q=cu, cu_seqlens_k=cu,
                                                      return_lse=True), q, k, v)

    def test_sinks(self):
        """They are f32, too coarse for finite differences: against autograd of the definition."""
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
class Torch(Case):
    """What torch asks of an op."""

    def test_opcheck(self):
        dtype = torch.float32
        for grad in (False, True):
            q, k, v = self.inputs(dtype, grad=grad)
            bias = self.draw(1, 4, 5, 9, grad=grad)
            for op, arguments, options in ((_op, (q, k, v), {}),
                                           (_op, (q, k, v, None, None, bias), {}),
                                           (_op_lse, (q, k, v), dict(causal=True)),
                                           (_op_lse, (q, k, v, None, None, bias), {}),
                                           (_op_lse, (q, k, v), dict(partial=True))):
                with self.subTest(f"{op} grad {grad} {sorted(options)}"):
                    torch.library.opcheck(op, arguments, options)
        packed = [self.draw(7, heads, 16) for heads in (4, 2, 2)]
        cu = self.ints(0, 3, 7)
        for op in (_op, _op_lse):
            torch.library.opcheck(op, (*packed, None, None, None, None, None, None, cu, cu))

    def test_opcheck_append(self):
        new, cache = self.draw(2, 2, 3, 8), self.draw(2, 2, 9, 8)
        torch.library.opcheck(torch.ops.flashcore.append.default,
                              (new, new.clone(), cache, cache.clone(), self.ints(0, 4)))

    @unittest.skipUnless(shutil.which("g++"), "torch's inductor needs g++")
    def test_compile_with_dynamic_shapes(self):
        def model(q, k, v):
            return flashcore.attention(q * 2, k, v, causal=True, window=(4, 0)) + 1

        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for q_len, kv_len in ((5, 9), (8, 8), (3, 20)):
            inputs = self.inputs(q_len=q_len, kv_len=kv_len)
            self.check(compiled(*inputs), model(*inputs))

    def test_compile_with_gradients(self):
        torch._dynamo.reset()
        compiled = torch.compile(lambda *a: flashcore.attention(*a, causal=True), fullgraph=True,
                                 dynamic=True, backend=self.backend())
        inputs = self.inputs(grad=True)
        compiled(*inputs).square().sum().backward()
        got = [one.grad.clone() for one in inputs]
        for one in inputs:
            one.grad = None
        flashcore.attention(*inputs, causal=True).square().sum().backward()
        for one, want in zip(got, inputs):
            self.check(one, want.grad)

    def test_compile_before_anything_else(self):
        """In a process where the first call ever is a compiled one, flashcore imported first."""
        program = """
import flashcore
import torch
q = torch.ones(1, 2, 3, 8)
call = torch.compile(lambda q: flashcore.attention(q, q, q), fullgraph=True, backend="aot_eager")
assert torch.equal(call(q), q)
"""
        subprocess.run([sys.executable, "-c", program], check=True,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_compile_append(self):
        def step(new, cache, used):
            flashcore.append(new, new, cache[0], cache[1], used)
            return flashcore.attention(new, cache[0], cache[1], seqused_k=used + new.shape[2])

        torch._dynamo.reset()
        new, used = self.draw(2, 2, 3, 8), self.ints(0, 4)
        ours, theirs = ([torch.zeros(2, 2, 9, 8, device=self.device) for _ in range(2)]
                        for _ in range(2))
        got = torch.compile(step, fullgraph=True, backend=self.backend())(new, ours, used)
        self.check(got, step(new, theirs, used))
        self.assertTrue(torch.equal(ours[0], theirs[0]))

    def backend(self):
        """aot_eager traces, decomposes and functionalises like inductor, but needs no compiler."""
        return "aot_eager"

    def test_autocast(self):
        q, k, v = self.inputs(grad=True)
        sinks = self.draw(4)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            out = flashcore.attention(q, k, v, sinks=sinks)
        self.assertEqual(out.dtype, torch.bfloat16)
        rounded = [one.detach().bfloat16() for one in (q, k, v)]
        self.assertTrue(torch.equal(out, flashcore.attention(*rounded, sinks=sinks)))
        out.float().sum().backward()
        self.assertEqual(q.grad.dtype, torch.float32)

    def test_vmap(self):
        q, k, v = (self.draw(3, 2, heads, 5, 8) for heads in (4, 2, 2))
        bias, mask = self.draw(3, 1, 1, 5, 5), self.draw(5, 5) > -0.5
        want = torch.stack([flashcore.attention(q[n], k[n], v[0], bias=bias[n], mask=mask)
                            for n in range(3)])
        got = torch.vmap(lambda q, k, b: flashcore.attention(q, k, v[0], bias=b, mask=mask))(
            q, k, bias)
        self.check(got, want)
        out, lse = torch.vmap(lambda q: flashcore.attention(q, k[0], v[0], return_lse=True),
                              in_dims=1, out_dims=1)(q.transpose(0, 1))
        self.check(lse.transpose(0, 1), torch.stack([
            flashcore.attention(q[n], k[0], v[0], return_lse=True)[1] for n in range(3)]))

    def test_vmap_refusals(self):
        cu, packed = self.ints(0, 2, 5), self.draw(3, 5, 2, 8)
        with self.assertRaisesRegex(NotImplementedError, "cu_seqlens_q: vmap over packed"):
            torch.vmap(lambda q: flashcore.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu))(
                packed)
        q, sinks = self.draw(3, 1, 2, 5, 8), self.draw(3, 2)
        with self.assertRaisesRegex(NotImplementedError, "sinks: vmap over it is not supported"):
            torch.vmap(lambda q, s: flashcore.attention(q, q, q, sinks=s))(q, sinks)

    def test_forward_derivatives_are_refused(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(NotImplementedError, "forward-mode derivatives"):
            torch.func.jvp(lambda q: flashcore.attention(q, k, v), (q,), (q,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, q)
            with self.assertRaisesRegex(NotImplementedError, "forward-mode derivatives"):
                flashcore.attention(dual, k, v)
            flashcore.attention(q, k, v)  # without a tangent it goes

    def test_traced_by_torch_jit(self):
        """The call is in the traced program, not its result."""
        q, k, v = self.inputs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda q: flashcore.attention(q, k, v), q, check_trace=False)
        other = self.draw(*q.shape)
        self.check(traced(other), self.expected(other, k, v)[0])

    def test_exported(self):
        class Model(torch.nn.Module):
            def forward(self, q, k, v):
                return flashcore.attention(q, k, v, causal=True)

        inputs = self.inputs()
        program = torch.export.export(Model(), inputs)
        self.assertIn("flashcore.attention", str(program.graph))
        self.assertTrue(torch.equal(program.module()(*inputs), Model()(*inputs)))

    def test_functional_gradients_are_refused(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(NotImplementedError, "inside torch.func are not supported"):
            torch.func.grad(lambda q: flashcore.attention(q, k, v).square().sum())(q)

    def test_mistakes(self):
        q, k, v = self.inputs()
        for kind, pattern, arguments in (
                (ValueError, "k: head_dim is 8, q has 16", (q, k[..., :8], v)),
                (ValueError, "k: dtype is f64; wanted f32", (q, k.double(), v)),
                (NotImplementedError, "q: dtype", (q.to(torch.complex64), k, v)),
                (NotImplementedError, "q: layout is torch.sparse_coo", (q.to_sparse(), k, v)),
                (NotImplementedError, "q: is on meta", (q.to("meta"), k, v))):
            with self.subTest(pattern), self.assertRaisesRegex(kind, pattern):
                flashcore.attention(*arguments)


@needs_cuda
class CudaOnly(Case):
    device = "cuda"

    def test_a_call_with_tensors_on_both(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(ValueError, "k: is on cpu:0, q is on cuda:0"):
            flashcore.attention(q, k.cpu(), v)
        with self.assertRaisesRegex(ValueError, "k: is on cuda:0, q is on cpu:0"):
            flashcore.attention(q.cpu(), k, v)

    def test_f64_says_where_it_runs(self):
        with self.assertRaisesRegex(NotImplementedError, "f64 runs on the CPU only"):
            flashcore.attention(*self.inputs(torch.float64))

    def test_streams(self):
        """Each call runs on the current stream: what was queued before it there is done first."""
        q, k, v = self.inputs(torch.float16, q_len=64, kv_len=4096, head_dim=64, v_dim=64)
        want = flashcore.attention(q, k, v)
        torch.cuda.synchronize()
        for _ in range(3):
            stream = torch.cuda.Stream()
            late = torch.full_like(q, float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late.copy_(q)
                got = flashcore.attention(late, k, v)
            stream.synchronize()
            self.assertTrue(torch.equal(got, want))

    def test_graphs(self):
        """Captured once, replayed on new data; split keys use the workspace's counters."""
        q, k, v = self.inputs(torch.bfloat16, q_len=1, kv_len=8192, head_dim=128, v_dim=128)
        used = self.ints(8192, 100)
        call = dict(seqused_k=used, causal=True, q_start=None)
        flashcore.attention(q, k, v, **call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = flashcore.attention(q, k, v, **call)
            second = flashcore.attention(first, k, v, **call)
        for lengths in ((8192, 100), (5, 8192), (4097, 4096)):
            used.copy_(self.ints(*lengths))
            q.copy_(self.draw(*q.shape, dtype=q.dtype))
            graph.replay()
            other = flashcore.attention(q, k, v, **call)  # between replays, on the same memory
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(first, other))
            self.assertTrue(torch.equal(second, flashcore.attention(other, k, v, **call)))

    def test_torch_s_own_capture(self):
        """mode="reduce-overhead" captures the op, after it has run it in the graph's own pool, where
        nothing that FlashCore keeps may lie. Split keys need a workspace of more than its header."""
        if not has_triton():
            self.skipTest("torch's inductor needs Triton for CUDA")
        for q_len, kv_len in ((32, 32), (1, 8192)):
            torch._dynamo.reset()
            compiled = torch.compile(lambda *a: flashcore.attention(*a, causal=True),
                                     fullgraph=True, mode="reduce-overhead")
            inputs = self.inputs(torch.float16, q_len=q_len, kv_len=kv_len, head_dim=64, v_dim=64)
            want = flashcore.attention(*inputs, causal=True)
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                self.assertTrue(torch.equal(compiled(*inputs), want))

    def test_what_is_kept_lies_outside_of_pools(self):
        """A thread may allocate in a pool of its own for a while, as torch does before a capture."""
        q, k, v = self.inputs(torch.float16, q_len=1, kv_len=8192, head_dim=64, v_dim=64)
        want = flashcore.attention(q, k, v, causal=True, q_start=8191)
        kind = _arrays.kind_of("q", q)
        stream, pool = torch.cuda.Stream(), torch.cuda.MemPool()
        stream.wait_stream(torch.cuda.current_stream())
        kind._numbers.clear()
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            got = flashcore.attention(q, k, v, causal=True, q_start=8191)
        stream.synchronize()
        self.assertTrue(torch.equal(got, want))
        blocks = [(segment["address"], segment["address"] + segment["total_size"])
                  for segment in pool.snapshot()]
        inside = [any(low <= address < high for low, high in blocks) for address in (
            got.data_ptr(), *(one[1] for one in kind._workspaces.values()),
            *(one.data_ptr() for one in kind._numbers.values()))]
        self.assertEqual(inside, [True] + [False] * (len(inside) - 1))

    def test_a_gpu_that_is_not_current(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("there is one GPU")
        inputs = self.inputs(torch.float16, q_len=1, kv_len=8192, head_dim=64, v_dim=64)
        want = flashcore.attention(*inputs, causal=True)
        there = [one.to("cuda:1") for one in inputs]
        out = flashcore.attention(*there, causal=True)
        self.assertEqual((str(out.device), torch.cuda.current_device()), ("cuda:1", 0))
        self.assertTrue(torch.equal(out.to("cuda:0"), want))
        with self.assertRaisesRegex(ValueError, "k: is on cuda:1, q is on cuda:0"):
            flashcore.attention(inputs[0], *there[1:])


class Reasons(unittest.TestCase):
    def test_the_reason_for_leaving_cuda_out_is_said(self):
        self.assertEqual(bool(NO_CUDA), not (torch.cuda.is_available()
                                             and flashcore.load().cuda_device_count()[0] > 0))


if __name__ == "__main__":
    unittest.main()
