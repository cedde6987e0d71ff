"""Overhead of a call from Python: a tiny shape, compared with the same call on prepared C structs.

On a GPU it also measures a small problem in successive calls without a graph.
"""

import functools
import importlib.util
import json
import statistics
import time

from flashcore._attention import DEFAULTS, attention
from flashcore._core.arrays import adapter_of
from flashcore._core.call_cache import PreparedCall
from flashcore._core.options import OPTIONS

_SHAPE = (1, 1, 1, 16)
_SMALL_SHAPE = (1, 8, 512, 64)
_OPTIONS = tuple(DEFAULTS[name] for name in OPTIONS)
# Limits of the overhead above the bare call, in microseconds.
BARS = {"flashcore.attention, NumPy": 10.0, "flashcore.attention, torch": 10.0,
        "torch.ops.flashcore.attention": 15.0,
        "torch.ops.flashcore.attention, gradients on": 15.0}


def us_per_call(function, finish=None, rounds=15, calls=2000):
    """The median of the rounds; the first round is discarded. Without finish() it measures the CPU time
    of this thread, which excludes other programs."""
    clock = time.thread_time if finish is None else time.perf_counter
    times = []
    for _ in range(rounds + 1):
        begin = clock()
        for _ in range(calls):
            function()
        if finish is not None:
            finish()
        times.append(1e6 * (clock() - begin) / calls)
    return statistics.median(times[1:])


def bare_call(array):
    """(a function that calls flashcore_attention on this array, objects that it needs)."""
    adapter = adapter_of("q", array)
    call = PreparedCall(adapter, _OPTIONS, ())
    out = adapter.empty_out(array, array)
    call.describe(adapter, array, array, array, out, None, ())
    call.run(adapter, adapter.gpu(array))
    function, arguments = call._function, call._arguments
    return (lambda: function(*arguments)), (call, out)


@functools.cache
def op_of_nothing(torch):
    """An op with our arguments that returns its first. It measures the overhead of torch's dispatcher."""
    from flashcore._torch.library import SHORT_SCHEMA
    library = torch.library.Library("flashcore_overhead", "DEF")
    library.define(f"nothing({SHORT_SCHEMA}) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl("nothing", lambda q, *_, **__: q, key)
    return library, torch.ops.flashcore_overhead.nothing.default


def measure(device, torch=None, numpy=None):
    """{name: microseconds}. Rows that need a missing framework are omitted."""
    rows = {}
    finish = torch.cuda.synchronize if device == "cuda" else None
    if numpy is not None and device == "cpu":
        array = numpy.ones(_SHAPE, numpy.float32)
        bare, keep = bare_call(array)
        rows["bare C call, NumPy"] = us_per_call(bare)
        del keep
        rows["flashcore.attention, NumPy"] = us_per_call(
            lambda: attention(array, array, array))
    if torch is None:
        return rows
    from flashcore import ops
    dtype = torch.float16 if device == "cuda" else torch.float32
    tensor = torch.ones(_SHAPE, dtype=dtype, device=device)
    if device == "cpu":
        torch.set_num_threads(1)
    with torch.inference_mode():
        bare, keep = bare_call(tensor)
        rows["bare C call, torch"] = us_per_call(bare, finish)
        del keep
        rows["flashcore.attention, torch"] = us_per_call(
            lambda: attention(tensor, tensor, tensor), finish)
        op = ops.attention.default
        rows["torch.ops.flashcore.attention"] = us_per_call(
            lambda: op(tensor, tensor, tensor), finish)
        nothing = op_of_nothing(torch)[1]
        rows["an op of torch that does nothing"] = us_per_call(
            lambda: nothing(tensor, tensor, tensor), finish)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        rows["F.scaled_dot_product_attention"] = us_per_call(
            lambda: sdpa(tensor, tensor, tensor), finish)
    with torch.enable_grad():  # enabled, but no tensor requires a gradient
        rows["torch.ops.flashcore.attention, gradients on"] = us_per_call(
            lambda: op(tensor, tensor, tensor), finish)
    return rows


def measure_small(torch):
    """{name: microseconds} of _SMALL_SHAPE on the GPU, with 16-bit and 8-bit inputs."""
    finish = torch.cuda.synchronize
    inputs = [torch.randn(_SMALL_SHAPE, dtype=torch.float16, device="cuda") for _ in range(3)]
    codes = [one.to(torch.float8_e4m3fn) for one in inputs]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.inference_mode():
        return {
            "flashcore.attention, e4m3": us_per_call(lambda: attention(*codes), finish),
            "flashcore.attention, e4m3, out given": us_per_call(
                lambda: attention(*codes, out=torch.empty_like(inputs[0])), finish),
            "flashcore.attention, f16": us_per_call(lambda: attention(*inputs), finish),
            "F.scaled_dot_product_attention, f16": us_per_call(lambda: sdpa(*inputs), finish),
        }


def above_bare(rows):
    """{name: microseconds above the bare call} of the rows that have a limit."""
    bare = {"NumPy": rows.get("bare C call, NumPy"), "torch": rows.get("bare C call, torch")}
    return {name: rows[name] - bare["NumPy" if "NumPy" in name else "torch"]
            for name in BARS if name in rows}


def main(device, torch, as_json=False):
    """Prints the table. Returns the exit code 0."""
    has_numpy = importlib.util.find_spec("numpy") is not None
    rows = measure(device, torch, importlib.import_module("numpy") if has_numpy else None)
    over = above_bare(rows)
    small = measure_small(torch) if device == "cuda" else {}
    if as_json:
        print(json.dumps({"device": device, "us": rows, "us_above_bare": over, "us_small": small}))
        return 0
    print(f"{'call on ' + str(_SHAPE) + ', ' + device:<44} {'us':>7} {'above bare':>11} {'bar':>5}")
    for name, us in rows.items():
        more = f"{over[name]:>11.1f} {BARS[name]:>5.0f}" if name in over else ""
        print(f"{name:<44} {us:>7.1f} {more}")
    if small:
        print(f"{'call on ' + str(_SMALL_SHAPE):<44} {'us':>7}")
    for name, us in small.items():
        print(f"{name:<44} {us:>7.1f}")
    return 0
