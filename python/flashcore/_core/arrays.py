"""Array adapters: how FlashCore reads and creates the arrays of a framework.

ArrayAdapter is the interface. _core.providers names the module that implements it for each framework.
adapter_of() imports that module when the first array of the framework arrives. Arrays are used in place.
"""

import ctypes
import sys
from typing import Any, NamedTuple

from flashcore._core import abi, providers


class NoStorageError(RuntimeError):
    """The tensor has no storage of its own, as inside torch.vmap. Only its framework can resolve it."""


class ArrayInfo(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device_type: int
    device_id: int


class TensorDesc:
    """One array argument of one call: its C descriptor and the objects that keep it valid."""

    __slots__ = ("name", "keep")

    def __init__(self, name):
        self.name, self.keep = name, None

    def hold(self, info, address):
        """Describes the memory at `address`. Returns the address of the C descriptor."""
        self.keep = abi.tensor(address, info.shape, info.dtype, info.device_type, info.device_id,
                               info.strides)
        return ctypes.addressof(self.keep)


class ArrayAdapter:
    """Interface to the arrays of one framework. This base class reads an array through info() and
    address()."""

    waits = False  # True if a call must have finished when it returns
    has_gpus = True  # False if gpu() is always -1
    # Fast path through _core.fastcall: None if the library cannot describe the arrays. Otherwise a
    # pair: the address of the framework's C function that describes an array (None: __dlpack__), and
    # the framework's empty_like (None: Python allocates the result).
    reader: Any = None
    finish: Any = None  # optional method that converts a written result for the caller
    dispatcher: Any = None  # optional module that routes calls through the framework's dispatcher

    def view(self, array, desc):
        """The address of a C descriptor. It is valid while array and desc.keep are alive."""
        return desc.hold(self.info(array, desc.name), self.address(array))

    def info(self, array, name):
        raise NotImplementedError

    def address(self, array):
        raise NotImplementedError

    def check_writable(self, array, name):
        """Raises if results cannot be written into the array."""

    def check_no_gradient(self, array, name):
        """Raises if the framework would miss a gradient through the array."""

    def check_readable(self, array, name):
        """Raises if the array has no plain memory. Runs before its shape is read."""

    def wrote(self, array):
        """Tells the framework that the contents of a caller's array have changed."""

    def shape(self, array):
        return array.shape

    def empty(self, like, shape, dtype=None):
        """A new array on the device of `like`. dtype is a key of NEW_DTYPES; None: like's dtype."""
        raise NotImplementedError

    def empty_gradient(self, array):
        """A new array for the gradient of an input."""
        return self.empty(array, tuple(self.shape(array)))

    def int32(self, like, value):
        """An int32 array that holds one number."""
        raise NotImplementedError

    def from_host(self, like, memory, shape, dtype, owner=None):
        """The ctypes array `memory` as an array on the device of `like`: "i32" or "bool". It may share
        the memory, which `owner` then keeps alive. This class makes a NumPy array."""
        if self.has_gpus and self.gpu(like) >= 0:
            raise NotImplementedError("mask: a BlockMask on a GPU is for torch tensors; give "
                                      "mask.to_dense()")
        import numpy
        made = numpy.ctypeslib.as_array(memory)[:_count(shape)].reshape(shape)
        return made.view(numpy.bool_) if dtype == "bool" else made

    def is_f64(self, array):
        return array.dtype == "float64"

    def empty_out(self, q, v):
        """A new array with q's shape and v's width; float16 if q is 8-bit."""
        narrow = "f16" if q.dtype.itemsize == 1 else None
        return self.empty(q, (*q.shape[:-1], width_of(v)), narrow)

    def fill(self, array, value):
        """Fills a new array with one value and returns it."""
        array[...] = value
        return array

    def stream(self, gpu):
        raise NotImplementedError

    def gpu(self, array):
        """The index of the array's GPU; -1 on the CPU."""
        return -1

    def ready_workspace(self, gpu):
        """The workspace of the GPU's current stream, if it can be reused; otherwise None."""
        return None

    def workspace(self, gpu, stream, size, call):
        """(stream, address, bytes, None, owner): at least `size` bytes of initialized memory for one
        call on the stream."""
        raise NotImplementedError

    def captured_workspace(self, gpu, stream, plan, library):
        """(stream, address, bytes, header or None, owner) for a call that is being captured in a
        graph. It needs no work on the GPU. None: use workspace()."""
        return None


def _count(shape):
    count = 1
    for extent in shape:
        count *= extent
    return count


def width_of(v):
    """The last extent of v, which may belong to any framework."""
    try:
        return v.shape[-1]
    except AttributeError:
        return adapter_of("v", v).shape(v)[-1]


_DTYPE_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "bool": "bool",
    "uint8": "byte",  # read as boolean when it is a mask
    "int8": "int8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    **{name: name for name in ("int16", "int64", "uint16", "uint32", "uint64", "complex64",
                               "complex128")},
}
EIGHT_BIT = ("e4m3", "e5m2", "int8", "byte")
_WANTED = "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, int32 and bool"
# Dtypes of new NumPy-like arrays. NumPy has no 8-bit floats; flashcore.Quantized records the format.
NEW_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "i32": "int32", "int8": "int8",
              "byte": "uint8", "e4m3": "uint8", "e5m2": "uint8"}


def dtype_name(dtype, argument):
    """FlashCore's name of a NumPy dtype."""
    if dtype.name not in _DTYPE_NAMES or not dtype.isnative:
        order = "" if dtype.isnative else " of another byte order"
        raise NotImplementedError(
            f"{argument}: dtype is {dtype.name}{order}; FlashCore takes {_WANTED}")
    return _DTYPE_NAMES[dtype.name]


def element_strides(strides, itemsize, argument):
    """Byte strides converted to element strides."""
    if any(stride % itemsize for stride in strides):
        raise ValueError(f"{argument}: strides are {strides} bytes, which are not multiples of its "
                         f"element size {itemsize}; copy the array")
    return tuple(stride // itemsize for stride in strides)


def compact_strides(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def read_descriptor(address, name):
    """The ArrayInfo of a C descriptor."""
    tensor = abi.Tensor.from_address(address)
    dtype = (tensor.dtype.code, tensor.dtype.bits)
    for known, described in abi.DTYPES.items():
        if described == dtype and tensor.dtype.lanes == 1:
            break
    else:
        raise NotImplementedError(f"{name}: dtype has DLPack code {dtype[0]} and {dtype[1]} bits; "
                                  f"FlashCore takes {_WANTED}")
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else compact_strides(shape)
    return ArrayInfo(shape, strides, known, tensor.device.device_type, tensor.device.device_id)


_ARRAY_TYPES = {"torch": "Tensor", "numpy": "ndarray", "cupy": "ndarray", "jax": "Array"}
# Array type -> adapter. The types of one framework share an adapter.
ADAPTERS: dict[type, Any] = {}


def _framework_of(array):
    # An array exists only if its framework is loaded, so no framework is imported here.
    for name, array_type in _ARRAY_TYPES.items():
        found = getattr(sys.modules.get(name), array_type, None)
        if found is not None and isinstance(array, found):
            return name
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return "dlpack"
    return None


def adapter_of(name, array):
    """The adapter of an array's framework. `name` is the argument's name, for error messages."""
    adapter = ADAPTERS.get(type(array))
    if adapter is not None:
        return adapter
    framework = _framework_of(array)
    if framework is None:
        raise TypeError(f"{name}: is a {type(array).__name__}; wanted an array of NumPy, torch, CuPy "
                        "or JAX, or another with __dlpack__")
    if framework == "numpy" and hasattr(array, "mask"):
        raise TypeError(f"{name}: is a masked array; give its data, and mask= for the keys to hide")
    adapter = ADAPTERS[type(array)] = getattr(providers, framework)
    return adapter
