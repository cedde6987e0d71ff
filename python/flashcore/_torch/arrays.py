"""Adapter of torch tensors, on the CPU and on CUDA's current stream."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashcore._core import abi
from flashcore._core.arrays import (ArrayAdapter, ArrayInfo, NoStorageError, capsule_pointer,
                                    dtype_name)
from flashcore._torch.graph_headers import HEADERS_AT_ONCE, GraphHeaders

_MAX_NUMBERS = 1024  # int32 scalars cached on the GPU
_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16,
           "bf16": torch.bfloat16, "i32": torch.int32, "int8": torch.int8, "byte": torch.uint8,
           "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h, version 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    ]


def _descriptor_reader():
    """The address of torch's C function that describes a tensor; None if this torch has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    try:
        api = _ExchangeApi.from_address(capsule_pointer(capsule, b"dlpack_exchange_api"))
    except (TypeError, ValueError):  # another version of the API
        return None
    if api.major != 1 or not api.tensor_from_object:
        return None
    return api.tensor_from_object


_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing",
                     torch.cuda.is_current_stream_capturing)


def _raw_stream_reader():
    """A function that returns the current stream of a device as an integer. torch's compiled code uses
    the private function, which is ten times as fast as the public one."""
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is not None:
        return fast
    return lambda device_id: torch.cuda.current_stream(device_id).cuda_stream


def _new_bytes(gpu, size):
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", gpu))


def _outside_pools(gpu, make):
    """Calls make() on the current stream, with memory outside the pools of CUDA graphs. Before torch
    captures a graph, it runs the program once and allocates in the graph's pool, where no memory may
    outlive the graph. The pool belongs to this thread, so another thread allocates."""
    stream = torch.cuda.current_stream(gpu)

    def on_the_stream():
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_the_stream).result()


def empty_out(q, v):
    """A new tensor with q's shape and order of dimensions and v's width; float16 if q is 8-bit."""
    dtype = torch.float16 if q.element_size() == 1 else q.dtype
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def empty_gradient(one):
    """A new tensor like an input, in the same order of dimensions, so that a gradient needs no copy to
    become that of the tensor of which the input is a view. Rows are dense."""
    made = torch.empty_like(one)
    return made if made.stride()[-1:] == (1,) else torch.empty(one.shape, dtype=one.dtype,
                                                              device=one.device)


class TorchAdapter(ArrayAdapter):
    stream = staticmethod(_raw_stream_reader())
    gpu = staticmethod(torch.Tensor.get_device)
    empty_out = staticmethod(empty_out)
    empty_gradient = staticmethod(empty_gradient)

    def __init__(self):
        read = _descriptor_reader()
        self.reader = None if read is None else (read, torch.empty_like)
        self._workspaces: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._graph_headers: dict[int, GraphHeaders] = {}
        self._want_headers: set[int] = set()  # GPUs that are short of graph headers
        self._numbers: dict[tuple[Any, int], torch.Tensor] = {}

    def view(self, tensor, desc):
        # The memory of a negative view holds the negated values.
        resolved = tensor.resolve_neg()
        address = ArrayAdapter.view(self, resolved, desc)
        desc.keep = desc.keep, resolved
        return address

    def check_readable(self, tensor, name):
        if tensor.is_nested:
            raise NotImplementedError(f"{name}: is a nested tensor; give varlen sequences with "
                                      "cu_seqlens_q and cu_seqlens_k, or a padded batch")
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name}: is on {tensor.device}; FlashCore runs on cpu and cuda")
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"{name}: layout is {tensor.layout}; wanted torch.strided")
        if tensor.is_quantized:
            raise NotImplementedError(f"{name}: dtype is {tensor.dtype}; give a flashcore.Quantized "
                                      "of its int_repr() and scale, or dequantize() it")

    def info(self, tensor, name):
        self.check_readable(tensor, name)
        device = tensor.device
        return ArrayInfo(tuple(tensor.shape), tuple(tensor.stride()),
                           dtype_name(_TorchDtype(tensor.dtype), name),
                           abi.CUDA if device.type == "cuda" else abi.CPU, device.index or 0)

    def address(self, tensor):
        try:
            return tensor.data_ptr()
        except RuntimeError as error:
            raise NoStorageError(str(error)) from None

    def check_writable(self, tensor, name):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires grad; gradients cannot flow through a given output, "
                             "leave it out")
        if tensor.is_neg():
            raise ValueError(f"{name}: is a negative view, whose memory holds the negated "
                             f"values; give {name}.resolve_neg()")

    def wrote(self, tensor):
        # A backward pass that saved the old values must raise.
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def fill(self, tensor, value):
        return tensor.fill_(value)

    def check_no_gradient(self, tensor, name):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires grad; gradients cannot flow through a cache, 8-bit "
                             "tensors, merge() or arrays of other frameworks, use torch.no_grad() or "
                             "detach()")

    def empty(self, like, shape, dtype=None):
        return torch.empty(shape, dtype=like.dtype if dtype is None else _DTYPES[dtype],
                           device=like.device)

    def from_host(self, like, memory, shape, dtype, owner=None):
        kind = torch.int32 if dtype == "i32" else torch.bool
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=kind, device=like.device)
        made = torch.frombuffer(memory, dtype=kind, count=count).reshape(shape)
        if not like.is_cuda:
            return made
        if _capturing():
            raise RuntimeError("mask: its first use on a GPU copies it there, which a graph cannot "
                               "capture; call attention() with it once before the capture")
        copied = _outside_pools(like.get_device(), lambda: made.to(like.device))
        torch.cuda.current_stream(like.device).synchronize()  # other streams read it too
        return copied

    def is_f64(self, tensor):
        return tensor.dtype is torch.float64

    def int32(self, like, value):
        if not like.is_cuda or _capturing():
            return torch.full((1,), value, dtype=torch.int32, device=like.device)
        found = self._numbers.get((like.device, value))
        if found is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            found = _outside_pools(like.get_device(), lambda: torch.full(
                (1,), value, dtype=torch.int32, device=like.device))
            torch.cuda.current_stream(like.device).synchronize()  # other streams read it too
            self._numbers[like.device, value] = found
        return found

    def ready_workspace(self, gpu):
        if _capturing() or gpu in self._want_headers:
            return None
        return self._workspaces.get((gpu, self.stream(gpu)))

    def workspace(self, gpu, stream, size, call):
        """One workspace per stream, because the calls of a stream run in order. A graph may be replayed
        on any stream, so a captured call has its own workspace, which the graph zeroes at every
        replay. captured_workspace() avoids that."""
        if _capturing():
            return self._new_workspace(gpu, stream, size, call, _new_bytes(gpu, size))
        if gpu in self._want_headers or gpu not in self._graph_headers:
            self._add_graph_headers(gpu, stream, call)
        found = self._workspaces.get((gpu, stream))
        if found is None or found[2] < size:
            memory = _outside_pools(gpu, lambda: _new_bytes(gpu, size))
            found = self._new_workspace(gpu, stream, size, call, memory)
            self._workspaces[gpu, stream] = found
        return found

    def _new_workspace(self, gpu, stream, size, call, memory):
        call.init_workspace(memory.data_ptr(), size, gpu, stream)
        return stream, memory.data_ptr(), size, None, memory

    def captured_workspace(self, gpu, stream, plan, library):
        """Partial results are in the graph's memory. The header is zeroed in advance, is outside the
        graph's memory and outlives the graph. None if the plan uses a header and none is free, for
        example without a warm-up call."""
        if not _capturing():
            return None
        size, header = plan.workspace_bytes, None
        if plan.uses_header:
            headers = self._graph_headers.get(gpu)
            capture = library.capture_id(gpu, stream)
            if headers is None or capture == 0:
                return None
            header = headers.take(capture, stream,
                                  lambda ended: library.capture_id(gpu, stream, ended))
            if headers.are_few():
                self._want_headers.add(gpu)  # the next call outside a capture adds some
            if header is None:
                return None
            size -= abi.WORKSPACE_HEADER_BYTES
        memory = _new_bytes(gpu, size) if size > 0 else None
        return stream, None if memory is None else memory.data_ptr(), size, header, memory

    def _add_graph_headers(self, gpu, stream, call):
        """Allocates more headers. Runs outside captures, whose allocations belong to the graph."""
        headers = self._graph_headers.setdefault(gpu, GraphHeaders())
        self._want_headers.discard(gpu)
        if not headers.are_few():
            return
        size = HEADERS_AT_ONCE * abi.WORKSPACE_HEADER_BYTES
        try:
            memory = _outside_pools(gpu, lambda: torch.zeros(
                size, dtype=torch.uint8, device=torch.device("cuda", gpu)))
        except torch.cuda.OutOfMemoryError:
            return  # captured graphs zero their workspaces then
        call.wait_for_workspace(memory.data_ptr(), size, gpu, stream)  # other streams use them
        headers.add(memory.data_ptr(), memory)


class _TorchDtype:
    """A torch dtype with the attributes of a NumPy dtype that dtype_name() reads."""

    isnative = True

    def __init__(self, dtype):
        self.name = str(dtype).removeprefix("torch.")


# Created at import: torch.compile may be the first to need the adapter, and it can trace an import but
# not this constructor.
ADAPTER = TorchAdapter()
