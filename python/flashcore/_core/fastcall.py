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
    `fields` are the addresses of the struct fields of the arrays that run() takes; of the arrays with the
    numbers in `swapped`, axes 1 and 2 are swapped. `backward` is given for a call of gradients. `read` is
    the address of the framework's C function that describes an array; None: use __dlpack__.

    new(q, k, v) returns the result as a new array, or None if Python must allocate it. `empty_like` is
    the framework's allocation function; without it, new is None.

    If `interruptible`, both functions raise the exception of a signal handler during a long call.
    """

    def __init__(self, library: Any, params: abi.Params, error: abi.Error,
                 cpu_workspace: abi.PythonWorkspace, interruptible: bool, fields: Sequence[int],
                 read: int | None, empty_like: Callable[[Any], Any] | None,
                 backward: abi.BackwardParams | None = None, swapped: Sequence[int] = ()) -> None:
        self._keep = params, error, cpu_workspace, backward
        self._call = abi.PythonCall(
            read, "__dlpack__", empty_like, ctypes.addressof(params), ctypes.addressof(cpu_workspace),
            ctypes.addressof(error), interruptible, sum(1 << index for index in swapped),
            None if backward is None else ctypes.addressof(backward), len(fields),
            (ctypes.c_void_p * abi.MAX_PYTHON_ARRAYS)(*fields))
        self.run: Callable[..., int] = self._function(library.python_run)
        self.new: Callable[[Any, Any, Any], Any] | None = None
        if empty_like is not None:
            self.new = self._function(library.python_new)

    def _function(self, address: int) -> Any:
        return _new_function(_definition(address), ctypes.addressof(self._call), None)


def field_addresses(struct: ctypes.Structure, names: Sequence[str]) -> list[int]:
    """The addresses of fields of a struct."""
    address = ctypes.addressof(struct)
    return [address + int(getattr(type(struct), name).offset) for name in names]


def unavailable(*arrays: Any) -> int:
    """Replaces FastCall.run for arrays that only Python can describe."""
    return -1
