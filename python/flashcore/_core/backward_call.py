"""Prepared calls of attention_backward(): as in call_cache.py, a repeated call only sets its arrays."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from flashcore._core import abi, fastcall
from flashcore._core.call_cache import PreparedCall, thread_state
from flashcore._core.library import library
from flashcore._core.options import Options


class PreparedBackward:
    """flashcore_attention_backward with its params. run_fast() takes q, k, v, out, lse, dout, the optional
    arrays, dlse if there is one, and the gradients."""

    def __init__(self, adapter: Any, options: Options, names: Sequence[str], wanted: Sequence[str],
                 has_dlse: bool, global_lse: bool = False, swaps_out: bool = False) -> None:
        """options: a result of normalize_options(); names: params fields of the optional arrays; wanted:
        names of inputs; swaps_out: out and dout have heads and rows swapped."""
        self.forward = PreparedCall(adapter, options, names)
        self.busy = False
        params = self.forward.params
        self._params = abi.BackwardParams(ctypes.sizeof(abi.BackwardParams), ctypes.pointer(params))
        self._params.global_lse = global_lse
        own = ("dlse",) * has_dlse + tuple("d" + name for name in wanted)
        fields = (*fastcall.field_addresses(params, ("q", "k", "v", "out", "lse")),
                  *fastcall.field_addresses(self._params, ("dout",)),
                  *fastcall.field_addresses(params, names),
                  *fastcall.field_addresses(self._params, own))
        self.run_fast: Callable[..., int] = fastcall.unavailable
        if adapter.reader is not None:
            self._fast = fastcall.FastCall(
                library(), params, abi.Error(), thread_state.workspace.described,
                thread_state.interruptible, fields, adapter.reader[0], None, self._params,
                (3, 5) if swaps_out else ())
            self.run_fast = self._fast.run


def run_backward(call: PreparedBackward, adapter: Any, arrays: Sequence[Any], inputs: Sequence[Any],
                 in_f32: bool = False) -> list[Any] | None:
    """The gradients of `inputs`, which the call was prepared for. `arrays` are the others that run_fast()
    takes. None if Python must describe the arrays, or report an error; nothing has run then. in_f32: the
    gradients are f32."""
    if call.busy:
        return None
    call.busy = True
    try:
        if in_f32:
            made = [adapter.empty(one, tuple(adapter.shape(one)), "f32") for one in inputs]
        else:
            made = [adapter.empty_gradient(one) for one in inputs]
        gpu = adapter.gpu(arrays[0]) if adapter.has_gpus else -1
        if not call.forward.has_workspace(adapter, gpu) or call.run_fast(*arrays, *made) != 0:
            return None
        if gpu >= 0 and (call.forward.must_wait or adapter.waits):
            call.forward.wait(gpu)
        return made
    finally:
        call.busy = False
