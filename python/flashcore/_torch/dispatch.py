"""Decides whether torch must see a call, and routes it through torch.ops.flashcore if so.

flashcore.attention() calls the library directly if it can, and records gradients with _torch.gradients. It
goes through the op for autocast, torch.compile, vmap and tensor subclasses.
"""

from numbers import Integral

import torch
from torch.autograd import forward_ad

from flashcore._core.arrays import NoStorageError, adapter_of
from flashcore._core.execute import given_arrays
from flashcore._core.options import NONE, OPTIONS, normalize_options
from flashcore._core.options_table import to_schema
from flashcore._core.scalars import integer
from flashcore._torch.arrays import ADAPTER
from flashcore._torch.gradients import record, record_to_rows, run_to_rows
from flashcore._torch.library import (DEFAULTS, PLAIN_TYPES, TENSORS, are_plain as are_plain,
                                      dispatch_modes, in_functorch, is_compiling, is_traced, op_append,
                                      op_lse, op_options, op_short)

_Tensor = torch.Tensor
_grad_is_on = torch.is_grad_enabled
_autocast_is_on = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


def _autocast_casts(q, k, v):
    """True if autocast has another dtype for q, k or v. See transforms.py."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return False
    wanted = torch.get_autocast_dtype(device_type)
    return not (q.dtype is k.dtype is v.dtype is wanted)


def route(q, k, v, optional, out=None):
    """The function that runs attention(), if torch must see the call: attention(), or recorded(). None: the
    library can be called directly."""
    if not (type(q) is type(k) is type(v) is _Tensor
            or (type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES)):
        return attention if all(isinstance(one, _Tensor) for one in (q, k, v)) or any(
            isinstance(one, _Tensor) and (type(one) not in PLAIN_TYPES or one.is_neg()
                                          or (one.requires_grad and _grad_is_on()))
            for one in (q, k, v, *optional, out)) else None
    # The memory of a negative view holds the negated values. The op gets them resolved.
    if (is_compiling() or (_autocast_is_on() and _autocast_casts(q, k, v)) or dispatch_modes() > 0
            or is_traced() or forward_ad._current_level >= 0 or q.is_neg() or k.is_neg() or v.is_neg()):
        return attention
    if out is not None and isinstance(out, _Tensor) and (
            type(out) not in PLAIN_TYPES or out.is_neg()):
        return attention
    if optional is not NONE:
        tensors = [one for one in optional if isinstance(one, _Tensor)]
        if any(one.is_neg() for one in tensors):
            return attention
        if _grad_is_on() and any(one.requires_grad for one in tensors):
            return _route_of_gradients(q, k, v, optional, out)
    if _grad_is_on() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _route_of_gradients(q, k, v, optional, out)
    return None


def _route_of_gradients(q, k, v, optional, out):
    """recorded(), or attention() for calls that the op must compute, such as on meta tensors, or reject."""
    if (q.is_nested or k.is_nested or v.is_nested or q.is_meta or k.is_meta or v.is_meta or out is not None
            or in_functorch()):
        return attention
    if optional is not NONE and any(isinstance(one, _Tensor) and (type(one) not in PLAIN_TYPES or one.is_meta)
                                    for one in optional):
        return attention
    return recorded


def to_rows(q, k, v, causal, window, scale, softcap):
    """attention() of [batch, heads, len, dim] to [batch, len, heads, dim], which is contiguous. None if the
    call must go through an op."""
    way = route(q, k, v, NONE)
    if way is not recorded and (way is not None or in_functorch()):
        return None
    options = (causal, window, scale, softcap, "bhsd", 0, "deterministic", False, 0, 0, False, False, None)
    try:
        return (run_to_rows if way is None else record_to_rows)(q, k, v, options)
    except NoStorageError:  # a tensor that torch.vmap or torch.func.grad has left behind
        return None


def recorded(q, k, v, options, optional, out):
    """flashcore.attention() with gradients. `out` is None."""
    if optional is NONE:
        return record(q, k, v, options)
    _check_no_blocks(optional)
    optional = [one if one is None or isinstance(one, Integral) else _tensor_of(name, one)
                for name, one in zip(TENSORS, optional)]
    given = given_arrays(ADAPTER, q, (*optional, None, None))
    return record(q, k, v, options, tuple(name for name, _, _ in given), [one for _, _, one in given])


def append_needed(k_new, v_new, k, v):
    """True if an append() call must go through the op."""
    for name, one in (("k_new", k_new), ("v_new", v_new), ("k", k), ("v", v)):
        if isinstance(one, _Tensor) and one.is_nested:  # the op's own error would be misleading
            adapter_of(name, one).check_readable(one, name)
    return all(isinstance(one, _Tensor) for one in (k_new, v_new, k, v)) and route(
        k_new, v_new, k, (v,)) is not None


append = op_append


def _check_tangents(tensors):
    """Raises for forward-mode tangents, which torch would drop silently."""
    if any(isinstance(one, _Tensor) and forward_ad.unpack_dual(one).tangent is not None
           for one in tensors):
        raise NotImplementedError("forward-mode derivatives are not supported; use "
                                  "torch.autograd.grad or backward()")


def attention(q, k, v, options, optional, out):
    """flashcore.attention() through the op, which takes no block mask."""
    _check_no_blocks(optional)
    optional = optional[:len(TENSORS)]
    if not is_compiling():  # a trace has symbolic numbers, which torch checks itself
        options = normalize_options(*options)
        q, k, v, *optional = _tensors_of(q, k, v, optional)
        if forward_ad._current_level >= 0:
            _check_tangents((q, k, v, *optional))
    given = dict(zip(OPTIONS, options))
    return_lse, partial = given["return_lse"], given["partial"]
    grad = torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in (q, k, v, *optional))
    if grad and out is not None:
        raise ValueError("out: given while an input requires grad; leave it out, or use "
                         "torch.no_grad()")
    tensors = [torch.full((1,), one, dtype=torch.int32, device=q.device) if isinstance(one, Integral)
               else one for one in optional]
    options = to_schema(options)
    try:
        if return_lse or partial or grad:  # the backward needs the LSE
            made, lse = op_lse(q, k, v, *tensors, partial=partial, **options)
        elif (all(one is None for one in tensors)
              and {**options, "causal": False, "scale": None} == DEFAULTS):
            made, lse = op_short(q, k, v, causal=given["causal"], scale=given["scale"]), None
        else:
            made, lse = op_options(q, k, v, *tensors, **options), None
    except RuntimeError as error:
        if "functorch" in str(error):
            raise NotImplementedError("gradients inside torch.func are not supported; use "
                                      "torch.autograd.grad or backward()") from error
        raise
    if out is not None:
        made = _copy_into(out, made)
    return (made, lse) if return_lse or partial else made


def _check_no_blocks(optional):
    if any(one is not None for one in optional[len(TENSORS):]):
        raise NotImplementedError("mask: a BlockMask inside torch.vmap or torch.func is not supported; "
                                  "give mask.to_dense(q)")


def _tensors_of(q, k, v, optional):
    """All arrays as tensors, including those of other frameworks. Numbers stay numbers."""
    names = ("q", "k", "v", *TENSORS)
    return [_tensor_of(name, one) for name, one in zip(names, (q, k, v, *optional))]


def _tensor_of(name, one, written=False):
    if one is None:
        return None
    if isinstance(one, Integral):
        return integer(name, one, 32)
    adapter = adapter_of(name, one)
    if isinstance(one, _Tensor):
        if one.is_nested:  # the op's own error would be misleading
            adapter.check_readable(one, name)
        return one
    try:
        try:
            return torch.from_dlpack(one)
        except BufferError:  # some torch versions reject read-only arrays
            if written:
                raise
            return torch.from_dlpack(one.copy())
    except (AttributeError, BufferError, TypeError, RuntimeError) as error:  # no dtype of torch
        raise TypeError(f"{name}: is a {type(one).__name__} that torch cannot read with the tensors "
                        f"of this call ({error}); give a tensor") from None


def _copy_into(out, made):
    """Copies `made` into `out` and returns `out`. Accepts the shapes and dtypes that the library
    accepts."""
    given = out
    if not isinstance(out, _Tensor):
        adapter_of("out", out).check_writable(out, "out")
        out = _tensor_of("out", out, written=True)
    if out.is_nested:
        adapter_of("out", out).check_readable(out, "out")
    if out.shape != made.shape:
        raise ValueError(f"out: shape is {tuple(out.shape)}; wanted {tuple(made.shape)}")
    if out.dtype not in (made.dtype, torch.float32):
        raise ValueError(f"out: dtype is {_dtype_text(out.dtype)}; wanted {_dtype_text(made.dtype)}"
                         + ("" if made.dtype is torch.float32 else " or float32"))
    if out.device != made.device:
        raise ValueError(f"out: is on {out.device}, q is on {made.device}; all tensors must be on one "
                         "device")
    if not is_compiling() and torch._debug_has_internal_overlap(out) == 1:
        raise ValueError("out: its strides make elements overlap; an output must not")
    out.copy_(made)
    return given


def _dtype_text(dtype):
    return str(dtype).removeprefix("torch.")
