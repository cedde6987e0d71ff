"""flashcore.attention captured in CUDA graphs. Graphs contain kernels only, and graphs that may run
concurrently do not share counters."""

import ctypes
import gc
import time
import unittest
from typing import NamedTuple
from unittest import mock

from torch_support import Case, needs_cuda

import torch

import flashcore
from flashcore._core import abi
from flashcore._core.arrays import adapter_of
from flashcore._torch import arrays as torch_arrays
from flashcore._torch.graph_headers import HEADERS_AT_ONCE

_KERNEL, _MEMSET = 0, 2  # CU_GRAPH_NODE_TYPE_*


def node_types(graph):
    """The node types of a graph that was captured with keep_graph=True, unordered."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) != 0:
        raise RuntimeError("cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    if count.value and driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) != 0:
        raise RuntimeError("cuGraphGetNodes")
    found = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) != 0:
            raise RuntimeError("cuGraphNodeGetType")
        found.append(kind.value)
    return found


class Problem(NamedTuple):
    inputs: tuple
    options: dict
    counts: bool  # uses counters in the header on Hopper
    kernels: int = 1  # launches of one call

    def run(self):
        return flashcore.attention(*self.inputs, **self.options)


class Captured:
    """A graph of `calls` successive calls of each problem."""

    def __init__(self, *problems, calls=1):
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            self.results = [[one.run() for _ in range(calls)] for one in problems]

    def replay(self, stream=None):
        with torch.cuda.stream(stream or torch.cuda.current_stream()):
            self.graph.replay()

    def forget_results(self):
        for results in self.results:
            for one in results:
                one.fill_(float("nan"))


class Workspaces(unittest.TestCase):
    """Workspaces of captured calls, tested without a GPU: memory is on the CPU, and `capture` replaces
    CUDA's capture id of the stream."""

    capture = 0

    def setUp(self):
        self.adapter = torch_arrays.TorchAdapter()
        self.initialised, self.waited = [], []
        for name, stand_in in (("_capturing", lambda: self.capture != 0),
                               ("_new_bytes", lambda gpu, size: torch.empty(size, dtype=torch.uint8)),
                               ("_outside_pools", self.outside_pools)):
            patch = mock.patch.object(torch_arrays, name, stand_in)
            patch.start()
            self.addCleanup(patch.stop)
        patch = mock.patch.object(self.adapter, "stream", lambda gpu: 1)
        patch.start()
        self.addCleanup(patch.stop)
        self.memory = True

    def outside_pools(self, gpu, make):
        self.assertEqual(self.capture, 0)
        if not self.memory:
            raise torch.cuda.OutOfMemoryError("none")
        return torch.zeros(HEADERS_AT_ONCE * abi.WORKSPACE_HEADER_BYTES, dtype=torch.uint8)

    # Methods of the library and of a prepared call.
    def capture_id(self, gpu, stream, graph_ended=None):
        return self.capture

    def init_workspace(self, address, size, gpu, stream):
        self.initialised.append(address)

    def wait_for_workspace(self, address, size, gpu, stream):
        self.waited.append(address)

    def give(self, size, uses_header, stream=1):
        plan = abi.PlanInfo(workspace_bytes=size, uses_header=uses_header)
        return (self.adapter.captured_workspace(0, stream, plan, self)
                or self.adapter.workspace(0, stream, size, self))

    def test_with_a_warm_up(self):
        header_bytes = abi.WORKSPACE_HEADER_BYTES
        eager = self.give(header_bytes, True)
        self.assertEqual((eager[3], len(self.initialised), len(self.waited)), (None, 1, 1))
        self.assertIsNotNone(self.adapter.ready_workspace(0))
        self.capture = 7
        self.assertIsNone(self.adapter.ready_workspace(0))
        stream, address, size, header, _ = self.give(header_bytes, True)
        self.assertEqual((stream, address, size), (1, None, 0))
        self.assertIsNotNone(header)
        again = self.give(header_bytes + 512, True)
        self.assertEqual((again[1], again[2:4]), (again[4].data_ptr(), (512, header)))
        self.assertNotIn(self.give(header_bytes, True, stream=2)[3], (None, header))
        self.capture = 8
        self.assertNotIn(self.give(header_bytes, True)[3], (None, header))
        self.assertEqual(len(self.initialised), 1)

    def test_without_a_warm_up(self):
        self.capture = 7
        size = abi.WORKSPACE_HEADER_BYTES + 256
        found = self.give(size, True)
        self.assertEqual((found[2:4], self.initialised), ((size, None), [found[1]]))
        found = self.give(size, False)  # needs no initialization
        self.assertEqual((found[2:4], len(self.initialised)), ((size, None), 1))

    def test_more_captures_than_headers(self):
        size = abi.WORKSPACE_HEADER_BYTES
        self.give(size, True)
        found = []
        for self.capture in range(1, HEADERS_AT_ONCE + 2):
            found.append(self.give(size, True)[3])
        self.assertEqual(found.index(None), HEADERS_AT_ONCE)
        self.assertEqual(len(set(found)), HEADERS_AT_ONCE + 1)
        self.assertEqual(len(self.initialised), 2)
        self.capture, self.memory = 0, False
        self.assertIsNone(self.adapter.ready_workspace(0))  # more headers are needed
        self.give(size, True)
        self.assertIsNotNone(self.adapter.ready_workspace(0))  # out of memory: continues without headers
        self.capture = 1000
        self.assertIsNone(self.give(size, True)[3])
        self.capture, self.memory = 0, True
        self.give(size, True)
        self.capture = 1001
        self.assertIsNotNone(self.give(size, True)[3])


@needs_cuda
class Graphs(Case):
    device = "cuda"

    def setUp(self):
        super().setUp()
        self.adapter = adapter_of("q", torch.empty(1))
        self.addCleanup(torch.cuda.synchronize)

    def fresh_headers(self):
        """Restores the state of a process before its first call."""
        for name in ("_graph_headers", "_workspaces"):
            patch = mock.patch.object(self.adapter, name, {})
            patch.start()
            self.addCleanup(patch.stop)

    def headers(self):
        return self.adapter._graph_headers[torch.cuda.current_device()]

    def scheduled(self):
        """More work tiles than SMs: on Hopper, CTAs fetch tiles by a counter in the header."""
        return Problem(self.inputs(torch.bfloat16, batch=2, q_heads=32, kv_heads=32, q_len=2048,
                                   kv_len=2048, head_dim=128, v_dim=128), {"causal": True}, True)

    def last_cta_combined(self):
        """More splits than a cluster has CTAs: the last CTA combines them."""
        return Problem(self.inputs(torch.bfloat16, batch=2, q_heads=32, kv_heads=8, q_len=1,
                                   kv_len=8192, head_dim=128, v_dim=128), {"num_splits": 24}, True)

    def tail_split(self):
        """On Hopper, tiles of the last wave are split along the keys, and arrivals are counted."""
        return Problem(self.inputs(torch.bfloat16, batch=1, q_heads=4, kv_heads=4, q_len=2048,
                                   kv_len=2048, head_dim=128, v_dim=128), {}, True)

    def kernel_combined(self):
        """Splits that a second kernel combines: partial results and no counters."""
        return Problem(self.inputs(torch.float32, q_len=33, kv_len=700, head_dim=64, v_dim=64),
                       {"num_splits": 5}, False, kernels=2)

    def small(self):
        """A call that needs no workspace."""
        return Problem(self.inputs(torch.float16, head_dim=64, v_dim=64), {"num_splits": 1}, False)

    def problems(self):
        return (self.scheduled(), self.last_cta_combined(), self.tail_split(), self.kernel_combined(),
                self.small())

    def expect(self, captured, wanted):
        for results, want in zip(captured.results, wanted, strict=True):
            for one in results:
                self.assertTrue(torch.equal(one, want))

    def test_graphs_contain_kernels_only(self):
        for problem in self.problems():
            want = problem.run()
            captured = Captured(problem, calls=4)
            self.assertEqual(node_types(captured.graph), [_KERNEL] * 4 * problem.kernels)
            for _ in range(20):
                captured.forget_results()
                captured.replay()
                self.expect(captured, [want])

    def test_one_warm_up_is_enough(self):
        """Any call serves as the warm-up."""
        problem = self.scheduled()
        want = problem.run()
        self.fresh_headers()
        self.small().run()
        torch.cuda.synchronize()
        captured = Captured(problem, calls=2)
        self.assertEqual(node_types(captured.graph), [_KERNEL] * 2)
        captured.replay()
        self.expect(captured, [want])

    def test_without_a_warm_up(self):
        """Results are correct: calls that need a header zero it in the graph."""
        for problem in self.problems():
            want = problem.run()
            with self.subTest(str(problem.options)):
                with mock.patch.object(self.adapter, "_graph_headers", {}):
                    captured = Captured(problem, calls=3)
                    self.assertEqual(self.adapter._graph_headers, {})
                types = node_types(captured.graph)
                self.assertEqual(types.count(_KERNEL), 3 * problem.kernels)
                if torch.cuda.get_device_capability() == (9, 0):
                    self.assertEqual(types.count(_MEMSET), 3 * problem.counts)
                for _ in range(5):
                    captured.forget_results()
                    captured.replay()
                    self.expect(captured, [want])

    def test_a_plan_without_counters_never_needs_a_memset(self):
        self.fresh_headers()
        for problem in (self.kernel_combined(), self.small()):
            captured = Captured(problem)
            self.assertEqual(node_types(captured.graph), [_KERNEL] * problem.kernels)
            captured.replay()
            self.expect(captured, [problem.run()])

    def test_two_graphs_at_once(self):
        for make in (self.scheduled, self.last_cta_combined, self.tail_split):
            problems = make(), make()
            wanted = [one.run() for one in problems]
            graphs = [Captured(one, calls=10) for one in problems]
            streams = torch.cuda.Stream(), torch.cuda.Stream()
            for _ in range(10):
                for one in graphs:
                    one.forget_results()
                torch.cuda.synchronize()
                for _ in range(5):
                    for one, stream in zip(graphs, streams):
                        one.replay(stream)
                torch.cuda.synchronize()
                for one, want in zip(graphs, wanted):
                    self.expect(one, [want])

    def test_concurrent_calls_outside_of_graphs(self):
        """Calls on another stream, and on the stream of the capture."""
        for make in (self.scheduled, self.last_cta_combined, self.tail_split):
            inside, outside = make(), make()
            wanted = inside.run(), outside.run()
            captured = Captured(inside, calls=10)
            replays = torch.cuda.Stream()
            for stream in (torch.cuda.Stream(), torch.cuda.graph.default_capture_stream):
                for _ in range(10):
                    captured.forget_results()
                    torch.cuda.synchronize()
                    results = []
                    for _ in range(5):
                        captured.replay(replays)
                        with torch.cuda.stream(stream):
                            results += [outside.run() for _ in range(10)]
                    torch.cuda.synchronize()
                    self.expect(captured, wanted[:1])
                    for one in results:
                        self.assertTrue(torch.equal(one, wanted[1]))

    def test_streams_that_fork_inside_a_capture(self):
        for make in (self.scheduled, self.last_cta_combined):
            here, there = make(), make()
            wanted = here.run(), there.run()
            torch.cuda.synchronize()
            before = set(self.headers()._taken)
            graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
            with torch.cuda.graph(graph):
                results = [[here.run()], []]
                side.wait_stream(torch.cuda.current_stream())
                for _ in range(10):
                    results[0].append(here.run())
                    with torch.cuda.stream(side):
                        results[1].append(there.run())
                torch.cuda.current_stream().wait_stream(side)
            self.assertEqual(node_types(graph).count(_MEMSET), 0)
            captures = [capture for capture, _ in set(self.headers()._taken) - before]
            self.assertEqual(captures, captures[:1] * 2)  # one header for each stream
            for _ in range(20):
                for one in (*results[0], *results[1]):
                    one.fill_(float("nan"))
                graph.replay()
                torch.cuda.synchronize()
                for found, want in zip(results, wanted):
                    for one in found:
                        self.assertTrue(torch.equal(one, want))

    def wait_for(self, condition):
        """Waits for a condition: CUDA reports destroyed graphs asynchronously."""
        until = time.monotonic() + 20
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        self.assertTrue(condition())

    def test_a_graph_destroyed_and_another_captured(self):
        problem = self.scheduled()
        self.fresh_headers()
        want = problem.run()
        first = Captured(problem, calls=3)
        header, = self.headers()._taken.values()
        for _ in range(3):
            first.replay()
        self.expect(first, [want])
        del first
        gc.collect()
        torch.cuda.synchronize()
        self.wait_for(lambda: self.headers()._ended[header].value == 1)
        other = self.last_cta_combined()
        wanted = problem.run(), other.run()
        second = Captured(problem, other, calls=3)
        self.assertEqual(node_types(second.graph), [_KERNEL] * 6)
        self.assertEqual(list(self.headers()._taken.values()), [header])  # the header is reused
        for _ in range(20):
            second.forget_results()
            second.replay()
            self.expect(second, wanted)

    def test_a_live_graph_keeps_its_header(self):
        """An executable graph keeps the header after the captured graph is destroyed, as by default."""
        problem = self.last_cta_combined()
        want = problem.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = problem.run()
        header = list(self.headers()._taken.values())[-1]
        time.sleep(0.2)
        self.assertEqual(self.headers()._ended[header].value, 0)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(result, want))
        self.assertEqual(self.headers()._ended[header].value, 0)

    def test_more_graphs_than_headers(self):
        """Graphs without a header zero their own. The next call outside a capture adds headers."""
        problem = self.last_cta_combined()
        self.fresh_headers()
        want = problem.run()
        graphs = [Captured(problem) for _ in range(HEADERS_AT_ONCE + 2)]
        memsets = [node_types(one.graph).count(_MEMSET) for one in graphs]
        self.assertEqual(memsets, [0] * HEADERS_AT_ONCE + [1, 1])
        self.assertIsNone(self.adapter.ready_workspace(torch.cuda.current_device()))
        self.assertTrue(torch.equal(problem.run(), want))
        self.assertIsNotNone(self.adapter.ready_workspace(torch.cuda.current_device()))
        graphs.append(Captured(problem))
        self.assertEqual(node_types(graphs[-1].graph), [_KERNEL])
        streams = [torch.cuda.Stream() for _ in range(8)]
        for _ in range(5):
            for one in graphs:
                one.forget_results()
            torch.cuda.synchronize()
            for i, one in enumerate(graphs):
                one.replay(streams[i % len(streams)])
            torch.cuda.synchronize()
            for one in graphs:
                self.expect(one, [want])
        headers = self.headers()._taken.values()
        self.assertEqual(len(set(headers)), len(headers))
        del one
        graphs.clear()

    def test_headers_stay_zero(self):
        problems = self.scheduled(), self.last_cta_combined(), self.tail_split()
        self.fresh_headers()
        for one in problems:
            one.run()
        graphs = [Captured(one, calls=3) for one in problems]
        for _ in range(10):
            for one in graphs:
                one.replay()
        torch.cuda.synchronize()
        memory, = self.headers()._memory
        self.assertEqual(int(torch.count_nonzero(memory)), 0)
        del one
        graphs.clear()


if __name__ == "__main__":
    unittest.main()
