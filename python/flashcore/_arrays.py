"""Arrays of every framework, read in place through DLPack: where the elements lie, how new ones are
made, which stream the framework is on. One kind per framework; KINDS remembers that of each type."""

import ctypes
import sys
from typing import Any, NamedTuple

from flashcore import _abi


class NoMemoryHere(RuntimeError):
    """The tensor stands for others, as inside torch.vmap: only its framework knows where they are."""


class Description(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device_type: int
    device_id: int


class Slot:
    """One argument of one call: its C descriptor, and what must live until the call is over."""

    __slots__ = ("name", "keep")

    def __init__(self, name):
        self.name, self.keep = name, None

    def hold(self, description, address):
        """Describes memory at `address`; returns the address of the descriptor."""
        self.keep = _abi.tensor(address, description.shape, description.dtype,
                                description.device_type, description.device_id, description.strides)
        return ctypes.addressof(self.keep)


class Kind:
    """What FlashCore asks of a framework. This base reads arrays through describe() and address()."""

    waits = False  # whether a call must have ended when it returns
    has_gpus = True  # whether gpu() must be asked
    # Whether the library can describe arrays itself: None no, else (the address of the framework's
    # function for it, or None for __dlpack__; the framework's empty_like where out is made by it).
    reader: Any = None
    finish: Any = None  # or makes of a new array that was written what the caller gets
    dispatcher: Any = None  # or the framework's own way to call: flashcore._torch_ops

    def view_all(self, call, q, k, v, out, lse):
        """Describes the arrays of a call in it; lse may be None."""
        arrays = call.arrays
        arrays.q = self.view(q, call.q)
        arrays.k = kind_of("k", k).view(k, call.k)
        arrays.v = kind_of("v", v).view(v, call.v)
        arrays.out = kind_of("out", out).view(out, call.out)
        arrays.lse = None if lse is None else kind_of("lse", lse).view(lse, call.lse)

    def view(self, array, slot):
        """The address of a C descriptor of the array, valid as long as array and slot.keep."""
        return slot.hold(self.describe(array, slot.name), self.address(array))

    def describe(self, array, name):
        raise NotImplementedError

    def address(self, array):
        raise NotImplementedError

    def check_writable(self, array, name):
        """Raises where results cannot be written into the array."""

    def check_no_gradient(self, array, name):
        """Raises where the framework would miss a gradient through the array."""

    def check_readable(self, array, name):
        """Raises where the array has not the memory of an array, before its shape is asked for."""

    def wrote(self, array):
        """Tells the framework that the elements of a caller's array have changed."""

    def shape(self, array):
        return array.shape

    def empty(self, like, shape, dtype=None):
        """A new array beside `like`; dtype one of WIDE, None: like's."""
        raise NotImplementedError

    def int32(self, like, value):
        """An array of this one number."""
        raise NotImplementedError

    def is_f64(self, array):
        return array.dtype == "float64"

    def empty_out(self, q, v):
        """A new array of q's shape, but as wide as v, and float16 where q is 8-bit."""
        narrow = "f16" if q.dtype.itemsize == 1 else None
        return self.empty(q, (*q.shape[:-1], _width(v)), narrow)

    def fill(self, array, value):
        """A new array with this value everywhere; returns it."""
        array[...] = value
        return array

    def stream(self, gpu):
        raise NotImplementedError

    def gpu(self, array):
        """The number of the array's GPU; -1: it is on the CPU."""
        return -1

    def ready_workspace(self, gpu):
        """What workspace() has given for the GPU's current stream, if it may be used again."""
        return None

    def workspace(self, gpu, stream, size, call):
        """(stream, address, bytes, None, what keeps them alive): at least `size` bytes of initialised
        memory for one call on the stream."""
        raise NotImplementedError

    def captured_workspace(self, gpu, stream, plan, library):
        """(stream, address, bytes, header or None, what keeps them alive) for a call of this plan that
        is being captured in a graph, ready without any work of the GPU; None: workspace() gives one."""
        return None


def _width(v):
    try:
        return v.shape[-1]
    except AttributeError:  # of no framework that is known here
        return kind_of("v", v).shape(v)[-1]


_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "bool": "bool",
    "uint8": "byte",  # as a mask it is boolean
    "int8": "int8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    **{name: name for name in ("int16", "int64", "uint16", "uint32", "uint64", "complex64",
                               "complex128")},
}
EIGHT_BIT = ("e4m3", "e5m2", "int8", "byte")
_WANTED = "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, uint8, int32 and bool"
# What new arrays are made of. NumPy has no 8-bit floats: flashcore.Quantized says what bytes mean.
WIDE = {"f64": "float64", "f32": "float32", "f16": "float16", "i32": "int32", "int8": "int8",
        "byte": "uint8", "e4m3": "uint8", "e5m2": "uint8"}


def dtype_name(dtype, argument):
    """FlashCore's name of a NumPy dtype."""
    if dtype.name not in _NAMES or not dtype.isnative:
        order = "" if dtype.isnative else " of another byte order"
        raise NotImplementedError(
            f"{argument}: dtype is {dtype.name}{order}; FlashCore takes {_WANTED}")
    return _NAMES[dtype.name]


def _in_elements(strides, itemsize, argument):
    if any(stride % itemsize for stride in strides):
        raise ValueError(f"{argument}: strides are {strides} bytes, its elements have {itemsize}; "
                         "copy the array")
    return tuple(stride // itemsize for stride in strides)


def compact_strides(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class NumpyKind(Kind):
    """NumPy arrays, also of ml_dtypes' bfloat16."""

    has_gpus = False
    reader = (None, None)

    def __init__(self, numpy):
        self._numpy = numpy
        self._empty = numpy.empty

    def view(self, array, slot):
        # What a DLPack capsule holds begins with a DLTensor, which is FlashCore's descriptor.
        try:
            slot.keep = capsule = array.__dlpack__()
        except (BufferError, TypeError):  # read-only, or bfloat16
            return Kind.view(self, array, slot)
        return _capsule_pointer(capsule, b"dltensor")

    def describe(self, array, name):
        dtype = array.dtype
        return Description(array.shape, _in_elements(array.strides, dtype.itemsize, name),
                           dtype_name(dtype, name), _abi.CPU, 0)

    def address(self, array):
        return array.ctypes.data

    def check_writable(self, array, name):
        if not array.flags.writeable:
            raise ValueError(f"{name}: is read-only; give a writable array")

    def empty(self, like, shape, dtype=None):
        return self._empty(shape, like.dtype if dtype is None else WIDE[dtype])

    def empty_out(self, q, v):
        shape, dtype = q.shape, q.dtype
        try:
            v_dim = v.shape[-1]
        except AttributeError:
            v_dim = _width(v)
        return self._empty(shape if shape[-1] == v_dim else (*shape[:-1], v_dim),
                           "float16" if dtype.itemsize == 1 else dtype)

    def int32(self, like, value):
        return self._numpy.full(1, value, self._numpy.int32)


class CupyKind(Kind):
    """CuPy arrays, on CuPy's current stream."""

    def __init__(self, cupy):
        self._cupy = cupy
        self._workspaces: dict[tuple[Any, ...], Any] = {}

    def describe(self, array, name):
        dtype = array.dtype
        return Description(array.shape, _in_elements(array.strides, dtype.itemsize, name),
                           dtype_name(dtype, name), _abi.CUDA, array.device.id)

    def address(self, array):
        return array.data.ptr

    def empty(self, like, shape, dtype=None):
        with like.device:
            return self._cupy.empty(shape, like.dtype if dtype is None else WIDE[dtype])

    def fill(self, array, value):
        with array.device:
            return Kind.fill(self, array, value)

    def int32(self, like, value):
        with like.device:
            return self._cupy.full(1, value, dtype=self._cupy.int32)

    def gpu(self, array):
        return array.device.id

    def stream(self, gpu):
        with self._cupy.cuda.Device(gpu):
            return self._cupy.cuda.get_current_stream().ptr

    def workspace(self, gpu, stream, size, call):
        found = self._workspaces.get((gpu, stream))
        if found is None or found[2] < size:
            with self._cupy.cuda.Device(gpu):
                memory = self._cupy.empty(size, dtype=self._cupy.uint8)
            call.init_workspace(memory.data.ptr, size, gpu, stream)
            found = self._workspaces[gpu, stream] = stream, memory.data.ptr, size, None, memory
        return found


class JaxKind(Kind):
    """JAX arrays, outside jit. They are immutable: results are new arrays, and the call returns when
    the result is there."""

    waits = True

    def __init__(self, jax):
        self._jax = jax
        self._workspaces: dict[int, Any] = {}

    def check_readable(self, array, name):
        if isinstance(array, self._jax.core.Tracer):
            raise TypeError(f"{name}: is traced by jax.jit, grad or vmap; inside of them call "
                            "flashcore.integrations.jax.attention")

    def view(self, array, slot):
        self.check_readable(array, slot.name)
        slot.keep = capsule = array.block_until_ready().__dlpack__()
        return _capsule_pointer(capsule, b"dltensor")

    def describe(self, array, name):
        slot = Slot(name)
        return read_descriptor(self.view(array, slot), name)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def check_writable(self, array, name):
        raise ValueError(f"{name}: is a JAX array, which is immutable; leave it out and use what is "
                         "returned")

    def empty(self, like, shape, dtype=None):
        import numpy
        self.check_readable(like, "q")
        kind = numpy.dtype(like.dtype if dtype is None else WIDE[dtype])
        if like.device.platform == "cpu":
            return numpy.empty(shape, kind)
        # Nobody else has seen this buffer: it is written before it is given away.
        return self._jax.device_put(self._jax.numpy.zeros(shape, kind), like.device)

    def fill(self, array, value):
        if not isinstance(array, self._jax.Array):
            return Kind.fill(self, array, value)
        return self._jax.device_put(self._jax.numpy.full_like(array, value), array.device)

    def finish(self, made):
        if made is None or isinstance(made, self._jax.Array):
            return made
        return self._jax.numpy.asarray(made)

    def int32(self, like, value):
        return self._jax.device_put(self._jax.numpy.full(1, value, "int32"), like.device)

    def gpu(self, array):
        device = array.device
        return -1 if device.platform == "cpu" else device.local_hardware_id

    def stream(self, gpu):
        return None  # inputs are ready, and the call waits for its result

    def workspace(self, gpu, stream, size, call):
        found = self._workspaces.get(gpu)
        if found is None or found[2] < size:
            device = next(one for one in self._jax.devices() if one.local_hardware_id == gpu)
            memory = self._jax.device_put(self._jax.numpy.zeros(size, "uint8"), device)
            address = self.address(memory.block_until_ready())
            call.init_workspace(address, size, gpu, stream)
            found = self._workspaces[gpu] = stream, address, size, None, memory
        return found


class DlpackKind(Kind):
    """Any other array on the CPU with __dlpack__. Results are NumPy arrays."""

    has_gpus = False

    def view(self, array, slot):
        device_type, _ = array.__dlpack_device__()
        if device_type != _abi.CPU:
            raise NotImplementedError(
                f"{slot.name}: is a {type(array).__name__} on DLPack device {device_type}; on a GPU "
                "FlashCore takes torch, CuPy and JAX arrays")
        slot.keep = capsule = array.__dlpack__()
        return _capsule_pointer(capsule, b"dltensor")

    def describe(self, array, name):
        slot = Slot(name)
        return read_descriptor(self.view(array, slot), name)

    def address(self, array):
        slot = Slot("")
        tensor = _abi.Tensor.from_address(self.view(array, slot))
        return (tensor.data or 0) + tensor.byte_offset

    def empty(self, like, shape, dtype=None):
        import numpy
        name = dtype or self.describe(like, "q").dtype
        kind = WIDE.get(name)
        if kind is None:
            raise TypeError(f"out: not given, and NumPy has no {name} to make it of; give out=")
        return numpy.empty(shape, kind)

    def is_f64(self, array):
        return self.describe(array, "q").dtype == "f64"

    def shape(self, array):
        return self.describe(array, "").shape

    def empty_out(self, q, v):
        shape, v_shape = self.shape(q), kind_of("v", v).shape(v)
        narrow = "f16" if self.describe(q, "q").dtype in EIGHT_BIT else None
        return self.empty(q, (*shape[:-1], v_shape[-1]), narrow)

    def int32(self, like, value):
        import numpy
        return numpy.full(1, value, numpy.int32)


def read_descriptor(address, name):
    """The Description in a C descriptor."""
    tensor = _abi.Tensor.from_address(address)
    dtype = (tensor.dtype.code, tensor.dtype.bits)
    for known, described in _abi.DTYPES.items():
        if described == dtype and tensor.dtype.lanes == 1:
            break
    else:
        raise NotImplementedError(f"{name}: dtype has DLPack code {dtype[0]} and {dtype[1]} bits; "
                                  f"FlashCore takes {_WANTED}")
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else compact_strides(shape)
    return Description(shape, strides, known, tensor.device.device_type, tensor.device.device_id)


# type -> kind. A type is looked up once; the types of one framework share a kind.
KINDS: dict[type, Any] = {}
_FRAMEWORKS = {"torch": "Tensor", "numpy": "ndarray", "cupy": "ndarray", "jax": "Array"}
_frameworks: dict[str, Any] = {}


def _make_kind(name):
    if name == "torch":
        from flashcore import _torch_arrays
        return _torch_arrays.KIND
    if name == "dlpack":
        return DlpackKind()
    return {"numpy": NumpyKind, "cupy": CupyKind, "jax": JaxKind}[name](sys.modules[name])


def _framework_of(array):
    # An array's framework is loaded, or there would be no array: none is imported here.
    for name, array_type in _FRAMEWORKS.items():
        found = getattr(sys.modules.get(name), array_type, None)
        if found is not None and isinstance(array, found):
            return name
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return "dlpack"
    return None


def kind_of(name, array):
    """The kind of an array's framework. `name` is the argument's, for the message."""
    kind = KINDS.get(type(array))
    if kind is not None:
        return kind
    framework = _framework_of(array)
    if framework is None:
        raise TypeError(f"{name}: is a {type(array).__name__}; wanted an array of NumPy, torch, CuPy "
                        "or JAX, or another with __dlpack__")
    if framework == "numpy" and hasattr(array, "mask"):
        raise TypeError(f"{name}: is a masked array; give its data, and mask= for the keys to hide")
    if framework not in _frameworks:
        _frameworks[framework] = _make_kind(framework)
    KINDS[type(array)] = _frameworks[framework]
    return _frameworks[framework]
