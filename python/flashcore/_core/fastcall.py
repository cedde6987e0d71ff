"""flashcore_python_run and flashcore_python_new as Python functions.

They run one prepared call directly on array objects. ctypes only creates the functions and is not on
the call path.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from flashcore._core import abi

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """PyMethodDef, which is the same in every CPython version."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
                ("doc", ctypes.c_char_p)]


_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_definitions: dict[int, _MethodDef] = {}  # by function address; Python functions refer to them


def _definition(address: int) -> int:
    if address not in _definitions:
        _definitions[address] = _MethodDef(b"run", address, _METH_FASTCALL, None)
    return ctypes.addressof(_definitions[address])


class FastCall:
    """Two functions for one prepared call.

    run(array, ...) returns the status code of the C call, or -1 if Python must describe the arrays.
    `fields` are the params fields of the arrays that run() takes. `read` is the address of the
    framework's C function that describes an array; None: use __dlpack__.

    new(q, k, v) returns the result as a new array, or None if Python must allocate it. `empty_like` is
    the framework's allocation function; without it, new is None.

    If `interruptible`, both functions raise the exception of a signal handler during a long call.
    """

    def __init__(self, library: Any, params: abi.Params, error: abi.Error,
                 cpu_workspace: abi.PythonWorkspace, interruptible: bool, fields: Sequence[str],
                 read: int | None, empty_like: Callable[[Any], Any] | None) -> None:
        address = ctypes.addressof(params)
        self._keep = params, error, cpu_workspace
        self._call = abi.PythonCall(
            read, "__dlpack__", empty_like, address, ctypes.addressof(cpu_workspace),
            ctypes.addressof(error), interruptible, len(fields),
            (ctypes.c_void_p * abi.MAX_PYTHON_ARRAYS)(
                *(address + getattr(abi.Params, name).offset for name in fields)))
        self.run: Callable[..., int] = self._function(library.python_run)
        self.new: Callable[[Any, Any, Any], Any] | None = None
        if empty_like is not None:
            self.new = self._function(library.python_new)

    def _function(self, address: int) -> Any:
        return _new_function(_definition(address), ctypes.addressof(self._call), None)


def unavailable(*arrays: Any) -> int:
    """Replaces FastCall.run for arrays that only Python can describe."""
    return -1
