"""Fast paths from a torch tensor into the library: results that the library allocates, and calls without
gradients. Each must give the result of the general path, and must not be taken for unsupported calls."""

import os
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

from torch_support import Case, on_every_device

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashcore
from flashcore import _backward
from flashcore._attention import DEFAULTS
from flashcore._core import arrays, backward_call, call_cache, execute
from flashcore._core.options import NO_WINDOW, OPTIONS
from flashcore._torch import dispatch, gradients, kernels, library as torch_library

_op = torch.ops.flashcore.attention
_DEFAULTS = tuple(DEFAULTS[name] for name in OPTIONS)


@on_every_device
class AllocatedByTheLibrary(Case):
    def setUp(self):
        super().setUp()
        self.q, self.k, self.v = self.inputs(v_dim=16)
        self.adapter = arrays.adapter_of("q", self.q)
        if self.adapter.reader is None:
            self.skipTest("this torch has no C exchange API of DLPack")
        self.want = self.expected(self.q, self.k, self.v)[0]
        flashcore.attention(self.q, self.k, self.v)  # makes a workspace

    def run_new(self, q, k, v):
        call = execute.prepared_call(self.adapter, _DEFAULTS)
        return execute.run_new(self.adapter, call, q, k, v)

    def test_taken(self):
        made = self.run_new(self.q, self.k, self.v)
        self.check(made, self.want)
        swapped = self.q.transpose(1, 2).contiguous().transpose(1, 2)
        made = self.run_new(swapped, self.k, self.v)
        self.check(made, self.want)
        self.assertEqual(made.stride(), swapped.stride())

    def test_not_taken(self):
        q, k, v = self.q, self.k, self.v
        self.assertIsNone(self.run_new(q, k, v[..., :8]))  # the result is not like q
        self.assertIsNone(self.run_new(q, k[..., :8], v))  # invalid: Python reports the error
        self.assertIsNone(self.run_new(q, k.cpu().numpy(), v))
        self.assertIsNone(self.run_new(q, None, v))
        call = execute.prepared_call(self.adapter, _DEFAULTS)
        call.busy = True
        self.addCleanup(setattr, call, "busy", False)
        self.assertIsNone(execute.run_new(self.adapter, call, q, k, v))
        self.check(flashcore.attention(q, k, v), self.want)  # with another prepared call

    def test_after_a_captured_call(self):
        """A later call must not use the header of the captured call."""
        call = execute.prepared_call(self.adapter, _DEFAULTS)
        call._use((None, None, 0, 1 << 20, None))
        call._workspace = None  # as PreparedCall.run() leaves it
        made = execute.run_new(self.adapter, call, self.q, self.k, self.v)
        self.assertIsNotNone(made)
        self.check(made, self.want)

    def test_a_larger_workspace(self):
        """A call prepared with a small workspace uses the larger one that replaced it."""
        with mock.patch.object(call_cache.thread_state, "workspace", call_cache._CpuWorkspace()), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            for kv_len in (9, 5000, 9):
                q, k, v = self.inputs(q_len=1, kv_len=kv_len, v_dim=16)
                for _ in range(2):
                    self.check(flashcore.attention(q, k, v), self.expected(q, k, v)[0])

    def test_another_call_during_the_allocation(self):
        """A nested call, as from a finalizer, needs the same prepared call."""
        read, empty_like = self.adapter.reader
        other = self.draw(*self.q.shape)
        inner = []

        def make(q):
            if not inner:
                inner.append(None)
                inner[0] = flashcore.attention(other, self.k, self.v)
            return empty_like(q)

        with mock.patch.object(self.adapter, "reader", (read, make)), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            flashcore.attention(self.q, self.k, self.v)  # prepares the call, in Python
            inner.clear()
            outer = flashcore.attention(self.q, self.k, self.v)
        self.check(outer, self.want)
        self.check(inner[0], self.expected(other, self.k, self.v)[0])

    def test_a_failed_allocation(self):
        read, _ = self.adapter.reader

        def fail(q):
            raise RuntimeError("no memory")

        with mock.patch.object(self.adapter, "reader", (read, fail)), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            for _ in range(2):
                self.check(flashcore.attention(self.q, self.k, self.v), self.want)

    def test_the_op_in_another_thread(self):
        """Each thread prepares its own call of the op, and takes the general path if needed."""
        def through_op():
            made.append(_op(self.q, self.k, self.v))
            new.append(kernels._short_call.new)

        made, new = [], []
        through_op()
        thread = threading.Thread(target=through_op)
        thread.start()
        thread.join()
        self.assertIsNot(new[0], new[1])
        with mock.patch.object(self.adapter, "reader", None):
            thread = threading.Thread(target=through_op)
            thread.start()
            thread.join()
        self.assertIsNone(new[2](self.q, self.k, self.v))
        self.assertEqual(len(made), 3)
        for one in made:
            self.check(one, self.want)


@on_every_device
class WithoutGradients(Case):
    def test_the_kernel_of_each_call(self):
        """Calls with gradients are recorded; only unusual calls go through torch's own autograd kernel."""
        self.assertTrue(torch_library.DIRECT_KEYSETS)
        taken = []
        autograd = torch_library.only_for_gradients(
            lambda keyset, *arguments, **options: taken.append("torch's"),
            lambda q, k, v, tensors, options: taken.append("recorded"),
            lambda q, k, v, *tensors, **options: taken.append("kernel"))
        library = torch.library.Library("flashcore_test_" + self.device, "DEF")
        library.define(f"call({torch_library.COMMON_SCHEMA}) -> Tensor")
        seen = []
        library.impl("call", lambda keyset, *a, **o: seen.append(keyset) or a[0], "Autograd",
                     with_keyset=True)
        call = getattr(torch.ops, "flashcore_test_" + self.device).call.default
        q, k, v = self.inputs()
        bias = self.draw(1, 1, 5, 9, grad=True)
        negative = torch.complex(q, q).conj().imag
        for inputs, wanted in (
                ((q, k, v), "kernel"), ((q.clone().requires_grad_(), k, v), "recorded"),
                ((q, k, v, None, None, bias), "recorded"), ((negative, k, v), "torch's")):
            call(*inputs)
            autograd(seen[-1], *inputs)
            self.assertEqual(taken.pop(), wanted)
        with torch.no_grad():
            autograd(seen[0], q.clone().requires_grad_(), k, v)
        self.assertEqual(taken, ["kernel"])
        library._destroy()

    def test_both_paths_give_the_same_result(self):
        q, k, v = self.inputs()
        bias = self.draw(1, 1, 5, 9)
        for keysets in (torch_library.DIRECT_KEYSETS, frozenset()):
            with mock.patch.object(torch_library, "DIRECT_KEYSETS", keysets):
                self.check(_op(q, k, v), self.expected(q, k, v)[0])
                self.check(_op(q, k, v, None, None, bias, causal=True),
                           self.expected(q, k, v, bias=bias.expand(2, 4, 5, 9), causal=True)[0])
                wanting = q.clone().requires_grad_()
                self.assertTrue(_op(wanting, k, v).requires_grad)
                with torch.no_grad():
                    self.assertFalse(_op(wanting, k, v).requires_grad)


class _Ops(TorchDispatchMode):
    """The names of the ops that torch sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def weight_of(one):
    """Numbers in no simple pattern, in the shape of a tensor."""
    made = torch.arange(one.numel(), device=one.device, dtype=torch.float64).square().cos()
    return made.view(one.shape).to(one.dtype)


@on_every_device
class RecordedGradients(Case):
    """The gradients of _torch.gradients have the bits of those of the ops."""

    def cases(self):
        """(name, inputs, optional tensors, options)"""
        rows = torch.tensor([0, 3, 10], dtype=torch.int32, device=self.device)
        varlen = [self.draw(10, heads, 16) for heads in (4, 2, 2)]
        plain = self.inputs(v_dim=16)
        swapped = [one.transpose(1, 2) for one in plain]
        mask = self.draw(2, 1, 5, 9) > -1
        mask[..., 0] = True
        yield "q, k and v", plain, {}, {}
        yield "causal", plain, {}, dict(causal=True, scale=0.3)
        yield "a narrow v", self.inputs(v_dim=8), {}, dict(causal=True)
        yield "window and softcap", plain, {}, dict(window=(3, 1), softcap=2.0)
        yield "batch invariant", plain, {}, dict(reproducibility="batch_invariant", num_splits=1)
        yield "bshd", swapped, {}, dict(layout="bshd", causal=True)
        yield "half", [one.half() for one in plain], {}, dict(causal=True)
        yield "partial", plain, {}, dict(partial=True)
        yield "sinks", plain, dict(sinks=self.draw(4)), {}
        yield "bias", plain, dict(bias=self.draw(1, 4, 5, 9)), {}
        yield "one bias for all keys", plain, dict(bias=self.draw(2, 4, 5, 1)), {}
        yield "mask", plain, dict(mask=mask), {}
        yield "a start", plain, {}, dict(causal=True, q_start=3)
        yield "lengths", plain, dict(seqused_k=self.ints(4, 9)), dict(causal=True)
        yield "varlen", varlen, dict(cu_seqlens_q=rows, cu_seqlens_k=rows), dict(causal=True)

    def gradients(self, inputs, tensors, options, function=flashcore.attention, with_lse=False):
        """The results and the gradients of all floating-point tensors."""
        named = {name: one.detach().clone() if one.dtype in (torch.bool, torch.int32) else
                 one.detach().requires_grad_() for name, one in tensors.items()}
        leaves = [one.detach().requires_grad_() for one in inputs]
        made = function(*leaves, **named, **options, **({"return_lse": True} if with_lse else {}))
        outs = made if isinstance(made, tuple) else (made,)
        weights = [weight_of(one) for one in outs]
        leaves += [one for one in named.values() if one.requires_grad]
        return [*outs, *torch.autograd.grad(outs, leaves, weights)]

    def through_the_op(self, *arguments, **options):
        with mock.patch.object(dispatch, "recorded", dispatch.attention), \
                mock.patch.object(torch_library, "DIRECT_KEYSETS", frozenset()):
            return self.gradients(*arguments, **options)

    def assert_same(self, got, want):
        self.assertEqual(len(got), len(want))
        for one, other in zip(got, want):
            self.assertTrue(torch.equal(one, other))

    def test_bits(self):
        for name, inputs, tensors, options in self.cases():
            for with_lse in (False, True):
                with self.subTest(name, lse=with_lse):
                    want = self.through_the_op(inputs, tensors, options, with_lse=with_lse)
                    for _ in range(2):  # the second call finds everything prepared
                        self.assert_same(self.gradients(inputs, tensors, options, with_lse=with_lse), want)

    def test_f64(self):
        if self.device == "cuda":
            self.skipTest("f64 is for the CPU")
        inputs = self.inputs(torch.float64)
        self.assert_same(self.gradients(inputs, {}, {}), self.through_the_op(inputs, {}, {}))

    def test_it_is_prepared(self):
        """After the first call, no call needs Python's descriptors, however few gradients it wants."""
        for name, inputs, tensors, options in self.cases():
            if name in ("bias", "one bias for all keys", "a start"):
                continue  # a gradient of another shape; a number for each sequence
            self.gradients(inputs, tensors, options)
            with self.subTest(name), mock.patch.object(_backward, "_Call", side_effect=AssertionError), \
                    mock.patch.object(gradients, "through_op", side_effect=AssertionError):
                self.gradients(inputs, tensors, options)

    def test_subsets(self):
        inputs = self.inputs()
        whole = self.gradients(inputs, {}, {})[1:]
        for wanted in range(1, 8):
            leaves = [one.detach().requires_grad_(bool(wanted >> i & 1)) for i, one in enumerate(inputs)]
            out = flashcore.attention(*leaves)
            out.backward(weight_of(out))
            for leaf, want in zip(leaves, whole):
                self.assertEqual(leaf.grad is not None, leaf.requires_grad)
                if leaf.requires_grad:
                    self.assertTrue(torch.equal(leaf.grad, want))

    def test_layouts(self):
        """A gradient has the strides of its input, so that no copy follows."""
        inputs = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in self.inputs(v_dim=16)]
        for options in ({}, dict(causal=True)):
            for _ in range(2):
                for one, grad in zip(inputs, self.gradients(inputs, {}, options)[1:]):
                    self.assertEqual(one.stride(), grad.stride())
        q, k, v = self.inputs(v_dim=16, kv_heads=1)
        wide = k.expand(2, 4, 9, 16), v.expand(2, 4, 9, 16), q.transpose(2, 3).contiguous().transpose(2, 3)
        made = self.gradients((wide[2], *wide[:2]), {}, {})
        self.assert_same(made, self.through_the_op((wide[2], *wide[:2]), {}, {}))
        for grad in made[1:]:
            self.assertEqual(grad.stride(-1), 1)

    def test_to_rows(self):
        """[batch, heads, len, dim] to [batch, len, heads, dim], without a copy."""
        for inputs in (self.inputs(v_dim=16), [one.transpose(1, 2).contiguous().transpose(1, 2)
                                               for one in self.inputs(v_dim=16)], self.inputs(v_dim=8)):
            want = self.gradients(inputs, {}, dict(causal=True))

            def to_rows(*leaves):
                out = dispatch.to_rows(*leaves, True, NO_WINDOW, None, 0.0)
                self.assertTrue(out.is_contiguous())
                return out.transpose(1, 2)

            for _ in range(2):
                self.assert_same(self.gradients(inputs, {}, {}, to_rows), want)
                with torch.no_grad():
                    self.assertTrue(torch.equal(to_rows(*inputs), want[0]))
        with torch.autocast(self.device, torch.bfloat16):
            self.assertIsNone(dispatch.to_rows(*inputs, True, NO_WINDOW, None, 0.0))

    def test_options_are_still_checked(self):
        inputs = self.inputs(grad=True)
        flashcore.attention(*inputs, max_q_len=1, window=(1, 0))
        for options in (dict(max_q_len=True), dict(max_q_len=1.0), dict(window=(True, 0)),
                        dict(window=(1.0, 0))):
            with self.subTest(str(options)), self.assertRaises(TypeError):
                flashcore.attention(*inputs, **{"max_q_len": 1, "window": (1, 0)} | options)

    def test_errors(self):
        q, k, v = self.inputs(grad=True)
        with self.assertRaisesRegex(ValueError, "^k: "):
            flashcore.attention(q, k[..., :8], v)
        with self.assertRaisesRegex(NotImplementedError, "alibi_slopes: requires grad"):
            flashcore.attention(q, k, v, alibi_slopes=self.draw(4, grad=True)).sum().backward()
        out = flashcore.attention(q, k, v)
        grad, = torch.autograd.grad(out.sum(), q, create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "second derivative"):
            grad.sum().backward()
        changed = v * 1
        out = flashcore.attention(q, k, changed)
        changed.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            out.sum().backward()

    def test_what_torch_must_see(self):
        """A mode in the backward pass sees the op. So does the backward of vectorized gradients."""
        inputs = self.inputs(grad=True)
        want = torch.autograd.grad(flashcore.attention(*inputs).sum(), inputs)
        out = flashcore.attention(*inputs).sum()
        with _Ops() as seen:
            got = torch.autograd.grad(out, inputs)
        self.assertIn("flashcore.attention_backward.default", seen.names)
        self.assert_same(got, want)
        with _Ops() as seen:
            flashcore.attention(*inputs)
        self.assertIn("flashcore.attention_lse.default", seen.names)
        out = flashcore.attention(*inputs)
        weights = self.draw(3, *out.shape)
        got = torch.autograd.grad(out, inputs, weights, is_grads_batched=True)
        each = [torch.autograd.grad(flashcore.attention(*inputs), inputs, one) for one in weights]
        self.assert_same(got, [torch.stack(one) for one in zip(*each)])

    def test_tensors_without_plain_memory(self):
        q, k, v = self.inputs(v_dim=16, grad=True)
        nested = torch.nested.nested_tensor([self.draw(4, 5, 16), self.draw(4, 3, 16)], requires_grad=True)
        for inputs in ((nested, nested, nested), (q, nested, v)):
            with self.assertRaisesRegex(NotImplementedError, "is a nested tensor"):
                flashcore.attention(*inputs)
        with self.assertRaisesRegex(NotImplementedError, "v: layout is torch.sparse_coo"):
            flashcore.attention(q, k, v.detach().to_sparse().requires_grad_())
        q, k, v = (one.detach().to("meta").requires_grad_() for one in (q, k, v))
        out = flashcore.attention(q, k, v)
        self.assertEqual((out.device.type, out.shape), ("meta", q.shape))
        self.assertEqual(torch.autograd.grad(out.sum(), k)[0].shape, k.shape)

    def test_hooks_and_checkpoints(self):
        inputs = self.inputs(grad=True)
        want = torch.autograd.grad(flashcore.attention(*inputs).sum(), inputs)
        with torch.autograd.graph.save_on_cpu():
            out = flashcore.attention(*inputs)
        self.assert_same(torch.autograd.grad(out.sum(), inputs), want)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.unsqueeze(0), lambda one: one[0]):
            out = flashcore.attention(*inputs)
        self.assert_same(torch.autograd.grad(out.sum(), inputs), want)
        out = torch.utils.checkpoint.checkpoint(flashcore.attention, *inputs, use_reentrant=False)
        self.assert_same(torch.autograd.grad(out.sum(), inputs), want)

    def test_autocast(self):
        """Autocast casts f32, through the op. Tensors that have its dtype are recorded as without it."""
        inputs = self.inputs(torch.bfloat16)
        want = self.gradients(inputs, {}, dict(causal=True))
        other = "cpu" if self.device == "cuda" else "cuda"
        for one, leaves, seen in ((self.device, inputs, True), (self.device, self.inputs(), False),
                                  (other, self.inputs(), True)):
            way = mock.Mock(wraps=dispatch.recorded)
            with mock.patch.object(dispatch, "recorded", way), torch.autocast(one, torch.bfloat16):
                made = self.gradients(leaves, {}, dict(causal=True))
            self.assertEqual(way.called, seen)
            if leaves is inputs:
                self.assert_same(made, want)
        self.assertIs(made[0].dtype, torch.float32)  # under the other device's autocast

    def test_a_negative_gradient(self):
        inputs = self.inputs(grad=True)
        out = flashcore.attention(*inputs)
        weight = self.draw(*out.shape)
        negative = torch.complex(weight, -weight).conj().imag
        self.assertTrue(negative.is_neg())
        self.assert_same(torch.autograd.grad(out, inputs, negative, retain_graph=True),
                         torch.autograd.grad(out, inputs, weight))

    def test_a_call_in_use(self):
        """A call inside the allocation of another one's gradients, as from a finalizer."""
        inputs = self.inputs(grad=True)

        def grads():
            with torch.enable_grad():
                return torch.autograd.grad(flashcore.attention(*inputs).sum(), inputs)

        want, inner, make = grads(), [], arrays.adapter_of("q", inputs[0]).empty_gradient

        def empty_gradient(one):
            if not inner:
                inner.append(None)
                inner[0] = grads()
            return make(one)

        with mock.patch.object(arrays.adapter_of("q", inputs[0]), "empty_gradient", empty_gradient):
            self.assert_same(grads(), want)
        self.assert_same(inner[0], want)

    def test_without_the_exchange_api(self):
        inputs = self.inputs()
        want = self.gradients(inputs, {}, {})
        with mock.patch.object(arrays.adapter_of("q", inputs[0]), "reader", None), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            self.assert_same(self.gradients(inputs, {}, {}), want)

    def test_threads(self):
        """Each thread prepares its own calls."""
        inputs = self.inputs()
        want, made = self.gradients(inputs, {}, {}), []
        threads = [threading.Thread(target=lambda: made.append(self.gradients(inputs, {}, {})))
                   for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(len(made), 3)
        for one in made:
            self.assert_same(one, want)

    def test_a_larger_workspace(self):
        with mock.patch.object(call_cache.thread_state, "workspace", call_cache._CpuWorkspace()), \
                mock.patch.object(call_cache.thread_state, "calls", {}):
            for kv_len in (9, 700, 9):
                inputs = self.inputs(q_len=3, kv_len=kv_len)
                want = self.through_the_op(inputs, {}, {})
                for _ in range(2):
                    self.assert_same(self.gradients(inputs, {}, {}), want)


@on_every_device
class PreparedBackward(Case):
    """attention_backward() itself."""

    def test_prepared_calls_give_the_same_bits(self):
        q, k, v = self.inputs(torch.float16, v_dim=16)
        sinks, dlse = self.draw(4), self.draw(2, 4, 5)
        out, lse = flashcore.attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
        dout = self.draw(*out.shape, dtype=out.dtype)
        for options in (dict(), dict(dlse=dlse), dict(wanted=("k", "sinks")), dict(global_lse=True),
                        dict(wanted=()), dict(grad_dtype="f32")):
            options |= dict(sinks=sinks, causal=True)
            with mock.patch.object(_backward, "_run_prepared", return_value=None):
                want = flashcore.attention_backward(dout, q, k, v, out, lse, **options)
            for _ in range(2):
                got = flashcore.attention_backward(dout, q, k, v, out, lse, **options)
                self.assertEqual(len(got), len(want))
                for one, other in zip(got, want):
                    self.assertEqual(one.dtype, other.dtype)
                    self.assertTrue(torch.equal(one, other))

    def test_not_taken(self):
        q, k, v = self.inputs()
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        run = mock.Mock(wraps=backward_call.run_backward)
        with mock.patch.object(_backward, "run_backward", run):
            flashcore.attention_backward(out, q, k, v, out, lse)
            self.assertEqual(run.call_count, 1)
            flashcore.attention_backward(out, q, k, v, out, lse, bias=self.draw(1, 4, 5, 9),
                                         wanted=("bias",))
            flashcore.attention_backward(out, q, k, v, out, lse, wanted=("q", "q"))
            for mistake in (dict(wanted=("x",)), dict(wanted=("sinks",)), dict(global_lse=2),
                            dict(window=(1,)), dict(softcap="x"), dict(grad_dtype="f16")):
                with self.subTest(str(mistake)), self.assertRaises((TypeError, ValueError)):
                    flashcore.attention_backward(out, q, k, v, out, lse, **mistake)
            self.assertEqual(run.call_count, 1)
            with self.assertRaisesRegex(ValueError, "^dout: "):
                flashcore.attention_backward(out[:, :, :4], q, k, v, out, lse)


class HostTime(unittest.TestCase):
    def test_figures(self):
        tree = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, tree / "bench" / "torch_host_time.py", "--device", "cpu", "--dtype", "float32", "--shape",
             "1", "4", "8", "16", "--kv-heads", "2", "--calls", "2", "--rounds", "2"],
            text=True, env={**os.environ, "PYTHONPATH": str(tree / "python")}, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual([one.split()[0] for one in lines[:3]], ["sdpa", "flashcore", "of"])
        for one in lines:
            self.assertRegex(one, r"forward +\d+\.\d, backward +\d+\.\d" + (
                "$" if "library" in one else r", both +\d+\.\d$"))


if __name__ == "__main__":
    unittest.main()
