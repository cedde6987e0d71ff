"""The forward call of a benchmark case on torch tensors: the C call, flashcore.attention, and their check."""

import ctypes
from typing import Any

from flashcore._attention import attention
from flashcore._core import abi
from flashcore.bench import reference
from flashcore.bench.inputs import DTYPES, Codes
from flashcore.bench.tolerance import Verdict, arithmetic_of, compare, probability_dtype
from flashcore.quant import Quantized

_BITS = {"f64": "int64", "f32": "int32", "f16": "int16", "bf16": "int16"}


def same_bits(torch: Any, a: Any, b: Any, dtype: str) -> bool:
    kind = getattr(torch, _BITS[dtype])
    return a.shape == b.shape and bool((a.view(kind) == b.view(kind)).all())


def described(tensor: Any, dtype: str, code: int) -> Any:
    """A pointer for a field of flashcore_params."""
    return ctypes.pointer(abi.tensor(tensor.data_ptr(), tuple(tensor.shape), dtype, code, 0,
                                     tensor.stride() if tensor.numel() else None))


def plan_of(function: Any, params: Any) -> Any:
    """The plan of params. A kernel that does not exist is NotImplementedError, so that its case is skipped."""
    try:
        return function(params)
    except ValueError as error:
        if "no kernel has this id" in str(error):
            raise NotImplementedError(str(error)) from None
        raise


class Workspace:
    """Memory for every call of a case: the calls of a stream run in order."""

    def __init__(self, torch: Any, library: Any, place: Any, size: int) -> None:
        self.memory = torch.full((size + 256,), 255, device=place.device, dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 256
        self.size = size
        place.wait()
        library.workspace_init(self.address, size, place.code, 0, place.stream_address)
        place.wait()

    def put(self, params: Any, stream: int | None) -> None:
        params.workspace, params.workspace_bytes, params.stream = self.address, self.size, stream


def forward_params(library: Any, inputs: Any, index: int, out: Any, place: Any, kernel: str | None) -> Any:
    """flashcore_params of one set of inputs, without a workspace."""
    case, params = inputs.case, library.params()
    tensors = {"q": (inputs.q[index], case.q_dtype), "k": (inputs.k[index], case.kv_dtype),
               "v": (inputs.v[index], case.kv_dtype), "out": (out, case.out_dtype)}
    for name, (one, dtype) in tensors.items():
        if isinstance(one, Codes):
            setattr(params, name + "_scale", described(one.scale, "f32", place.code))
            one = one.codes
        setattr(params, name, described(one, dtype, place.code))
    for name, one in (("used_k", inputs.used_k), ("block_table", inputs.block_table),
                      ("cu_seqlens_q", inputs.cu_seqlens), ("cu_seqlens_k", inputs.cu_seqlens)):
        if one is not None:
            setattr(params, name, described(one, "i32", place.code))
    for name, (one, dtype) in inputs.scores.tensors(inputs.q[index]).items():
        setattr(params, name, described(one, dtype, place.code))
    if case.packed:
        params.max_q_len, params.max_kv_len = case.q_len, case.kv_len
    if case.window:
        params.window_left = case.window
    params.softcap = case.options.softcap
    params.reproducibility = int(case.options.batch_invariant)
    params.causal, params.threads = int(case.causal), place.threads
    params.kernel = kernel.encode() if kernel else None
    return params


def public_arguments(inputs: Any) -> dict[str, Any]:
    """Keywords of flashcore.attention for a case, without its kernel."""
    case = inputs.case
    options: dict[str, Any] = {"causal": case.causal, **inputs.scores.arguments()}
    if case.options.batch_invariant:
        options["reproducibility"] = "batch_invariant"
    if case.window:
        options["window"] = (case.window, -1)
    if case.packed:
        options.update(cu_seqlens_q=inputs.cu_seqlens, cu_seqlens_k=inputs.cu_seqlens,
                       max_q_len=case.q_len, max_kv_len=case.kv_len)
    return {**options, "seqused_k": inputs.used_k, "block_table": inputs.block_table}


def public_call(inputs: Any, index: int, kernel: str | None = None) -> Any:
    """flashcore.attention as a user of torch calls it, on one set of inputs."""
    case = inputs.case
    q, k, v = (Quantized(one.codes, one.scale) if isinstance(one, Codes) else one
               for one in (inputs.q[index], inputs.k[index], inputs.v[index]))
    out = inputs.torch.empty(case.out_shape, device=inputs.device, dtype=inputs.torch.float32) \
        if case.options.f32_out else None
    return attention(q, k, v, out=out, kernel=kernel, **public_arguments(inputs))


class Forward:
    """Results are tuples of tensors: here (out,)."""

    def __init__(self, torch: Any, library: Any, inputs: Any, place: Any, kernel: str | None) -> None:
        self.torch, self.library, self.inputs, self.place, self.kernel = torch, library, inputs, place, kernel
        self.case = case = inputs.case
        dtype = getattr(torch, DTYPES[case.out_dtype])
        self.out = [torch.full(case.out_shape, float("nan"), device=place.device, dtype=dtype) for _ in inputs.q]
        self.lse = torch.full(case.lse_shape, float("nan"), device=place.device,
                              dtype=torch.float64 if case.dtype == "f64" else torch.float32)
        self.params = [forward_params(library, inputs, index, out, place, kernel)
                       for index, out in enumerate(self.out)]
        self.plan = plan_of(library.plan, self.params[0])
        self.workspace = Workspace(torch, library, place, self.plan.workspace_bytes)
        for params in self.params:
            self.workspace.put(params, place.stream_address)
        self.references: dict[int, Any] = {}
        self.checked: dict[int, Any] = {}

    def bare(self, index: int) -> tuple[Any, ...]:
        """The C call."""
        self.library.attention(self.params[index])
        return (self.out[index],)

    def public(self, index: int) -> tuple[Any, ...]:
        return (public_call(self.inputs, index, self.kernel),)

    def check(self) -> Verdict:
        """Runs every input set on NaN-filled outputs. Compares sampled rows of the first and last set with
        the fp64 reference, and checks all outputs for unwritten and non-finite elements."""
        torch, last = self.torch, len(self.params) - 1
        verdicts = []
        for index in sorted({0, last}):
            self.params[index].lse = described(self.lse, "f64" if self.case.dtype == "f64" else "f32",
                                               self.place.code)
            self.lse.fill_(float("nan"))
            self.place.wait()
            self.bare(index)
            self.place.wait()
            self.params[index].lse = None
            verdicts.append(self._compare(index))
        with_lse = self.out[0].clone()
        for out in self.out:
            out.fill_(float("nan"))
        self.place.wait()
        for index in range(len(self.params)):
            self.bare(index)
        self.place.wait()
        self.checked = {index: (self.out[index].clone(),) for index in {0, last}}
        self.place.wait()  # finish the copies before a call on another stream writes
        verdict: Verdict = max(verdicts, key=lambda one: (not one.ok, one.worst_ratio))
        if not verdict.ok:
            return verdict
        if not all(bool(torch.isfinite(out).all()) for out in self.out):
            verdict.ok, verdict.reason = False, "an element was never written, or is not finite"
        elif not same_bits(torch, with_lse, self.out[0], self.case.out_dtype):
            verdict.ok, verdict.reason = False, "asking for the LSE changes the output"
        return verdict

    def same(self, results: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
        return all(same_bits(self.torch, one, want, self.case.out_dtype) for one, want in zip(results, wanted))

    def current(self, index: int) -> tuple[Any, ...]:
        """The outputs of the last C call of a set."""
        return (self.out[index],)

    def _compare(self, index: int) -> Verdict:
        case = self.case
        rows = reference.sample_rows(case, seed=index + 1)
        want = self.inputs.reference(index, rows)
        self.references[index] = rows, want
        b, h, i = (self.torch.tensor(one, device=self.place.device) for one in zip(*rows))
        lse_at = (h, self.inputs.cu_seqlens[b] + i) if case.packed else (b, h, i)
        got = self.inputs.rows_of(self.out[index], rows).tolist()
        lse = self.lse[lse_at].double().tolist()
        operands = "f16" if case.q_dtype == "e4m3" else case.q_dtype
        probability = probability_dtype(self.plan.family.decode(), operands, self.plan.kernel.decode())
        verdict: Verdict = compare(want, got, lse, case.head_dim, arithmetic_of(case.out_dtype, probability),
                                   case.out_dtype)
        return verdict
