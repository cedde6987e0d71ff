"""Autocast and vmap rules of torch.ops.flashcore."""

import torch

from flashcore._torch.library import LIBRARY, TENSORS, op_lse, op_options, op_short


def _autocast_rule(op, device_type):
    """Casts q, k and v to the autocast dtype, as torch's own attention does. Other tensors keep their
    dtypes."""
    def rule(q, k, v, *tensors, **options):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (one.to(dtype) if one.dtype in (torch.float32, torch.float16, torch.bfloat16)
                   else one for one in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return op(q, k, v, *tensors, **options)
    return rule


for _op_name, _one in (("attention", op_short), ("attention.options", op_options),
                       ("attention_lse", op_lse)):
    LIBRARY.impl(_op_name, _autocast_rule(_one, "cpu"), "AutocastCPU")
    LIBRARY.impl(_op_name, _autocast_rule(_one, "cuda"), "AutocastCUDA")


def _batched(one, dim, size):
    """The tensor as [size, ...]. Without a vmap dimension it is expanded."""
    return one.unsqueeze(0).expand(size, *one.shape) if dim is None else one.movedim(dim, 0)


def _with_larger_batch(size, in_dims, q, k, v, tensors):
    """The tensors of one call that computes all `size` calls: the vmap dimension joins the batch."""
    given = dict(zip(TENSORS, tensors))
    dims = dict(zip(TENSORS, in_dims[3:]))
    for name in TENSORS:
        one, dim = given.get(name), dims.get(name)
        if one is None:
            continue
        if name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"):
            raise NotImplementedError(f"{name}: vmap over varlen or paged sequences is not "
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
        else:  # one number or one row per sequence
            one = _batched(one, dim, size)
            given[name] = one.expand(size, batch, *one.shape[2:]).flatten(0, 1).contiguous()
    q, k, v = (_batched(one, dim, size).flatten(0, 1) for one, dim in zip((q, k, v), in_dims))
    return q, k, v, *(given.get(name) for name in TENSORS)


def _vmap(info, in_dims, q, k, v, *tensors, **options):
    size = info.batch_size
    out = op_options(*_with_larger_batch(size, in_dims, q, k, v, tensors), **options)
    return out.unflatten(0, (size, -1)), 0


def _vmap_lse(info, in_dims, q, k, v, *tensors, **options):
    size = info.batch_size
    made = op_lse(*_with_larger_batch(size, in_dims, q, k, v, tensors), **options)
    return tuple(one.unflatten(0, (size, -1)) for one in made), (0, 0)


torch.library.register_vmap("flashcore::attention", _vmap, lib=LIBRARY)
torch.library.register_vmap("flashcore::attention.options", _vmap, lib=LIBRARY)
torch.library.register_vmap("flashcore::attention_lse", _vmap_lse, lib=LIBRARY)
