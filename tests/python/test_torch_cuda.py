"""flashcore.attention on CUDA tensors: streams, graphs, memory pools, several GPUs."""

import unittest
from unittest import mock

from torch_support import Case, needs_cuda

import torch
from torch.utils._triton import has_triton

import flashcore
from flashcore._core import arrays


@needs_cuda
class CudaOnly(Case):
    device = "cuda"

    def test_a_call_with_tensors_on_cpu_and_gpu(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(ValueError, "k: is on cpu:0, q is on cuda:0"):
            flashcore.attention(q, k.cpu(), v)
        with self.assertRaisesRegex(ValueError, "k: is on cuda:0, q is on cpu:0"):
            flashcore.attention(q.cpu(), k, v)

    def test_f64_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "f64 runs on the CPU only"):
            flashcore.attention(*self.inputs(torch.float64))

    def test_streams(self):
        """Each call runs on the current stream, after the work queued there."""
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
        """A graph is captured once and replayed on new data. Splits use the workspace's counters."""
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
            other = flashcore.attention(q, k, v, **call)  # between replays, with the same memory
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(first, other))
            self.assertTrue(torch.equal(second, flashcore.attention(other, k, v, **call)))

    def test_reduce_overhead(self):
        """mode="reduce-overhead" runs the op once in the graph's own pool before it captures it. FlashCore
        must not keep memory of that pool. Splits need a workspace that is larger than its header."""
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

    def test_kept_memory_is_outside_of_pools(self):
        """A thread may temporarily allocate in its own pool, as torch does before a capture."""
        q, k, v = self.inputs(torch.float16, q_len=1, kv_len=8192, head_dim=64, v_dim=64)
        want = flashcore.attention(q, k, v, causal=True, q_start=8191)
        adapter = arrays.adapter_of("q", q)
        stream, pool = torch.cuda.Stream(), torch.cuda.MemPool()
        stream.wait_stream(torch.cuda.current_stream())
        adapter._numbers.clear()
        patch = mock.patch.object(adapter, "_graph_headers", {})
        patch.start()
        self.addCleanup(patch.stop)
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            got = flashcore.attention(q, k, v, causal=True, q_start=8191)
        stream.synchronize()
        headers = [memory for one in adapter._graph_headers.values() for memory in one._memory]
        self.assertEqual(len(headers), 1)
        self.assertTrue(torch.equal(got, want))
        blocks = [(segment["address"], segment["address"] + segment["total_size"])
                  for segment in pool.snapshot()]
        inside = [any(low <= address < high for low, high in blocks) for address in (
            got.data_ptr(), *(one[1] for one in adapter._workspaces.values()),
            *(one.data_ptr() for one in adapter._numbers.values()), headers[0].data_ptr())]
        self.assertEqual(inside, [True] + [False] * (len(inside) - 1))

    def test_a_gpu_that_is_not_current(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("there is no second device")
        inputs = self.inputs(torch.float16, q_len=1, kv_len=8192, head_dim=64, v_dim=64)
        want = flashcore.attention(*inputs, causal=True)
        there = [one.to("cuda:1") for one in inputs]
        out = flashcore.attention(*there, causal=True)
        self.assertEqual((str(out.device), torch.cuda.current_device()), ("cuda:1", 0))
        self.assertTrue(torch.equal(out.to("cuda:0"), want))
        with self.assertRaisesRegex(ValueError, "k: is on cuda:1, q is on cuda:0"):
            flashcore.attention(inputs[0], *there[1:])


if __name__ == "__main__":
    unittest.main()
