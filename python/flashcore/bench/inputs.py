"""Random inputs of a benchmark case as torch tensors, and views of them for the reference."""

import itertools
from typing import Any

from flashcore.bench import reference
from flashcore.bench.score_options import ScoreOptions

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
          "e4m3": "float8_e4m3fn", "int8": "int8"}
_LARGEST_CODE = {"e4m3": 448.0, "int8": 127.0}


class Pages:
    """Paged keys or values, [pages, page_size, kv_heads, dim]. Indexing: [b, h] -> [len, dim]."""

    def __init__(self, memory, block_table):
        self.memory, self.block_table = memory, block_table

    def __getitem__(self, at):
        b, h = at
        return self.memory[self.block_table[b].long(), :, h].flatten(0, 1)


class Packed:
    """Varlen sequences, [total, heads, dim]. Indexing: [b, h] -> [len, dim] and [b, h, i] -> [dim]."""

    def __init__(self, memory, starts):
        self.memory, self.starts = memory, starts

    def __getitem__(self, at):
        b, h, *row = at
        return self.memory[self.starts[b]:self.starts[b + 1], h][row[0] if row else slice(None)]


class Codes:
    """An 8-bit tensor and its scales [batch, heads]. Indexing returns values: [b, h] -> [len, dim] and
    [b, h, i] -> [dim]."""

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __getitem__(self, at):
        return self.codes[at].float().double() * self.scale[at[:2]].double()

    @classmethod
    def of(cls, torch, values, dtype, group=1):
        """Quantizes values to e4m3 or int8. `group` is the number of adjacent heads that share a scale. The query heads
        of one KV head share it, so that a library with one query scale per KV head computes the same
        problem."""
        scale = values.unflatten(1, (-1, group)).abs().amax((2, 3, 4)) / _LARGEST_CODE[dtype]
        scale = scale.repeat_interleave(group, 1)
        codes = values / scale[:, :, None, None]
        if dtype == "int8":
            codes = codes.round()
        return cls(codes.to(getattr(torch, DTYPES[dtype])), scale)

    def widened(self, dtype):
        return (self.codes.float() * self.scale[:, :, None, None]).to(dtype)


class Inputs:
    """`sets` sets of q, k and v of a case (and dout), and its lengths, pages and options. Keys past a length
    of used_k are NaN, because they must not affect the result."""

    def __init__(self, torch, case, device, sets=1, seed=1):
        self.torch, self.case, self.device = torch, case, device
        self._generator = torch.Generator(device).manual_seed(seed)
        k_shape, v_shape = case.k_shape, case.v_shape
        self.used_k: Any = None
        self.block_table: Any = None
        self.cu_seqlens: Any = None
        self.starts: list[int] = []
        if case.page_size:
            pages = case.batch * case.kv_len // case.page_size
            k_shape, v_shape = ((pages, case.page_size, case.kv_heads, dim)
                                for dim in (case.head_dim, case.value_dim))
            order = torch.randperm(pages, generator=self._generator, device=device,
                                   dtype=torch.int32)
            self.block_table = order.reshape(case.batch, -1).contiguous()
        group = case.q_heads // case.kv_heads
        self.q = [self._normal(case.q_shape, case.q_dtype, group) for _ in range(sets)]
        self.k = [self._normal(k_shape, case.kv_dtype) for _ in range(sets)]
        self.v = [self._normal(v_shape, case.kv_dtype) for _ in range(sets)]
        self.scores = ScoreOptions(torch, case, device, self._generator,
                                   getattr(torch, DTYPES[case.out_dtype if case.eight_bit else case.q_dtype]))
        self.dout = [self._normal(case.out_shape, case.q_dtype)
                     for _ in range(sets if case.kind == "bwd" else 0)]
        if case.packed:
            self.starts = [0, *itertools.accumulate(case.packed)]
            self.cu_seqlens = self.int32(self.starts)
        if case.used_k:
            self.used_k = self.int32(case.used_k)
            for memory in self.k + self.v:
                for b, length in enumerate(case.used_k):
                    memory[b, :, length:] = float("nan")

    def _normal(self, shape, dtype, group=1):
        torch = self.torch
        values = torch.randn(shape, generator=self._generator, device=self.device,
                             dtype=torch.float32)
        return Codes.of(torch, values, dtype, group) if dtype in _LARGEST_CODE else \
            values.to(getattr(torch, DTYPES[dtype]))

    def __len__(self):
        return len(self.q)

    def int32(self, values):
        return self.torch.tensor(list(values), device=self.device, dtype=self.torch.int32)

    def readable(self, index):
        """q, k and v of one set, indexed as the reference needs them."""
        q, k, v = self.q[index], self.k[index], self.v[index]
        if self.block_table is not None:
            return q, Pages(k, self.block_table), Pages(v, self.block_table)
        if self.case.packed:
            return tuple(Packed(memory, self.starts) for memory in (q, k, v))
        return q, k, v

    def reference(self, index, rows):
        """The ReferenceRows of one set."""
        q, k, v = self.readable(index)
        return reference.torch_rows(self.torch, self.case, q, k, v, rows, self.scores)

    def rows_of(self, out, rows):
        """The rows (b, h, i) of a result with the case's out_shape, as [rows, v_dim] in f64."""
        b, h, i = (self.torch.tensor(one, device=self.device) for one in zip(*rows))
        if self.case.packed:
            return out[self.cu_seqlens[b] + i, h].double()
        return out[b, h, i].double()
