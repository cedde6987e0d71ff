"""torch.ops.flashcore: attention, its backward, append. Registered with define and impl: half the
overhead of torch.library.custom_op.

flashcore.attention() goes straight to the library where it can, and through the op where torch
itself must see the call: gradients, autocast, torch.compile, vmap, tensor subclasses."""

import torch

from flashcore import _attention, _cache, _torch_backward
from flashcore._arrays import KINDS, kind_of

_LIBRARY = torch.library.Library("flashcore", "DEF")
_TENSORS = ("sinks", "alibi_slopes", "bias", "mask", "q_start", "k_start", "cu_seqlens_q",
            "cu_seqlens_k", "seqused_k", "block_table")
_OPTIONAL_SCHEMA = ", ".join(f"Tensor? {name}=None" for name in _TENSORS)
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONAL_SCHEMA}, *, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float? scale=None, float softcap=0.0, "
    'str layout="bhsd", SymInt num_splits=0, str reproducibility="deterministic", '
    "bool return_lse=False, SymInt max_q_len=0, SymInt max_kv_len=0, bool partial=False, "
    "bool checked=False, str? kernel_id=None) -> (Tensor out, Tensor lse)")
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_OPTIONAL_SCHEMA}, *, bool causal, SymInt window_left, "
    "SymInt window_right, float? scale, float softcap, str layout, bool partial, "
    "bool[] wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)")
_LIBRARY.define(
    "append(Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor seqused_k, "
    "Tensor? block_table=None, Tensor? cu_seqlens_new=None) -> ()")

_op = torch.ops.flashcore.attention.default


# --- When torch must see the call.

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_autocast_is_on = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def needed(q, k, v, optional):
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return all(isinstance(one, torch.Tensor) for one in (q, k, v))
    return (torch.compiler.is_compiling() or _autocast_is_on() or _dispatch_modes() > 0
            or (torch.is_grad_enabled()
                and (q.requires_grad or k.requires_grad or v.requires_grad
                     or any(isinstance(one, torch.Tensor) and one.requires_grad
                            for one in optional))))


def attention(q, k, v, options, optional, out):
    """flashcore.attention() through the op."""
    (causal, window, scale, softcap, layout, num_splits, reproducibility, return_lse, max_q_len,
     max_kv_len, partial, checked, kernel) = options
    window_left, window_right = window
    grad = torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in (q, k, v, *optional))
    if grad and out is not None:
        raise ValueError("out: given while an input requires grad; leave it out, or use "
                         "torch.no_grad()")
    tensors = [torch.full((1,), one, dtype=torch.int32, device=q.device) if isinstance(one, int)
               else one for one in optional]
    try:
        made, lse = _op(q, k, v, *tensors, causal=causal, window_left=window_left,
                        window_right=window_right, scale=scale, softcap=softcap, layout=layout,
                        num_splits=num_splits, reproducibility=reproducibility,
                        return_lse=return_lse or partial or grad, max_q_len=max_q_len,
                        max_kv_len=max_kv_len, partial=partial, checked=checked, kernel_id=kernel)
    except RuntimeError as error:
        if "functorch" in str(error):
            raise NotImplementedError("gradients inside torch.func are not supported; use "
                                      "torch.autograd.grad or backward()") from error
        raise
    if out is not None:
        made = out.copy_(made)
    return (made, lse) if return_lse or partial else made


# --- The op on tensors with memory.

def empty_out(q, v):
    """Like q, also in the order of its dimensions in memory, but as wide as v."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _kernel(q, k, v, sinks=None, alibi_slopes=None, bias=None, mask=None, q_start=None, k_start=None,
            cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, block_table=None, *, causal=False,
            window_left=-1, window_right=-1, scale=None, softcap=0.0, layout="bhsd", num_splits=0,
            reproducibility="deterministic", return_lse=False, max_q_len=0, max_kv_len=0,
            partial=False, checked=False, kernel_id=None):
    if (sinks is None and alibi_slopes is None and bias is None and mask is None and q_start is None
            and k_start is None and cu_seqlens_q is None and cu_seqlens_k is None
            and seqused_k is None and block_table is None):
        optional = _attention.NONE
    else:
        optional = (sinks, alibi_slopes, bias, mask, q_start, k_start, cu_seqlens_q, cu_seqlens_k,
                    seqused_k, block_table)
    found = _attention.run(
        KINDS.get(type(q)) or kind_of("q", q), q, k, v,
        (causal, (window_left, window_right), scale, softcap, layout, num_splits, reproducibility,
         return_lse, max_q_len, max_kv_len, partial, checked, kernel_id), optional, None)
    return found if return_lse or partial else (found, q.new_empty(0))


_LIBRARY.impl("attention", _kernel, "CPU")
_LIBRARY.impl("attention", _kernel, "CUDA")


def _lse_shape(q, layout, packed):
    if packed:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else tuple(q.shape[:3])


def _wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.register_fake("flashcore::attention", lib=_LIBRARY)
def _fake(q, k, v, *tensors, layout="bhsd", return_lse=False, partial=False, **_):
    packed = len(tensors) > 6 and tensors[6] is not None
    rank = 3 if packed else 4
    torch._check_value(q.dim() == rank, lambda: f"q: rank is {q.dim()}; wanted {rank}")
    if partial:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_wide(q.dtype))
    else:
        out = empty_out(q, v)
    if not (return_lse or partial):
        return out, q.new_empty(0)
    return out, q.new_empty(_lse_shape(q, layout, packed), dtype=_wide(q.dtype))


# --- Gradients: the attention matrix again, in blocks of rows.

def _setup_context(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *tensors = inputs
    tensors += [None] * (len(_TENSORS) - len(tensors))
    ctx.options = keyword_only_inputs
    ctx.wants = tuple(ctx.needs_input_grad)
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.has_lse = keyword_only_inputs["return_lse"] or keyword_only_inputs["partial"]
    ctx.mark_non_differentiable(*([] if ctx.has_lse else [lse]))
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = ctx.options
    count = len(ctx.wants)
    if count > 4 and ctx.wants[4]:
        raise NotImplementedError("alibi_slopes: requires grad; gradients are computed for q, k, v, "
                                  "sinks and bias")
    if grad_out is None and grad_lse is None:
        return (None,) * count
    if not ctx.has_lse:  # called through torch.ops without return_lse
        lse = _op(q, k, v, *tensors, **{**options, "return_lse": True})[1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [*ctx.wants[:3], count > 3 and ctx.wants[3], count > 5 and ctx.wants[5]]
    names = ("causal", "window_left", "window_right", "scale", "softcap", "layout", "partial")
    dq, dk, dv, dsinks, dbias = torch.ops.flashcore.attention_backward.default(
        grad_out, grad_lse, q, k, v, out, lse, *tensors,
        **{name: options[name] for name in names}, wanted=wanted)
    grads = [dq, dk, dv, dsinks, None, dbias] + [None] * (count - 6)
    return tuple(one if one is not None and number < count and ctx.wants[number] else None
                 for number, one in enumerate(grads[:count]))


torch.library.register_autograd("flashcore::attention", _backward, setup_context=_setup_context,
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

def _autocast_rule(device_type):
    def rule(q, k, v, *tensors, **options):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (one.to(dtype) if one.dtype in (torch.float32, torch.float16, torch.bfloat16)
                   else one for one in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return _op(q, k, v, *tensors, **options)
    return rule


_LIBRARY.impl("attention", _autocast_rule("cpu"), "AutocastCPU")
_LIBRARY.impl("attention", _autocast_rule("cuda"), "AutocastCUDA")


# --- vmap: the new dimension becomes part of the batch.

def _batched(one, dim, size):
    """[size, ...] of a tensor with or without that dimension."""
    return one.unsqueeze(0).expand(size, *one.shape) if dim is None else one.movedim(dim, 0)


def _vmap(info, in_dims, q, k, v, *tensors, **options):
    size = info.batch_size
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
    out, lse = _op(q, k, v, *(given.get(name) for name in _TENSORS), **options)
    out = out.unflatten(0, (size, -1))
    if lse.dim() == 1:
        return (out, lse), (0, None)
    return (out, lse.unflatten(0, (size, -1))), (0, 0)


torch.library.register_vmap("flashcore::attention", _vmap, lib=_LIBRARY)


# --- append.

def _append(k_new, v_new, k, v, seqused_k, block_table=None, cu_seqlens_new=None):
    _cache.run_append(kind_of("k", k), k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)


append = torch.ops.flashcore.append.default
_LIBRARY.impl("append", _append, "CPU")
_LIBRARY.impl("append", _append, "CUDA")


@torch.library.register_fake("flashcore::append", lib=_LIBRARY)
def _fake_append(*_, **__):
    return None
