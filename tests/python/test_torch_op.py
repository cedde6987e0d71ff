"""The ops under torch: opcheck, torch.compile, export, autocast, vmap, tracing."""

import os
import shutil
import subprocess
import sys
import unittest
import warnings

from torch_support import Case, on_every_device

import torch
from torch.autograd import forward_ad

import flashcore
import flashcore.ops  # noqa: F401 (registers torch.ops.flashcore)

_op_plain = torch.ops.flashcore.attention.default
_op = torch.ops.flashcore.attention.options
_op_lse = torch.ops.flashcore.attention_lse.default


@on_every_device
class Op(Case):
    def test_opcheck(self):
        dtype = torch.float32
        for grad in (False, True):
            q, k, v = self.inputs(dtype, grad=grad)
            bias = self.draw(1, 4, 5, 9, grad=grad)
            for op, arguments, options in ((_op_plain, (q, k, v), {}),
                                           (_op_plain, (q, k, v), dict(causal=True, scale=0.5)),
                                           (_op, (q, k, v), {}),
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

    def test_the_overload_that_has_the_arguments(self):
        class Model(torch.nn.Module):
            def __init__(self, **options):
                super().__init__()
                self.options = options

            def forward(self, q, k, v):
                return flashcore.attention(q, k, v, **self.options)

        q, k, v = self.inputs()
        mask = self.draw(5, 9) > -1
        for options, overload in ((dict(causal=True, scale=0.5), "default"),
                                  (dict(causal=True, window=(3, 0)), "options"),
                                  (dict(mask=mask), "options"), (dict(num_splits=2), "options")):
            with self.subTest(str(sorted(options))):
                exported = torch.export.export(Model(**options), (q, k, v))
                self.assertIn(f"flashcore.attention.{overload}]", str(exported.graph))
        packet = torch.ops.flashcore.attention
        self.check(packet(q, k, v, causal=True), self.expected(q, k, v, causal=True)[0])
        self.check(packet(q, k, v, mask=mask), self.expected(
            q, k, v, mask=mask.expand(2, 1, 5, 9))[0])

    def test_none_instead_of_a_tensor(self):
        """None is refused also after a valid call, when the op has a prepared call."""
        one = self.draw(1, 1, 3, 8)
        torch.ops.flashcore.attention(one, one, one)
        for position, name in enumerate("qkv"):
            arguments = [one] * 3
            arguments[position] = None
            with self.subTest(name), self.assertRaisesRegex(TypeError, f"{name}: is a NoneType"):
                torch.ops.flashcore.attention(*arguments)

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
        """The first call of a process is a compiled one, and flashcore is imported before torch."""
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
        """aot_eager traces, decomposes and functionalizes like inductor, but needs no compiler."""
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
        with self.assertRaisesRegex(NotImplementedError, "cu_seqlens_q: vmap over varlen"):
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
            flashcore.attention(q, k, v)  # works without a tangent

    def test_traced_by_torch_jit(self):
        """The traced program contains the call, not its result."""
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


if __name__ == "__main__":
    unittest.main()
