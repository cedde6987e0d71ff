"""attention_backward() and explain_backward(): gradients of attention on arrays of any framework."""

import ctypes
from collections.abc import Sequence
from typing import Any

from flashcore._attention import DEFAULTS
from flashcore._core import abi
from flashcore._core.arrays import ADAPTERS, TensorDesc, adapter_of, read_descriptor
from flashcore._core.backward_call import PreparedBackward, run_backward
from flashcore._core.call_cache import PreparedCall, thread_state
from flashcore._core.descriptors import described
from flashcore._core.execute import check_shaped, given_arrays
from flashcore._core.library import library
from flashcore._core.options import (NO_WINDOW, OPTIONAL, OPTIONS, Options, are_exact,
                                     normalize_options, python_name)
from flashcore._core.scalars import flag, one_of
from flashcore.block_mask import BlockMask
from flashcore.quant import Quantized

WANTED = ("q", "k", "v", "bias", "sinks")
_PREPARED = ("q", "k", "v", "sinks")  # the gradient of a bias may have another shape


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                       wanted: Sequence[str] = ("q", "k", "v"), causal: bool = False,
                       window: tuple[int, int] = NO_WINDOW, scale: float | None = None,
                       softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
                       bias: Any = None, mask: Any = None, q_start: Any = None, k_start: Any = None,
                       cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_k: Any = None,
                       block_table: Any = None, layout: str = "bhsd", reproducibility: str = "deterministic",
                       max_q_len: int = 0, max_kv_len: int = 0, partial: bool = False,
                       checked: bool = False, kernel: str | None = None, grad_dtype: str | None = None,
                       global_lse: bool = False) -> tuple[Any, ...]:
    """Gradients of attention(q, k, v, ...): a tuple in the order of `wanted`.

    dout is the gradient of the result `out`, dlse (optional) that of `lse`; both results are those of
    attention(..., return_lse=True) with the same options. `wanted` names inputs: "q", "k", "v", "bias"
    and "sinks". A gradient has the shape and dtype of its input. The same call
    gives the same bits, on a CPU for any number of threads. Paged and 8-bit k and v have no gradients.

    For sums of gradients over parts of the keys, as in a ring:

    grad_dtype        "f32": gradients of 16-bit inputs are not rounded to their dtype
    global_lse        out and lse cover more keys than the call has

    >>> import numpy as np, flashcore
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 4, 8)).astype(np.float32)
    >>> out, lse = flashcore.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dv = flashcore.attention_backward(out, q, k, v, out, lse, causal=True, wanted=("q", "v"))
    >>> dq.shape == q.shape and dv.dtype == v.dtype
    True
    """
    options = (causal, window, scale, softcap, layout, 0, reproducibility, False, max_q_len, max_kv_len,
               partial, checked, kernel)
    optional = (sinks, alibi_slopes, bias, mask, q_start, k_start, cu_seqlens_q, cu_seqlens_k, seqused_k,
                block_table, None, None)
    made = _run_prepared((q, k, v, out, lse, dout), dlse, tuple(wanted), options, optional, grad_dtype,
                         global_lse)
    if made is not None:
        return made
    arguments = {name: one for name, one in locals().items() if name in DEFAULTS and name != "out"}
    return _Call(dout, q, k, v, out, lse, dlse, wanted, arguments, grad_dtype, global_lse).run()


def explain_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                     wanted: Sequence[str] = ("q", "k", "v"), grad_dtype: str | None = None,
                     global_lse: bool = False, **arguments: Any) -> str:
    """Describes what attention_backward() would do with the same arguments."""
    return _Call(dout, q, k, v, out, lse, dlse, wanted, arguments, grad_dtype, global_lse).explain()


def _run_prepared(arrays: tuple[Any, ...], dlse: Any, wanted: tuple[str, ...], options: Options,
                  optional: Options, grad_dtype: Any, global_lse: Any) -> tuple[Any, ...] | None:
    """attention_backward() through a prepared call. None if _Call must run it, or report its error."""
    adapter = ADAPTERS.get(type(arrays[0]))
    inputs = {"q": arrays[0], "k": arrays[1], "v": arrays[2], "sinks": optional[0]}
    if adapter is None or not (grad_dtype is None or grad_dtype == "f32") or any(
            name not in _PREPARED or inputs[name] is None for name in wanted):
        return None
    given = [(name, one) for name, one in zip(OPTIONAL, optional) if one is not None]
    arrays = (*arrays, *(one for _, one in given), *(() if dlse is None else (dlse,)))
    if any(ADAPTERS.get(type(one)) is not adapter for one in arrays) or (
            adapter.dispatcher is not None and not adapter.dispatcher.are_plain(arrays)):
        return None
    call = _prepared_call(adapter, options, tuple(name for name, _ in given), wanted, dlse is not None,
                          global_lse)
    if call is None:
        return None
    in_f32 = grad_dtype is not None and not adapter.is_f64(arrays[0])
    made = run_backward(call, adapter, arrays, [inputs[one] for one in wanted], in_f32)
    if made is None:
        return None
    return tuple(made if adapter.finish is None else map(adapter.finish, made))


def _prepared_call(adapter: Any, options: Options, names: tuple[str, ...], wanted: tuple[str, ...],
                   has_dlse: bool, global_lse: Any) -> PreparedBackward | None:
    """The prepared call of gradients with these options. None if _Call must report an error."""
    if type(global_lse) is not bool or len(set(wanted)) < len(wanted):
        return None
    rest = names, wanted, has_dlse, global_lse
    try:
        call: PreparedBackward | None = thread_state.calls.get(("backward", adapter, options, *rest))
        if call is not None and are_exact(options):
            return call
    except TypeError:  # not hashable
        pass
    try:
        options = normalize_options(*options)  # keys must hold no arrays, because arrays can change
    except (TypeError, ValueError):
        return None
    key = "backward", adapter, options, *rest
    call = thread_state.calls.get(key)
    if call is None:
        call = PreparedBackward(adapter, options, *rest)
        thread_state.remember(key, call)
    return call


class _Call:
    """One call: the forward's params, and descriptors of the gradients."""

    def __init__(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any,
                 wanted: Sequence[str], arguments: dict[str, Any], grad_dtype: str | None,
                 global_lse: bool) -> None:
        if grad_dtype is not None:
            one_of("grad_dtype", grad_dtype, ("f32",))
        for name in wanted:
            if name not in WANTED:
                raise ValueError(f"wanted has {name!r}; wanted names of {', '.join(WANTED)}")
        for name, one in (("q", q), ("k", k), ("v", v)):
            if type(one) is Quantized:
                raise NotImplementedError(f"{name}: is a Quantized; gradients are computed for "
                                          "float arrays, dequantize() it first")
        for name, one in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("dout", dout)):
            check_shaped(name, one)
        values = {**DEFAULTS, **arguments}
        for name in values:
            if name not in DEFAULTS:
                raise TypeError(f"attention_backward() got an unexpected keyword argument '{name}'")
        self.adapter = adapter = adapter_of("q", q)
        if type(values["mask"]) is BlockMask:
            values["mask"] = values["mask"].to_dense(q)
        given = given_arrays(adapter, q, tuple(values.get(python_name(name)) for name in OPTIONAL))
        options = normalize_options(*(values[name] for name in OPTIONS))
        self.forward = PreparedCall(adapter, options, [name for name, _, _ in given])
        self.forward.describe(adapter, q, k, v, out, lse, given)
        self.arrays = {"q": q, "k": k, "v": v, "bias": values["bias"], "sinks": values["sinks"]}
        self.wanted = tuple(wanted)
        for name in ("bias", "sinks"):
            if name in self.wanted and self.arrays[name] is None:
                raise ValueError(f"wanted has {name!r}, but the call has no {name}")
        self._descs: list[TensorDesc] = []
        self.grad_dtype = None if adapter.is_f64(q) else grad_dtype
        self.params = abi.BackwardParams(ctypes.sizeof(abi.BackwardParams),
                                         ctypes.pointer(self.forward.params))
        self.params.global_lse = flag("global_lse", global_lse)
        self._describe("dout", dout)
        if dlse is not None:
            self._describe("dlse", dlse)
        self.made = {name: self._new(name) for name in dict.fromkeys(self.wanted)}

    def _describe(self, field: str, array: Any) -> None:
        desc = TensorDesc(field)
        self._descs.append(desc)
        setattr(self.params, field, ctypes.cast(described(field, array, desc),
                                                ctypes.POINTER(abi.Tensor)))

    def _new(self, name: str) -> Any:
        """Allocates the gradient of an input. That of a bias has four dimensions and all keys."""
        array = self.arrays[name]
        adapter = adapter_of(name, array)
        shape = tuple(adapter.shape(array))
        if name == "bias":
            full = read_descriptor(self.forward.arrays.bias, "bias").shape
            # A bias with one column for all keys is summed over them in the wider type.
            columns = len(shape) > 0 and shape[-1] == full[3]
            wide = not columns and not adapter.is_f64(array)
            made = adapter.empty(array, full, "f32" if wide else self.grad_dtype)
        elif self.grad_dtype is None:
            made = adapter.empty_gradient(array)
        else:
            made = adapter.empty(array, shape, self.grad_dtype)
        self._describe("d" + name, made)
        return made

    def run(self) -> tuple[Any, ...]:
        gpu = self.adapter.gpu(self.arrays["q"]) if self.adapter.has_gpus else -1
        plan = library().backward_plan(self.params)  # raises if the call is invalid
        self.forward.use_workspace_for(self.adapter, gpu, plan)
        library().attention_backward(self.params)
        if gpu >= 0 and (self.forward.must_wait or self.adapter.waits):
            self.forward.wait(gpu)
        results = [self._result(name) for name in self.wanted]
        finish = self.adapter.finish
        return tuple(results if finish is None else map(finish, results))

    def _result(self, name: str) -> Any:
        made = self.made[name]
        if name != "bias":
            return made
        bias = self.arrays["bias"]
        shape = tuple(adapter_of("bias", bias).shape(bias))
        if shape[-1] != made.shape[3]:
            made = made.sum(axis=3, keepdims=True)
            if self.grad_dtype is None:
                made = made.to(bias.dtype) if hasattr(made, "to") else made.astype(bias.dtype)
        return made.reshape(shape)

    def explain(self) -> str:
        return library().backward_explain(self.params)
