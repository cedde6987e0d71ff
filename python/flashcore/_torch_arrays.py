"""torch tensors, on the CPU and on CUDA's current stream."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashcore import _abi, _torch_ops
from flashcore._arrays import Description, Kind, NoMemoryHere, _capsule_pointer, dtype_name
from flashcore._graph_headers import HEADERS_AT_ONCE, GraphHeaders

_MAX_NUMBERS = 1024  # kept on the GPU for calls that are given a number
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
    """The address of torch's C function that describes a tensor; None where this torch has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    try:
        api = _ExchangeApi.from_address(_capsule_pointer(capsule, b"dlpack_exchange_api"))
    except (TypeError, ValueError):  # another version's
        return None
    if api.major != 1 or not api.tensor_from_object:
        return None
    return api.tensor_from_object


_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing",
                     torch.cuda.is_current_stream_capturing)


def _raw_stream_reader():
    """The current stream of a device as an integer: what torch's own compiled code calls, ten times
    as fast as the public way."""
    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is not None:
        return fast
    return lambda device_id: torch.cuda.current_stream(device_id).cuda_stream


def _new_bytes(gpu, size):
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", gpu))


def _outside_pools(gpu, make):
    """make() on the current stream, in memory that lives as long as it likes. Before torch captures a
    graph it runs the program once with everything this thread allocates in the graph's own pool, and
    nothing in there may live on: so another thread allocates."""
    stream = torch.cuda.current_stream(gpu)

    def on_the_stream():
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_the_stream).result()


class TorchKind(Kind):
    dispatcher = _torch_ops
    stream = staticmethod(_raw_stream_reader())
    gpu = staticmethod(torch.Tensor.get_device)
    empty_out = staticmethod(_torch_ops.empty_out)

    def __init__(self):
        read = _descriptor_reader()
        self.reader = None if read is None else (read, torch.empty_like)
        self._workspaces: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._graph_headers: dict[int, GraphHeaders] = {}
        self._want_headers: set[int] = set()  # GPUs whose captures may soon find none
        self._numbers: dict[tuple[Any, int], torch.Tensor] = {}

    def view(self, tensor, slot):
        # A negative view's memory holds the opposite of its values.
        resolved = tensor.resolve_neg()
        address = Kind.view(self, resolved, slot)
        slot.keep = slot.keep, resolved
        return address

    def check_readable(self, tensor, name):
        if tensor.is_nested:
            raise NotImplementedError(f"{name}: is a nested tensor; give packed sequences with "
                                      "cu_seqlens_q and cu_seqlens_k, or a padded batch")
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name}: is on {tensor.device}; FlashCore runs on cpu and cuda")
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"{name}: layout is {tensor.layout}; wanted torch.strided")
        if tensor.is_quantized:
            raise NotImplementedError(f"{name}: dtype is {tensor.dtype}; give a flashcore.Quantized "
                                      "of its int_repr() and scale, or dequantize() it")

    def describe(self, tensor, name):
        self.check_readable(tensor, name)
        device = tensor.device
        return Description(tuple(tensor.shape), tuple(tensor.stride()),
                           dtype_name(_TorchDtype(tensor.dtype), name),
                           _abi.CUDA if device.type == "cuda" else _abi.CPU, device.index or 0)

    def address(self, tensor):
        try:
            return tensor.data_ptr()
        except RuntimeError as error:
            raise NoMemoryHere(str(error)) from None

    def check_writable(self, tensor, name):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires grad; gradients cannot flow through a given output, "
                             "leave it out")
        if tensor.is_neg():
            raise ValueError(f"{name}: is a negative view, whose memory holds the opposite of its "
                             f"values; give {name}.resolve_neg()")

    def wrote(self, tensor):
        # A gradient that was to be computed from what was there before must raise.
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
            torch.cuda.current_stream(like.device).synchronize()  # other streams will read it too
            self._numbers[like.device, value] = found
        return found

    def ready_workspace(self, gpu):
        if _capturing() or gpu in self._want_headers:
            return None
        return self._workspaces.get((gpu, self.stream(gpu)))

    def workspace(self, gpu, stream, size, call):
        """One per stream, as calls of a stream follow each other. A graph may be replayed on any
        stream, so a captured call has its own. It is zeroed in the graph, at every replay: what
        captured_workspace() gives saves that."""
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
        """Partial results lie in the graph's memory; a header that was zeroed before does not, and
        outlives the graph. None where a header is wanted and none is there, as without a warm-up."""
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
                self._want_headers.add(gpu)  # the next call that is not captured adds some
            if header is None:
                return None
            size -= _abi.WORKSPACE_HEADER_BYTES
        memory = _new_bytes(gpu, size) if size > 0 else None
        return stream, None if memory is None else memory.data_ptr(), size, header, memory

    def _add_graph_headers(self, gpu, stream, call):
        """While nothing is captured: what is allocated during a capture belongs to the graph."""
        headers = self._graph_headers.setdefault(gpu, GraphHeaders())
        self._want_headers.discard(gpu)
        if not headers.are_few():
            return
        size = HEADERS_AT_ONCE * _abi.WORKSPACE_HEADER_BYTES
        try:
            memory = _outside_pools(gpu, lambda: torch.zeros(
                size, dtype=torch.uint8, device=torch.device("cuda", gpu)))
        except torch.cuda.OutOfMemoryError:
            return  # captures zero in the graph then
        call.wait_for_workspace(memory.data_ptr(), size, gpu, stream)  # other streams will use them
        headers.add(memory.data_ptr(), memory)


class _TorchDtype:
    """A torch dtype as dtype_name() reads one of NumPy."""

    isnative = True

    def __init__(self, dtype):
        self.name = str(dtype).removeprefix("torch.")


# Made when this module is imported: torch.compile may be what looks for it first, and it can trace an
# import, but not what is done here.
KIND = TorchKind()
