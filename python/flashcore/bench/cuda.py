"""One benchmark case on a GPU through torch.

flashcore.attention, the C call below it, and every peer are captured in CUDA graphs, which are replayed in
turns on one stream.
"""

import ctypes
import time
from typing import Any

from flashcore._core import abi
from flashcore.bench import peers as bench_peers, reference, timing
from flashcore.bench.peers_base import first_line, off_by, usable
from flashcore._attention import attention
from flashcore.bench.inputs import DTYPES, Codes, Inputs
from flashcore.bench.tolerance import arithmetic_of, compare, probability_dtype
from flashcore.quant import Quantized

_BITS = {"f32": "int32", "f16": "int16", "bf16": "int16"}
_ROTATED_BYTES = 300e6  # cold-L2 cases read this much before they reuse an input
_MAX_SETS = 512
_SAMPLE_US = 200
_SLEEP_CYCLES = 1_000_000  # half a millisecond, in which the host queues a sample
_MIN_REST_S = 2e-3


class Runner:
    """A graph of `calls` calls, and its time. `result` is the result of the last call, which uses the last
    input set, because all sets are used equally often. The graph owns its memory."""

    busy_s = 0.0  # GPU time of the previous sample

    def __init__(self, torch, stream, call, calls, sets):
        self.torch, self.stream, self.calls = torch, stream, calls
        self.graph = torch.cuda.CUDAGraph()
        self.result: Any = None
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(calls):
                    self.result = None  # the next call can reuse its memory
                    self.result = call(number % sets)
            finally:
                self.graph.capture_end()
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def replay(self):
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()

    def us_per_call(self):
        """The time of one replay without idle time before it."""
        with self.torch.cuda.stream(self.stream):
            self.begin.record(self.stream)
            self.graph.replay()
            self.end.record(self.stream)
        self.stream.synchronize()
        return 1e3 * self.begin.elapsed_time(self.end) / self.calls

    def sample(self):
        """us per call after an idle time as long as a sample. Without it, the previous load would decide
        how much of the power budget is left. The replays are queued behind a short sleep kernel, so that
        they do not wait for the host. The first replay is not timed, because it is slower after idling."""
        time.sleep(max(_MIN_REST_S, self.busy_s))
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
        self.replay()
        us = self.us_per_call()
        self.busy_s = 2e-6 * us * self.calls
        return us

    def recomputed(self):
        """The result of one more replay into NaN-filled memory. It stays NaN if the work was not captured,
        for example because a call used its own stream."""
        found = self.result[0] if isinstance(self.result, tuple) else self.result
        with self.torch.cuda.stream(self.stream), self.torch.inference_mode():
            found.fill_(float("nan"))
        self.replay()
        self.stream.synchronize()
        return self.result


class CudaCase:
    """A case in GPU memory that can be checked and timed."""

    device = "cuda"
    call = "flashcore.attention"  # the call that a row's `us` measures

    def __init__(self, library, case, torch, seed=1, kernel=None, peers=()):
        """peers: keys of bench.peers.known()."""
        self.library, self.case, self.torch, self.peers = library, case, torch, peers
        self.kernel = kernel
        self.stream = torch.cuda.Stream()
        sets = 1
        if case.cold_l2:
            sets = int(min(max(-(-_ROTATED_BYTES // case.input_bytes()), 1), _MAX_SETS))
        self.inputs: Any = Inputs(torch, case, "cuda", sets, seed)
        self.out = [torch.full(case.out_shape, float("nan"), device="cuda",
                               dtype=getattr(torch, DTYPES[case.out_dtype]))
                    for _ in range(sets)]
        self.lse = torch.full(case.lse_shape, float("nan"), device="cuda", dtype=torch.float32)
        self.params = [self._describe(index, kernel) for index in range(sets)]
        self.plan = library.plan(self.params[0])
        # One workspace is enough, because the calls of a stream run in order.
        self.workspace = torch.full((self.plan.workspace_bytes,), 255, device="cuda",
                                    dtype=torch.uint8)
        for params in self.params:
            params.workspace = self.workspace.data_ptr()
            params.workspace_bytes = self.plan.workspace_bytes
            params.stream = self.stream.cuda_stream
        torch.cuda.synchronize()
        library.workspace_init(self.workspace.data_ptr(), self.plan.workspace_bytes, abi.CUDA, 0,
                               self.stream.cuda_stream)
        self.peers_note = {}
        self._references = {}
        self._runners = {}

    def close(self):
        """Frees the memory before the next case."""
        self._runners = {}
        self.inputs = self.workspace = None
        self.out = []
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def _describe(self, index, kernel):
        params = self.library.params()
        case, inputs = self.case, self.inputs
        for name, one, dtype in (("q", inputs.q[index], case.q_dtype),
                                 ("k", inputs.k[index], case.kv_dtype),
                                 ("v", inputs.v[index], case.kv_dtype),
                                 ("out", self.out[index], case.out_dtype)):
            if isinstance(one, Codes):
                setattr(params, name + "_scale", ctypes.pointer(
                    abi.tensor(one.scale.data_ptr(), tuple(one.scale.shape), "f32", abi.CUDA)))
                one = one.codes
            setattr(params, name, ctypes.pointer(
                abi.tensor(one.data_ptr(), tuple(one.shape), dtype, abi.CUDA)))
        for name, one in (("used_k", inputs.used_k), ("block_table", inputs.block_table),
                          ("cu_seqlens_q", inputs.cu_seqlens), ("cu_seqlens_k", inputs.cu_seqlens)):
            if one is not None:
                setattr(params, name, ctypes.pointer(
                    abi.tensor(one.data_ptr(), tuple(one.shape), "i32", abi.CUDA)))
        if case.packed:
            params.max_q_len, params.max_kv_len = case.q_len, case.kv_len
        if case.window:
            params.window_left = case.window
        params.causal = int(case.causal)
        params.kernel = kernel.encode() if kernel else None
        return params

    def _run(self, index):
        """The bare C call."""
        self.library.attention(self.params[index])
        return self.out[index]

    def check(self):
        """Runs every input set on NaN-filled outputs. Compares sampled rows of the first and last set with
        the fp64 reference, and checks all outputs for unwritten and non-finite elements."""
        torch = self.torch
        last = len(self.params) - 1
        verdicts = []
        for index in sorted({0, last}):
            self.params[index].lse = ctypes.pointer(
                abi.tensor(self.lse.data_ptr(), tuple(self.lse.shape), "f32", abi.CUDA))
            self.lse.fill_(float("nan"))
            torch.cuda.synchronize()
            self._run(index)
            self.stream.synchronize()
            self.params[index].lse = None
            verdicts.append(self._compare(index))
        with_lse = self.out[0].clone()
        for out in self.out:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for index in range(len(self.params)):
            self._run(index)
        self.stream.synchronize()
        self._checked = {index: self.out[index].clone() for index in {0, last}}
        torch.cuda.synchronize()  # finish the copies before a call on another stream writes
        verdict = max(verdicts, key=lambda one: (not one.ok, one.worst_ratio))
        if not verdict.ok:
            return verdict
        if not all(bool(torch.isfinite(out).all()) for out in self.out):
            verdict.ok, verdict.reason = False, "an element was never written, or is not finite"
        elif not self._same_bits(with_lse, self.out[0]):
            verdict.ok, verdict.reason = False, "asking for the LSE changes the output"
        else:
            self._check_public_call(verdict)
        return verdict

    def _check_public_call(self, verdict):
        """Checks that flashcore.attention, which is timed, gives the checked bits."""
        for index, want in self._checked.items():
            with self.torch.cuda.stream(self.stream):
                got = public_call(self.inputs, index, self.kernel)
            self.stream.synchronize()
            if not self._same_bits(got, want):
                verdict.ok = False
                verdict.reason = "flashcore.attention and the C call give different results"

    def _compare(self, index):
        case = self.case
        rows = reference.sample_rows(case, seed=index + 1)
        q, k, v = self.inputs.readable(index)
        want = reference.torch_rows(self.torch, case, q, k, v, rows)
        self._references[index] = rows, want
        b, h, i = (self.torch.tensor(one, device="cuda") for one in zip(*rows))
        lse_at = (h, self.inputs.cu_seqlens[b] + i) if case.packed else (b, h, i)
        got = self.inputs.rows_of(self.out[index], rows).tolist()
        lse = self.lse[lse_at].double().tolist()
        family = self.plan.family.decode()
        return compare(want, got, lse, case.head_dim,
                       arithmetic_of(case.out_dtype, probability_dtype(family, case.out_dtype)),
                       case.out_dtype)

    def _same_bits(self, a, b):
        kind = getattr(self.torch, _BITS[self.case.out_dtype])
        return a.shape == b.shape and bool((a.view(kind) == b.view(kind)).all())

    def prepare(self):
        """Captures graphs of flashcore.attention, of the bare C call and of every peer that supports the case."""
        inputs, kernel = self.inputs, self.kernel
        self._runners = {
            timing.OURS: self._capture(lambda index: public_call(inputs, index, kernel)),
            timing.BARE: self._capture(self._run)}
        known = bench_peers.known()
        for name in self.peers:
            runner, note = self._peer(known[name])
            if runner is not None:
                self._runners[name] = runner
            if note is not None:
                self.peers_note[name] = note

    def _peer(self, peer):
        """(graph, remark or None), or (None, reason why the peer is not timed). The graph's result is also
        compared with the reference."""
        rows, want = self._references[0]
        call, note = usable(peer, self.inputs, rows, want, self._run_once)
        if call is None:
            return None, note
        try:
            runner = self._capture(call)
            rows, want = self._references[len(self.params) - 1]
            wrong = off_by(peer, self.inputs, runner.recomputed(), rows, want)
        except Exception as error:  # a foreign library may raise anything
            return None, f"could not be captured: {first_line(error)}"
        return (runner, note) if wrong is None else (None, f"captured, {wrong}")

    def _run_once(self, call):
        self.torch.cuda.synchronize()  # another stream made the peer's inputs
        with self.torch.cuda.stream(self.stream):
            result = call(0)
        self.stream.synchronize()
        return result

    def _capture(self, call):
        sets = len(self.inputs)
        for number in range(2):
            with self.torch.cuda.stream(self.stream):
                call(number % sets)
        self.stream.synchronize()
        calls = timing.whole_turns(8 if self.case.flops() < 1e10 else 1, sets)
        runner = Runner(self.torch, self.stream, call, calls, sets)
        runner.us_per_call()
        wanted = timing.whole_turns(
            timing.calls_per_sample(runner.us_per_call(), _SAMPLE_US, sets), sets)
        if wanted <= calls:
            return runner
        return Runner(self.torch, self.stream, call, wanted, sets)

    def sample(self, reverse=False):
        """One round: {name: us per call}."""
        return timing.one_round({name: one.sample for name, one in self._runners.items()}, reverse)

    def unchanged(self):
        """True if the timed calls give exactly the checked bits."""
        last = len(self.params) - 1
        return (self._same_bits(self._runners[timing.OURS].recomputed(), self._checked[last])
                and all(self._same_bits(self.out[index], want)
                        for index, want in self._checked.items()))


def public_call(inputs, index, kernel=None):
    """flashcore.attention as a user of torch calls it, on one set of inputs."""
    case = inputs.case
    q, k, v = (Quantized(one.codes, one.scale) if isinstance(one, Codes) else one
               for one in (inputs.q[index], inputs.k[index], inputs.v[index]))
    options: dict[str, Any] = {"causal": case.causal, "kernel": kernel}
    if case.window:
        options["window"] = (case.window, -1)
    if case.packed:
        options.update(cu_seqlens_q=inputs.cu_seqlens, cu_seqlens_k=inputs.cu_seqlens,
                       max_q_len=case.q_len, max_kv_len=case.kv_len)
    return attention(q, k, v, seqused_k=inputs.used_k, block_table=inputs.block_table, **options)
