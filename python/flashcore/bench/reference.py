"""fp64 reference rows of a case, computed from the definition.

torch computes them on the device of the tensors; plain Python does so without torch. Only a sample of
the rows is computed: the first, the last, and random ones.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from flashcore.bench import cut_sums
from flashcore.bench.cases import Case
from flashcore.bench.tolerance import ReferenceRow

Row = Callable[[int, int, int], Sequence[float]]


def sample_rows(case: Case, heads: int = 8, rows_per_head: int = 8,
                seed: int = 1) -> list[tuple[int, int, int]]:
    """Sorted (b, h, i) triples: at most `rows_per_head` rows of at most `heads` heads. They include the
    first row of the first head and the last row of the last head."""
    draw = random.Random(seed)
    pairs = case.batch * case.q_heads
    chosen = {0, pairs - 1}
    while len(chosen) < min(heads, pairs):
        chosen.add(draw.randrange(pairs))
    rows = []
    for pair in sorted(chosen):
        q_len = case.q_lengths()[pair // case.q_heads]
        queries = {0, q_len - 1}
        while len(queries) < min(rows_per_head, q_len):
            queries.add(draw.randrange(q_len))
        rows += [(pair // case.q_heads, pair % case.q_heads, i) for i in sorted(queries)]
    return rows


def torch_rows(torch: Any, case: Case, q: Any, k: Any, v: Any, rows: Sequence[tuple[int, int, int]],
               scores: Any = None) -> list[ReferenceRow]:
    """Reference rows with torch. q, k and v are [batch, heads, len, dim] tensors, or objects with the
    indexing [b, h] -> [len, dim] and [b, h, i] -> [dim]. scores: the case's ScoreOptions."""
    scale = 1.0 / math.sqrt(case.head_dim)
    group = case.q_heads // case.kv_heads
    result = []
    loaded = None
    for b, h, i in rows:
        if loaded != (b, h // group):  # adjacent rows share a head
            loaded = (b, h // group)
            keys, values = k[b, h // group].double(), v[b, h // group].double()
        visible = slice(case.visible_begin(b, i), case.visible_end(b, i))
        query = q[b, h, i].double()
        products = keys[visible] * query
        score, magnitude = scale * products.sum(-1), scale * products.abs().sum(-1)
        if scores is not None:
            score, magnitude = scores.modified((b, h, i), visible, score, magnitude)
        shown = score > -math.inf
        if not bool(shown.any()):
            result.append(_row_without_keys(case, b, h, i))
            continue
        score, products, seen = score[shown], products[shown], values[visible][shown]
        cut = cut_sums.largest_cut(torch, query, keys[visible][shown], case.q_dtype, case.kv_dtype)
        top = score.max()
        weight = torch.exp(score - top)
        total = weight.sum()
        p = (weight / total).unsqueeze(-1)
        out = (p * seen).sum(0)
        result.append(ReferenceRow(
            b=b, h=h, i=i,
            out=out.tolist(),
            lse=float(top + torch.log(total)),
            magnitude=float(magnitude.max()),
            largest_product=float(scale * products.abs().max()),
            largest_cut=scale * cut,
            spread=(p * seen).square().sum(0).sqrt().tolist(),
            deviation=(p * (seen - out).abs()).sum(0).tolist(),
            v_mass=(seen.abs().sum(0) / total).tolist(),
            kv_len=case.lengths()[b],
        ))
    return result


def _row_without_keys(case: Case, b: int, h: int, i: int) -> ReferenceRow:
    zeros = [0.0] * case.value_dim
    return ReferenceRow(b=b, h=h, i=i, out=zeros, lse=-math.inf, magnitude=0.0, largest_product=0.0,
                        largest_cut=0.0, spread=zeros, deviation=zeros, v_mass=zeros,
                        kv_len=case.lengths()[b])


def plain_rows(case: Case, q: Row, k: Row, v: Row,
               rows: Sequence[tuple[int, int, int]]) -> list[ReferenceRow]:
    """Reference rows in plain Python, for results of CPUs, which cut nothing. q, k and v are functions
    (b, h, row) -> list of floats."""
    scale = 1.0 / math.sqrt(case.head_dim)
    group = case.q_heads // case.kv_heads
    result = []
    for b, h, i in rows:
        keys = range(case.visible_begin(b, i), case.visible_end(b, i))
        query = q(b, h, i)
        products = [[x * y for x, y in zip(query, k(b, h // group, j))] for j in keys]
        score = [scale * math.fsum(one) for one in products]
        values = [v(b, h // group, j) for j in keys]
        top = max(score)
        weight = [math.exp(s - top) for s in score]
        total = math.fsum(weight)
        p = [w / total for w in weight]
        columns = list(zip(*values))
        out = [math.fsum(map(_multiply, p, column)) for column in columns]
        result.append(ReferenceRow(
            b=b, h=h, i=i, out=out,
            lse=top + math.log(total),
            magnitude=scale * max(math.fsum(map(abs, one)) for one in products),
            largest_product=scale * max(max(map(abs, one)) for one in products),
            largest_cut=0.0,
            spread=[math.sqrt(math.fsum((w * x) ** 2 for w, x in zip(p, column)))
                    for column in columns],
            deviation=[math.fsum(w * abs(x - centre) for w, x in zip(p, column))
                       for column, centre in zip(columns, out)],
            v_mass=[math.fsum(map(abs, column)) / total for column in columns],
            kv_len=case.lengths()[b],
        ))
    return result


def _multiply(a: float, b: float) -> float:
    return a * b
