"""flashcore_python_run and flashcore_python_new as functions of Python: one prepared call from the
arrays themselves, without ctypes on the way. ctypes only makes them."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from flashcore import _abi

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """PyMethodDef, the same in every version."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int),
                ("doc", ctypes.c_char_p)]


_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
_definitions: dict[int, _MethodDef] = {}  # of a library's function: functions made of it live on


def _definition(address: int) -> int:
    if address not in _definitions:
        _definitions[address] = _MethodDef(b"run", address, _METH_FASTCALL, None)
    return ctypes.addressof(_definitions[address])


class Direct:
    """run(array, ...): the C call's code, or -1 where the arrays must be described in Python. `fields`
    are the names in params of the arrays that run() is given; `read` is the address of the framework's
    C function that describes one, None for arrays with __dlpack__. Both functions raise what a signal
    handler raises during a long call, if `interruptible`.

    new(q, k, v): the result as a new array, or None where Python must make it. `empty_like` is the
    framework's function for it; where that is None, so is new."""

    def __init__(self, library: Any, params: _abi.Params, error: _abi.Error,
                 cpu_workspace: _abi.PythonWorkspace, interruptible: bool, fields: Sequence[str],
                 read: int | None, empty_like: Callable[[Any], Any] | None) -> None:
        address = ctypes.addressof(params)
        self._keep = params, error, cpu_workspace
        self._call = _abi.PythonCall(
            read, "__dlpack__", empty_like, address, ctypes.addressof(cpu_workspace),
            ctypes.addressof(error), interruptible, len(fields),
            (ctypes.c_void_p * _abi.MAX_PYTHON_ARRAYS)(
                *(address + getattr(_abi.Params, name).offset for name in fields)))
        self.run: Callable[..., int] = self._function(library.python_run)
        self.new: Callable[[Any, Any, Any], Any] | None = None
        if empty_like is not None:
            self.new = self._function(library.python_new)

    def _function(self, address: int) -> Any:
        return _new_function(_definition(address), ctypes.addressof(self._call), None)


def never(*arrays: Any) -> int:
    """In place of Direct.run for arrays that only Python can describe."""
    return -1
