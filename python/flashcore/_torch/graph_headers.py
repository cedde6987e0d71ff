"""Zeroed workspace headers for calls that are captured in CUDA graphs, so that no graph must zero its
own. Kernels leave a header zero, so each serves one graph after the other."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from flashcore._core import abi

HEADERS_AT_ONCE = 64  # 4 MiB
_FEW = HEADERS_AT_ONCE // 2


class GraphHeaders:
    """Of one GPU. Calls captured on one stream follow each other, and an executable graph never runs
    beside itself: they share a header. Another stream of the capture and another graph may run at the
    same time: they have others. A graph's headers come back when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may call too
        self._free: list[int] = []
        self._taken: dict[tuple[int, int | None], int] = {}  # (capture, stream) -> header
        self._ended: dict[int, ctypes.c_int32] = {}  # of every header: 1 when its graph is gone
        self._memory: list[Any] = []

    def add(self, address: int, memory: Any) -> None:
        """HEADERS_AT_ONCE more, which lie at `address` and are zero. `memory` is kept for ever."""
        flags = (ctypes.c_int32 * HEADERS_AT_ONCE)()
        # CUDA may write them when the interpreter has let go of everything else.
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
        """The address of the header of this capture on this stream; None where none is left. watch()
        is given what must be 1 when the captured graph is gone."""
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
        """Whether it is time to add() some."""
        with self._lock:
            self._collect()
            return len(self._free) < _FEW

    def _collect(self) -> None:
        for key, header in list(self._taken.items()):
            if self._ended[header].value and self._taken.pop(key, None) is not None:
                self._free.append(header)
