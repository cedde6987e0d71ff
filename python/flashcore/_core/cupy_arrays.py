"""Adapter of CuPy arrays, on CuPy's current stream."""

from typing import Any

import cupy

from flashcore._core import abi
from flashcore._core.arrays import NEW_DTYPES, ArrayAdapter, ArrayInfo, dtype_name, element_strides


class CupyAdapter(ArrayAdapter):
    def __init__(self):
        self._workspaces: dict[tuple[Any, ...], Any] = {}

    def info(self, array, name):
        dtype = array.dtype
        return ArrayInfo(array.shape, element_strides(array.strides, dtype.itemsize, name),
                         dtype_name(dtype, name), abi.CUDA, array.device.id)

    def address(self, array):
        return array.data.ptr

    def empty(self, like, shape, dtype=None):
        with like.device:
            return cupy.empty(shape, like.dtype if dtype is None else NEW_DTYPES[dtype])

    def fill(self, array, value):
        with array.device:
            return ArrayAdapter.fill(self, array, value)

    def int32(self, like, value):
        with like.device:
            return cupy.full(1, value, dtype=cupy.int32)

    def gpu(self, array):
        return array.device.id

    def stream(self, gpu):
        with cupy.cuda.Device(gpu):
            return cupy.cuda.get_current_stream().ptr

    def workspace(self, gpu, stream, size, call):
        found = self._workspaces.get((gpu, stream))
        if found is None or found[2] < size:
            with cupy.cuda.Device(gpu):
                memory = cupy.empty(size, dtype=cupy.uint8)
            call.init_workspace(memory.data.ptr, size, gpu, stream)
            found = self._workspaces[gpu, stream] = stream, memory.data.ptr, size, None, memory
        return found


ADAPTER = CupyAdapter()
