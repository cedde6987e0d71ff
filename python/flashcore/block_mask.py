"""BlockMask: a mask by blocks of queries and keys. Kernels skip hidden blocks."""

import ctypes
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flashcore._core import abi
from flashcore._core.arrays import adapter_of
from flashcore._core.library import library
from flashcore._core.scalars import integer

DOCUMENTS, PREFIX_LM, SLIDING_WINDOW, TREE, DENSE, BSR = range(6)
_BLOCK = (128, 128)
_HIDDEN, _VISIBLE = 0, 1

Block = tuple[int, int]


class BlockMask:
    """A mask by blocks, for mask= of attention(). It combines with causal, window and lengths.

    >>> import flashcore
    >>> flashcore.BlockMask.documents([1024, 3072])
    BlockMask(batch=1, heads=1, q_len=4096, kv_len=4096, block=(128, 128): 37.5 % of the blocks hidden, 62.5 % visible, 0.0 % mixed)

    The constructors are documents(), prefix_lm(), sliding_window(), tree(), from_dense() and
    from_bsr(). `block` is (queries, keys) per block: powers of two from 16 and 32 to 1024. Query i has
    the position of key i + kv_len - q_len, as in a causal call.

    The mask is built once in host memory. Its first use on a GPU copies it there; use it once before
    you capture a CUDA graph. Arrays of values are int32, or lists of integers.
    """

    def __init__(self, pattern: int, q_len: int, kv_len: int, block: Block, values: Any = None,
                 columns: Any = None, window: tuple[int, int] = (-1, -1),
                 global_tokens: int = 0) -> None:
        """Use the named constructors. values and columns are abi.Tensors in host memory."""
        block_q, block_k = block
        params = abi.BlockMaskParams(
            ctypes.sizeof(abi.BlockMaskParams), integer("q_len", q_len), integer("kv_len", kv_len),
            integer("block_q", block_q), integer("block_k", block_k), integer("window_left", window[0]),
            integer("window_right", window[1]), integer("global_tokens", global_tokens),
            None if values is None else ctypes.pointer(values),
            None if columns is None else ctypes.pointer(columns), pattern)
        if block_q == 0 or block_k == 0:
            raise ValueError(f"block is {block!r}; wanted powers of two from (16, 32) to (1024, 1024)")
        handle = library().block_mask_create(params)
        weakref.finalize(self, library().block_mask_free, handle)
        self._blocks, self._bits = library().block_mask_tensors(handle)
        self.q_len, self.kv_len, self.block = int(q_len), int(kv_len), (int(block_q), int(block_k))
        self.batch, self.heads, q_blocks, k_blocks = self._blocks.shape[:4]
        self._counts = Counter(_host_values(self._blocks))
        self._total = max(self.batch * self.heads * q_blocks * k_blocks, 1)
        self._arrays: dict[Any, tuple[Any, Any]] = {}

    @classmethod
    def documents(cls, lengths: Any = None, *, ids: Any = None, q_len: int | None = None,
                  block: Block = _BLOCK) -> "BlockMask":
        """Documents in a packed row: a query sees the keys of its own document. Give the lengths of the
        documents in order, or the document of each key (negative: padding). Rows of a batch are lists of
        lists, or [batch, n]."""
        if (lengths is None) == (ids is None):
            raise ValueError("lengths and ids: give one of them")
        if lengths is not None:
            rows = [[document for document, length in enumerate(row)
                     for _ in range(integer("lengths", length))] for row in _rows("lengths", lengths)]
            longest = max((len(row) for row in rows), default=0)
            rows = [row + [-1] * (longest - len(row)) for row in rows]
        else:
            rows = _rows("ids", ids)
        kv_len = len(rows[0]) if rows else 0
        return cls(DOCUMENTS, kv_len if q_len is None else q_len, kv_len, block,
                   _int_tensor("ids", rows))

    @classmethod
    def prefix_lm(cls, prefix: Any, q_len: int, kv_len: int | None = None, *,
                  block: Block = _BLOCK) -> "BlockMask":
        """Every query sees the first `prefix` keys and all keys up to its own position. One number, or
        one per sequence."""
        values = [prefix] if isinstance(prefix, int) else _rows("prefix", prefix)[0]
        return cls(PREFIX_LM, q_len, q_len if kv_len is None else kv_len, block,
                   _int_tensor("prefix", values))

    @classmethod
    def sliding_window(cls, q_len: int, window: tuple[int, int], global_tokens: int = 0,
                       kv_len: int | None = None, *, block: Block = _BLOCK) -> "BlockMask":
        """A window of (left, right) keys around each position, -1: no limit. All queries see the first
        `global_tokens` keys, and those positions see all keys."""
        return cls(SLIDING_WINDOW, q_len, q_len if kv_len is None else kv_len, block, window=window,
                   global_tokens=global_tokens)

    @classmethod
    def tree(cls, parents: Any, past: int = 0, *, block: Block = (16, 128)) -> "BlockMask":
        """A tree of tokens after `past` keys, as in speculative decoding: a token sees the past, its
        ancestors and itself. parents[i] < i is the parent of token i; -1: none."""
        rows = _rows("parents", parents)
        count = len(rows[0]) if rows else 0
        return cls(TREE, count, integer("past", past) + count, block, _int_tensor("parents", rows))

    @classmethod
    def from_dense(cls, mask: Any, *, block: Block = _BLOCK) -> "BlockMask":
        """A boolean array [q_len, kv_len], [heads, q_len, kv_len] or [batch, heads, q_len, kv_len], True
        where a key is visible. A tensor on a GPU is copied to the host."""
        if hasattr(mask, "cpu"):
            mask = mask.detach().cpu()
        adapter = adapter_of("mask", mask)
        info = adapter.info(mask, "mask")
        if not 2 <= len(info.shape) <= 4:
            raise ValueError(f"mask: has {len(info.shape)} dimensions; wanted 2 to 4")
        missing = 4 - len(info.shape)
        shape, strides = (1,) * missing + info.shape, (0,) * missing + info.strides
        values = abi.tensor(adapter.address(mask), shape, info.dtype, info.device_type, info.device_id,
                            strides)
        return cls(DENSE, shape[2], shape[3], block, values)

    @classmethod
    def from_bsr(cls, row_offsets: Any, columns: Any, q_len: int, kv_len: int, *,
                 block: Block = _BLOCK) -> "BlockMask":
        """Block sparse rows: block row r sees the blocks columns[row_offsets[r]:row_offsets[r + 1]]. All
        stored blocks are visible; combine with causal for the diagonal. Lists are for all sequences and
        heads; nested lists are [batch, heads, q_blocks + 1]."""
        offsets = row_offsets.tolist() if hasattr(row_offsets, "tolist") else row_offsets
        depth, one = 0, offsets
        while isinstance(one, Sequence) and len(one) > 0:
            depth, one = depth + 1, one[0]
        if depth not in (1, 3):
            raise ValueError("row_offsets: wanted [q_blocks + 1] or [batch, heads, q_blocks + 1]")
        planes = [[offsets]] if depth == 1 else offsets
        return cls(BSR, q_len, kv_len, block, _int_tensor("row_offsets", planes),
                   _int_tensor("columns", _rows("columns", columns)[0]))

    @property
    def hidden_share(self) -> float:
        """The share of blocks that are hidden from all their queries."""
        return float(self._counts[_HIDDEN] / self._total)

    @property
    def visible_share(self) -> float:
        """The share of blocks that all their queries see whole."""
        return float(self._counts[_VISIBLE] / self._total)

    @property
    def mixed_share(self) -> float:
        return 1.0 - self.hidden_share - self.visible_share

    @property
    def nbytes(self) -> int:
        """Memory of the mask on each device that uses it."""
        return 4 * (self._blocks.count + self._bits.count)

    def to_dense(self, like: Any = None) -> Any:
        """The mask as a boolean array [batch, heads, q_len, kv_len]: a NumPy array, or an array of the
        framework and on the device of `like`."""
        shape = (self.batch, self.heads, self.q_len, self.kv_len)
        count = self.batch * self.heads * self.q_len * self.kv_len
        memory = (ctypes.c_uint8 * max(count, 1))()
        dense = abi.tensor(ctypes.addressof(memory), shape, "bool")
        library().block_mask_expand(self._blocks.tensor, self._bits.tensor, dense)
        if like is None:
            import numpy
            return numpy.frombuffer(memory, numpy.bool_, count).reshape(shape)
        return adapter_of("like", like).from_host(like, memory, shape, "bool")

    def arrays(self, like: Any) -> tuple[Any, Any]:
        """mask_blocks and mask_bits as int32 arrays on the device of `like`, copied once."""
        adapter = adapter_of("q", like)
        key = adapter, adapter.gpu(like) if adapter.has_gpus else -1
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = tuple(
                adapter.from_host(like, one.memory, one.shape, "i32", owner=self)
                for one in (self._blocks, self._bits))
        return found

    def __repr__(self) -> str:
        return (f"BlockMask(batch={self.batch}, heads={self.heads}, q_len={self.q_len}, "
                f"kv_len={self.kv_len}, block={self.block}: {100 * self.hidden_share:.1f} % of the "
                f"blocks hidden, {100 * self.visible_share:.1f} % visible, "
                f"{100 * abs(self.mixed_share):.1f} % mixed)")


def _host_values(host: Any) -> memoryview:
    return memoryview(host.memory).cast("B").cast("i")[:host.count]


def _rows(name: str, values: Any) -> list[list[int]]:
    """[n] or [batch, n] values as lists."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if not values or not isinstance(values[0], (list, tuple)):
        values = [values]
    rows = [list(row) for row in values]
    if name != "lengths" and any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{name}: rows have different lengths; wanted [batch, n]")
    return rows


def _int_tensor(name: str, values: Any) -> Any:
    """Nested lists as an int32 tensor in host memory."""
    shape: list[int] = []
    one = values
    while isinstance(one, (list, tuple)):
        shape.append(len(one))
        one = one[0] if len(one) > 0 else None
    flat = values
    for _ in shape[1:]:
        flat = [number for row in flat for number in row]
    count = 1
    for extent in shape:
        count *= extent
    if len(flat) != count:
        raise ValueError(f"{name}: rows have different lengths")
    memory = (ctypes.c_int32 * max(count, 1))(*(integer(name, one, 32) for one in flat))
    made = abi.tensor(ctypes.addressof(memory), shape, "i32")
    made.memory = memory  # keeps it alive
    return made
