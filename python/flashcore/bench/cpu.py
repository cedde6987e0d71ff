"""One benchmark case on the CPU: FlashCore, and torch's SDPA if torch is installed. Without torch, the
inputs are arrays of the standard library."""

import array
import contextlib
import ctypes
import functools
import random
import struct
import time

from flashcore._core import abi
from flashcore.bench import reference, timing
from flashcore.bench.tolerance import arithmetic_of, compare, probability_dtype

_FORMATS = {"f64": "d", "f32": "f", "f16": "H", "bf16": "H"}  # 16-bit formats are kept as bits
_TABLE = 100_003  # a tensor with more elements repeats a table of this (prime) length
_PLAIN_WORK = 4e6  # multiply-adds that plain Python may spend on reference rows
_SAMPLE_US = 5000
_ALIGNMENT = 256
# Peer -> torch backend. "torch" lets torch choose.
PEERS = {"torch": None, "math": "MATH"}
_MATH_BYTES = 5e7  # limit of its attention matrix; larger cases take too long


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


class TorchTensor:
    """The same interface on a torch tensor."""

    _DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}

    def __init__(self, torch, shape, dtype, seed=None):
        self.shape, self.dtype = shape, dtype
        kind = getattr(torch, self._DTYPES[dtype])
        if seed is None:
            self.data = torch.full(shape, float("nan"), dtype=kind)
        else:
            generator = torch.Generator().manual_seed(seed)
            self.data = torch.randn(shape, generator=generator, dtype=torch.float32).to(kind)

    def address(self):
        return self.data.data_ptr()

    def copy(self):
        return self.data.clone()

    def equals(self, copy):
        return bool((self.data == copy).all())

    def row(self, b, h, i):
        return self.data[b, h, i].double().tolist()


class CpuCase:
    """A case in memory that can be checked and timed."""

    device = "cpu"
    call = None  # a row's `us` is the time of the C call

    def __init__(self, library, case, torch=None, threads=0, seed=1, kernel=None,
                 peers=tuple(PEERS)):
        self.peers = peers
        self.library, self.case, self.torch, self.threads = library, case, torch, threads
        make = PlainTensor if torch is None else \
            (lambda *arguments: TorchTensor(torch, *arguments))
        self.q = make(case.q_shape, case.dtype, seed)
        self.k = make(case.k_shape, case.dtype, seed + 1)
        self.v = make(case.v_shape, case.dtype, seed + 2)
        self.out = make(case.out_shape, case.dtype)
        wide = "f64" if case.dtype == "f64" else "f32"
        self.lse = make((case.batch, case.q_heads, case.q_len, 1), wide)
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
        self.peers_note = {} if torch is not None else {"torch": "torch is not installed"}

    def close(self):
        pass

    def _run(self):
        self.library.attention(self.params)

    def check(self):
        """Runs once with LSE on NaN-filled outputs and compares sampled rows with the fp64 reference."""
        case = self.case
        if self.torch is None:
            per_row = case.kv_len * 2 * case.head_dim
            budget = max(int(_PLAIN_WORK / per_row), 2)
            rows = reference.sample_rows(case, min(8, max(budget // 2, 1)), min(8, budget))[:budget]
            want = reference.plain_rows(case, self.q.row, self.k.row, self.v.row, rows)
        else:
            rows = reference.sample_rows(case)
            want = reference.torch_rows(self.torch, case, self.q.data, self.k.data, self.v.data,
                                         rows)
        lse_shape = self.lse.shape[:3]
        self.params.lse = ctypes.pointer(
            abi.tensor(self.lse.address(), lse_shape, self.lse.dtype))
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
        if self.torch is not None:
            return bool(self.torch.isfinite(data).all())
        exponent = {"f16": 0x7C00, "bf16": 0x7F80}.get(self.case.dtype)
        if exponent is not None:
            return all(x & exponent != exponent for x in data)
        return all(x - x == 0 for x in data)

    def prepare(self):
        """Sets up the functions that take part in the rounds."""
        self._runners = {"ours": self._run}
        if self.torch is not None:
            for name in self.peers:
                self._add_torch(name)
        self._calls = {}
        for name, run in self._runners.items():
            run()
            begin = time.perf_counter()
            run()
            us = 1e6 * (time.perf_counter() - begin)
            self._calls[name] = timing.calls_per_sample(us, _SAMPLE_US, 1, most=200)

    def _add_torch(self, name):
        torch, case = self.torch, self.case
        if case.causal and case.q_len != case.kv_len:
            self.peers_note[name] = "torch's is_causal is top-left: not the same problem"
            return
        matrix_bytes = 4.0 * case.batch * case.q_heads * case.q_len * case.kv_len
        if name == "math" and matrix_bytes > _MATH_BYTES:
            self.peers_note[name] = f"its matrix would have {matrix_bytes / 1e9:.0f} GB: not timed"
            return
        if self.threads > 0:
            torch.set_num_threads(self.threads)
        from torch.nn.attention import SDPBackend, sdpa_kernel
        def chosen():
            backend = PEERS[name]
            return sdpa_kernel([getattr(SDPBackend, backend)]) if backend else \
                contextlib.nullcontext()

        def run():
            with torch.inference_mode(), chosen():
                return torch.nn.functional.scaled_dot_product_attention(
                    self.q.data, self.k.data, self.v.data, is_causal=case.causal,
                    enable_gqa=case.q_heads != case.kv_heads)

        ours, theirs = self.out.data.double(), run().double()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error < 0.02:
            self.peers_note[name] = f"its result differs from ours by {error:.2g}: not timed"
            return
        self._runners[name] = run

    def sample(self, reverse=False):
        """One round: {name: us per call}."""
        return timing.one_round({name: functools.partial(self._time, name)
                                  for name in self._runners}, reverse)

    def _time(self, name):
        run, calls = self._runners[name], self._calls[name]
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e6 * (time.perf_counter() - begin) / calls

    def unchanged(self):
        """True if the timed calls left exactly the checked result."""
        return self.out.equals(self._checked)
