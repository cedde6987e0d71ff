"""Adapter of JAX arrays outside jit. They are immutable, so results are new arrays. A call returns
when its result is complete."""

from typing import Any

import jax

from flashcore._core.arrays import (NEW_DTYPES, ArrayAdapter, TensorDesc, capsule_pointer,
                                    read_descriptor)


class JaxAdapter(ArrayAdapter):
    waits = True

    def __init__(self):
        self._workspaces: dict[int, Any] = {}

    def check_readable(self, array, name):
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name}: is traced by jax.jit, grad or vmap; inside of them call "
                            "flashcore.integrations.jax.attention")

    def view(self, array, desc):
        self.check_readable(array, desc.name)
        desc.keep = capsule = array.block_until_ready().__dlpack__()
        return capsule_pointer(capsule, b"dltensor")

    def info(self, array, name):
        desc = TensorDesc(name)
        return read_descriptor(self.view(array, desc), name)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def check_writable(self, array, name):
        raise ValueError(f"{name}: is a JAX array, which is immutable; omit it and use the returned "
                         "array")

    def empty(self, like, shape, dtype=None):
        import numpy
        self.check_readable(like, "q")
        wanted = numpy.dtype(like.dtype if dtype is None else NEW_DTYPES[dtype])
        if like.device.platform == "cpu":
            return numpy.empty(shape, wanted)
        # Writing into this buffer is safe: nothing else refers to it yet.
        return jax.device_put(jax.numpy.zeros(shape, wanted), like.device)

    def fill(self, array, value):
        if not isinstance(array, jax.Array):
            return ArrayAdapter.fill(self, array, value)
        return jax.device_put(jax.numpy.full_like(array, value), array.device)

    def finish(self, made):
        if made is None or isinstance(made, jax.Array):
            return made
        return jax.numpy.asarray(made)

    def int32(self, like, value):
        return jax.device_put(jax.numpy.full(1, value, "int32"), like.device)

    def gpu(self, array):
        device = array.device
        return -1 if device.platform == "cpu" else device.local_hardware_id

    def stream(self, gpu):
        return None  # inputs are ready, and the call waits for its result

    def workspace(self, gpu, stream, size, call):
        found = self._workspaces.get(gpu)
        if found is None or found[2] < size:
            device = next(one for one in jax.devices() if one.local_hardware_id == gpu)
            memory = jax.device_put(jax.numpy.zeros(size, "uint8"), device)
            address = self.address(memory.block_until_ready())
            call.init_workspace(address, size, gpu, stream)
            found = self._workspaces[gpu] = stream, address, size, None, memory
        return found


ADAPTER = JaxAdapter()
