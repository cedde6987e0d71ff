"""8-bit tensors: Quantized, quantize() and dequantize()."""

from typing import Any, NamedTuple

from flashcore._core import abi, names
from flashcore._core.arrays import EIGHT_BIT as DTYPES, adapter_of
from flashcore._core.call_cache import PreparedCall
from flashcore._core.descriptors import Pointers, shaped
from flashcore._core.library import library
from flashcore._core.scalars import flag, integer, one_of

# Format -> array dtypes that can hold its codes. NumPy has no 8-bit floats and stores them as uint8.
_STORED_AS = {"e4m3": ("e4m3", "byte"), "e5m2": ("e5m2", "byte"), "int8": ("int8",),
              "byte": ("byte",)}
_PER = ("tensor", "head", "block")


class Quantized(NamedTuple):
    """An 8-bit tensor: value = code * scale (byte: (code - 128) / 127 * 448 * scale).

    codes       8-bit floats, int8 or bytes: [batch, heads, len, dim], or any shape that attention()
                takes
    scale       f32 [1], [batch, heads] or [batch, heads, blocks]; None: 1
    dtype       e4m3, e5m2, int8 or byte; None: the dtype of the array (uint8 is byte). Only uint8
                codes are ambiguous
    block_rows  rows (keys) per scale, if the scale has blocks
    rotated     True if rows were rotated before quantization: quantize(..., rotate=True)
    """

    codes: Any
    scale: Any = None
    dtype: str | None = None
    block_rows: int = 0
    rotated: bool = False


def quantize(x: Any, dtype: str = "e4m3", *, per: str = "tensor", block_rows: int = 0,
             scale: Any = None, rotate: bool = False, return_saturated: bool = False,
             checked: bool = False) -> Any:
    """Quantizes x to 8 bits. x is float32, float16 or bfloat16, [batch, heads, len, dim]. The result
    is a Quantized with arrays of the same framework.

    dtype     e4m3, e5m2, int8 (symmetric) or byte (zero point 128)
    per       the unit that shares a scale: the "tensor", each "head" of each batch, or each "block" of
              block_rows rows of a head
    scale     f32, used as given; by default the largest magnitude becomes the largest code
    rotate    multiply rows by an orthogonal matrix first. That spreads outliers of a few columns over
              many columns (docs/numerics.md, "Rotating"). Rotate both q and k or neither: only then
              the scores are unchanged. dequantize() reverts the rotation
    checked   a NaN that int8 or byte cannot represent raises on a GPU too, instead of becoming 0;
              waits for the GPU

    Rounds to nearest, ties to even. Values that are too large become the largest code;
    return_saturated=True also returns how often that happened, i32 in the shape of the scale. On the
    CPU a NaN that int8 or byte cannot represent always raises ValueError.

    >>> import numpy as np, flashcore
    >>> q = flashcore.quantize(np.array([[[[1.0, -2.0, 0.3]]]], np.float32), "int8")
    >>> q.codes.tolist(), round(float(q.scale[0]), 6)
    ([[[[64, -127, 19]]]], 0.015748)
    """
    one_of("dtype", dtype, DTYPES)
    one_of("per", per, _PER)
    block_rows, rotate = integer("block_rows", block_rows), flag("rotate", rotate)
    if per == "block" and block_rows < 1:
        raise ValueError(f"block_rows is {block_rows}; per=\"block\" needs the number of rows per scale")
    adapter, shape = shaped("x", x)
    if scale is not None:
        shaped("scale", scale)
    codes = adapter.empty(x, shape, dtype)
    batch, heads, rows, _ = (1,) * (4 - len(shape)) + shape
    wanted = {"tensor": (1,), "head": (batch, heads),
              "block": (batch, heads, -(-rows // max(block_rows, 1)))}[per]
    given = scale is not None
    if not given:
        scale = adapter.empty(x, wanted, "f32")
    made = Quantized(codes, scale, dtype, block_rows if per == "block" else 0, rotate)
    saturated = None
    if flag("return_saturated", return_saturated):
        saturated = adapter.empty(x, tuple(adapter_of("scale", scale).shape(scale)), "i32")
    pointers = Pointers()
    params = abi.QuantParams(to=pointers.to("codes", codes, dtype),
                              scale=pointers.to("scale", scale),
                              saturated=pointers.to("saturated", saturated),
                              block_rows=made.block_rows, given_scale=given,
                              rotate=made.rotated)
    setattr(params, "from", pointers.to("x", x))
    names.call({"from": "x", "to": "codes"}, _run, library().quantize, params, adapter, x,
                flag("checked", checked))
    if adapter.finish is not None:
        made = made._replace(codes=adapter.finish(codes),
                             scale=scale if given else adapter.finish(scale))
        saturated = adapter.finish(saturated)
    return (made, saturated) if return_saturated else made


def dequantize(x: Quantized, dtype: str = "f32", *, out: Any = None) -> Any:
    """The values of a Quantized as f32, f16 or (torch) bf16, or in `out`. The rotation of a rotated
    Quantized is reverted.

    >>> import numpy as np, flashcore
    >>> flashcore.dequantize(flashcore.quantize(np.array([0.5, -1.0], np.float32))).tolist()
    [0.5, -1.0]
    """
    if out is None:
        one_of("dtype", dtype, ("f32", "f16", "bf16"))
    x = checked_quantized("x", x)
    adapter, shape = shaped("x.codes", x.codes)
    try:
        made = adapter.empty(x.codes, shape, dtype) if out is None else out
    except KeyError:
        raise NotImplementedError("dtype is 'bf16', which this framework does not have; give out=")
    pointers = Pointers()
    scale = x.scale
    if scale is None:
        scale = adapter.fill(adapter.empty(x.codes, (1,), "f32"), 1.0)
    params = abi.QuantParams(to=pointers.to("out", made, written=out is not None),
                              scale=pointers.to("x.scale", scale),
                              block_rows=x.block_rows, given_scale=1, rotate=x.rotated)
    setattr(params, "from", pointers.to("x.codes", x.codes, x.dtype))
    names.call({"from": "x.codes", "to": "out", "scale": "x.scale", "block_rows": "x.block_rows"},
                _run, library().dequantize, params, adapter, x.codes)
    pointers.wrote()
    return made if out is not None or adapter.finish is None else adapter.finish(made)


def is_rotated(one: Any) -> bool:
    """True for a Quantized whose rows are rotated."""
    return type(one) is Quantized and one.rotated


def checked_quantized(name: str, one: Any) -> Quantized:
    """A caller's Quantized with its dtype filled in. Raises if its codes cannot have that dtype."""
    if type(one) is not Quantized:
        raise TypeError(f"{name}: is a {type(one).__name__}; wanted a flashcore.Quantized, as "
                        "quantize() returns it")
    shaped(f"{name}.codes", one.codes)
    stored = adapter_of(name, one.codes).info(one.codes, f"{name}.codes").dtype
    dtype = stored if one.dtype is None else one_of(f"{name}.dtype", one.dtype, DTYPES)
    if stored not in DTYPES:
        raise ValueError(f"{name}.codes: dtype is {stored}; wanted an 8-bit type (e4m3, e5m2, int8 or "
                         "byte, which is uint8), as quantize() returns it")
    if stored not in _STORED_AS[dtype]:
        raise ValueError(f"{name}.dtype is {dtype!r}, {name}.codes are {stored}; wanted codes of "
                         f"{' or '.join(_STORED_AS[dtype])} (byte is uint8)")
    return one._replace(dtype=dtype, block_rows=integer(f"{name}.block_rows", one.block_rows),
                        rotated=flag(f"{name}.rotated", one.rotated))


def _run(function: Any, params: Any, adapter: Any, like: Any, checked: bool = False) -> None:
    """Runs the call on the device and stream of the array `like`. On a GPU it waits only if it must."""
    gpu = adapter.gpu(like)
    if gpu >= 0:
        params.stream = adapter.stream(gpu)
    if gpu < 0 or not (checked or adapter.waits):
        function(params)
        return
    _, address, size, *_ = adapter.workspace(gpu, params.stream, abi.WORKSPACE_HEADER_BYTES,
                                          PreparedCall)
    params.workspace, params.workspace_bytes = address, size
    function(params)
    library().workspace_status(address, size, abi.CUDA, gpu, params.stream)
