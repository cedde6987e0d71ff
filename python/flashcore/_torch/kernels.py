"""Kernels and fake kernels of torch.ops.flashcore, on tensors that have memory."""

import threading
from typing import Any

import torch

from flashcore._core.arrays import adapter_of
from flashcore._core.call_cache import PreparedCall
from flashcore._core.execute import run, run_new
from flashcore._core.options import NONE
from flashcore._core.options_table import from_schema
from flashcore._torch.arrays import empty_out
from flashcore._torch.library import KERNELS, LIBRARY, TENSORS
from flashcore.cache import run_append


class _ShortCall(threading.local):
    """The prepared call of q, k and v alone, one per thread. new(q, k, v) computes the result on the
    CPU in one library call; it returns None if Python must allocate the result."""

    new: Any = None

    def prepare(self, adapter):
        self.adapter = adapter
        self.call = PreparedCall(adapter, from_schema(), ())  # used here only, so it is never busy
        self.new = self.call.run_new or (lambda q, k, v: None)


_short_call = _ShortCall()


def _kernel(q, k, v, *tensors, **options):  # torch omits arguments with default values
    if not tensors and not options and q is not None:  # torch passes None on; _run() rejects it
        if _short_call.new is None:
            _short_call.prepare(adapter_of("q", q))
        made = _short_call.new(q, k, v) if q.is_cpu else run_new(
            _short_call.adapter, _short_call.call, q, k, v)
        if made is not None:
            return made
    return _run(q, k, v, tensors, options)


def _kernel_lse(q, k, v, *tensors, **options):
    return _run(q, k, v, tensors, {**options, "return_lse": True})


def _run(q, k, v, tensors, options):
    if tensors:
        tensors += (None,) * (len(TENSORS) - len(tensors))
    return run(adapter_of("q", q), q, k, v, from_schema(**options), tensors or NONE, None)


KERNELS.update({"attention": _kernel, "attention.options": _kernel, "attention_lse": _kernel_lse})
ATTENTION_OPS = tuple(KERNELS)
for _name, _function in KERNELS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _function, _key)


def _lse_shape(q, layout, varlen):
    if varlen:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else tuple(q.shape[:3])


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _is_varlen(q, tensors):
    """True if cu_seqlens_q is given. Raises if q does not have the matching rank."""
    varlen = len(tensors) > 6 and tensors[6] is not None
    rank = 3 if varlen else 4
    torch._check_value(q.dim() == rank, lambda: f"q: rank is {q.dim()}; wanted {rank}")
    return varlen


@torch.library.register_fake("flashcore::attention", lib=LIBRARY)
@torch.library.register_fake("flashcore::attention.options", lib=LIBRARY)
def _fake(q, k, v, *tensors, **_):
    _is_varlen(q, tensors)
    return empty_out(q, v)


@torch.library.register_fake("flashcore::attention_lse", lib=LIBRARY)
def _fake_lse(q, k, v, *tensors, layout="bhsd", partial=False, **_):
    varlen, wide = _is_varlen(q, tensors), _wide(q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide) if partial else empty_out(q, v)
    return out, q.new_empty(_lse_shape(q, layout, varlen), dtype=wide)


def _append(k_new, v_new, k, v, seqused_k, block_table=None, cu_seqlens_new=None):
    run_append(adapter_of("k", k), k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)


LIBRARY.impl("append", _append, "CPU")
LIBRARY.impl("append", _append, "CUDA")


@torch.library.register_fake("flashcore::append", lib=LIBRARY)
def _fake_append(*_, **__):
    return None
