"""Zeroed workspace headers for calls that are captured in CUDA graphs.

With them a graph need not zero its own header. Kernels leave a header zero, so it can be reused by
another graph later.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from flashcore._core import abi

HEADERS_AT_ONCE = 64  # 4 MiB
_FEW = HEADERS_AT_ONCE // 2


class GraphHeaders:
    """The headers of one GPU.

    Calls captured on one stream run in order, and an executable graph never runs concurrently with
    itself, so they share a header. Other streams of the capture and other graphs may run concurrently,
    so they have their own. The headers of a graph become free when the graph is destroyed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finalizer may call
        self._free: list[int] = []
        self._taken: dict[tuple[int, int | None], int] = {}  # (capture, stream) -> header
        self._ended: dict[int, ctypes.c_int32] = {}  # header -> 1 if its graph is destroyed
        self._memory: list[Any] = []

    def add(self, address: int, memory: Any) -> None:
        """Adds HEADERS_AT_ONCE zeroed headers at `address`. `memory` is never released."""
        flags = (ctypes.c_int32 * HEADERS_AT_ONCE)()
        # CUDA may write the flags after the interpreter has released everything else.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(flags))
        with self._lock:
            self._memory.append(memory)
            for i in range(HEADERS_AT_ONCE):
                header = address + i * abi.WORKSPACE_HEADER_BYTES
                self._ended[header] = ctypes.c_int32.from_buffer(
                    flags, i * ctypes.sizeof(ctypes.c_int32))
                self._free.append(header)

    def take(self, capture: int, stream: int | None,
             watch: Callable[[ctypes.c_int32], Any]) -> int | None:
        """The address of the header for this capture and stream; None if no header is free. watch() gets
        the flag that must become 1 when the captured graph is destroyed."""
        with self._lock:
            header = self._taken.get((capture, stream))
            if header is None:
                self._collect()
                if not self._free:
                    return None
                header = self._free.pop()
                self._ended[header].value = 0
                try:
                    watch(self._ended[header])
                except BaseException:
                    self._free.append(header)
                    raise
                self._taken[capture, stream] = header
            return header

    def are_few(self) -> bool:
        """True if more headers should be added."""
        with self._lock:
            self._collect()
            return len(self._free) < _FEW

    def _collect(self) -> None:
        for key, header in list(self._taken.items()):
            if self._ended[header].value and self._taken.pop(key, None) is not None:
                self._free.append(header)
