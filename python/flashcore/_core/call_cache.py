"""Prepared calls: params that are filled once for a set of options and then reused.

A repeated call with the same options only sets its arrays, which keeps the Python overhead small. Each
thread has its own cache.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from flashcore._core import abi, fastcall
from flashcore._core.arrays import TensorDesc, adapter_of, read_descriptor
from flashcore._core.library import exception, library, runs_handlers
from flashcore._core.options import OPTIONS, Given, Options, python_name, set_options

MAX_CALLS = 1024  # per thread; the cache is cleared when it is full
_ALIGNMENT = 256
_BROADCAST = ("bias", "mask", "q_start", "k_start")
Workspace = tuple[Any, ...]  # (stream, address, bytes, header or None, ...)


class _CpuWorkspace:
    """Workspace of one thread, used by one call at a time. The library reads `described`."""

    def __init__(self) -> None:
        self.described = abi.PythonWorkspace(None, 0)
        self._memory: Any = None

    def at_least(self, size: int) -> Workspace:
        """(None, address, bytes, None): no stream, and the header is inside."""
        if self.described.bytes < size:
            memory = ctypes.create_string_buffer(size + _ALIGNMENT)
            start = ctypes.addressof(memory)
            address = start + -start % _ALIGNMENT
            library().workspace_init(address, size)
            self.described.address, self.described.bytes = address, size
            self._memory = memory
        return None, self.described.address, self.described.bytes, None


class _ThreadState(threading.local):
    """State that a thread keeps between calls."""

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}  # PreparedCall and PreparedBackward
        self.workspace = _CpuWorkspace()
        self.interruptible = runs_handlers()

    def remember(self, key: Any, call: Any) -> None:
        if len(self.calls) >= MAX_CALLS:
            self.calls.clear()
        self.calls[key] = call


thread_state = _ThreadState()


def _extent(tensor: abi.Tensor, axis: int) -> int:
    """The extent of an axis; 1 if there is no such axis, since the library rejects the call then."""
    return int(tensor.shape[axis]) if axis < tensor.ndim else 1


class PreparedCall:
    """flashcore_attention with its params.

    run_fast() and run_new() set the addresses of the array descriptors themselves. For run(),
    describe() sets them through the fields of `arrays`.
    """

    def __init__(self, adapter: Any, options: Options, names: Sequence[str],
                 swaps_out: bool = False) -> None:
        """options: a result of normalize_options(); names: params fields of the optional arrays; swaps_out:
        run_fast() takes `out` with heads and rows swapped."""
        self.params = library().params()
        self.arrays = abi.RawParams.from_buffer(self.params)
        self.busy = False
        self._described = False
        self._cpu = thread_state.workspace
        self._workspace: Workspace | None = None  # the workspace in params
        self._main = [TensorDesc(name) for name in ("q", "k", "v", "out", "lse")]
        self.q, self.k, self.v, self.out, self.lse = self._main
        self.optional = {name: TensorDesc(python_name(name)) for name in names}
        self.is_varlen = "cu_seqlens_q" in self.optional
        self._error = abi.Error()
        self._function = library().python_attention
        interruptible = thread_state.interruptible
        self._arguments = ctypes.byref(self.params), ctypes.byref(self._error), interruptible
        self._set_options(options)
        fields = ("q", "k", "v", "out", *(("lse",) if self.wants_lse else ()), *names)
        self.run_fast: Callable[..., int] = fastcall.unavailable
        self.run_new: Callable[[Any, Any, Any], Any] | None = None
        if adapter.reader is not None:
            read, empty_like = adapter.reader
            self._fast = fastcall.FastCall(
                library(), self.params, self._error, self._cpu.described, interruptible,
                fastcall.field_addresses(self.params, fields), read, empty_like,
                swapped=(3,) if swaps_out else ())
            self.run_fast = self._fast.run
            if len(fields) == 4 and not self.must_wait and not swaps_out:
                self.run_new = self._fast.new

    def _set_options(self, options: Options) -> None:
        set_options(self.params, *options)
        given = dict(zip(OPTIONS, options))
        partial = given["partial"]
        self.must_wait = given["checked"]
        self.wants_lse = given["return_lse"] or partial
        self.wide_out = partial

    def describe(self, adapter: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
                 given: Given) -> None:
        """Writes descriptors of the arrays into the params. lse may be None."""
        self._described = True
        arrays = self.arrays
        arrays.q = adapter.view(q, self.q)
        arrays.k = adapter_of("k", k).view(k, self.k)
        arrays.v = adapter_of("v", v).view(v, self.v)
        arrays.out = adapter_of("out", out).view(out, self.out)
        arrays.lse = None if lse is None else adapter_of("lse", lse).view(lse, self.lse)
        if given:
            self.describe_optional(given)

    def describe_optional(self, given: Given) -> None:
        """Writes descriptors of the optional arrays. q, k, v, out and lse must be set first."""
        for name, adapter, array in given:
            setattr(self.arrays, name, adapter.view(array, self.optional[name]))
        for name in _BROADCAST:  # last, because their extents depend on other arrays
            if name in self.optional:
                address = getattr(self.arrays, name)
                setattr(self.arrays, name, self._broadcast(name, address, self.optional[name]))

    def _broadcast(self, name: str, address: int, desc: TensorDesc) -> int:
        """Expands a bias or mask that lacks leading dimensions or has one column for all keys, and a
        single start that applies to every sequence. Returns the new descriptor's address."""
        tensor = abi.Tensor.from_address(address)
        rank = tensor.ndim
        one = read_descriptor(address, desc.name)
        if name in ("q_start", "k_start"):
            if one.shape not in ((), (1,)):
                return address
            one = one._replace(shape=(self._batch(),), strides=(0,))
        elif 0 < rank <= 4:
            shape, strides = (1,) * (4 - rank) + one.shape, (0,) * (4 - rank) + one.strides
            if shape[3] == 1:
                shape, strides = (*shape[:3], self._kv_len()), (*strides[:3], 0)
            one = one._replace(shape=shape, strides=strides)
        kept = desc.keep
        address = desc.hold(one, (tensor.data or 0) + tensor.byte_offset)
        desc.keep = desc.keep, kept
        return address

    def _batch(self) -> int:
        cu_seqlens = self.params.cu_seqlens_q
        if cu_seqlens:
            return _extent(cu_seqlens.contents, 0) - 1
        return _extent(self.params.q.contents, 0)

    def _kv_len(self) -> int:
        k, table = self.params.k.contents, self.params.block_table
        if table:
            return _extent(table.contents, 1) * _extent(k, 1)
        return _extent(k, 0) if k.ndim == 3 else _extent(k, 1 if self.params.layout else 2)

    def empty_partial(self, adapter: Any, q: Any, v: Any) -> Any:
        wide = "f64" if adapter.is_f64(q) else "f32"
        return adapter.empty(q, (*adapter.shape(q)[:-1], adapter_of("v", v).shape(v)[-1]), wide)

    def empty_lse(self, adapter: Any, q: Any) -> Any:
        shape = tuple(adapter.shape(q))
        if len(shape) == 3:  # varlen
            shape = shape[1], shape[0]
        elif len(shape) == 4:
            shape = (shape[0], shape[2], shape[1]) if self.params.layout else shape[:3]
        return adapter.empty(q, shape, "f64" if adapter.is_f64(q) else "f32")

    def release(self) -> None:
        """Drops the arrays and marks the call as free."""
        if self._described:
            self._described = False
            for desc in (*self._main, *self.optional.values()):
                desc.keep = None
        self.busy = False

    def has_workspace(self, adapter: Any, gpu: int) -> bool:
        """Puts the reusable workspace of the current stream into the params. Returns False if there
        is none. gpu is the index of q's GPU; on the CPU (-1) the library finds the workspace itself."""
        if gpu < 0:
            return True
        found = adapter.ready_workspace(gpu)
        if found is None:
            return False
        if found is not self._workspace:
            self._use(found)
        return True

    def _use(self, found: Workspace) -> None:
        arrays = self.arrays
        (arrays.stream, arrays.workspace, arrays.workspace_bytes,
         arrays.workspace_header) = found[:4]
        self._workspace = found

    def use_workspace_for(self, adapter: Any, gpu: int, plan: abi.PlanInfo) -> None:
        """Puts a workspace of the plan's size into the params."""
        if gpu < 0:
            self._use(self._cpu.at_least(plan.workspace_bytes))
            return
        stream = adapter.stream(gpu)
        self._use(adapter.captured_workspace(gpu, stream, plan, library())
                  or adapter.workspace(gpu, stream, plan.workspace_bytes, self))
        self._workspace = None  # the adapter keeps reusable workspaces

    def run(self, adapter: Any, gpu: int) -> None:
        """Runs the call on the described arrays, with a workspace of sufficient size."""
        self.use_workspace_for(adapter, gpu, library().plan(self.params))  # raises if it is invalid
        if self._function(*self._arguments):  # a signal handler's exception propagates
            raise exception(self._error.code, self._error.message)

    def wait(self, gpu: int) -> None:
        """Waits for the call. Raises the error that a checked call has found."""
        if gpu < 0:
            return  # the call itself has raised; the header may hold an earlier call's error
        p = self.params
        address, size = p.workspace, p.workspace_bytes
        if p.workspace_header:
            address, size = p.workspace_header, abi.WORKSPACE_HEADER_BYTES
        library().workspace_status(address, size, abi.CUDA, gpu, p.stream)

    @staticmethod
    def wait_for_workspace(address: int, size: int, gpu: int, stream: int | None) -> None:
        """Waits for the work queued on the stream."""
        library().workspace_status(address, size, abi.CUDA, gpu, stream)

    @staticmethod
    def init_workspace(address: int, size: int, gpu: int, stream: int | None) -> None:
        library().workspace_init(address, size, abi.CUDA, gpu, stream)
