"""C descriptors of arrays for calls that are not prepared: append, merge, quantize, dequantize."""

import ctypes
from typing import Any

from flashcore._core import abi
from flashcore._core.arrays import TensorDesc, adapter_of, read_descriptor


def shaped(name: str, array: Any) -> tuple[Any, tuple[int, ...]]:
    """The adapter and shape of an array with 1 to 4 dimensions."""
    adapter = adapter_of(name, array)
    adapter.check_readable(array, name)
    shape = tuple(adapter.info(array, name).shape)
    if not 1 <= len(shape) <= 4:
        raise ValueError(f"{name}: has {len(shape)} dimensions; wanted 1 to 4")
    return adapter, shape


def described(name: str, array: Any, desc: TensorDesc, dtype: str | None = None) -> Any:
    """The address of a C descriptor. `dtype` overrides the array's own dtype, for 8-bit formats that
    are stored as bytes."""
    address = adapter_of(name, array).view(array, desc)
    if dtype is None:
        return address
    tensor, kept = abi.Tensor.from_address(address), desc.keep
    address = desc.hold(read_descriptor(address, name)._replace(dtype=dtype),
                        (tensor.data or 0) + tensor.byte_offset)
    desc.keep = desc.keep, kept
    return address


class Pointers:
    """The arrays of one call as pointers to C descriptors. It keeps the descriptors alive."""

    def __init__(self) -> None:
        self._descs: list[TensorDesc] = []
        self._written: list[Any] = []

    def wrote(self) -> None:
        """After the call: tells the frameworks which arrays have changed."""
        for array in self._written:
            adapter_of("out", array).wrote(array)

    def to(self, name: str, array: Any, dtype: str | None = None, written: bool = False) -> Any:
        """A pointer to the descriptor of an array; None for None. `dtype` is as in described().
        `written` says that the call changes the caller's array."""
        if array is None:
            return None
        if written:
            adapter_of(name, array).check_writable(array, name)
            self._written.append(array)
        else:
            adapter_of(name, array).check_no_gradient(array, name)
        desc = TensorDesc(name)
        self._descs.append(desc)
        return ctypes.cast(described(name, array, desc, dtype), ctypes.POINTER(abi.Tensor))
