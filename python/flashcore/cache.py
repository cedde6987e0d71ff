"""append(): writes new keys and values into a KV cache. merge(): merges partial results."""

import ctypes
from typing import Any

from flashcore._core import abi
from flashcore._core.arrays import adapter_of
from flashcore._core.descriptors import Pointers, shaped
from flashcore._core.library import library
from flashcore._core.scalars import flag, one_of
from flashcore.quant import Quantized, checked_quantized, is_rotated


def _stream(adapter: Any, like: Any) -> Any:
    gpu = adapter.gpu(like)
    return None if gpu < 0 else adapter.stream(gpu)


def append(k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, *, block_table: Any = None,
           cu_seqlens_new: Any = None, layout: str = "bhsd") -> None:
    """Writes new keys and values into a KV cache in place. Those of sequence b start at seqused_k[b].

    The cache is k [batch, kv_heads, capacity, head_dim], or with block_table paged,
    [pages, page_size, kv_heads, head_dim]; v likewise. k_new and v_new are
    [batch, kv_heads, new_len, head_dim], or with cu_seqlens_new varlen,
    [total_new, kv_heads, head_dim]. layout="bshd" swaps heads and lengths of arrays that are neither
    paged nor varlen. Pass the new lengths to the attention() call that follows.

    k and v may be Quantized. New values are then quantized with the existing scales, with the NaN rules
    of quantize(); a Quantized k_new or v_new is copied as it is. append() rotates nothing: a rotated k
    needs a k_new from quantize(..., scale=..., rotate=True).

    >>> import numpy as np, flashcore
    >>> k, v = np.zeros((2, 1, 1, 8, 4), np.float32)
    >>> new = np.ones((1, 1, 3, 4), np.float32)
    >>> flashcore.append(new, new, k, v, np.array([2], np.int32))
    >>> k[0, 0, :, 0].tolist()
    [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    if one_of("layout", layout, ("bhsd", "bshd")) == "bshd":
        if block_table is None:
            k, v = _swapped("k", k), _swapped("v", v)
        if cu_seqlens_new is None:
            k_new, v_new = _swapped("k_new", k_new), _swapped("v_new", v_new)
    if type(k) is Quantized or type(v) is Quantized:
        _append_codes(k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)
        return
    adapter = adapter_of("k", k)
    for name, one in (("k_new", k_new), ("v_new", v_new)):
        adapter_of(name, one).check_no_gradient(one, name)
    if adapter.dispatcher is not None and adapter.dispatcher.append_needed(k_new, v_new, k, v):
        adapter.dispatcher.append(k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)
    else:
        run_append(adapter, k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)


def run_append(adapter: Any, k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, block_table: Any,
               cu_seqlens_new: Any) -> None:
    """Runs append() on arrays that have memory."""
    pointers = Pointers()
    params = abi.AppendParams(
        k_new=pointers.to("k_new", k_new), v_new=pointers.to("v_new", v_new),
        k=pointers.to("k", k, written=True), v=pointers.to("v", v, written=True),
        used_k=pointers.to("seqused_k", seqused_k),
        block_table=pointers.to("block_table", block_table),
        cu_seqlens_new=pointers.to("cu_seqlens_new", cu_seqlens_new))
    params.stream = _stream(adapter, k)
    library().append(params)
    pointers.wrote()


def _append_codes(k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, block_table: Any,
                  cu_seqlens_new: Any) -> None:
    """append() if k and v are Quantized."""
    if type(k) is not Quantized or type(v) is not Quantized:
        raise ValueError("k and v: one is a Quantized, the other is not; wanted both or neither")
    k, v = checked_quantized("k", k), checked_quantized("v", v)
    if k.block_rows != v.block_rows:
        raise ValueError(f"v: block_rows is {v.block_rows}, k has {k.block_rows}; they must match")
    for name, new, cache in (("k", k_new, k), ("v", v_new, v)):
        if is_rotated(new) != is_rotated(cache):
            raise ValueError(f"{name}_new: is{'' if is_rotated(new) else ' not'} rotated, {name} is"
                             f"{'' if is_rotated(cache) else ' not'}; append() rotates nothing: "
                             f"make {name}_new with quantize(..., scale=..., "
                             f"rotate={is_rotated(cache)})")
    pointers = Pointers()
    params = abi.AppendParams(kv_scale_block=k.block_rows)
    for name, one in (("k_new", k_new), ("v_new", v_new), ("k", k), ("v", v)):
        one = checked_quantized(name, one) if type(one) is Quantized else Quantized(one)
        setattr(params, name, pointers.to(name, one.codes, one.dtype, written=name in ("k", "v")))
    params.k_scale = pointers.to("k.scale", k.scale)
    params.v_scale = pointers.to("v.scale", v.scale)
    params.used_k = pointers.to("seqused_k", seqused_k)
    params.block_table = pointers.to("block_table", block_table)
    params.cu_seqlens_new = pointers.to("cu_seqlens_new", cu_seqlens_new)
    params.stream = _stream(adapter_of("k", k.codes), k.codes)
    library().append(params)
    pointers.wrote()


def _swapped(name: str, array: Any) -> Any:
    """A view of [batch, len, heads, dim] as [batch, heads, len, dim]. Arrays of another rank are
    returned as they are; the library rejects them."""
    if type(array) is Quantized:
        return array._replace(codes=_swapped(f"{name}.codes", array.codes))
    adapter = adapter_of(name, array)
    adapter.check_readable(array, name)
    if not hasattr(array, "swapaxes"):
        raise TypeError(f"{name}: is a {type(array).__name__}, whose axes cannot be swapped; give it in "
                        'layout="bhsd"')
    return array.swapaxes(1, 2) if len(array.shape) == 4 else array


def _parts(name: str, many: Any) -> list[Any]:
    try:
        return list(many)
    except TypeError:
        raise TypeError(f"{name}: is a {type(many).__name__}; wanted a sequence of arrays") from None


def merge(outs: Any, lses: Any, *, sinks: Any = None, out: Any = None,
          return_lse: bool = False) -> Any:
    """Merges partial results in the given order. The result is attention over all keys.

    outs and lses are results of attention(..., partial=True), each over a part of the keys. Pass sinks
    to the last merge only. The result is f32 like the parts, or `out`, which may have any float dtype.
    With return_lse=True it is a pair with the LSE.

    >>> import numpy as np, flashcore
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 8, 16)).astype(np.float32)
    >>> parts = [flashcore.attention(q, k[:, :, part], v[:, :, part], partial=True)
    ...          for part in (slice(0, 5), slice(5, 8))]
    >>> merged = flashcore.merge(*zip(*parts))
    >>> bool(np.abs(merged - flashcore.attention(q, k, v)).max() < 1e-5)
    True
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    return_lse = flag("return_lse", return_lse)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs: has {len(outs)} parts, lses has {len(lses)}; wanted equal "
                         "numbers, at least one")
    adapter, shape = shaped("outs[0]", outs[0])
    made = adapter.empty(outs[0], shape) if out is None else out
    lse_adapter, lse_shape = shaped("lses[0]", lses[0])
    lse = lse_adapter.empty(lses[0], lse_shape) if return_lse else None
    pointers, tensor = Pointers(), abi.Tensor
    for name, many in (("outs", outs), ("lses", lses)):
        for place, one in enumerate(many):
            adapter_of(f"{name}[{place}]", one)
    described = [[pointers.to(f"{name}[{place}]", one).contents for place, one in enumerate(many)]
                 for name, many in (("outs", outs), ("lses", lses))]
    blocks = [(tensor * len(many))(*many) for many in described]
    params = abi.MergeParams(
        outs=ctypes.cast(blocks[0], ctypes.POINTER(tensor)),
        lses=ctypes.cast(blocks[1], ctypes.POINTER(tensor)), parts=len(outs),
        out=pointers.to("out", made, written=out is not None), lse=pointers.to("lse", lse),
        sinks=pointers.to("sinks", sinks))
    params.stream = _stream(adapter, outs[0])
    library().merge(params)
    pointers.wrote()
    if adapter.finish is not None:
        made, lse = made if out is not None else adapter.finish(made), adapter.finish(lse)
    return (made, lse) if return_lse else made
