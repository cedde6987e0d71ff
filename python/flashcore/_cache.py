"""append(): new keys and values into a cache; merge(): partial results into one."""

import ctypes
from typing import Any

from flashcore import _abi
from flashcore._arrays import kind_of
from flashcore._prepared import library
from flashcore._quant import Pointers, Quantized, _checked, _shaped, is_rotated
from flashcore._scalars import flag, one_of

_MAX_PARTS = 32


def _stream(kind: Any, like: Any) -> Any:
    gpu = kind.gpu(like)
    return None if gpu < 0 else kind.stream(gpu)


def append(k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, *, block_table: Any = None,
           cu_seqlens_new: Any = None, layout: str = "bhsd") -> None:
    """Writes new keys and values into a cache in place, sequence b's at seqused_k[b].

    The cache is k [batch, kv_heads, capacity, head_dim], or with block_table pages
    [pages, page_size, kv_heads, head_dim]; v likewise. New are [batch, kv_heads, new_len, head_dim],
    or with cu_seqlens_new packed, [total_new, kv_heads, head_dim]. layout="bshd" swaps heads and
    lengths of what is neither paged nor packed. The attention that follows is told the new lengths.
    k and v may be Quantized: what is new becomes codes under the scales that are there (the NaN rules
    of quantize() hold), or stays as it is where it is a Quantized too. Nothing is rotated here: what
    goes into a rotated k is a Quantized, made by quantize(..., scale=..., rotate=True).

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
    kind = kind_of("k", k)
    for name, one in (("k_new", k_new), ("v_new", v_new)):
        kind_of(name, one).check_no_gradient(one, name)
    if kind.dispatcher is not None and kind.dispatcher.append_needed(k_new, v_new, k, v):
        kind.dispatcher.append(k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)
    else:
        run_append(kind, k_new, v_new, k, v, seqused_k, block_table, cu_seqlens_new)


def run_append(kind: Any, k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, block_table: Any,
               cu_seqlens_new: Any) -> None:
    """The call itself, on arrays that have memory."""
    pointers = Pointers()
    params = _abi.AppendParams(
        k_new=pointers.to("k_new", k_new), v_new=pointers.to("v_new", v_new),
        k=pointers.to("k", k, written=True), v=pointers.to("v", v, written=True),
        used_k=pointers.to("seqused_k", seqused_k),
        block_table=pointers.to("block_table", block_table),
        cu_seqlens_new=pointers.to("cu_seqlens_new", cu_seqlens_new))
    params.stream = _stream(kind, k)
    library().append(params)
    pointers.wrote()


def _append_codes(k_new: Any, v_new: Any, k: Any, v: Any, seqused_k: Any, block_table: Any,
                  cu_seqlens_new: Any) -> None:
    """append() into a cache of Quantized k and v."""
    if type(k) is not Quantized or type(v) is not Quantized:
        raise ValueError("k and v: one is a Quantized, the other is not; wanted both or neither")
    k, v = _checked("k", k), _checked("v", v)
    if k.block_rows != v.block_rows:
        raise ValueError(f"v: block_rows is {v.block_rows}, k has {k.block_rows}; they must match")
    for name, new, cache in (("k", k_new, k), ("v", v_new, v)):
        if is_rotated(new) != is_rotated(cache):
            raise ValueError(f"{name}_new: is{'' if is_rotated(new) else ' not'} rotated, {name} is"
                             f"{'' if is_rotated(cache) else ' not'}; append() rotates nothing: "
                             f"make {name}_new by quantize(..., scale=..., "
                             f"rotate={is_rotated(cache)})")
    pointers = Pointers()
    params = _abi.AppendParams(kv_scale_block=k.block_rows)
    for name, one in (("k_new", k_new), ("v_new", v_new), ("k", k), ("v", v)):
        one = _checked(name, one) if type(one) is Quantized else Quantized(one)
        setattr(params, name, pointers.to(name, one.codes, one.dtype, written=name in ("k", "v")))
    params.k_scale = pointers.to("k.scale", k.scale)
    params.v_scale = pointers.to("v.scale", v.scale)
    params.used_k = pointers.to("seqused_k", seqused_k)
    params.block_table = pointers.to("block_table", block_table)
    params.cu_seqlens_new = pointers.to("cu_seqlens_new", cu_seqlens_new)
    params.stream = _stream(kind_of("k", k.codes), k.codes)
    library().append(params)
    pointers.wrote()


def _swapped(name: str, array: Any) -> Any:
    """[batch, len, heads, dim] seen as [batch, heads, len, dim]; of another rank, as it is: the
    library refuses it."""
    if type(array) is Quantized:
        return array._replace(codes=_swapped(f"{name}.codes", array.codes))
    kind = kind_of(name, array)
    kind.check_readable(array, name)
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
    """Joins partial results, at most 32, in the order given: attention over all of their keys.

    outs and lses are what attention(..., partial=True) gives over some of the keys each. Sinks
    belong into the last merge only. The result is f32 like the parts, or `out`, of any float type;
    with return_lse=True a pair with the LSE.

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
        raise ValueError(f"outs: has {len(outs)} parts, lses has {len(lses)}; wanted as many, at "
                         "least one")
    if len(outs) > _MAX_PARTS:
        raise ValueError(f"outs: has {len(outs)} parts; at most {_MAX_PARTS} can be merged at once")
    kind, shape = _shaped("outs[0]", outs[0])
    made = kind.empty(outs[0], shape) if out is None else out
    lse_kind, lse_shape = _shaped("lses[0]", lses[0])
    lse = lse_kind.empty(lses[0], lse_shape) if return_lse else None
    pointers, tensor = Pointers(), _abi.Tensor
    for name, many in (("outs", outs), ("lses", lses)):
        for place, one in enumerate(many):
            kind_of(f"{name}[{place}]", one)
    described = [[pointers.to(f"{name}[{place}]", one).contents for place, one in enumerate(many)]
                 for name, many in (("outs", outs), ("lses", lses))]
    blocks = [(tensor * len(many))(*many) for many in described]
    params = _abi.MergeParams(
        outs=ctypes.cast(blocks[0], ctypes.POINTER(tensor)),
        lses=ctypes.cast(blocks[1], ctypes.POINTER(tensor)), parts=len(outs),
        out=pointers.to("out", made, written=out is not None), lse=pointers.to("lse", lse),
        sinks=pointers.to("sinks", sinks))
    params.stream = _stream(kind, outs[0])
    library().merge(params)
    pointers.wrote()
    if kind.finish is not None:
        made, lse = made if out is not None else kind.finish(made), kind.finish(lse)
    return (made, lse) if return_lse else made
