"""8-bit tensors: quantize(), dequantize(), and attention on what they make."""

import ctypes
from typing import Any, NamedTuple

from flashcore import _abi, _names
from flashcore._arrays import EIGHT_BIT as DTYPES, Slot, kind_of, read_descriptor
from flashcore._prepared import PreparedCall, library, plain_options
from flashcore._scalars import flag, integer, one_of

# The array types that may hold codes of a type. NumPy has no 8-bit floats: their bytes are uint8.
_STORED_AS = {"e4m3": ("e4m3", "byte"), "e5m2": ("e5m2", "byte"), "int8": ("int8",),
              "byte": ("byte",)}
_PER = ("tensor", "head", "block")


class Quantized(NamedTuple):
    """An 8-bit tensor: value = code * scale (byte: (code - 128) / 127 * 448 * scale).

    codes       8-bit floats, int8, or bytes; [batch, heads, len, dim], or as attention() takes it
    scale       f32 [1], [batch, heads] or [batch, heads, blocks]; None: 1
    dtype       e4m3, e5m2, int8 or byte; None: what the array's own type says (uint8 is byte). Only
                uint8 codes can be of several
    block_rows  rows (keys) that share a scale, where it has blocks
    rotated     rows were rotated before they became codes: quantize(..., rotate=True)
    """

    codes: Any
    scale: Any = None
    dtype: str | None = None
    block_rows: int = 0
    rotated: bool = False


def quantize(x: Any, dtype: str = "e4m3", *, per: str = "tensor", block_rows: int = 0,
             scale: Any = None, rotate: bool = False, return_saturated: bool = False,
             checked: bool = False) -> Any:
    """x (float32, float16, bfloat16; [batch, heads, len, dim]) as a Quantized of the same framework.

    dtype     e4m3, e5m2, int8 (symmetric) or byte (zero at 128)
    per       what shares a scale: the "tensor", each "head" of each batch, or a "block" of block_rows
              rows of it
    scale     f32, used as it is; by default the largest magnitude becomes the largest code
    rotate    multiply rows by an orthogonal matrix first, which spreads what is large in a few
              columns over many (docs/numerics.md, "Rotating"). For q and k: both or neither, since
              only then scores are what they were. dequantize() turns rows back
    checked   a NaN that int8 or byte cannot say raises on a GPU too, instead of becoming 0; waits
              for the GPU

    Rounds to nearest, ties to even; what is too large becomes the largest code, and
    return_saturated=True adds how often that happened, i32 of the scale's shape. On the CPU a NaN
    that int8 or byte cannot say is always a ValueError.

    >>> import numpy as np, flashcore
    >>> q = flashcore.quantize(np.array([[[[1.0, -2.0, 0.3]]]], np.float32), "int8")
    >>> q.codes.tolist(), round(float(q.scale[0]), 6)
    ([[[[64, -127, 19]]]], 0.015748)
    """
    one_of("dtype", dtype, DTYPES)
    one_of("per", per, _PER)
    block_rows, rotate = integer("block_rows", block_rows), flag("rotate", rotate)
    if per == "block" and block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; per=\"block\" needs how many rows share a scale")
    kind, shape = _shaped("x", x)
    if scale is not None:
        _shaped("scale", scale)
    codes = kind.empty(x, shape, dtype)
    batch, heads, rows, _ = (1,) * (4 - len(shape)) + shape
    wanted = {"tensor": (1,), "head": (batch, heads),
              "block": (batch, heads, -(-rows // max(block_rows, 1)))}[per]
    given = scale is not None
    if not given:
        scale = kind.empty(x, wanted, "f32")
    made = Quantized(codes, scale, dtype, block_rows if per == "block" else 0, rotate)
    saturated = None
    if flag("return_saturated", return_saturated):
        saturated = kind.empty(x, tuple(kind_of("scale", scale).shape(scale)), "i32")
    pointers = Pointers()
    params = _abi.QuantParams(to=pointers.to("codes", codes, dtype),
                              scale=pointers.to("scale", scale),
                              saturated=pointers.to("saturated", saturated),
                              block_rows=made.block_rows, given_scale=given,
                              rotate=made.rotated)
    setattr(params, "from", pointers.to("x", x))
    _names.call({"from": "x", "to": "codes"}, _run, library().quantize, params, kind, x,
                flag("checked", checked))
    if kind.finish is not None:
        made = made._replace(codes=kind.finish(codes),
                             scale=scale if given else kind.finish(scale))
        saturated = kind.finish(saturated)
    return (made, saturated) if return_saturated else made


def dequantize(x: Quantized, dtype: str = "f32", *, out: Any = None) -> Any:
    """The values of a Quantized as f32, f16 or (torch) bf16, or in `out`; of a rotated one, those
    before the rotation.

    >>> import numpy as np, flashcore
    >>> flashcore.dequantize(flashcore.quantize(np.array([0.5, -1.0], np.float32))).tolist()
    [0.5, -1.0]
    """
    if out is None:
        one_of("dtype", dtype, ("f32", "f16", "bf16"))
    x = _checked("x", x)
    kind, shape = _shaped("x.codes", x.codes)
    try:
        made = kind.empty(x.codes, shape, dtype) if out is None else out
    except KeyError:
        raise NotImplementedError("dtype is 'bf16', which this framework has not by itself; give out=")
    pointers = Pointers()
    scale = x.scale
    if scale is None:
        scale = kind.fill(kind.empty(x.codes, (1,), "f32"), 1.0)
    params = _abi.QuantParams(to=pointers.to("out", made, written=out is not None),
                              scale=pointers.to("x.scale", scale),
                              block_rows=x.block_rows, given_scale=1, rotate=x.rotated)
    setattr(params, "from", pointers.to("x.codes", x.codes, x.dtype))
    _names.call({"from": "x.codes", "to": "out", "scale": "x.scale", "block_rows": "x.block_rows"},
                _run, library().dequantize, params, kind, x.codes)
    pointers.wrote()
    return made if out is not None or kind.finish is None else kind.finish(made)


def attention(q: Any, k: Any, v: Any, options: Any, optional: Any, out: Any) -> Any:
    """flashcore.attention() where q, k or v is a Quantized."""
    call, kind, array, made, lse = _bind(q, k, v, options, optional, out)
    gpu = kind.gpu(array)
    try:
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


def explain(q: Any, k: Any, v: Any, options: Any, optional: Any, out: Any) -> str:
    call = _bind(q, k, v, options, optional, out)[0]
    try:
        return library().explain(call.params)
    finally:
        call.release()


def _bind(q: Any, k: Any, v: Any, options: Any, optional: Any, out: Any) -> tuple[Any, ...]:
    """A call with the descriptors of these arrays in it; the kind and array it runs by; its results."""
    from flashcore import _attention  # which imports this module
    q, k, v = (_checked(name, one) if type(one) is Quantized else one
               for name, one in (("q", q), ("k", k), ("v", v)))
    _check_rotations(q, k, v)
    array, values = _codes(q), _codes(v)
    for name, one in (("q", array), ("k", _codes(k)), ("v", values)):
        _attention.check_shaped(name, one)
    kind = kind_of("q", array)
    given = _attention._given(kind, array, optional)
    call = PreparedCall(kind, plain_options(*options), [name for name, _, _ in given])
    for name, one in (("q", q), ("k", k), ("v", v)):
        _describe(call, name, one if type(one) is Quantized else Quantized(one))
    made, lse = _attention._outputs(call, kind, array, _codes(k), values, out)
    call.arrays.out = described("out", made, call.out)
    call.arrays.lse = None if lse is None else described("lse", lse, call.lse)
    call.describe_optional(given)
    return call, kind, array, made, lse


_BLOCKS = {"q": "q_scale_block", "k": "kv_scale_block", "v": "kv_scale_block"}


def _describe(call: Any, name: str, one: Any) -> None:
    """Puts a Quantized into a call: codes, scale, and how many rows share one."""
    for part in (one.codes, one.scale):
        if part is not None:
            kind_of(name, part).check_no_gradient(part, name)
    setattr(call.arrays, name, described(name, one.codes, getattr(call, name), one.dtype))
    if one.scale is None:
        return
    scale_name = name + "_scale"
    slot = call.optional[scale_name] = Slot(scale_name)
    setattr(call.arrays, scale_name, described(scale_name, one.scale, slot))
    if one.block_rows:
        before = getattr(call.params, _BLOCKS[name])
        if before not in (0, one.block_rows):
            raise ValueError(f"v: block_rows is {one.block_rows}, k has {before}; they must match")
        setattr(call.params, _BLOCKS[name], one.block_rows)


def is_rotated(one: Any) -> bool:
    return type(one) is Quantized and one.rotated


def _check_rotations(q: Any, k: Any, v: Any) -> None:
    """Scores need q and k rotated alike; a rotated v would give a rotated result."""
    if is_rotated(v):
        raise ValueError("v: is rotated; quantize it without rotate=True, which is for q and k")
    if is_rotated(q) and not is_rotated(k):
        raise ValueError("k: is not rotated, q is; quantize both with rotate=True, or neither")
    if is_rotated(k) and not is_rotated(q):
        raise ValueError("q: is not rotated, k is; quantize both with rotate=True, or neither (where "
                         "a wider q was rotated by other means, give k._replace(rotated=False))")


def _codes(one: Any) -> Any:
    return one.codes if type(one) is Quantized else one


def _shaped(name: str, array: Any) -> tuple[Any, tuple[int, ...]]:
    """The kind and shape of an array with 1 to 4 dimensions."""
    kind = kind_of(name, array)
    kind.check_readable(array, name)
    shape = tuple(kind.describe(array, name).shape)
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"{name}: has {len(shape)} dimensions; wanted 1 to 4")
    return kind, shape


def _checked(name: str, one: Any) -> Quantized:
    """A caller's Quantized whose dtype is what its codes can be; None becomes what they are."""
    if type(one) is not Quantized:
        raise TypeError(f"{name}: is a {type(one).__name__}; wanted a flashcore.Quantized, as "
                        "quantize() makes it")
    _shaped(f"{name}.codes", one.codes)
    stored = kind_of(name, one.codes).describe(one.codes, f"{name}.codes").dtype
    dtype = stored if one.dtype is None else one_of(f"{name}.dtype", one.dtype, DTYPES)
    if stored not in DTYPES:
        raise ValueError(f"{name}.codes: dtype is {stored}; wanted an 8-bit type (e4m3, e5m2, int8 or "
                         "byte, which is uint8): quantize() makes it so")
    if stored not in _STORED_AS[dtype]:
        raise ValueError(f"{name}.dtype is {dtype!r}, {name}.codes are {stored}; wanted codes of "
                         f"{' or '.join(_STORED_AS[dtype])} (byte is uint8)")
    return one._replace(dtype=dtype, block_rows=integer(f"{name}.block_rows", one.block_rows),
                        rotated=flag(f"{name}.rotated", one.rotated))


def described(name: str, array: Any, slot: Slot, dtype: Any = None) -> Any:
    """The address of a C descriptor; dtype: what its bytes are, by _checked(), if the array cannot
    say so."""
    address = kind_of(name, array).view(array, slot)
    if dtype is None:
        return address
    tensor, kept = _abi.Tensor.from_address(address), slot.keep
    address = slot.hold(read_descriptor(address, name)._replace(dtype=dtype),
                        (tensor.data or 0) + tensor.byte_offset)
    slot.keep = slot.keep, kept
    return address


class Pointers:
    """Arrays of one call as pointers to C descriptors; keeps alive what they need."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._written: list[Any] = []

    def wrote(self) -> None:
        """The call is over: the frameworks learn which arrays have changed."""
        for array in self._written:
            kind_of("out", array).wrote(array)

    def to(self, name: str, array: Any, dtype: Any = None, written: bool = False) -> Any:
        """dtype: as for described(); written: the caller's array is changed by the call."""
        if array is None:
            return None
        if written:
            kind_of(name, array).check_writable(array, name)
            self._written.append(array)
        else:
            kind_of(name, array).check_no_gradient(array, name)
        slot = Slot(name)
        self._slots.append(slot)
        return ctypes.cast(described(name, array, slot, dtype), ctypes.POINTER(_abi.Tensor))


def _run(function: Any, params: Any, kind: Any, like: Any, checked: bool = False) -> None:
    """The call on the device and stream of an array; on a GPU it is waited for only where it must."""
    gpu = kind.gpu(like)
    if gpu >= 0:
        params.stream = kind.stream(gpu)
    if gpu < 0 or not (checked or kind.waits):
        function(params)
        return
    _, address, size, *_ = kind.workspace(gpu, params.stream, _abi.WORKSPACE_HEADER_BYTES,
                                          PreparedCall)
    params.workspace, params.workspace_bytes = address, size
    function(params)
    library().workspace_status(address, size, _abi.CUDA, gpu, params.stream)
