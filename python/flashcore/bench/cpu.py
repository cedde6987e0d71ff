"""One benchmark case on the CPU. With torch it is a TorchCase beside torch's SDPA; without, a plain case on
arrays of the standard library."""

import array
import ctypes
import random
import struct
import time
from typing import Any

from flashcore._core import abi
from flashcore.bench import reference, timing
from flashcore.bench.places import Cpu
from flashcore.bench.tolerance import arithmetic_of, compare, probability_dtype
from flashcore.bench.torch_case import TorchCase

_FORMATS = {"f64": "d", "f32": "f", "f16": "H", "bf16": "H"}  # 16-bit formats are kept as bits
_TABLE = 100_003  # a tensor with more elements repeats a table of this (prime) length
_PLAIN_WORK = 4e6  # multiply-adds that plain Python may spend on reference rows
_SAMPLE_US = 5000
_ALIGNMENT = 256
PEERS = ("torch", "math")  # names of bench.peers.known()


def encode(values, dtype):
    """Rounds floats to the format. Returns an array of elements, or of their bits for 16-bit formats."""
    if dtype == "f16":
        return array.array("H", struct.pack(f"{len(values)}e", *values))
    if dtype == "bf16":
        bits = array.array("I", struct.pack(f"{len(values)}f", *values))
        return array.array("H", [(x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits])
    return array.array(_FORMATS[dtype], values)


def decode(elements, dtype):
    """The float values of `elements`, a slice of an encoded array."""
    if dtype == "f16":
        return list(struct.unpack(f"{len(elements)}e", elements.tobytes()))
    if dtype == "bf16":
        wide = array.array("I", [x << 16 for x in elements])
        return list(struct.unpack(f"{len(wide)}f", wide.tobytes()))
    return list(elements)


class PlainTensor:
    """A compact [batch, heads, len, dim] tensor in an array of the standard library."""

    def __init__(self, shape, dtype, seed=None):
        self.shape, self.dtype = shape, dtype
        count = shape[0] * shape[1] * shape[2] * shape[3]
        if seed is None:  # an output, which is NaN until it is written
            self.data = encode([float("nan")], dtype) * count
        else:
            draw = random.Random(seed)
            table = encode([draw.gauss(0.0, 1.0) for _ in range(min(count, _TABLE))], dtype)
            self.data = (table * (count // len(table) + 1))[:count]

    def address(self):
        return self.data.buffer_info()[0]

    def copy(self):
        return self.data[:]

    def equals(self, copy):
        return self.data.tobytes() == copy.tobytes()

    def row(self, b, h, i):
        _, heads, length, dim = self.shape
        begin = ((b * heads + h) * length + i) * dim
        return decode(self.data[begin:begin + dim], self.dtype)


class Timer:
    """Samples of a call by the wall clock."""

    def __init__(self, call: Any, sets: int = 1) -> None:
        self._call, self._sets = call, sets
        call(0)
        begin = time.perf_counter()
        call(0)
        us = 1e6 * (time.perf_counter() - begin)
        self._calls = timing.whole_turns(timing.calls_per_sample(us, _SAMPLE_US, sets, most=200), sets)

    def sample(self) -> float:
        """us per call."""
        begin = time.perf_counter()
        for number in range(self._calls):
            self._call(number % self._sets)
        return 1e6 * (time.perf_counter() - begin) / self._calls

    def recomputed(self) -> Any:
        return self._call(self._sets - 1)


class CpuTorchCase(TorchCase):
    def __init__(self, library: Any, case: Any, torch: Any, threads: int = 0, seed: int = 1,
                 kernel: str | None = None, peers: Any = PEERS) -> None:
        if threads > 0:
            torch.set_num_threads(threads)
        super().__init__(library, case, torch, Cpu(threads), 1, seed, kernel, peers)

    def _runner(self, call: Any) -> Timer:
        return Timer(call)


class CpuCase:
    """A plain case in memory that can be checked and timed without torch."""

    call = None  # a row's `us` is the time of the C call
    peers_note = {"torch": "torch is not installed"}

    def __init__(self, library, case, threads=0, seed=1, kernel=None):
        if case.needs_torch():
            raise NotImplementedError("torch is not installed; without it only plain cases are timed")
        self.library, self.case = library, case
        self.q = PlainTensor(case.q_shape, case.dtype, seed)
        self.k = PlainTensor(case.k_shape, case.dtype, seed + 1)
        self.v = PlainTensor(case.v_shape, case.dtype, seed + 2)
        self.out = PlainTensor(case.out_shape, case.dtype)
        wide = "f64" if case.dtype == "f64" else "f32"
        self.lse = PlainTensor((case.batch, case.q_heads, case.q_len, 1), wide)
        self.params = library.params()
        for name in ("q", "k", "v", "out"):
            one = getattr(self, name)
            setattr(self.params, name,
                    ctypes.pointer(abi.tensor(one.address(), one.shape, case.dtype)))
        self.params.causal = int(case.causal)
        self.params.threads = threads
        self.params.kernel = kernel.encode() if kernel else None
        self.plan = library.plan(self.params)
        self._memory = ctypes.create_string_buffer(self.plan.workspace_bytes + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.params.workspace = start + -start % _ALIGNMENT
        self.params.workspace_bytes = self.plan.workspace_bytes
        library.workspace_init(self.params.workspace, self.plan.workspace_bytes)

    def close(self):
        pass

    def _run(self, index=0):
        self.library.attention(self.params)

    def check(self):
        """Runs once with LSE on NaN-filled outputs and compares sampled rows with the fp64 reference."""
        case = self.case
        per_row = case.kv_len * 2 * case.head_dim
        budget = max(int(_PLAIN_WORK / per_row), 2)
        rows = reference.sample_rows(case, min(8, max(budget // 2, 1)), min(8, budget))[:budget]
        want = reference.plain_rows(case, self.q.row, self.k.row, self.v.row, rows)
        self.params.lse = ctypes.pointer(
            abi.tensor(self.lse.address(), self.lse.shape[:3], self.lse.dtype))
        self._run()
        self.params.lse = None
        verdict = compare(want, [self.out.row(*row) for row in rows],
                          [self.lse.row(*row)[0] for row in rows], case.head_dim,
                          arithmetic_of(case.dtype,
                                        probability_dtype(self.plan.family.decode(), case.dtype,
                                                          self.plan.kernel.decode())),
                          case.dtype)
        if verdict.ok and not self._all_finite():
            verdict.ok, verdict.reason = False, "an element was never written, or is not finite"
        self._checked = self.out.copy()
        return verdict

    def _all_finite(self):
        data = self.out.data
        exponent = {"f16": 0x7C00, "bf16": 0x7F80}.get(self.case.dtype)
        if exponent is not None:
            return all(x & exponent != exponent for x in data)
        return all(x - x == 0 for x in data)

    def prepare(self):
        self._timer = Timer(self._run)

    def sample(self, reverse=False):
        """One round: {name: us per call}."""
        return {timing.OURS: self._timer.sample()}

    def unchanged(self):
        """True if the timed calls left exactly the checked result."""
        return self.out.equals(self._checked)
