"""One benchmark case on a GPU through torch: ours and torch's SDPA backends, each as a CUDA graph,
replayed in turns on one stream."""

import ctypes
import itertools
import time
import warnings
from typing import Any

from flashcore import _abi, _reference, _timing
from flashcore._judge import arithmetic_of, compare, probability_dtype

_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
_LARGEST_E4M3 = 448.0
_BITS = {"f32": "int32", "f16": "int16", "bf16": "int16"}
_ROTATED_BYTES = 300e6  # cold cases read this much before they come back to the same input
_MAX_SETS = 512
_SAMPLE_US = 200
_SLEEP_CYCLES = 1_000_000  # half a millisecond: the host queues a whole round behind it
# How far a peer's result may be from the fp64 reference before it is not the same problem.
_PEER_TOLERANCE = {"f32": 2e-3, "f16": 1e-2, "bf16": 3e-2}
PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION", "eff": "EFFICIENT_ATTENTION",
         "math": "MATH"}
_MATH_BYTES = 4e9  # of its attention matrix; larger cases are not worth their time
_WIDENED_FLOPS = 1e10  # of an 8-bit case that peers get in 16 bits; larger ones have peers of their own


class _Runner:
    """A graph of `calls` calls, and its time."""

    def __init__(self, torch, stream, call, calls, sets):
        self.torch, self.stream, self.calls = torch, stream, calls
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(calls):
                    call(number % sets)
            finally:
                self.graph.capture_end()
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def queue(self):
        with self.torch.cuda.stream(self.stream):
            self.begin.record(self.stream)
            self.graph.replay()
            self.end.record(self.stream)

    def queue_untimed(self):
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()

    def us_per_call(self):
        return 1e3 * self.begin.elapsed_time(self.end) / self.calls


class _Pages:
    """Paged keys or values, [pages, page_size, kv_heads, dim], read as [b, h] -> [len, dim]."""

    def __init__(self, memory, block_table):
        self.memory, self.block_table = memory, block_table

    def __getitem__(self, at):
        b, h = at
        return self.memory[self.block_table[b].long(), :, h].flatten(0, 1)


class _Packed:
    """Sequences one after the other, [total, heads, dim], read as [b, h] -> [len, dim] and
    [b, h, i] -> [dim]."""

    def __init__(self, memory, starts):
        self.memory, self.starts = memory, starts

    def __getitem__(self, at):
        b, h, *row = at
        return self.memory[self.starts[b]:self.starts[b + 1], h][row[0] if row else slice(None)]


class _Codes:
    """An 8-bit tensor and its scales [batch, heads], read as values: [b, h] -> [len, dim] and
    [b, h, i] -> [dim]."""

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __getitem__(self, at):
        return self.codes[at].float().double() * self.scale[at[:2]].double()

    @classmethod
    def of(cls, torch, values):
        scale = values.abs().amax((2, 3)) / _LARGEST_E4M3
        codes = (values / scale[:, :, None, None]).to(torch.float8_e4m3fn)
        return cls(codes, scale)

    def widened(self, dtype):
        return (self.codes.float() * self.scale[:, :, None, None]).to(dtype)


class CudaCase:
    """A case in GPU memory, ready to be checked and then timed."""

    device = "cuda"

    def __init__(self, library, case, torch, seed=1, kernel=None, peers=tuple(PEERS)):
        self.library, self.case, self.torch, self.peers = library, case, torch, peers
        self.stream = torch.cuda.Stream()
        sets = 1
        if case.cold_l2:
            sets = int(min(max(-(-_ROTATED_BYTES // case.input_bytes()), 1), _MAX_SETS))
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(shape, dtype):
            values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
            return _Codes.of(torch, values) if dtype == "e4m3" else \
                values.to(getattr(torch, _DTYPES[dtype]))

        k_shape, v_shape = case.k_shape, case.v_shape
        self.used_k: Any = None
        self.block_table: Any = None
        self.cu_seqlens: Any = None
        if case.page_size:
            pages = case.batch * case.kv_len // case.page_size
            k_shape, v_shape = ((pages, case.page_size, case.kv_heads, dim)
                                for dim in (case.head_dim, case.value_dim))
            order = torch.randperm(pages, generator=generator, device="cuda", dtype=torch.int32)
            self.block_table = order.reshape(case.batch, -1).contiguous()
        self.q = [normal(case.q_shape, case.q_dtype) for _ in range(sets)]
        self.k = [normal(k_shape, case.kv_dtype) for _ in range(sets)]
        self.v = [normal(v_shape, case.kv_dtype) for _ in range(sets)]
        if case.packed:
            self.starts = [0, *itertools.accumulate(case.packed)]
            self.cu_seqlens = torch.tensor(self.starts, device="cuda", dtype=torch.int32)
        if case.used_k:
            self.used_k = torch.tensor(case.used_k, device="cuda", dtype=torch.int32)
            for memory in self.k + self.v:  # what lies past a length must not matter
                for b, length in enumerate(case.used_k):
                    memory[b, :, length:] = float("nan")
        self.out = [torch.full(case.out_shape, float("nan"), device="cuda",
                               dtype=getattr(torch, _DTYPES[case.out_dtype]))
                    for _ in range(sets)]
        self.lse = torch.full(case.lse_shape, float("nan"), device="cuda", dtype=torch.float32)
        self.params = [self._describe(index, kernel) for index in range(sets)]
        self.plan = library.plan(self.params[0])
        # One workspace is enough: the calls of one stream follow each other.
        self.workspace = torch.full((self.plan.workspace_bytes,), 255, device="cuda",
                                    dtype=torch.uint8)
        for params in self.params:
            params.workspace = self.workspace.data_ptr()
            params.workspace_bytes = self.plan.workspace_bytes
            params.stream = self.stream.cuda_stream
        torch.cuda.synchronize()
        library.workspace_init(self.workspace.data_ptr(), self.plan.workspace_bytes, _abi.CUDA, 0,
                               self.stream.cuda_stream)
        self.peers_note = {}
        self._runners = {}

    def close(self):
        """Gives the memory back before the next case."""
        self._runners = {}
        self.q = self.k = self.v = self.out = []
        self.workspace = None
        self.used_k = self.block_table = self.cu_seqlens = None
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def _describe(self, index, kernel):
        params = self.library.params()
        case = self.case
        for name, dtype in (("q", case.q_dtype), ("k", case.kv_dtype), ("v", case.kv_dtype),
                            ("out", case.out_dtype)):
            one = getattr(self, name)[index]
            if isinstance(one, _Codes):
                setattr(params, name + "_scale", ctypes.pointer(
                    _abi.tensor(one.scale.data_ptr(), tuple(one.scale.shape), "f32", _abi.CUDA)))
                one = one.codes
            setattr(params, name, ctypes.pointer(
                _abi.tensor(one.data_ptr(), tuple(one.shape), dtype, _abi.CUDA)))
        for name, one in (("used_k", self.used_k), ("block_table", self.block_table),
                          ("cu_seqlens_q", self.cu_seqlens), ("cu_seqlens_k", self.cu_seqlens)):
            if one is not None:
                setattr(params, name, ctypes.pointer(
                    _abi.tensor(one.data_ptr(), tuple(one.shape), "i32", _abi.CUDA)))
        if self.case.packed:
            params.max_q_len, params.max_kv_len = self.case.q_len, self.case.kv_len
        if self.case.window:
            params.window_left = self.case.window
        params.causal = int(self.case.causal)
        params.kernel = kernel.encode() if kernel else None
        return params

    def _run(self, index):
        self.library.attention(self.params[index])

    def check(self):
        """Runs every input set on poisoned outputs; judges sampled rows of the first and the last
        against fp64, and all of them for unwritten or non-finite elements."""
        torch = self.torch
        last = len(self.params) - 1
        verdicts = []
        for index in sorted({0, last}):
            self.params[index].lse = ctypes.pointer(
                _abi.tensor(self.lse.data_ptr(), tuple(self.lse.shape), "f32", _abi.CUDA))
            self.lse.fill_(float("nan"))
            torch.cuda.synchronize()
            self._run(index)
            self.stream.synchronize()
            self.params[index].lse = None
            verdicts.append(self._judge(index))
        with_lse = self.out[0].clone()
        for out in self.out:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for index in range(len(self.params)):
            self._run(index)
        self.stream.synchronize()
        self._checked = [self.out[0].clone(), self.out[last].clone()]
        torch.cuda.synchronize()  # copied before the next call, on another stream, writes again
        verdict = max(verdicts, key=lambda one: (not one.ok, one.worst_ratio))
        if not verdict.ok:
            return verdict
        if not all(bool(torch.isfinite(out).all()) for out in self.out):
            verdict.ok, verdict.reason = False, "an element was never written, or is not finite"
        elif not self._same_bits(with_lse, self.out[0]):
            verdict.ok, verdict.reason = False, "asking for the LSE changes the output"
        return verdict

    def _judge(self, index):
        case = self.case
        rows = _reference.sample_rows(case, seed=index + 1)
        q, k, v = self.q[index], self.k[index], self.v[index]
        if self.block_table is not None:
            k, v = _Pages(k, self.block_table), _Pages(v, self.block_table)
        if case.packed:
            q, k, v = (_Packed(memory, self.starts) for memory in (q, k, v))
        want = _reference.torch_rows(self.torch, case, q, k, v, rows)
        if index == 0:
            self._rows, self._want = rows, want
        b, h, i = (self.torch.tensor(one, device="cuda") for one in zip(*rows))
        out_at: tuple[Any, ...] = (b, h, i)
        lse_at = out_at
        if case.packed:
            row = self.cu_seqlens[b] + i
            out_at, lse_at = (row, h), (h, row)
        got = self.out[index][out_at].double().tolist()
        lse = self.lse[lse_at].double().tolist()
        family = self.plan.family.decode()
        return compare(want, got, lse, case.head_dim,
                       arithmetic_of(case.out_dtype, probability_dtype(family, case.out_dtype)),
                       case.out_dtype)

    def _same_bits(self, a, b):
        kind = getattr(self.torch, _BITS[self.case.out_dtype])
        return bool((a.view(kind) == b.view(kind)).all())

    def prepare(self):
        """Captures a graph of ours and of every peer that takes the case."""
        self._busy_s = 0.0
        self._runners = {"ours": self._capture(self._run)}
        for name in self.peers:
            call = self._peer(name)
            if call is None:
                continue
            try:
                self._runners[name] = self._capture(call)
            except RuntimeError as error:
                self.peers_note[name] = f"could not be captured: {_first_line(error)}"

    def _capture(self, call):
        sets = len(self.q)
        for number in range(2):
            with self.torch.cuda.stream(self.stream):
                call(number % sets)
        self.stream.synchronize()
        calls = max(sets, 8 if self.case.flops() < 1e10 else 1)
        runner = _Runner(self.torch, self.stream, call, calls, sets)
        for _ in range(2):
            runner.queue()
        self.stream.synchronize()
        wanted = _timing.calls_per_sample(runner.us_per_call(), _SAMPLE_US, sets)
        if wanted <= calls:
            return runner
        return _Runner(self.torch, self.stream, call, wanted, sets)

    def _peer(self, name):
        """A function that calls torch's backend on one input set; None, with a note, where it
        refuses the case or its result is not the reference's."""
        torch, case = self.torch, self.case
        from torch.nn.attention import SDPBackend, sdpa_kernel
        if case.causal and case.q_len != case.kv_len:
            self.peers_note[name] = "torch's is_causal is top-left: not the same problem"
            return None
        if case.used_k or case.packed or case.page_size or case.window:
            self.peers_note[name] = "torch's SDPA takes neither lengths nor pages nor windows"
            return None
        matrix_bytes = 4.0 * case.batch * case.q_heads * case.q_len * case.kv_len
        if name == "math" and matrix_bytes > _MATH_BYTES:
            self.peers_note[name] = f"its matrix would have {matrix_bytes / 1e9:.0f} GB: not timed"
            return None
        inputs: list[Any] = list(zip(self.q, self.k, self.v))
        if case.eight_bit:
            if case.cold_l2 or case.flops() > _WIDENED_FLOPS:
                self.peers_note[name] = "torch's SDPA takes no 8-bit tensors"
                return None
            dtype = getattr(torch, _DTYPES[case.out_dtype])
            self.peers_note[name] = f"on the same values in {case.out_dtype}"
            inputs = [[one.widened(dtype) if isinstance(one, _Codes) else one for one in three]
                      for three in inputs]
        backend = getattr(SDPBackend, PEERS[name])

        def call(index):
            with torch.inference_mode(), sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(
                    *inputs[index], is_causal=case.causal,
                    enable_gqa=case.q_heads != case.kv_heads)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with torch.cuda.stream(self.stream):
                    result = call(0)
                self.stream.synchronize()
            except (RuntimeError, NotImplementedError) as error:
                self.peers_note[name] = _refusal(error, caught)
                return None
        off = self._peer_error(result)
        if not off < _PEER_TOLERANCE[case.out_dtype]:
            self.peers_note[name] = f"its result is off by {off:.2g} (relative): not timed"
            return None
        return call

    def _peer_error(self, result):
        at = tuple(self.torch.tensor(one, device="cuda") for one in zip(*self._rows))
        want = self.torch.tensor([row.out for row in self._want], device="cuda",
                                 dtype=self.torch.float64)
        return float((result[at].double() - want).norm() / want.norm())

    def sample(self, reverse=False):
        """One round: {name: us per call}. The card first rests for as long as a round keeps it busy:
        otherwise what ran before decides how much of its power is left. All graphs are queued behind
        a short sleep, so that none waits for the host, and behind a replay that is not timed: the
        first one after a pause takes longer than the same one a moment later."""
        time.sleep(self._busy_s)
        names = list(self._runners)
        order = names[::-1] if reverse else names
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
        self._runners[order[0]].queue_untimed()
        for name in order:
            self._runners[name].queue()
        self.stream.synchronize()
        times = {name: self._runners[name].us_per_call() for name in names}
        self._busy_s = 1e-6 * sum(times[name] * self._runners[name].calls for name in names)
        return times

    def unchanged(self):
        """Whether the calls that were timed left the very bits that were checked."""
        return (self._same_bits(self.out[0], self._checked[0])
                and self._same_bits(self.out[-1], self._checked[1]))


def _refusal(error, caught):
    """Torch warns with its reason and then raises something general."""
    for warning in caught:
        text = _first_line(warning.message).split(" (Triggered internally")[0]
        if "not used because" not in text:
            return text
    return _first_line(error)


def _first_line(message):
    return (str(message).strip().splitlines() or ["refused"])[0][:160]
