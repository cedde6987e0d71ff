"""Adapter of any other CPU array with __dlpack__. Results are NumPy arrays."""

from flashcore._core import abi
from flashcore._core.arrays import (EIGHT_BIT, NEW_DTYPES, ArrayAdapter, TensorDesc, adapter_of,
                                    capsule_pointer, read_descriptor)


class DlpackAdapter(ArrayAdapter):
    has_gpus = False

    def view(self, array, desc):
        device_type, _ = array.__dlpack_device__()
        if device_type != abi.CPU:
            raise NotImplementedError(
                f"{desc.name}: is a {type(array).__name__} on DLPack device {device_type}; on a GPU "
                "FlashCore takes torch, CuPy and JAX arrays")
        desc.keep = capsule = array.__dlpack__()
        return capsule_pointer(capsule, b"dltensor")

    def info(self, array, name):
        desc = TensorDesc(name)
        return read_descriptor(self.view(array, desc), name)

    def address(self, array):
        desc = TensorDesc("")
        tensor = abi.Tensor.from_address(self.view(array, desc))
        return (tensor.data or 0) + tensor.byte_offset

    def empty(self, like, shape, dtype=None):
        import numpy
        name = dtype or self.info(like, "q").dtype
        wanted = NEW_DTYPES.get(name)
        if wanted is None:
            raise TypeError(f"out: not given, and NumPy has no {name} to make it of; give out=")
        return numpy.empty(shape, wanted)

    def is_f64(self, array):
        return self.info(array, "q").dtype == "f64"

    def shape(self, array):
        return self.info(array, "").shape

    def empty_out(self, q, v):
        shape, v_shape = self.shape(q), adapter_of("v", v).shape(v)
        narrow = "f16" if self.info(q, "q").dtype in EIGHT_BIT else None
        return self.empty(q, (*shape[:-1], v_shape[-1]), narrow)

    def int32(self, like, value):
        import numpy
        return numpy.full(1, value, numpy.int32)


ADAPTER = DlpackAdapter()
