"""attention() and explain(): one call on arrays of any framework."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from flashcore import _quant
from flashcore._arrays import KINDS, NoMemoryHere, kind_of
from flashcore._prepared import PreparedCall, library, plain_options, thread_state
from flashcore._quant import Quantized
from flashcore._scalars import integer

# The optional arrays in the order they are handed around, by their names in the C struct.
OPTIONAL = ("sinks", "alibi_slopes", "bias", "mask", "q_start", "k_start", "cu_seqlens_q",
            "cu_seqlens_k", "used_k", "block_table")
NONE = (None,) * len(OPTIONAL)
_PYTHON_NAMES = {"used_k": "seqused_k"}
# The other arguments, in the order they are handed around.
OPTIONS = ("causal", "window", "scale", "softcap", "layout", "num_splits", "reproducibility",
           "return_lse", "max_q_len", "max_kv_len", "partial", "checked", "kernel")
Options = tuple[Any, ...]  # values of either, in that order
Given = Sequence[tuple[str, Any, Any]]  # (name, kind, array)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int, int] = (-1, -1),
              scale: float | None = None, softcap: float = 0.0, sinks: Any = None,
              alibi_slopes: Any = None, bias: Any = None, mask: Any = None, q_start: Any = None,
              k_start: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
              seqused_k: Any = None, block_table: Any = None, layout: str = "bhsd",
              num_splits: int = 0, reproducibility: str = "deterministic", return_lse: bool = False,
              out: Any = None, max_q_len: int = 0, max_kv_len: int = 0, partial: bool = False,
              checked: bool = False, kernel: str | None = None) -> Any:
    """Attention: softmax(scale * q k^T) v, on arrays of NumPy, torch, CuPy or JAX, in place.

    q is [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v likewise with
    v_dim; layout="bshd" is [batch, len, heads, dim]. The result is a new array of q's framework, or
    `out`; with return_lse=True a pair with the log-sum-exp, f32 [batch, q_heads, q_len].

    >>> import numpy as np, flashcore
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> v = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1) * np.ones((1, 1, 1, 4), np.float32)
    >>> flashcore.attention(q, q[:, :1], v, causal=True)[0, 0, :, 0].tolist()
    [0.0, 0.5, 1.0]

    causal            key position <= query position; the last query stands on the last key
    window            (left, right): keys kept on each side of the query's position; -1: all
    scale, softcap    default 1/sqrt(head_dim); scores become softcap * tanh(score / softcap)
    sinks             f32 [q_heads]: one more term in the denominator
    alibi_slopes      f32 [q_heads] or [batch, q_heads]
    bias, mask        added to the scores, or boolean where False hides the key; both broadcast to
                      [batch, q_heads, q_len, kv_len]
    q_start, k_start  positions of the first query and key: int, or i32 [batch]; q_start=0 is the
                      causal mask of torch
    cu_seqlens_q, _k  i32 [batch + 1]: q (or k and v) are packed, [total, heads, dim], and so is
                      out; LSE is then [q_heads, total_q]. max_q_len, max_kv_len: the longest
    seqused_k         i32 [batch]: how many keys of a cache count
    block_table       i32 [batch, max_pages]: k and v are pages [pages, page_size, kv_heads, dim]
    num_splits        ranges of keys computed apart; 0: the planner chooses
    reproducibility   "deterministic", or "batch_invariant": a row's bits depend on its data alone
    partial           f32 out and LSE without sinks, for merge(); implies return_lse
    checked           bad lengths and page ids raise; waits for the GPU
    kernel            run exactly this kernel, or fail

    q, k and v may be flashcore.Quantized: 8-bit with scales, as quantize() makes them. With an 8-bit
    q the result is float16, or `out`'s type.

    Rows of a packed q that no sequence has are 0 in a new result, and -inf in the LSE; in `out` they
    stay as they are.

    A mistake raises ValueError, what no kernel can do NotImplementedError; `out` is then untouched.
    Ctrl-C ends a long call on the CPU; `out` is then unspecified.
    """
    options = (causal, window, scale, softcap, layout, num_splits, reproducibility, return_lse,
               max_q_len, max_kv_len, partial, checked, kernel)
    if (sinks is None and alibi_slopes is None and bias is None and mask is None and q_start is None
            and k_start is None and cu_seqlens_q is None and cu_seqlens_k is None
            and seqused_k is None and block_table is None):
        optional = NONE
    else:
        optional = (sinks, alibi_slopes, bias, mask, q_start, k_start, cu_seqlens_q, cu_seqlens_k,
                    seqused_k, block_table)
    if type(k) is Quantized or type(v) is Quantized or type(q) is Quantized:
        return _quant.attention(q, k, v, options, optional, out)
    kind = KINDS.get(type(q)) or kind_of("q", q)
    if kind.dispatcher is not None:
        if kind.dispatcher.needed(q, k, v, optional, out):
            return kind.dispatcher.attention(q, k, v, options, optional, out)
        try:
            return run(kind, q, k, v, options, optional, out)
        except NoMemoryHere:  # inside torch.vmap or torch.func.grad
            return kind.dispatcher.attention(q, k, v, options, optional, out)
    return run(kind, q, k, v, options, optional, out)


DEFAULTS: dict[str, Any] = attention.__kwdefaults__ or {}  # of all keywords
_ANYWHERE = DEFAULTS["window"]


def explain(q: Any, k: Any, v: Any, **arguments: Any) -> str:
    """What attention() would do with the same arguments, in words: kernel, tiles, splits, why.

    >>> import numpy as np, flashcore
    >>> q = np.zeros((1, 8, 512, 64), np.float32)
    >>> print(flashcore.explain(q, q, q, causal=True))  # doctest: +ELLIPSIS
    problem    f32  batch 1  q_heads 8 ...
    """
    options, optional, out = _split_arguments(arguments)
    if type(k) is Quantized or type(v) is Quantized or type(q) is Quantized:
        return _quant.explain(q, k, v, options, optional, out)
    kind = kind_of("q", q)
    kind_of("k", k), kind_of("v", v)
    given = _given(kind, q, optional)
    call = prepared_call(kind, options, given)
    call.busy = True
    try:
        made, lse = _outputs(call, kind, q, k, v, out)
        call.describe(kind, q, k, v, made, lse, given)
        return str(library().explain(call.params))
    finally:
        call.release()


def _split_arguments(arguments: dict[str, Any]) -> tuple[Options, Options, Any]:
    """attention()'s keywords as run() takes them."""
    for name in arguments:
        if name not in DEFAULTS:
            raise TypeError(f"explain() got an unexpected keyword argument '{name}'")
    values = {**DEFAULTS, **arguments}
    optional = tuple(values[_PYTHON_NAMES.get(name, name)] for name in OPTIONAL)
    return tuple(values[name] for name in OPTIONS), optional, values["out"]


def run(kind: Any, q: Any, k: Any, v: Any, options: Options, optional: Options, out: Any) -> Any:
    """The call itself, on arrays that have memory. The library describes them where it can, which
    costs less than a microsecond; else, and where it refuses the call, Python does, and says why."""
    given = () if optional is NONE else _given(kind, q, optional)
    try:
        call = thread_state.calls.get((kind, options) if given == () else _key(kind, options, given))
    except TypeError:  # window is a list, scale an array
        call = None
    if call is not None and not (
            type(options[5]) is type(options[8]) is type(options[9]) is int
            and (options[1] is _ANYWHERE or type(options[1][0]) is type(options[1][1]) is int)):
        call = None  # True and 1.0 are equal to 1, and refused all the same
    if call is not None and out is None and given == ():
        made = run_new(kind, call, q, k, v)
        if made is not None:
            return made
    mixed = KINDS.get(type(k)) is not kind or KINDS.get(type(v)) is not kind
    if mixed:
        mixed = kind_of("k", k) is not kind or kind_of("v", v) is not kind  # or says what is wrong
    if call is None or call.busy:
        call = prepared_call(kind, options, given)
    call.busy = True
    try:
        made, lse = _outputs(call, kind, q, k, v, out)
        gpu = kind.gpu(q) if kind.has_gpus else -1
        if mixed or not call.has_workspace(kind, gpu):
            code = -1  # each framework describes its own
        elif lse is None and not given:
            code = call.run_direct(q, k, v, made)
        elif any(other is not kind for _, other, _ in given):
            code = -1
        else:
            code = call.run_direct(q, k, v, made, *(() if lse is None else (lse,)),
                                   *[one for _, _, one in given])
        if code != 0:
            _check_no_gradients(kind, k, v, given)
            call.describe(kind, q, k, v, made, lse, given)
            call.run(kind, gpu)
        if out is not None:
            kind_of("out", out).wrote(out)
        if call.must_wait or (gpu >= 0 and kind.waits):
            call.wait(gpu)
    finally:
        call.release()
    if kind.finish is not None:
        made, lse = made if out is not None else kind.finish(made), kind.finish(lse)
    return made if lse is None else (made, lse)


def run_new(kind: Any, call: PreparedCall, q: Any, k: Any, v: Any) -> Any:
    """A prepared call of the three arrays alone by one call of the library, which also makes the
    result; None where run() must do it."""
    if call.run_new is None or call.busy:
        return None
    gpu = kind.gpu(q)
    return call.run_new(q, k, v) if gpu < 0 or call.has_workspace(kind, gpu) else None


def _check_no_gradients(kind: Any, k: Any, v: Any, given: Given) -> None:
    """Of arrays of other frameworks than q's: its own has been asked already."""
    for name, other, one in (("k", kind_of("k", k), k), ("v", kind_of("v", v), v), *given):
        if other is not kind:
            other.check_no_gradient(one, name)


def _outputs(call: PreparedCall, kind: Any, q: Any, k: Any, v: Any, out: Any) -> tuple[Any, Any]:
    """(out, lse or None)."""
    if out is not None:
        kind_of("out", out).check_writable(out, "out")
    try:
        lse = call.empty_lse(kind, q) if call.wants_lse else None
        if out is None:
            out = call.empty_partial(kind, q, v) if call.wide_out else kind.empty_out(q, v)
            if call.is_packed:
                out = kind.fill(out, 0.0)
        if lse is not None and call.is_packed:
            lse = kind.fill(lse, float("-inf"))
    except Exception:
        for name, one in (("q", q), ("k", k), ("v", v)):
            check_shaped(name, one)
        raise
    return out, lse


def check_shaped(name: str, array: Any) -> None:
    """Raises where an array has no memory to be read, or no dimension."""
    kind = kind_of(name, array)
    kind.check_readable(array, name)
    if len(kind.describe(array, name).shape) == 0:
        raise ValueError(f"{name}: has no dimension; wanted [batch, heads, len, dim]")


def _key(kind: Any, options: Options, given: Given) -> Options:
    return (kind, options, *[name for name, _, _ in given]) if given else (kind, options)


def prepared_call(kind: Any, options: Options, given: Given = ()) -> PreparedCall:
    """A prepared call of these options that is not in use."""
    options = plain_options(*options)  # what is remembered is no array: arrays change
    key = _key(kind, options, given)
    call = thread_state.calls.get(key)
    if call is None or call.busy:
        call = PreparedCall(kind, options, [name for name, _, _ in given])
        thread_state.remember(key, call)
    return call


def _given(kind: Any, q: Any, optional: Options) -> Given:
    """(name, kind, array) of the optional arrays there are. A number is a start for every batch."""
    given: list[tuple[str, Any, Any]] = []
    for name, one in zip(OPTIONAL, optional):
        if one is None:
            continue
        if name in ("q_start", "k_start") and isinstance(one, Integral):
            one = kind.int32(q, integer(name, one, 32))
        elif name in ("q_start", "k_start") and isinstance(one, Real):
            raise TypeError(f"{name} is {one!r}; wanted an integer, or an array of int32")
        given.append((name, kind_of(_PYTHON_NAMES.get(name, name), one), one))
    return given
