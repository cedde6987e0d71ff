"""flashcore.verify(fn): finds the stage of an attention function that is wrong. See docs/verify.md.

    import flashcore
    report = flashcore.verify(my_attention)
    print(report)

The probes and the diagnosis are in the library (src/verify). This module lets it call Python functions.
It needs NumPy, and torch for functions on torch tensors.
"""

import ctypes
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from flashcore._core import abi, library as core_library, verify_abi
from flashcore._core.scalars import flag, integer, one_of, word

_DTYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
           "float8_e4m3fn": "e4m3", "int8": "int8", "uint8": "byte"}
_EIGHT_BIT = ("e4m3", "int8", "byte")
_NEEDS_TORCH = ("bf16",)
_MAX_HEAD_DIMS = 8  # as in flashcore_verify_options
_WIDER = {"f32": ("f64",), "f16": ("f32", "f64"), "bf16": ("f32", "f64")}


@dataclass
class Probe:
    """One probe of the sequence. status is "passed", "failed" or "not probed"."""

    name: str
    asks: str
    status: str
    detail: str
    calls: int
    seconds: float


@dataclass
class Report:
    """The verdict. `stage` is None or the name of the wrong stage, `detail` is one sentence of evidence,
    and `reproducer` is Python code that shows the fault again."""

    ok: bool
    stage: str | None
    detail: str
    call: str
    reproducer: str
    probes: list[Probe] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)
    conventions: list[str] = field(default_factory=list)
    not_probed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0
    _json: str = ""
    _html: str = ""
    _text: str = ""

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return json.dumps({**json.loads(self._json), "reproducer": self.reproducer}, indent=2)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained page with pictures of the error positions."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._html)

    def __str__(self) -> str:
        return self._text if self.ok else f"{self._text}\n{self.reproducer}"


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _short(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    short = _DTYPES.get(name, name)
    if short not in _DTYPES.values():
        raise ValueError(f"dtype is {dtype}; wanted one of {', '.join(_DTYPES)}")
    return short


def _choose_framework(function: Callable[..., Any], framework: str | None, dtype: str, device: str,
                      layout: str) -> tuple[Any, Any]:
    """(torch or None for NumPy, a small result). NumPy is used if the function accepts it."""
    import numpy

    if framework not in (None, "numpy", "torch"):
        raise ValueError(f'framework is {framework!r}; wanted "numpy", "torch" or None')
    torch = _torch()
    choices: list[Any] = []
    if framework != "torch" and device == "cpu" and dtype not in _NEEDS_TORCH:
        choices.append(None)
    if framework != "numpy" and torch is not None:
        choices.append(torch)
    if not choices:
        raise ModuleNotFoundError(f"dtype {dtype} on {device} needs torch, which is not installed")
    if dtype in _EIGHT_BIT:
        return choices[0], None
    first_error: Exception | None = None
    for choice in choices:
        for length, head_dim in ((8, 64), (64, 64), (128, 128), (64, 32)):
            shape = (1, 1, length, head_dim) if layout == "bhsd" else (1, length, 1, head_dim)
            name = next(long for long, short in _DTYPES.items() if short == dtype)
            values = numpy.random.default_rng(1).standard_normal(shape)
            if choice is None:
                q = values.astype(name)
            else:
                q = choice.from_numpy(values).to(device, getattr(choice, name))
            try:
                result = function(q, q, q)
                if result is None:
                    raise RuntimeError("it returned None")
            except Exception as error:  # noqa: BLE001: another framework or size may work
                first_error = first_error or error
                continue
            return choice, result
    raise RuntimeError(f"not even a plain call works: {type(first_error).__name__}: {first_error}"
                       ) from first_error


def _out_dtype(result: Any, dtype: str) -> str | None:
    """The dtype of the result if it is wider than `dtype`. A narrower one must be declared; otherwise
    its rounding counts as a fault."""
    out = result[0] if isinstance(result, (tuple, list)) else result
    found = _DTYPES.get(str(getattr(out, "dtype", "")).removeprefix("torch."))
    return found if found in _WIDER.get(dtype, ()) else None


def _declared(supports: dict[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """`supports` as a dict. For a collection of names, the verifier discovers the other properties."""
    if supports is None:
        return {}
    if not isinstance(supports, dict):
        supports = {name: True for name in supports}
    known = {*verify_abi.CAPABILITIES, *verify_abi.BACKWARD_CAPABILITIES, "head_dims", "causal_alignment", "lse_base"}
    for name in supports:
        if name not in known:
            raise ValueError(f"supports: there is no {name!r}; known are {', '.join(sorted(known))}")
    if "head_dims" in supports:
        given: Any = supports["head_dims"]
        head_dims = [integer("head_dims", one) for one in given]
        if len(head_dims) > _MAX_HEAD_DIMS:
            raise ValueError(f"supports: head_dims has {len(head_dims)} numbers; at most "
                             f"{_MAX_HEAD_DIMS} are possible")
        supports = {**supports, "head_dims": head_dims}
    return supports


def _reproducer(function: Callable[..., Any], arguments: str, found: dict[str, Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "fn")
    importable = module not in (None, "__main__") and "<" not in name and "." not in name
    lines = ["import flashcore"]
    lines.append(f"from {module} import {name} as fn" if importable else f"fn = ...  # {name}")
    lines.append(f"print(flashcore.verify(fn, {arguments}))")
    lines.append(f"# {found['call']}")
    return "\n".join(lines)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", "backward"))


def _backward_adapter(verify_call: Any, backward: Any, forward: Any, declared: dict[str, Any]) -> Any:
    """The adapter of the backward pass; None without one."""
    if backward is False or backward is None:
        return None
    if backward is True:
        if forward.torch is None:
            raise ValueError("backward=True needs a function on torch tensors that autograd can "
                             'differentiate; set framework="torch", or give the backward function')
        return verify_call.AutogradAdapter(forward.function, forward.torch, forward.layout,
                                           forward.device, forward.keywords)
    if not callable(backward):
        raise TypeError(f"backward is {backward!r}; wanted True, False or a function")
    keywords = verify_call.keywords_of(backward, [name for name, can in declared.items() if can])
    return verify_call.BackwardAdapter(backward, forward.torch, forward.layout, forward.device,
                                       keywords)


def verify(fn: Callable[..., Any], *, layout: str = "bhsd", dtype: Any = "float32",
           device: Any = "cpu", supports: dict[str, Any] | Iterable[str] | None = None,
           framework: str | None = None, out_dtype: Any = None, arithmetic: Any = None, seed: int = 1,
           backward: bool | Callable[..., Any] = False, quick: bool = False, only: str | None = None, name: str | None = None,
           progress: Callable[[str, int, int], Any] | None = None,
           library: core_library.Library | None = None) -> Report:
    """Probes `fn(q, k, v, *, causal=False, scale=None, **options)`, which returns out or (out, lse),
    and returns a Report. The signature of the function shows which options it accepts.

    layout: "bhsd" or "bshd", the order of the arrays' axes. dtype: float64, float32, float16,
    bfloat16, or 8-bit (float8_e4m3fn, int8, uint8) with q_scale, k_scale and v_scale [batch, heads].
    device: "cpu", or a torch device. supports: known properties of the function, e.g. {"gqa": False,
    "head_dims": [64], "causal_alignment": "top-left", "lse_base": 2, "strides": False}. A function
    with **options gets only the options that are named here, under the verifier's names.
    arithmetic: the format of scores and P, if it is not dtype. backward: True to probe the gradients that
    torch's autograd computes from `fn`, or a function of q, k, v, out, lse, dout and the options (and
    dlse, if it has that parameter) that returns (dq, dk, dv). Gradients are probed after the forward pass
    has passed. supports={"deterministic": True} promises the same bits in every call. progress: a function that is called
    with (probe, number, count).
    """
    from flashcore._core import verify_call

    one_of("layout", layout, ("bhsd", "bshd"))
    seed, quick = integer("seed", seed, 65), flag("quick", quick)  # unsigned in C
    if seed < 0:
        raise ValueError(f"seed is {seed}; wanted 0 or more")
    if only is not None:
        word("only", only, "the name of a probe")
    name = word("name", str(getattr(fn, "__name__", "attention")) if name is None else name,
                "what to call the function")
    short, device = _short(dtype), str(device)
    declared = _declared(supports)
    keywords = verify_call.keywords_of(fn, [name for name, can in declared.items() if can])
    if backward is True and framework is None:
        framework = "torch"
    torch, sample = _choose_framework(fn, framework, short, device, layout)
    adapter = verify_call.Adapter(fn, torch, layout, device, keywords)
    differentiate = _backward_adapter(verify_call, backward, adapter, declared)
    library = library or core_library.load()
    c = library._c
    for function, (result, argument_types) in verify_abi.FUNCTIONS.items():
        getattr(c, function).restype = result
        getattr(c, function).argtypes = argument_types
    options = verify_abi.Options()
    c.flashcore_verify_options_init(ctypes.byref(options), ctypes.sizeof(options))
    options.name = name.encode()
    options.dtype = short.encode()
    options.layout = layout.encode()
    options.seed, options.quick = seed, int(quick)
    out = _short(out_dtype) if out_dtype is not None else _out_dtype(sample, short)
    options.out_dtype = out.encode() if out else None
    options.arithmetic = _short(arithmetic).encode() if arithmetic is not None else None
    options.only = only.encode() if only is not None else None
    if differentiate is not None:
        options.backward = verify_abi.BACKWARD(differentiate)
    for capability in (*verify_abi.CAPABILITIES, *verify_abi.BACKWARD_CAPABILITIES):
        if capability in declared:
            setattr(options, capability, int(bool(declared[capability])))
    for at, head_dim in enumerate(declared.get("head_dims", [])):
        options.head_dims[at] = head_dim
    if "causal_alignment" in declared:
        options.causal_alignment = declared["causal_alignment"].encode()
    if "lse_base" in declared:
        options.lse_base = str(declared["lse_base"]).encode()
    if progress is not None:
        options.progress = verify_abi.PROGRESS(
            lambda probe, number, count, _user: progress(probe.decode(), number, count))
    called = verify_abi.FUNCTION(adapter)
    handle, error = ctypes.c_void_p(), abi.Error()
    code = c.flashcore_verify(ctypes.byref(options), called, None, ctypes.byref(handle),
                              ctypes.byref(error))
    if code != abi.OK:
        raise core_library.EXCEPTIONS.get(code, RuntimeError)(
            error.message.decode(errors="replace")) from adapter.raised
    try:
        text, raw, html = (getattr(c, f"flashcore_report_{kind}")(handle).decode()
                           for kind in ("text", "json", "html"))
    finally:
        c.flashcore_report_free(handle)
    found = json.loads(raw)
    failed = next((p["name"] for p in found["probes"] if p["status"] == "failed"), only)
    arguments = f'layout="{layout}", dtype="{dtype}", device="{device}", seed={seed}, only="{failed}"'
    if backward:
        arguments += f', backward={"True" if backward is True else _name_of(backward)}'
    return Report(
        ok=found["ok"], stage=found["stage"], detail=found["detail"], call=found["call"],
        reproducer="" if found["ok"] else _reproducer(fn, arguments, found),
        probes=[Probe(**probe) for probe in found["probes"]],
        capabilities=found["capabilities"], conventions=found["conventions"],
        not_probed=found["not_probed"], seconds=found["seconds"], calls=found["calls"],
        _json=raw, _html=html, _text=text)
