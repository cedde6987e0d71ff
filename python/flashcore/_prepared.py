"""Calls whose params are filled in once for a set of options: another call with the same options
only sets the arrays. That keeps a call from Python short."""

import ctypes
import threading
from typing import Any

from flashcore import _abi, _library
from flashcore._arrays import Slot, read_descriptor

_MAX_CALLS = 1024  # per thread; a program with more sets of options prepares some again
_ALIGNMENT = 256
_HEADER_BYTES = 65536  # every workspace begins with as much
_REPRODUCIBILITY = {"deterministic": 0, "batch_invariant": 1}
_BROADCAST = ("bias", "mask", "q_start", "k_start")
_LAYOUTS = {"bhsd": 0, "bshd": 1}

_loaded: Any = None


def library():
    """The library every call goes to, loaded once."""
    global _loaded
    if _loaded is None:
        _loaded = _library.load()
    return _loaded


class _CpuWorkspace:
    """Of one thread: it serves one call at a time."""

    __slots__ = ("address", "size", "_memory")

    def __init__(self):
        self.address, self.size, self._memory = None, 0, None

    def grow(self, size):
        self._memory = ctypes.create_string_buffer(size + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address, self.size = start + -start % _ALIGNMENT, size
        library().workspace_init(self.address, size)


class _ThreadState(threading.local):
    """What a thread keeps between calls."""

    def __init__(self):
        self.calls = {}
        self.workspace = _CpuWorkspace()

    def remember(self, key, call):
        if len(self.calls) >= _MAX_CALLS:
            self.calls.clear()
        self.calls[key] = call


thread_state = _ThreadState()


class PreparedCall:
    """flashcore_attention with its params. The addresses of the arrays' descriptors are set before
    each run, through the fields of `arrays`."""

    def __init__(self, options):
        self.params = library().params()
        self.arrays = _abi.RawParams.from_buffer(self.params)
        self.busy = False
        self._cpu = thread_state.workspace
        self._cpu_address = None  # which of its addresses the params have
        # One block, so that a framework can fill all of them at once.
        self.tensors = (_abi.Tensor * 5)()
        self.q, self.k, self.v, self.out, self.lse = self.slots = [
            Slot(name, tensor) for name, tensor in zip(("q", "k", "v", "out", "lse"), self.tensors)]
        self.addresses_are_slots = False
        self.objects = (ctypes.c_void_p * 5)()
        self.read_arguments = ctypes.byref(self.objects), ctypes.byref(self.tensors)
        self.optional = {}
        self._checked = False
        self._error = _abi.Error()
        self._function = library().raw_attention
        self._arguments = ctypes.byref(self.params), ctypes.byref(self._error)
        self._set_options(*options)

    def _set_options(self, causal, window, scale, softcap, layout, num_splits, reproducibility,
                     return_lse, max_q_len, max_kv_len, partial, checked, kernel):
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is {layout!r}; wanted one of {', '.join(_LAYOUTS)}")
        if reproducibility not in _REPRODUCIBILITY:
            raise ValueError(f"reproducibility is {reproducibility!r}; wanted one of "
                             f"{', '.join(_REPRODUCIBILITY)}")
        if len(window) != 2:
            raise ValueError(f"window is {window!r}; wanted (left, right)")
        p = self.params
        p.causal, p.partial, p.checked = bool(causal), bool(partial), bool(checked)
        p.window_left, p.window_right = window
        p.has_scale, p.scale = scale is not None, 0.0 if scale is None else scale
        p.softcap, p.num_splits = softcap, num_splits
        p.max_q_len, p.max_kv_len = max_q_len, max_kv_len
        p.layout, p.reproducibility = _LAYOUTS[layout], _REPRODUCIBILITY[reproducibility]
        p.kernel = None if kernel is None else kernel.encode()
        self._checked = checked
        self.layout = layout
        self.wants_lse = return_lse or partial
        self.wide_out = partial

    def point_at_slots(self):
        """q, k, v, out and lse are described in self.tensors."""
        a = self.arrays
        a.q, a.k, a.v, a.out = (slot.address for slot in self.slots[:4])
        a.lse = self.lse.address if self.wants_lse else None
        self.addresses_are_slots = True

    def set_optional(self, given):
        """given: (name, kind, array)."""
        for name, kind, array in given:
            slot = self.optional.get(name)
            if slot is None:
                slot = self.optional[name] = Slot("seqused_k" if name == "used_k" else name)
            setattr(self.arrays, name, kind.view(array, slot))
        for name in _BROADCAST:  # once all of them are there: lengths may come from another
            if name in self.optional:
                address = getattr(self.arrays, name)
                setattr(self.arrays, name, self._broadcast(name, address, self.optional[name]))

    def _broadcast(self, name, address, slot):
        """A bias or mask with leading dimensions left out, or with one column for all keys; one
        start for every sequence."""
        tensor = _abi.Tensor.from_address(address)
        rank = tensor.ndim
        one = read_descriptor(address, slot.name)
        if name in ("q_start", "k_start"):
            if one.shape != (1,):
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

    def _batch(self):
        cu_seqlens = self.params.cu_seqlens_q
        return cu_seqlens.contents.shape[0] - 1 if cu_seqlens else self.params.q.contents.shape[0]

    def _kv_len(self):
        k, table = self.params.k.contents, self.params.block_table
        if k.ndim < 3:
            return 1  # the call will be refused
        if table:
            return table.contents.shape[table.contents.ndim - 1] * k.shape[1]
        return k.shape[0] if k.ndim == 3 else k.shape[1 if self.params.layout else 2]

    def empty_partial(self, kind, q, v):
        wide = "f64" if kind.is_f64(q) else "f32"
        return kind.empty(q, (*q.shape[:-1], v.shape[-1]), wide)

    def empty_lse(self, kind, q):
        shape = tuple(q.shape)
        if len(shape) == 3:  # packed
            shape = shape[1], shape[0]
        elif len(shape) == 4:
            shape = (shape[0], shape[2], shape[1]) if self.params.layout else shape[:3]
        return kind.empty(q, shape, "f64" if kind.is_f64(q) else "f32")

    def release(self):
        """Lets go of the arrays; the call is free for the next one."""
        if not self.addresses_are_slots:
            for slot in self.slots:
                slot.keep = None
        for slot in self.optional.values():
            slot.keep = None
        self.busy = False

    def run(self, kind, gpu):
        """gpu: the number of q's GPU, negative on the CPU."""
        if gpu >= 0 or self._cpu.address is None or self._cpu.address != self._cpu_address:
            self._set_workspace(kind, gpu, _HEADER_BYTES)
        if self._function(*self._arguments):
            self._run_with_more(kind, gpu)
        if self._checked or (gpu >= 0 and kind.waits):
            p = self.params
            library().workspace_status(p.workspace, p.workspace_bytes,
                                       _abi.CPU if gpu < 0 else _abi.CUDA, max(gpu, 0), p.stream)

    def _set_workspace(self, kind, gpu, size):
        arrays = self.arrays
        if gpu < 0:
            cpu = self._cpu
            if cpu.size < size:
                cpu.grow(size)
            arrays.workspace, arrays.workspace_bytes, arrays.stream = cpu.address, cpu.size, None
            self._cpu_address = cpu.address
        else:
            self._cpu_address = None
            arrays.stream = stream = kind.stream(gpu)
            arrays.workspace, arrays.workspace_bytes = kind.workspace(gpu, stream, size, self)

    def init_workspace(self, address, size, gpu, stream):
        library().workspace_init(address, size, _abi.CUDA, gpu, stream)

    def planned_bytes(self):
        return library().plan(self.params).workspace_bytes

    def _run_with_more(self, kind, gpu):
        """Runs again if all that was wrong is the size of the workspace; else raises."""
        code, message = self._error.code, self._error.message
        needed = self.planned_bytes()  # or raises what is wrong
        if needed <= self.params.workspace_bytes:
            raise _library.exception(code, message)
        self._set_workspace(kind, gpu, needed)
        if self._function(*self._arguments):
            raise _library.exception(self._error.code, self._error.message)
