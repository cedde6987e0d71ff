"""Finds libflashcore, refuses a stale one, and calls it.

Searched in this order: $FLASHCORE_LIBRARY, beside this file (where pip puts it), build/cuda and
build/cpu of the source tree, the system's libraries. Inside a source tree the library must have been
built from that tree: its fingerprint is compared with what scripts/fingerprint prints. Elsewhere it
must be of the same version as these files.
"""

import ctypes
import ctypes.util
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashcore import _abi, _names


class CudaError(RuntimeError):
    """The CUDA runtime refused; the message carries its words."""


class StaleLibraryError(RuntimeError):
    """The library was built from other sources than those of the tree."""


_EXCEPTIONS = {
    _abi.INVALID_ARGUMENT: ValueError,
    _abi.UNSUPPORTED: NotImplementedError,
    _abi.OUT_OF_MEMORY: MemoryError,
    _abi.CUDA_ERROR: CudaError,
}


def exception(code: int, message: bytes) -> Exception:
    """The C library's error as a Python exception; arguments are named as Python names them."""
    text = message.decode(errors="replace")
    return _EXCEPTIONS.get(code, RuntimeError)(_names.in_python(text))


def runs_handlers() -> bool:
    """Whether this thread is the one on which Python runs signal handlers: the main one."""
    return threading.get_ident() == threading.main_thread().ident


class Library:
    """The C ABI of one loaded libflashcore; errors become exceptions."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._c = ctypes.CDLL(self.path)
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype = result
            function.argtypes = arguments
        # These release the GIL themselves. Without argtypes nothing is converted or checked.
        self._python = ctypes.PyDLL(self.path)
        self.python_attention = self._python["flashcore_python_attention"]
        # Python calls these itself: flashcore._direct.
        self.python_run = ctypes.cast(self._c["flashcore_python_run"], ctypes.c_void_p).value
        self.python_new = ctypes.cast(self._c["flashcore_python_new"], ctypes.c_void_p).value
        self.stale_paths: list[str] = []  # libraries that were passed over because they are stale

    @property
    def version(self) -> str:
        return str(self._c.flashcore_version().decode())

    def fingerprint(self, family: str = "") -> str | None:
        """Hash of the sources it was built from; None for an unknown kernel family."""
        found = self._c.flashcore_source_fingerprint(family.encode())
        return None if found is None else found.decode()

    def cuda_device_count(self) -> tuple[int, str]:
        """(how many, "") or (0, why none can be used)."""
        error = _abi.Error()
        count = self._c.flashcore_cuda_device_count(ctypes.byref(error))
        return count, error.message.decode() if count == 0 else ""

    def params(self) -> _abi.Params:
        """A params struct with its defaults."""
        params = _abi.Params()
        self._c.flashcore_params_init(ctypes.byref(params), ctypes.sizeof(params))
        return params

    def plan(self, params: _abi.Params) -> _abi.PlanInfo:
        info = _abi.PlanInfo(ctypes.sizeof(_abi.PlanInfo))
        self._call("flashcore_plan", ctypes.byref(params), ctypes.byref(info))
        return info

    def explain(self, params: _abi.Params) -> str:
        needed = ctypes.c_size_t()
        self._call("flashcore_explain", ctypes.byref(params), None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        self._call("flashcore_explain", ctypes.byref(params), text, needed.value, None)
        return text.value.decode()

    def attention(self, params: _abi.Params) -> None:
        self._call("flashcore_attention", ctypes.byref(params))

    def workspace_init(self, address: int | None, size: int, device_type: int = _abi.CPU,
                       device_id: int = 0, stream: int | None = None) -> None:
        device = _abi.Device(device_type, device_id)
        self._call("flashcore_workspace_init", address, size, device, stream)

    def workspace_status(self, address: int | None, size: int, device_type: int = _abi.CPU,
                         device_id: int = 0, stream: int | None = None) -> None:
        device = _abi.Device(device_type, device_id)
        self._call("flashcore_workspace_status", address, size, device, stream)

    def capture_id(self, device_id: int, stream: int | None,
                   graph_ended: "ctypes.c_int32 | None" = None) -> int:
        """Of the capture into a graph that is under way on a stream; 0: none is. The library sets
        graph_ended to 1 when the graph is gone: it must live until then."""
        found = ctypes.c_uint64()
        ended = None if graph_ended is None else ctypes.byref(graph_ended)
        self._call("flashcore_capture_id", _abi.Device(_abi.CUDA, device_id), stream,
                   ctypes.byref(found), ended)
        return found.value

    def merge(self, params: _abi.MergeParams) -> None:
        self._run(self._python.flashcore_python_merge, params)

    def append(self, params: _abi.AppendParams) -> None:
        self._run(self._python.flashcore_python_append, params)

    def quantize(self, params: _abi.QuantParams) -> None:
        self._run(self._python.flashcore_python_quantize, params)

    def dequantize(self, params: _abi.QuantParams) -> None:
        self._run(self._python.flashcore_python_dequantize, params)

    @staticmethod
    def _run(function: Any, params: Any) -> None:
        """Also raises what a signal handler raises during a long call."""
        params.struct_size = ctypes.sizeof(params)
        error = _abi.Error()
        if function(ctypes.byref(params), ctypes.byref(error), runs_handlers()):
            raise exception(error.code, error.message)

    def _call(self, name: str, *arguments: Any) -> None:
        error = _abi.Error()
        code = getattr(self._c, name)(*arguments, ctypes.byref(error))
        if code != _abi.OK:
            raise exception(code, error.message)


def tree_root() -> Path | None:
    """The source tree this file lies in, or None where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "scripts" / "fingerprint").is_file() else None


def tree_fingerprint(root: str | os.PathLike[str]) -> str:
    """What a binary of this tree must have been built from."""
    done = subprocess.run(
        [str(Path(root) / "scripts" / "fingerprint")],
        capture_output=True, text=True, timeout=60, check=True,
    )
    return done.stdout.strip()


def _candidates(root: Path | None) -> Iterator[Path | str]:
    beside = Path(__file__).with_name("libflashcore.so")
    if beside.is_file():
        yield beside
    if root is not None:
        for preset in ("cuda", "cpu"):
            path = root / "build" / preset / "libflashcore.so"
            if path.is_file():
                yield path
    found = ctypes.util.find_library("flashcore")
    if found is not None:
        yield found


def _why_stale(library: Library, wants: str | None) -> str | None:
    """Why a library cannot serve these Python files; None where it can. wants: the tree's
    fingerprint, None outside a tree."""
    from flashcore import __version__
    if library.version != __version__:
        return (f"{library.path} is of version {library.version}, the Python files are of "
                f"{__version__}; install both together: pip install .")
    if wants is not None and library.fingerprint() != wants:
        return _stale_message(library.path, library.fingerprint(), wants)
    return None


def _stale_message(path: str, has: str | None, wants: str) -> str:
    return (f"{path} was built from other sources (fingerprint {has}, the tree's is {wants}); "
            "build it again: cmake --build --preset cuda (or cpu)")


def load(path: str | os.PathLike[str] | None = None,
         root: str | os.PathLike[str] | None = None) -> Library:
    """Loads `path`, or $FLASHCORE_LIBRARY, or the first fresh library found. `root` is the source
    tree to be fresh against; by default the one this file lies in, if any."""
    root = Path(root) if root is not None else tree_root()
    wants = tree_fingerprint(root) if root is not None else None
    path = path or os.environ.get("FLASHCORE_LIBRARY")
    if path:
        if not Path(path).is_file():
            raise FileNotFoundError(f"FLASHCORE_LIBRARY is {path}; there is no such file")
        library = Library(path)
        why = _why_stale(library, wants)
        if why is not None:
            raise StaleLibraryError(why)
        return library
    stale: list[tuple[str, str]] = []
    for candidate in _candidates(root):
        library = Library(candidate)
        why = _why_stale(library, wants)
        if why is None:
            library.stale_paths = [path for path, _ in stale]
            return library
        stale.append((str(candidate), why))
    if stale:
        raise StaleLibraryError(stale[0][1])
    raise FileNotFoundError(
        "libflashcore.so was not found; build it (cmake --preset cpu && cmake --build --preset cpu), "
        "install it (pip install .), or set FLASHCORE_LIBRARY to its path")
