"""Calls whose params are filled in once for a set of options: another call with the same options
only sets the arrays. That keeps a call from Python short."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from flashcore import _abi, _direct, _library
from flashcore._arrays import Slot, kind_of, read_descriptor
from flashcore._scalars import flag, integer, number, one_of, word

_MAX_CALLS = 1024  # per thread; a program with more sets of options prepares some again
_ALIGNMENT = 256
_REPRODUCIBILITY = {"deterministic": 0, "batch_invariant": 1}
_BROADCAST = ("bias", "mask", "q_start", "k_start")
_LAYOUTS = {"bhsd": 0, "bshd": 1}
Found = tuple[Any, ...]  # a workspace: (stream, address, bytes, header or None, ...)

_loaded: _library.Library | None = None


def library() -> _library.Library:
    """The library every call goes to, loaded once."""
    global _loaded
    if _loaded is None:
        _loaded = _library.load()
    return _loaded


class _CpuWorkspace:
    """Of one thread: it serves one call at a time. `described` is where the library looks for it."""

    def __init__(self) -> None:
        self.described = _abi.PythonWorkspace(None, 0)
        self._memory: Any = None

    def at_least(self, size: int) -> Found:
        """(no stream, address, bytes, no header apart)."""
        if self.described.bytes < size:
            memory = ctypes.create_string_buffer(size + _ALIGNMENT)
            start = ctypes.addressof(memory)
            address = start + -start % _ALIGNMENT
            library().workspace_init(address, size)
            self.described.address, self.described.bytes = address, size
            self._memory = memory
        return None, self.described.address, self.described.bytes, None


class _ThreadState(threading.local):
    """What a thread keeps between calls."""

    def __init__(self) -> None:
        self.calls: dict[Any, PreparedCall] = {}
        self.workspace = _CpuWorkspace()
        self.interruptible = _library.runs_handlers()

    def remember(self, key: Any, call: "PreparedCall") -> None:
        if len(self.calls) >= _MAX_CALLS:
            self.calls.clear()
        self.calls[key] = call


thread_state = _ThreadState()


def plain_options(causal: Any, window: Any, scale: Any, softcap: Any, layout: Any, num_splits: Any,
                  reproducibility: Any, return_lse: Any, max_q_len: Any, max_kv_len: Any,
                  partial: Any, checked: Any, kernel: Any) -> tuple[Any, ...]:
    """The same as plain numbers and tuples; raises where one is not of its kind."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window is {window!r}; wanted (left, right)") from None
    return (flag("causal", causal),
            (integer("window_left", left), integer("window_right", right)),
            None if scale is None else number("scale", scale), number("softcap", softcap),
            one_of("layout", layout, _LAYOUTS), integer("num_splits", num_splits, 32),
            one_of("reproducibility", reproducibility, _REPRODUCIBILITY),
            flag("return_lse", return_lse), integer("max_q_len", max_q_len),
            integer("max_kv_len", max_kv_len), flag("partial", partial), flag("checked", checked),
            None if kernel is None else word("kernel", kernel, "the id of a kernel"))


def _extent(tensor: _abi.Tensor, axis: int) -> int:
    """1 where there is no such axis: the call will be refused."""
    return int(tensor.shape[axis]) if axis < tensor.ndim else 1


class PreparedCall:
    """flashcore_attention with its params. The addresses of the arrays' descriptors are set before
    each run: by run_direct() and run_new() themselves, or by describe() through the fields of
    `arrays`."""

    def __init__(self, kind: Any, options: tuple[Any, ...], names: Sequence[str]) -> None:
        """options: as plain_options() gives them; names: of the optional arrays, in params."""
        self.params = library().params()
        self.arrays = _abi.RawParams.from_buffer(self.params)
        self.busy = False
        self._described = False
        self._cpu = thread_state.workspace
        self._workspace: Found | None = None  # whichever the params have
        self.slots = [Slot(name) for name in ("q", "k", "v", "out", "lse")]
        self.q, self.k, self.v, self.out, self.lse = self.slots
        self.optional = {name: Slot("seqused_k" if name == "used_k" else name) for name in names}
        self.is_packed = "cu_seqlens_q" in self.optional
        self._error = _abi.Error()
        self._function = library().python_attention
        interruptible = thread_state.interruptible
        self._arguments = ctypes.byref(self.params), ctypes.byref(self._error), interruptible
        self._set_options(*options)
        fields = ("q", "k", "v", "out", *(("lse",) if self.wants_lse else ()), *names)
        self.run_direct: Callable[..., int] = _direct.never
        self.run_new: Callable[[Any, Any, Any], Any] | None = None
        if kind.reader is not None:
            self._direct = _direct.Direct(library(), self.params, self._error, self._cpu.described,
                                          interruptible, fields, *kind.reader)
            self.run_direct = self._direct.run
            if len(fields) == 4 and not self.must_wait:
                self.run_new = self._direct.new

    def _set_options(self, causal: bool, window: tuple[int, int], scale: float | None, softcap: float,
                     layout: str, num_splits: int, reproducibility: str, return_lse: bool,
                     max_q_len: int, max_kv_len: int, partial: bool, checked: bool,
                     kernel: str | None) -> None:
        p = self.params
        p.causal, p.partial, p.checked = causal, partial, checked
        p.window_left, p.window_right = window
        p.has_scale, p.scale = scale is not None, 0.0 if scale is None else scale
        p.softcap, p.num_splits = softcap, num_splits
        p.max_q_len, p.max_kv_len = max_q_len, max_kv_len
        p.layout, p.reproducibility = _LAYOUTS[layout], _REPRODUCIBILITY[reproducibility]
        p.kernel = None if kernel is None else kernel.encode()
        self.must_wait = checked
        self.wants_lse = return_lse or partial
        self.wide_out = partial

    def describe(self, kind: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
                 given: Sequence[tuple[str, Any, Any]]) -> None:
        """Puts descriptors of the arrays into the params; given: (name, kind, array) of others."""
        self._described = True
        kind.view_all(self, q, k, v, out, lse)
        if given:
            self.describe_optional(given)

    def describe_optional(self, given: Sequence[tuple[str, Any, Any]]) -> None:
        """For whom describes q, k, v, out and lse by itself; they come first."""
        for name, kind, array in given:
            setattr(self.arrays, name, kind.view(array, self.optional[name]))
        for name in _BROADCAST:  # once all of them are there: lengths may come from another
            if name in self.optional:
                address = getattr(self.arrays, name)
                setattr(self.arrays, name, self._broadcast(name, address, self.optional[name]))

    def _broadcast(self, name: str, address: int, slot: Slot) -> int:
        """A bias or mask with leading dimensions left out, or with one column for all keys; one
        start for every sequence."""
        tensor = _abi.Tensor.from_address(address)
        rank = tensor.ndim
        one = read_descriptor(address, slot.name)
        if name in ("q_start", "k_start"):
            if one.shape not in ((), (1,)):
                return address
            one = one._replace(shape=(self._batch(),), strides=(0,))
        elif 0 < rank <= 4:
            shape, strides = (1,) * (4 - rank) + one.shape, (0,) * (4 - rank) + one.strides
            if shape[3] == 1:
                shape, strides = (*shape[:3], self._kv_len()), (*strides[:3], 0)
            one = one._replace(shape=shape, strides=strides)
        kept = slot.keep
        address = slot.hold(one, (tensor.data or 0) + tensor.byte_offset)
        slot.keep = slot.keep, kept
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

    def empty_partial(self, kind: Any, q: Any, v: Any) -> Any:
        wide = "f64" if kind.is_f64(q) else "f32"
        return kind.empty(q, (*kind.shape(q)[:-1], kind_of("v", v).shape(v)[-1]), wide)

    def empty_lse(self, kind: Any, q: Any) -> Any:
        shape = tuple(kind.shape(q))
        if len(shape) == 3:  # packed
            shape = shape[1], shape[0]
        elif len(shape) == 4:
            shape = (shape[0], shape[2], shape[1]) if self.params.layout else shape[:3]
        return kind.empty(q, shape, "f64" if kind.is_f64(q) else "f32")

    def release(self) -> None:
        """Lets go of the arrays; the call is free for the next one."""
        if self._described:
            self._described = False
            for slot in (*self.slots, *self.optional.values()):
                slot.keep = None
        self.busy = False

    def has_workspace(self, kind: Any, gpu: int) -> bool:
        """Whether there is a workspace for the next call, of any size, and the params have it and its
        stream. gpu: the number of q's GPU; negative on the CPU, where the library looks itself."""
        if gpu < 0:
            return True
        found = kind.ready_workspace(gpu)
        if found is None:
            return False
        if found is not self._workspace:
            self._use(found)
        return True

    def _use(self, found: Found) -> None:
        arrays = self.arrays
        (arrays.stream, arrays.workspace, arrays.workspace_bytes,
         arrays.workspace_header) = found[:4]
        self._workspace = found

    def run(self, kind: Any, gpu: int) -> None:
        """Runs what describe() has described, with a workspace that is large enough."""
        plan = library().plan(self.params)  # or raises what is wrong
        if gpu < 0:
            self._use(self._cpu.at_least(plan.workspace_bytes))
        else:
            stream = kind.stream(gpu)
            self._use(kind.captured_workspace(gpu, stream, plan, library())
                      or kind.workspace(gpu, stream, plan.workspace_bytes, self))
            self._workspace = None  # who gave it keeps it, if it may be used again
        if self._function(*self._arguments):  # or raises what a signal handler raises
            raise _library.exception(self._error.code, self._error.message)

    def wait(self, gpu: int) -> None:
        """Until the call is over; raises what a checked one has found."""
        if gpu < 0:
            return  # the call has raised it itself; what an earlier one found may still be there
        p = self.params
        address, size = p.workspace, p.workspace_bytes
        if p.workspace_header:
            address, size = p.workspace_header, _abi.WORKSPACE_HEADER_BYTES
        library().workspace_status(address, size, _abi.CUDA, gpu, p.stream)

    @staticmethod
    def wait_for_workspace(address: int, size: int, gpu: int, stream: int | None) -> None:
        """Until what was done on the stream is done."""
        library().workspace_status(address, size, _abi.CUDA, gpu, stream)

    @staticmethod
    def init_workspace(address: int, size: int, gpu: int, stream: int | None) -> None:
        library().workspace_init(address, size, _abi.CUDA, gpu, stream)
