"""NumPy arrays next to guard pages: an access past an end kills the process."""

import ctypes
import mmap

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                       ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOTHING = 0  # PROT_NONE


class _Pages:
    """Memory between two inaccessible pages. It is unmapped with the last array on it."""

    def __init__(self, size):
        page = mmap.PAGESIZE
        self.inner = max(-(-size // page), 1) * page
        self.all = self.inner + 2 * page
        self.start = _libc.mmap(None, self.all, mmap.PROT_READ | mmap.PROT_WRITE,
                                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self.start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap: error {ctypes.get_errno()}")
        for guard in (self.start, self.start + page + self.inner):
            if _libc.mprotect(guard, page, _NOTHING) != 0:
                raise OSError(f"mprotect: error {ctypes.get_errno()}")

    def __del__(self):
        _libc.munmap(self.start, self.all)

    def at(self, size, at_start):
        offset = mmap.PAGESIZE + (0 if at_start else self.inner - size)
        view = (ctypes.c_uint8 * size).from_address(self.start + offset)
        view.pages = self  # arrays keep the view alive, and the view its pages
        return view


def empty(shape, dtype=np.float32, at_start=False):
    """An array that ends at the guard page after it, or begins at the guard page before it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(_Pages(size).at(size, at_start), dtype).reshape(shape)


def copy(array, at_start=False):
    made = empty(array.shape, array.dtype, at_start)
    made[...] = array
    return made
