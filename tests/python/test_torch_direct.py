"""Fast paths from a torch tensor into the library: results that the library allocates, and calls without
gradients. Each must give the result of the general path, and must not be taken for unsupported calls."""

import threading
import unittest
from unittest import mock

from torch_support import Case, on_every_device

import torch

import flashcore
from flashcore._attention import DEFAULTS
from flashcore._core import arrays, call_cache, execute
from flashcore._core.options import OPTIONS
from flashcore._torch import kernels, library as torch_library

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
    def test_the_autograd_kernel_is_called_for_gradients_only(self):
        self.assertTrue(torch_library.DIRECT_KEYSETS)
        recorded = []

        def record(keyset, *arguments, **options):
            recorded.append(arguments)
            return "recorded"

        autograd = torch_library.only_for_gradients(record, torch_library.KERNELS["attention"])
        library = torch.library.Library("flashcore_test_" + self.device, "DEF")
        library.define(f"call({torch_library.COMMON_SCHEMA}) -> Tensor")
        seen = []
        library.impl("call", lambda keyset, *a, **o: seen.append(keyset) or a[0], "Autograd",
                     with_keyset=True)
        call = getattr(torch.ops, "flashcore_test_" + self.device).call.default
        q, k, v = self.inputs()
        bias = self.draw(1, 1, 5, 9, grad=True)
        negative = torch.complex(q, q).conj().imag
        for inputs, wanted in (((q, k, v), False), ((q.clone().requires_grad_(), k, v), True),
                               ((q, k, v, None, None, bias), True), ((negative, k, v), True)):
            call(*inputs)
            autograd(seen[-1], *inputs)
            self.assertEqual(len(recorded), int(wanted))
            recorded.clear()
        with torch.no_grad():
            autograd(seen[0], q.clone().requires_grad_(), k, v)
        self.assertEqual(recorded, [])
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


if __name__ == "__main__":
    unittest.main()
