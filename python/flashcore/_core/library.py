"""Finds libflashcore, rejects a stale one, and calls it.

Search order: $FLASHCORE_LIBRARY, the package folder (where pip installs it), build/cuda and build/cpu
of the source tree, the system's libraries. Inside a source tree the library's fingerprint must match
the output of scripts/fingerprint. Elsewhere its version must match these files.
"""

import ctypes
import ctypes.util
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashcore._core import abi, names
from flashcore._core.version import VERSION


class CudaError(RuntimeError):
    """The CUDA runtime reported an error. The message contains its text."""


class StaleLibraryError(RuntimeError):
    """The library was built from other sources, or has another version."""


EXCEPTIONS = {
    abi.INVALID_ARGUMENT: ValueError,
    abi.UNSUPPORTED: NotImplementedError,
    abi.OUT_OF_MEMORY: MemoryError,
    abi.CUDA_ERROR: CudaError,
}


def exception(code: int, message: bytes) -> Exception:
    """A C error as a Python exception, with Python's argument names."""
    text = message.decode(errors="replace")
    return EXCEPTIONS.get(code, RuntimeError)(names.in_python(text))


def runs_handlers() -> bool:
    """True on the main thread, where Python runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


class Library:
    """The C ABI of one loaded libflashcore. Errors become exceptions."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        self._c = ctypes.CDLL(self.path)
        for name, (result, arguments) in abi.FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype = result
            function.argtypes = arguments
        # These functions release the GIL themselves. They have no argtypes, which skips conversions.
        self._python = ctypes.PyDLL(self.path)
        self.python_attention = self._python["flashcore_python_attention"]
        # _core.fastcall makes Python functions of these two.
        self.python_run = ctypes.cast(self._c["flashcore_python_run"], ctypes.c_void_p).value
        self.python_new = ctypes.cast(self._c["flashcore_python_new"], ctypes.c_void_p).value
        self.stale_paths: list[str] = []  # stale libraries that the search skipped

    @property
    def version(self) -> str:
        return str(self._c.flashcore_version().decode())

    def fingerprint(self, family: str = "") -> str | None:
        """Hash of the sources of the library or of one kernel family; None if the family is unknown."""
        found = self._c.flashcore_source_fingerprint(family.encode())
        return None if found is None else found.decode()

    def cuda_device_count(self) -> tuple[int, str]:
        """(count, ""), or (0, reason) if no GPU can be used."""
        error = abi.Error()
        count = self._c.flashcore_cuda_device_count(ctypes.byref(error))
        return count, error.message.decode() if count == 0 else ""

    def params(self) -> abi.Params:
        """A params struct with default values."""
        params = abi.Params()
        self._c.flashcore_params_init(ctypes.byref(params), ctypes.sizeof(params))
        return params

    def plan(self, params: abi.Params) -> abi.PlanInfo:
        info = abi.PlanInfo(ctypes.sizeof(abi.PlanInfo))
        self._call("flashcore_plan", ctypes.byref(params), ctypes.byref(info))
        return info

    def explain(self, params: abi.Params) -> str:
        return self._text("flashcore_explain", params)

    def backward_plan(self, params: abi.BackwardParams) -> abi.PlanInfo:
        info = abi.PlanInfo(ctypes.sizeof(abi.PlanInfo))
        self._call("flashcore_backward_plan", ctypes.byref(params), ctypes.byref(info))
        return info

    def backward_explain(self, params: abi.BackwardParams) -> str:
        return self._text("flashcore_backward_explain", ctypes.byref(params))

    def attention_backward(self, params: abi.BackwardParams) -> None:
        self._run(self._python.flashcore_python_backward, params)

    def attention(self, params: abi.Params) -> None:
        self._call("flashcore_attention", ctypes.byref(params))

    def workspace_init(self, address: int | None, size: int, device_type: int = abi.CPU,
                       device_id: int = 0, stream: int | None = None) -> None:
        device = abi.Device(device_type, device_id)
        self._call("flashcore_workspace_init", address, size, device, stream)

    def workspace_status(self, address: int | None, size: int, device_type: int = abi.CPU,
                         device_id: int = 0, stream: int | None = None) -> None:
        device = abi.Device(device_type, device_id)
        self._call("flashcore_workspace_status", address, size, device, stream)

    def capture_id(self, device_id: int, stream: int | None,
                   graph_ended: "ctypes.c_int32 | None" = None) -> int:
        """The id of the graph capture in progress on a stream; 0 if there is none. The library sets
        graph_ended to 1 when the graph is destroyed, so graph_ended must live until then."""
        found = ctypes.c_uint64()
        ended = None if graph_ended is None else ctypes.byref(graph_ended)
        self._call("flashcore_capture_id", abi.Device(abi.CUDA, device_id), stream,
                   ctypes.byref(found), ended)
        return found.value

    def merge(self, params: abi.MergeParams) -> None:
        self._run(self._python.flashcore_python_merge, params)

    def append(self, params: abi.AppendParams) -> None:
        self._run(self._python.flashcore_python_append, params)

    def quantize(self, params: abi.QuantParams) -> None:
        self._run(self._python.flashcore_python_quantize, params)

    def dequantize(self, params: abi.QuantParams) -> None:
        self._run(self._python.flashcore_python_dequantize, params)

    def block_mask_create(self, params: abi.BlockMaskParams) -> int:
        """The handle of a new block mask in host memory."""
        handle = ctypes.c_void_p()
        self._call("flashcore_block_mask_create", ctypes.byref(params), ctypes.byref(handle))
        return handle.value or 0

    def block_mask_tensors(self, handle: int) -> tuple["HostTensor", "HostTensor"]:
        """mask_blocks and mask_bits of a block mask, valid until it is freed."""
        return (HostTensor(self._c.flashcore_block_mask_blocks(handle).contents),
                HostTensor(self._c.flashcore_block_mask_bits(handle).contents))

    def block_mask_free(self, handle: int) -> None:
        self._c.flashcore_block_mask_free(handle)

    def block_mask_expand(self, blocks: abi.Tensor, bits: abi.Tensor, dense: abi.Tensor) -> None:
        self._call("flashcore_block_mask_expand", ctypes.byref(blocks), ctypes.byref(bits),
                   ctypes.byref(dense))

    def distributed_choose(self, problem: abi.DistributedProblem) -> tuple[int, int, str]:
        """(number of the scheme, ranks that divide heads, reason)."""
        problem.struct_size = ctypes.sizeof(problem)
        scheme, head_ranks = ctypes.c_int32(), ctypes.c_int32()
        reason = ctypes.create_string_buffer(512)
        self._call("flashcore_distributed_choose", ctypes.byref(problem), ctypes.byref(scheme),
                   ctypes.byref(head_ranks), reason, len(reason))
        return scheme.value, head_ranks.value, reason.value.decode()

    def distributed_plan(self, problem: abi.DistributedProblem, rank: int = -1) -> str:
        """The plan as JSON, with the bytes of each step of a rank if it is not negative."""
        problem.struct_size = ctypes.sizeof(problem)
        return self._text("flashcore_distributed_plan", ctypes.byref(problem), rank)

    def distributed_speeds(self) -> str:
        return self._text("flashcore_distributed_speeds")

    def _text(self, name: str, *arguments: Any) -> str:
        """The result of a function that writes text of any length."""
        needed = ctypes.c_size_t()
        self._call(name, *arguments, None, 0, ctypes.byref(needed))
        text = ctypes.create_string_buffer(needed.value)
        self._call(name, *arguments, text, needed.value, None)
        return text.value.decode()

    @staticmethod
    def _run(function: Any, params: Any) -> None:
        """Runs one call. The exception of a signal handler during a long call propagates."""
        params.struct_size = ctypes.sizeof(params)
        error = abi.Error()
        if function(ctypes.byref(params), ctypes.byref(error), runs_handlers()):
            raise exception(error.code, error.message)

    def _call(self, name: str, *arguments: Any) -> None:
        error = abi.Error()
        code = getattr(self._c, name)(*arguments, ctypes.byref(error))
        if code != abi.OK:
            raise exception(code, error.message)


class HostTensor:
    """A compact int32 tensor in host memory of the library."""

    def __init__(self, tensor: abi.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape[:tensor.ndim])
        self.count = 1
        for extent in self.shape:
            self.count *= extent
        # An empty vector has no address.
        self.memory: Any = ((ctypes.c_int32 * self.count).from_address(tensor.data)
                            if self.count > 0 else (ctypes.c_int32 * 1)())


def tree_root() -> Path | None:
    """The source tree that contains this file; None if the package is installed."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "scripts" / "fingerprint").is_file() else None


def tree_fingerprint(root: str | os.PathLike[str]) -> str:
    """The fingerprint that a library built from this tree has."""
    done = subprocess.run(
        [str(Path(root) / "scripts" / "fingerprint")],
        capture_output=True, text=True, timeout=60, check=True,
    )
    return done.stdout.strip()


def _candidates(root: Path | None) -> Iterator[Path | str]:
    installed = Path(__file__).parents[1] / "libflashcore.so"
    if installed.is_file():
        yield installed
    if root is not None:
        for preset in ("cuda", "cpu"):
            path = root / "build" / preset / "libflashcore.so"
            if path.is_file():
                yield path
    found = ctypes.util.find_library("flashcore")
    if found is not None:
        yield found


def _why_stale(library: Library, wants: str | None) -> str | None:
    """The reason why these Python files cannot use a library; None if they can. `wants` is the
    fingerprint of the source tree, or None outside a tree."""
    if library.version != VERSION:
        return (f"{library.path} has version {library.version}, the Python files have version "
                f"{VERSION}; install both together: pip install .")
    if wants is not None and library.fingerprint() != wants:
        return _stale_message(library.path, library.fingerprint(), wants)
    return None


def _stale_message(path: str, has: str | None, wants: str) -> str:
    return (f"{path} was built from other sources (fingerprint {has}, the tree's is {wants}); "
            "build it again: cmake --build --preset cuda (or cpu)")


def load(path: str | os.PathLike[str] | None = None,
         root: str | os.PathLike[str] | None = None) -> Library:
    """Loads `path`, or $FLASHCORE_LIBRARY, or the first library found that is not stale. `root` is
    the source tree that the library must match; default: the tree that contains this file, if any."""
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


_loaded: Library | None = None


def library() -> Library:
    """The library that all calls use, loaded once."""
    global _loaded
    if _loaded is None:
        _loaded = load()
    return _loaded
