"""Adapter of NumPy arrays, including arrays of ml_dtypes' bfloat16."""

import numpy

from flashcore._core import abi
from flashcore._core.arrays import (NEW_DTYPES, ArrayAdapter, ArrayInfo, capsule_pointer, dtype_name,
                                    element_strides, width_of)


class NumpyAdapter(ArrayAdapter):
    has_gpus = False
    reader = (None, None)

    def __init__(self):
        self._empty = numpy.empty

    def view(self, array, desc):
        # A DLPack capsule starts with a DLTensor, which is also FlashCore's descriptor.
        try:
            desc.keep = capsule = array.__dlpack__()
        except (BufferError, TypeError):  # read-only, or bfloat16
            return ArrayAdapter.view(self, array, desc)
        return capsule_pointer(capsule, b"dltensor")

    def info(self, array, name):
        dtype = array.dtype
        return ArrayInfo(array.shape, element_strides(array.strides, dtype.itemsize, name),
                         dtype_name(dtype, name), abi.CPU, 0)

    def address(self, array):
        return array.ctypes.data

    def check_writable(self, array, name):
        if not array.flags.writeable:
            raise ValueError(f"{name}: is read-only; give a writable array")

    def empty(self, like, shape, dtype=None):
        return self._empty(shape, like.dtype if dtype is None else NEW_DTYPES[dtype])

    def empty_out(self, q, v):
        shape, dtype = q.shape, q.dtype
        try:
            v_dim = v.shape[-1]
        except AttributeError:
            v_dim = width_of(v)
        return self._empty(shape if shape[-1] == v_dim else (*shape[:-1], v_dim),
                           "float16" if dtype.itemsize == 1 else dtype)

    def int32(self, like, value):
        return numpy.full(1, value, numpy.int32)


ADAPTER = NumpyAdapter()
