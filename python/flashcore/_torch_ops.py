"""torch.ops.flashcore: attention, attention_lse (which also returns the LSE), their backward, append.
Registered with define and impl: half the overhead of torch.library.custom_op.

flashcore.attention() goes straight to the library where it can, and through the op where torch
itself must see the call: gradients, autocast, torch.compile, vmap, tensor subclasses."""

import threading
from numbers import Integral
from typing import Any

import torch
from torch.autograd import forward_ad

from flashcore import _attention, _cache, _torch_backward
from flashcore._arrays import kind_of
from flashcore._prepared import PreparedCall, plain_options
from flashcore._scalars import integer


class _Library(torch.library.Library):
    """Calls that need no gradient stay out of torch's kernel that would record one."""

    def impl(self, op_name, fn, dispatch_key="", **more):
        if dispatch_key == "Autograd" and op_name in _KERNELS:
            fn = _only_for_gradients(fn, _KERNELS[op_name])
        super().impl(op_name, fn, dispatch_key, **more)


def _plain_keysets():
    """The keys of calls that go from recording a gradient straight to the kernel: no mode, trace,
    functorch, negative view or second device is in between. Empty where this torch names them
    otherwise."""
    try:
        key, keyset = torch._C.DispatchKey, torch._C.DispatchKeySet
        return frozenset((keyset(one) | keyset(autograd)).raw_repr() for one, autograd in (
            (key.CPU, key.AutogradCPU), (key.CUDA, key.AutogradCUDA)))
    except (AttributeError, TypeError):
        return frozenset()


_PLAIN_KEYSETS = _plain_keysets()


def _only_for_gradients(record, kernel):
    """The kernel for torch's key Autograd. record() is torch's own, which calls the dispatcher again;
    where there is nothing to record that would double the cost of a call."""
    def autograd(keyset, q, k, v, *tensors, **options):
        if keyset.raw_repr() not in _PLAIN_KEYSETS or (_grad_is_on() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (tensors and any(one is not None and one.requires_grad for one in tensors)))):
            return record(keyset, q, k, v, *tensors, **options)
        return kernel(q, k, v, *tensors, **options) if tensors or options else kernel(q, k, v)
    return autograd


_LIBRARY = _Library("flashcore", "DEF")
_TENSORS = ("sinks", "alibi_slopes", "bias", "mask", "q_start", "k_start", "cu_seqlens_q",
            "cu_seqlens_k", "seqused_k", "block_table")
_OPTIONAL_SCHEMA = ", ".join(f"Tensor? {name}=None" for name in _TENSORS)
COMMON_SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, {_OPTIONAL_SCHEMA}, *, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float? scale=None, float softcap=0.0, "
    'str layout="bhsd", SymInt num_splits=0, str reproducibility="deterministic", '
    "SymInt max_q_len=0, SymInt max_kv_len=0, bool checked=False, str? kernel_id=None")
# torch takes a sixth of a microsecond for every argument, also for those that are left out: the usual
# ones have an overload of their own. torch.ops.flashcore.attention(...) chooses by itself.
PLAIN_SCHEMA = "Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None"
_LIBRARY.define(f"attention({PLAIN_SCHEMA}) -> Tensor")
_LIBRARY.define(f"attention.options({COMMON_SCHEMA}) -> Tensor")
_LIBRARY.define(
    f"attention_lse({COMMON_SCHEMA}, bool partial=False) -> (Tensor out, Tensor lse)")
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_OPTIONAL_SCHEMA}, *, bool causal, SymInt window_left, "
    "SymInt window_right, float? scale, float softcap, str layout, bool partial, "
    "bool[] wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)")
_LIBRARY.define(
    "append(Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor seqused_k, "
    "Tensor? block_table=None, Tensor? cu_seqlens_new=None) -> ()")

_op_plain = torch.ops.flashcore.attention.default
_op = torch.ops.flashcore.attention.options
_op_lse = torch.ops.flashcore.attention_lse.default
_DEFAULTS = {one.name: one.default_value for one in _op._schema.arguments if one.kwarg_only}


# --- When torch must see the call.

_Tensor = torch.Tensor
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_is_compiling = torch.compiler.is_compiling
_grad_is_on = torch.is_grad_enabled
_autocast_is_on = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_is_traced = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # by torch.jit.trace


def needed(q, k, v, optional, out=None):
    if not (type(q) is type(k) is type(v) is _Tensor
            or (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)):
        return all(isinstance(one, _Tensor) for one in (q, k, v)) or any(
            isinstance(one, _Tensor) and (type(one) not in _PLAIN or one.is_neg()
                                          or (one.requires_grad and _grad_is_on()))
            for one in (q, k, v, *optional, out))
    # A negative view's memory holds the opposite of its values: the op gets them resolved.
    if (_is_compiling() or _autocast_is_on() or _dispatch_modes() > 0 or _is_traced()
            or forward_ad._current_level >= 0 or q.is_neg() or k.is_neg() or v.is_neg()):
        return True
    if out is not None and isinstance(out, _Tensor) and (type(out) not in _PLAIN or out.is_neg()):
        return True
    if optional is not _attention.NONE and any(
            isinstance(one, _Tensor) and (one.is_neg() or (one.requires_grad and _grad_is_on()))
            for one in optional):
        return True
    return _grad_is_on() and (q.requires_grad or k.requires_grad or v.requires_grad)


def append_needed(k_new, v_new, k, v):
    for name, one in (("k_new", k_new), ("v_new", v_new), ("k", k), ("v", v)):
        if isinstance(one, _Tensor) and one.is_nested:  # the op would say that it does not exist
            kind_of(name, one).check_readable(one, name)
    return all(isinstance(one, _Tensor) for one in (k_new, v_new, k, v)) and needed(
        k_new, v_new, k, (v,))


def _check_tangents(tensors):
    """torch would drop them silently."""
    if any(isinstance(one, _Tensor) and forward_ad.unpack_dual(one).tangent is not None
           for one in tensors):
        raise NotImplementedError("forward-mode derivatives are not supported; use "
                                  "torch.autograd.grad or backward()")


def attention(q, k, v, options, optional, out):
    """flashcore.attention() through the op."""
    if not _is_compiling():  # what a trace sees are no numbers, and torch checks them
        options = plain_options(*options)
        q, k, v, *optional = _tensors_of(q, k, v, optional)
        if forward_ad._current_level >= 0:
            _check_tangents((q, k, v, *optional))
    (causal, window, scale, softcap, layout, num_splits, reproducibility, return_lse, max_q_len,
     max_kv_len, partial, checked, kernel) = options
    window_left, window_right = window
    grad = torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in (q, k, v, *optional))
    if grad and out is not None:
        raise ValueError("out: given while an input requires grad; leave it out, or use "
                         "torch.no_grad()")
    tensors = [torch.full((1,), one, dtype=torch.int32, device=q.device) if isinstance(one, Integral)
               else one for one in optional]
    options = dict(causal=causal, window_left=window_left, window_right=window_right, scale=scale,
                   softcap=softcap, layout=layout, num_splits=num_splits,
                   reproducibility=reproducibility, max_q_len=max_q_len, max_kv_len=max_kv_len,
                   checked=checked, kernel_id=kernel)
    try:
        if return_lse or partial or grad:  # the backward needs the LSE
            made, lse = _op_lse(q, k, v, *tensors, partial=partial, **options)
        elif (all(one is None for one in tensors)
              and {**options, "causal": False, "scale": None} == _DEFAULTS):
            made, lse = _op_plain(q, k, v, causal=causal, scale=scale), None
        else:
            made, lse = _op(q, k, v, *tensors, **options), None
    except RuntimeError as error:
        if "functorch" in str(error):
            raise NotImplementedError("gradients inside torch.func are not supported; use "
                                      "torch.autograd.grad or backward()") from error
        raise
    if out is not None:
        made = _copy_into(out, made)
    return (made, lse) if return_lse or partial else made


def _tensors_of(q, k, v, optional):
    """All arrays as tensors, those of other frameworks too. Numbers stay."""
    names = ("q", "k", "v", *_TENSORS)
    return [_tensor_of(name, one) for name, one in zip(names, (q, k, v, *optional))]


def _tensor_of(name, one, written=False):
    if one is None:
        return None
    if isinstance(one, Integral):
        return integer(name, one, 32)
    kind = kind_of(name, one)
    if isinstance(one, _Tensor):
        if one.is_nested:  # the op would say that it does not exist
            kind.check_readable(one, name)
        return one
    try:
        try:
            return torch.from_dlpack(one)
        except BufferError:  # read-only, for some versions
            if written:
                raise
            return torch.from_dlpack(one.copy())
    except (AttributeError, BufferError, TypeError, RuntimeError) as error:  # no type of torch's
        raise TypeError(f"{name}: is a {type(one).__name__} that torch cannot read beside the tensors "
                        f"of this call ({error}); give a tensor") from None


def _copy_into(out, made):
    """out with the values of made, of a shape and type that the library would take too."""
    given = out
    if not isinstance(out, _Tensor):
        kind_of("out", out).check_writable(out, "out")
        out = _tensor_of("out", out, written=True)
    if out.is_nested:
        kind_of("out", out).check_readable(out, "out")
    if out.shape != made.shape:
        raise ValueError(f"out: shape is {tuple(out.shape)}; wanted {tuple(made.shape)}")
    if out.dtype not in (made.dtype, torch.float32):
        raise ValueError(f"out: dtype is {_dtype_words(out.dtype)}; wanted {_dtype_words(made.dtype)}"
                         + ("" if made.dtype is torch.float32 else " or float32"))
    if out.device != made.device:
        raise ValueError(f"out: is on {out.device}, q is on {made.device}; all tensors must be on one "
                         "device")
    if not _is_compiling() and torch._debug_has_internal_overlap(out) == 1:
        raise ValueError("out: its strides make elements overlap; an output must not")
    out.copy_(made)
    return given


def _dtype_words(dtype):
    return str(dtype).removeprefix("torch.")


# --- The op on tensors with memory.

def empty_out(q, v):
    """Like q, also in the order of its dimensions in memory, but as wide as v, and float16 where q is
    8-bit."""
    dtype = torch.float16 if q.element_size() == 1 else q.dtype
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


class _PlainCall(threading.local):
    """attention() of q, k and v alone, as each thread has prepared it for the op. new(q, k, v): the
    result by one call of the library, on the CPU; None where Python must make it."""

    new: Any = None

    def prepare(self, kind):
        self.kind = kind
        self.call = PreparedCall(kind, _options(), ())  # used by nothing else: never busy
        self.new = self.call.run_new or (lambda q, k, v: None)


_plain = _PlainCall()


def _kernel(q, k, v, *tensors, **options):  # torch leaves out what has its default value
    if not tensors and not options and q is not None:  # torch hands None on; _run() refuses it
        if _plain.new is None:
            _plain.prepare(kind_of("q", q))
        made = _plain.new(q, k, v) if q.is_cpu else _attention.run_new(
            _plain.kind, _plain.call, q, k, v)
        if made is not None:
            return made
    return _run(q, k, v, tensors, options)


def _kernel_lse(q, k, v, *tensors, **options):
    return _run(q, k, v, tensors, {**options, "return_lse": True})


def _run(q, k, v, tensors, options):
    if tensors:
        tensors += (None,) * (len(_TENSORS) - len(tensors))
    return _attention.run(kind_of("q", q), q, k, v, _options(**options), tensors or _attention.NONE,
                          None)


def _options(causal=False, window_left=-1, window_right=-1, scale=None, softcap=0.0,
             layout="bhsd", num_splits=0, reproducibility="deterministic", max_q_len=0, max_kv_len=0,
             checked=False, kernel_id=None, partial=False, return_lse=False):
    """attention()'s options of the op's arguments."""
    return (causal, (window_left, window_right), scale, softcap, layout, num_splits, reproducibility,
            return_lse, max_q_len, max_kv_len, partial, checked, kernel_id)


_KERNELS = {"attention": _kernel, "attention.options": _kernel, "attention_lse": _kernel_lse}
for _name, _function in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)


def _lse_shape(q, layout, packed):
    if packed:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else tuple(q.shape[:3])


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _is_packed(q, tensors):
    """Whether cu_seqlens_q is given; raises where q is not of the rank that goes with it."""
    packed = len(tensors) > 6 and tensors[6] is not None
    rank = 3 if packed else 4
    torch._check_value(q.dim() == rank, lambda: f"q: rank is {q.dim()}; wanted {rank}")
    return packed


@torch.library.register_fake("flashcore::attention", lib=_LIBRARY)
@torch.library.register_fake("flashcore::attention.options", lib=_LIBRARY)
def _fake(q, k, v, *tensors, **_):
    _is_packed(q, tensors)
    return empty_out(q, v)


@torch.library.register_fake("flashcore::attention_lse", lib=_LIBRARY)
def _fake_lse(q, k, v, *tensors, layout="bhsd", partial=False, **_):
    packed, wide = _is_packed(q, tensors), _wide(q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide) if partial else empty_out(q, v)
    return out, q.new_empty(_lse_shape(q, layout, packed), dtype=wide)


# --- Gradients: the attention matrix again, in blocks of rows.

def _setup_context(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *tensors = inputs
    tensors += [None] * (len(_TENSORS) - len(tensors))
    ctx.options = {**_DEFAULTS, **keyword_only_inputs}
    out, lse = output if isinstance(output, tuple) else (output, None)
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse=None):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = ctx.options
    # One for each argument that was given; in _setup_context torch has put one of its own after them.
    wants = ctx.needs_input_grad
    count = len(wants)
    if count > 4 and wants[4]:
        raise NotImplementedError("alibi_slopes: requires grad; gradients are computed for q, k, v, "
                                  "sinks and bias")
    if grad_out is None and grad_lse is None:
        return (None,) * count
    if lse is None:  # of flashcore::attention, which has none
        lse = _op_lse(q, k, v, *tensors, **options)[1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [*wants[:3], count > 3 and wants[3], count > 5 and wants[5]]
    names = ("causal", "window_left", "window_right", "scale", "softcap", "layout")
    dq, dk, dv, dsinks, dbias = torch.ops.flashcore.attention_backward.default(
        grad_out, grad_lse, q, k, v, out, lse, *tensors,
        **{name: options[name] for name in names}, partial=options.get("partial", False),
        wanted=wanted)
    grads = [dq, dk, dv, dsinks, None, dbias] + [None] * (count - 6)
    return tuple(one if want else None for one, want in zip(grads, wants))


for _name in _KERNELS:
    torch.library.register_autograd(f"flashcore::{_name}", _backward, setup_context=_setup_context,
                                    lib=_LIBRARY)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_backward", _torch_backward.backward, _key)


def _no_second_backward(ctx, *grads):
    raise NotImplementedError("flashcore.attention has no second derivative; use torch's math "
                              "backend where one is needed")


torch.library.register_autograd("flashcore::attention_backward", _no_second_backward, lib=_LIBRARY)


@torch.library.register_fake("flashcore::attention_backward", lib=_LIBRARY)
def _fake_backward(grad_out, grad_lse, q, k, v, out, lse, sinks=None, alibi_slopes=None, bias=None,
                   *_, wanted, **__):
    made = []
    for one, want in zip((q, k, v, sinks, bias), wanted):
        made.append(one.new_empty(one.shape) if want else q.new_empty(0))
    return tuple(made)


# --- Autocast: q, k and v in the lower precision, as torch's own attention. The rest keeps its type.

def _autocast_rule(op, device_type):
    def rule(q, k, v, *tensors, **options):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (one.to(dtype) if one.dtype in (torch.float32, torch.float16, torch.bfloat16)
                   else one for one in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return op(q, k, v, *tensors, **options)
    return rule


for _op_name, _one in (("attention", _op_plain), ("attention.options", _op),
                       ("attention_lse", _op_lse)):
    _LIBRARY.impl(_op_name, _autocast_rule(_one, "cpu"), "AutocastCPU")
    _LIBRARY.impl(_op_name, _autocast_rule(_one, "cuda"), "AutocastCUDA")


# --- vmap: the new dimension becomes part of the batch.

def _batched(one, dim, size):
    """[size, ...] of a tensor with or without that dimension."""
    return one.unsqueeze(0).expand(size, *one.shape) if dim is None else one.movedim(dim, 0)


def _with_larger_batch(size, in_dims, q, k, v, tensors):
    """The tensors of one call for all `size` calls."""
    given = dict(zip(_TENSORS, tensors))
    dims = dict(zip(_TENSORS, in_dims[3:]))
    for name in _TENSORS:
        one, dim = given.get(name), dims.get(name)
        if one is None:
            continue
        if name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"):
            raise NotImplementedError(f"{name}: vmap over packed or paged sequences is not "
                                      "supported; make them one batch instead")
        if name == "sinks" or (name == "alibi_slopes" and one.dim() - (dim is not None) == 1):
            if dim is not None:
                raise NotImplementedError(f"{name}: vmap over it is not supported; it belongs to the "
                                          "heads")
            continue
        batch = q.movedim(in_dims[0], 0).shape[1] if in_dims[0] is not None else q.shape[0]
        if name in ("bias", "mask"):
            one = _batched(one, dim, size)
            one = one.reshape(size, *(1,) * (5 - one.dim()), *one.shape[1:])
            given[name] = one.expand(size, batch, *one.shape[2:]).flatten(0, 1)
        else:  # one number, or one row, for each sequence
            one = _batched(one, dim, size)
            given[name] = one.expand(size, batch, *one.shape[2:]).flatten(0, 1).contiguous()
    q, k, v = (_batched(one, dim, size).flatten(0, 1) for one, dim in zip((q, k, v), in_dims))
    return q, k, v, *(given.get(name) for name in _TENSORS)


def _vmap(info, in_dims, q, k, v, *tensors, **options):
    size = info.batch_size
    out = _op(*_with_larger_batch(size, in_dims, q, k, v, tensors), **options)
    return out.unflatten(0, (size, -1)), 0


def _vmap_lse(info, in_dims, q, k, v, *tensors, **options):
    size = info.batch_size
    made = _op_lse(*_with_larger_batch(size, in_dims, q, k, v, tensors), **options)
    return tuple(one.unflatten(0, (size, -1)) for one in made), (0, 0)


torch.library.register_vmap("flashcore::attention", _vmap, lib=_LIBRARY)
torch.library.register_vmap("flashcore::attention.options", _vmap, lib=_LIBRARY)
torch.library.register_vmap("flashcore::attention_lse", _vmap_lse, lib=_LIBRARY)


# --- append.

def _append(k_new, v_new, k, v, seqused_k, block_table=None, cu_seqlens_new=None):
    _cache.run_append(kind_of("k", k), k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)


append = torch.ops.flashcore.append.default
_LIBRARY.impl("append", _append, "CPU")
_LIBRARY.impl("append", _append, "CUDA")


@torch.library.register_fake("flashcore::append", lib=_LIBRARY)
def _fake_append(*_, **__):
    return None
