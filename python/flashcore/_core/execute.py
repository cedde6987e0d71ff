"""Runs attention on arrays that have memory, through prepared calls."""

from numbers import Integral, Real
from typing import Any

from flashcore._core.arrays import ADAPTERS, adapter_of
from flashcore._core.call_cache import PreparedCall, thread_state
from flashcore._core.options import (NONE, OPTIONAL, Given, Options, are_exact, normalize_options,
                                     python_name)
from flashcore._core.scalars import integer


def run(adapter: Any, q: Any, k: Any, v: Any, options: Options, optional: Options, out: Any) -> Any:
    """Runs attention(). `adapter` is q's adapter.

    The fast path lets the library describe the arrays, which takes less than a microsecond. If it
    cannot, or if it rejects the call, Python describes them and reports the error.
    """
    given = () if optional is NONE else given_arrays(adapter, q, optional)
    try:
        call = thread_state.calls.get(
            (adapter, options) if given == () else _key(adapter, options, given))
    except TypeError:  # not hashable: window is a list, scale is an array
        call = None
    if call is not None and not are_exact(options):
        call = None
    if call is not None and out is None and given == ():
        made = run_new(adapter, call, q, k, v)
        if made is not None:
            return made
    mixed = ADAPTERS.get(type(k)) is not adapter or ADAPTERS.get(type(v)) is not adapter
    if mixed:  # k or v is of another framework, or of a new type; adapter_of() raises for other types
        mixed = adapter_of("k", k) is not adapter or adapter_of("v", v) is not adapter
    if call is None or call.busy:
        call = prepared_call(adapter, options, given)
    call.busy = True
    try:
        made, lse = make_outputs(call, adapter, q, k, v, out)
        gpu = adapter.gpu(q) if adapter.has_gpus else -1
        if mixed or not call.has_workspace(adapter, gpu):
            code = -1  # each adapter describes its own arrays
        elif lse is None and not given:
            code = call.run_fast(q, k, v, made)
        elif any(other is not adapter for _, other, _ in given):
            code = -1
        else:
            code = call.run_fast(q, k, v, made, *(() if lse is None else (lse,)),
                                 *[one for _, _, one in given])
        if code != 0:
            _check_no_gradients(adapter, k, v, given)
            call.describe(adapter, q, k, v, made, lse, given)
            call.run(adapter, gpu)
        if out is not None:
            adapter_of("out", out).wrote(out)
        if call.must_wait or (gpu >= 0 and adapter.waits):
            call.wait(gpu)
    finally:
        call.release()
    if adapter.finish is not None:
        made, lse = made if out is not None else adapter.finish(made), adapter.finish(lse)
    return made if lse is None else (made, lse)


def run_new(adapter: Any, call: PreparedCall, q: Any, k: Any, v: Any) -> Any:
    """Runs a prepared call of q, k and v alone in one library call, which also allocates the result.
    Returns None if run() must do it."""
    if call.run_new is None or call.busy:
        return None
    gpu = adapter.gpu(q)
    return call.run_new(q, k, v) if gpu < 0 or call.has_workspace(adapter, gpu) else None


def _check_no_gradients(adapter: Any, k: Any, v: Any, given: Given) -> None:
    """Checks the arrays that belong to other frameworks than q. q's dispatcher has checked its own."""
    for name, other, one in (("k", adapter_of("k", k), k), ("v", adapter_of("v", v), v), *given):
        if other is not adapter:
            other.check_no_gradient(one, name)


def make_outputs(call: PreparedCall, adapter: Any, q: Any, k: Any, v: Any,
                 out: Any) -> tuple[Any, Any]:
    """(out, lse or None), allocated as needed."""
    if out is not None:
        adapter_of("out", out).check_writable(out, "out")
    try:
        lse = call.empty_lse(adapter, q) if call.wants_lse else None
        if out is None:
            out = call.empty_partial(adapter, q, v) if call.wide_out else adapter.empty_out(q, v)
            if call.is_varlen:
                out = adapter.fill(out, 0.0)
        if lse is not None and call.is_varlen:
            lse = adapter.fill(lse, float("-inf"))
    except Exception:
        for name, one in (("q", q), ("k", k), ("v", v)):
            check_shaped(name, one)
        raise
    return out, lse


def check_shaped(name: str, array: Any) -> None:
    """Raises if an array has no memory to read, or no dimensions."""
    adapter = adapter_of(name, array)
    adapter.check_readable(array, name)
    if len(adapter.info(array, name).shape) == 0:
        raise ValueError(f"{name}: has no dimension; wanted [batch, heads, len, dim]")


def _key(adapter: Any, options: Options, given: Given) -> Options:
    return (adapter, options, *[name for name, _, _ in given]) if given else (adapter, options)


def prepared_call(adapter: Any, options: Options, given: Given = ()) -> PreparedCall:
    """A prepared call with these options that is not in use."""
    options = normalize_options(*options)  # keys must hold no arrays, because arrays can change
    key = _key(adapter, options, given)
    call = thread_state.calls.get(key)
    if call is None or call.busy:
        call = PreparedCall(adapter, options, [name for name, _, _ in given])
        thread_state.remember(key, call)
    return call


def given_arrays(adapter: Any, q: Any, optional: Options) -> Given:
    """The optional arrays that were passed. A number for q_start or k_start becomes an array."""
    given: list[tuple[str, Any, Any]] = []
    for name, one in zip(OPTIONAL, optional):
        if one is None:
            continue
        if name in ("q_start", "k_start") and isinstance(one, Integral):
            one = adapter.int32(q, integer(name, one, 32))
        elif name in ("q_start", "k_start") and isinstance(one, Real):
            raise TypeError(f"{name} is {one!r}; wanted an integer, or an array of int32")
        given.append((name, adapter_of(python_name(name), one), one))
    return given
