"""Cases and reference rows that several tests use."""

import random

from flashcore.bench import cases, reference as bench_reference
from flashcore.bench.cpu import decode, encode


def case(**fields):
    values = dict(kind="fwd", name="tiny", dtype="f32", batch=1, q_heads=2, kv_heads=1, q_len=5,
                  kv_len=9, head_dim=8, causal=False, cold_l2=False, suite="cpu")
    values.update(fields)
    return cases.Case(**values)


class Drawn:
    """Random inputs of a case as functions (b, h, row) -> floats, rounded to its format."""

    def __init__(self, one, sigma=1.0, seed=3):
        draw = random.Random(seed)
        self.rows = {}

        def row(name, b, h, i):
            key = (name, b, h, i)
            if key not in self.rows:
                values = [draw.gauss(0, sigma) for _ in range(one.head_dim)]
                self.rows[key] = decode(encode(values, one.dtype), one.dtype)
            return self.rows[key]

        self.q = lambda b, h, i: row("q", b, h, i)
        self.k = lambda b, h, i: row("k", b, h, i)
        self.v = lambda b, h, i: row("v", b, h, i)


def reference(one, sigma=1.0, seed=3):
    drawn = Drawn(one, sigma, seed)
    rows = [(b, h, i) for b in range(one.batch) for h in range(one.q_heads)
            for i in range(one.q_len)]
    return bench_reference.plain_rows(one, drawn.q, drawn.k, drawn.v, rows)


def rounded(rows, dtype):
    """The reference rounded to the output's format: the best possible result."""
    return [decode(encode(row.out, dtype), dtype) for row in rows]
