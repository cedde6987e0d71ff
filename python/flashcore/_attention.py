"""attention() and explain(): one call on arrays of any framework."""

from typing import Any

from flashcore._core.arrays import ADAPTERS, NoStorageError, TensorDesc, adapter_of
from flashcore._core.call_cache import PreparedCall
from flashcore._core.descriptors import described
from flashcore._core.execute import check_shaped, given_arrays, make_outputs, prepared_call, run
from flashcore._core.library import library
from flashcore._core.options import (NO_WINDOW, NONE, OPTIONAL, OPTIONS, Options, normalize_options,
                                     python_name)
from flashcore.block_mask import BlockMask
from flashcore.quant import Quantized, checked_quantized, is_rotated


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int, int] = NO_WINDOW,
              scale: float | None = None, softcap: float = 0.0, sinks: Any = None,
              alibi_slopes: Any = None, bias: Any = None, mask: Any = None, q_start: Any = None,
              k_start: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
              seqused_k: Any = None, block_table: Any = None, layout: str = "bhsd",
              num_splits: int = 0, reproducibility: str = "deterministic", return_lse: bool = False,
              out: Any = None, max_q_len: int = 0, max_kv_len: int = 0, partial: bool = False,
              checked: bool = False, kernel: str | None = None) -> Any:
    """Attention: softmax(scale * q k^T) v, on arrays of NumPy, torch, CuPy or JAX, in place.

    q is [batch, q_heads, q_len, head_dim], k is [batch, kv_heads, kv_len, head_dim], and v is like k
    with v_dim instead of head_dim. layout="bshd" is [batch, len, heads, dim]. The result is a new array
    of q's framework, or `out`. With return_lse=True it is a pair with the log-sum-exp, f32
    [batch, q_heads, q_len].

    >>> import numpy as np, flashcore
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1) * np.ones((1, 1, 1, 4), np.float32)
    >>> flashcore.attention(q, q[:, :1], v, causal=True)[0, 0, :, 0].tolist()
    [0.0, 0.5, 1.0]

    causal            key position <= query position; the last query is aligned with the last key
    window            (left, right): keys kept on each side of the query's position; -1: all
    scale, softcap    default 1/sqrt(head_dim); scores become softcap * tanh(score / softcap)
    sinks             f32 [q_heads]: an additional term in the softmax denominator
    alibi_slopes      f32 [q_heads] or [batch, q_heads]
    bias, mask        bias is added to the scores; mask is boolean, and False hides the key. Both
                      broadcast to [batch, q_heads, q_len, kv_len]. mask may be a flashcore.BlockMask
    q_start, k_start  positions of the first query and key: int, or i32 [batch]; q_start=0 is the
                      causal mask of torch
    cu_seqlens_q, _k  i32 [batch + 1]: q (or k and v) are varlen, [total, heads, dim], and so is out;
                      the LSE is then [q_heads, total_q]. max_q_len, max_kv_len: the longest sequence
    seqused_k         i32 [batch]: the number of keys in use in each sequence of a KV cache
    block_table       i32 [batch, max_pages]: paged KV; k and v are [pages, page_size, kv_heads, dim]
    num_splits        number of KV splits; 0: the planner chooses
    reproducibility   "deterministic", or "batch_invariant": a row's bits depend on its data alone
    partial           f32 out and LSE without sinks, for merge(); implies return_lse
    checked           invalid lengths and page ids raise; waits for the GPU
    kernel            run exactly this kernel, or fail

    q, k and v may be flashcore.Quantized: 8-bit with scales, as quantize() returns them. If q is 8-bit,
    the result is float16, or has the dtype of `out`.

    Rows of a varlen q that belong to no sequence are 0 in a new result, and -inf in the LSE. In `out`
    they keep their values.

    An invalid argument raises ValueError. A call that no kernel supports raises NotImplementedError.
    In both cases `out` is unchanged. Ctrl-C ends a long call on the CPU; `out` is then unspecified.
    """
    options = (causal, window, scale, softcap, layout, num_splits, reproducibility, return_lse,
               max_q_len, max_kv_len, partial, checked, kernel)
    if (sinks is None and alibi_slopes is None and bias is None and mask is None and q_start is None
            and k_start is None and cu_seqlens_q is None and cu_seqlens_k is None
            and seqused_k is None and block_table is None):
        optional = NONE
    else:
        optional = (sinks, alibi_slopes, bias, mask, q_start, k_start, cu_seqlens_q, cu_seqlens_k,
                    seqused_k, block_table, None, None)
        if type(mask) is BlockMask:
            optional = _with_block_mask(q, k, v, optional, out)
    if type(k) is Quantized or type(v) is Quantized or type(q) is Quantized:
        return _run_quantized(q, k, v, options, optional, out)
    adapter = ADAPTERS.get(type(q)) or adapter_of("q", q)
    if adapter.dispatcher is not None:
        route = adapter.dispatcher.route(q, k, v, optional, out)
        if route is not None:
            return route(q, k, v, options, optional, out)
        try:
            return run(adapter, q, k, v, options, optional, out)
        except NoStorageError:  # inside torch.vmap or torch.func.grad
            return adapter.dispatcher.attention(q, k, v, options, optional, out)
    return run(adapter, q, k, v, options, optional, out)


DEFAULTS: dict[str, Any] = attention.__kwdefaults__ or {}  # default values of all keywords


def explain(q: Any, k: Any, v: Any, **arguments: Any) -> str:
    """Describes what attention() would do with the same arguments: kernel, tiles, splits and reasons.

    >>> import numpy as np, flashcore
    >>> q = np.zeros((1, 8, 512, 64), np.float32)
    >>> print(flashcore.explain(q, q, q, causal=True))  # doctest: +ELLIPSIS
    problem    f32  batch 1  q_heads 8 ...
    """
    options, optional, out = _split_arguments(arguments)
    if type(optional[_MASK]) is BlockMask:
        optional = _block_arrays(_codes(q), optional)
    if type(k) is Quantized or type(v) is Quantized or type(q) is Quantized:
        call = _bind_quantized(q, k, v, options, optional, out)[0]
        try:
            return library().explain(call.params)
        finally:
            call.release()
    adapter = adapter_of("q", q)
    adapter_of("k", k), adapter_of("v", v)
    given = given_arrays(adapter, q, optional)
    call = prepared_call(adapter, options, given)
    call.busy = True
    try:
        made, lse = make_outputs(call, adapter, q, k, v, out)
        call.describe(adapter, q, k, v, made, lse, given)
        return library().explain(call.params)
    finally:
        call.release()


def _split_arguments(arguments: dict[str, Any]) -> tuple[Options, Options, Any]:
    """The keywords of attention() as run() takes them: (options, optional arrays, out)."""
    for name in arguments:
        if name not in DEFAULTS:
            raise TypeError(f"explain() got an unexpected keyword argument '{name}'")
    values = {**DEFAULTS, **arguments}
    optional = tuple(values.get(python_name(name)) for name in OPTIONAL)
    return tuple(values[name] for name in OPTIONS), optional, values["out"]


_MASK = OPTIONAL.index("mask")


def _block_arrays(q: Any, optional: Options) -> Options:
    """The optional arrays with the arrays of a BlockMask instead of it."""
    blocks, bits = optional[_MASK].arrays(q)
    return (*optional[:_MASK], None, *optional[_MASK + 1:-2], blocks, bits)


def _with_block_mask(q: Any, k: Any, v: Any, optional: Options, out: Any) -> Options:
    """_block_arrays(), or a boolean mask if the call goes through torch's dispatcher, for example for
    gradients."""
    array = _codes(q)
    adapter = adapter_of("q", array)
    others = (*optional[:_MASK], None, *optional[_MASK + 1:])
    if adapter.dispatcher is not None and array is q and adapter.dispatcher.route(
            q, k, v, others, out) is not None:
        return (*optional[:_MASK], optional[_MASK].to_dense(q), *optional[_MASK + 1:])
    return _block_arrays(array, optional)


def _run_quantized(q: Any, k: Any, v: Any, options: Options, optional: Options, out: Any) -> Any:
    """attention() if q, k or v is a Quantized."""
    call, adapter, array, made, lse = _bind_quantized(q, k, v, options, optional, out)
    gpu = adapter.gpu(array)
    try:
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


def _bind_quantized(q: Any, k: Any, v: Any, options: Options, optional: Options,
                    out: Any) -> tuple[PreparedCall, Any, Any, Any, Any]:
    """(call with the descriptors of these arrays, q's adapter, q's array, out, lse or None)."""
    q, k, v = (checked_quantized(name, one) if type(one) is Quantized else one
               for name, one in (("q", q), ("k", k), ("v", v)))
    _check_rotations(q, k, v)
    array, values = _codes(q), _codes(v)
    for name, one in (("q", array), ("k", _codes(k)), ("v", values)):
        check_shaped(name, one)
    adapter = adapter_of("q", array)
    given = given_arrays(adapter, array, optional)
    call = PreparedCall(adapter, normalize_options(*options), [name for name, _, _ in given])
    for name, one in (("q", q), ("k", k), ("v", v)):
        _describe_quantized(call, name, one if type(one) is Quantized else Quantized(one))
    made, lse = make_outputs(call, adapter, array, _codes(k), values, out)
    call.arrays.out = described("out", made, call.out)
    call.arrays.lse = None if lse is None else described("lse", lse, call.lse)
    call.describe_optional(given)
    return call, adapter, array, made, lse


_SCALE_BLOCKS = {"q": "q_scale_block", "k": "kv_scale_block", "v": "kv_scale_block"}


def _describe_quantized(call: PreparedCall, name: str, one: Quantized) -> None:
    """Writes a Quantized into the params: codes, scale, and the number of rows per scale."""
    for part in (one.codes, one.scale):
        if part is not None:
            adapter_of(name, part).check_no_gradient(part, name)
    setattr(call.arrays, name, described(name, one.codes, getattr(call, name), one.dtype))
    if one.scale is None:
        return
    scale_name = name + "_scale"
    desc = call.optional[scale_name] = TensorDesc(scale_name)
    setattr(call.arrays, scale_name, described(scale_name, one.scale, desc))
    if one.block_rows:
        before = getattr(call.params, _SCALE_BLOCKS[name])
        if before not in (0, one.block_rows):
            raise ValueError(f"v: block_rows is {one.block_rows}, k has {before}; they must match")
        setattr(call.params, _SCALE_BLOCKS[name], one.block_rows)


def _check_rotations(q: Any, k: Any, v: Any) -> None:
    """Scores need both q and k rotated or neither. A rotated v would give a rotated result."""
    if is_rotated(v):
        raise ValueError("v: is rotated; quantize it without rotate=True, which is for q and k")
    if is_rotated(q) and not is_rotated(k):
        raise ValueError("k: is not rotated, q is; quantize both with rotate=True, or neither")
    if is_rotated(k) and not is_rotated(q):
        raise ValueError("q: is not rotated, k is; quantize both with rotate=True, or neither (if a "
                         "wider q was rotated by other means, give k._replace(rotated=False))")


def _codes(one: Any) -> Any:
    return one.codes if type(one) is Quantized else one
