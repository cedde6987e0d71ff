"""fp64 rows of the gradients dq, dk and dv, and their error bound (docs/numerics.md, "Gradients").

Only a sample of rows is computed, with torch on the device of the tensors: queries of the first and the last
head, and keys of their KV heads. The bound is a separate implementation of src/verify/inputs/compare_bwd.cc. It
leaves out the truncation of tensor-core sums, so it is the same or stricter.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashcore.bench.tolerance import Arithmetic, Verdict

_ROWS = 16  # of each head and tensor
_CHUNK_BYTES = 2e8  # of one matrix of scores
_MEAN_OF_ROWS = 8  # the mean over a head is judged from so many rows on


@dataclass
class GradientRows:
    """Rows `at` of one head of a gradient. All tensors are f64 [rows, dim]; terms is [rows, 1]."""

    name: str
    b: int
    h: int
    at: list[int]
    value: Any
    noise: Any  # sum of the squared terms
    error: Any
    mass: Any
    terms: Any

    def bound(self, a: Arithmetic) -> Any:
        walk = self.noise.sqrt().maximum(self.value.abs())
        return (2 * a.out_unit * self.value.abs() + 4 * (a.p_unit + a.sum_unit * self.terms.sqrt()) * walk
                + self.error + a.out_smallest + a.p_smallest * self.mass)


def _sampled(length: int, draw: random.Random) -> list[int]:
    chosen = {0, length - 1}
    while len(chosen) < min(_ROWS, length):
        chosen.add(draw.randrange(length))
    return sorted(chosen)


class _Rows:
    """A chunk of query rows of one head: everything that each of its pairs shares."""

    def __init__(self, head: "_Head", queries: Any) -> None:
        torch, u = head.torch, head.sum_unit
        self.queries, self.q, self.dout = queries, head.q[queries].double(), head.dout[queries].double()
        score = head.scale * (self.q @ head.k.T)
        self.hidden = ~head.visible(queries)
        score.masked_fill_(self.hidden, -math.inf)
        self.lse = torch.logsumexp(score, 1, keepdim=True)
        self.p = torch.exp(score - self.lse).nan_to_num_(0.0)
        magnitude = abs(head.scale) * (self.q.abs() @ head.k.abs().T)
        largest = magnitude.masked_fill_(self.hidden, 0.0).amax(1, keepdim=True)
        self.score_error = u * (4 + math.sqrt(head.k.shape[1])) * largest + 2 * u * self.lse.abs()
        product = self.dout * head.out[queries].double()
        walk = u * (2 + math.sqrt(head.v.shape[1]))
        self.delta, self.delta_error = product.sum(1, keepdim=True), walk * product.abs().sum(1, keepdim=True)
        self._walk, self._u, self._head = walk, u, head

    def pairs(self, keys: Any) -> tuple[Any, Any, Any, Any]:
        """(P, dP - delta, error of dS, whether it is visible) of the pairs with some keys."""
        v, p = self._head.v[keys], self.p[:, keys]
        w = self.dout @ v.T - self.delta
        error = p * ((self.score_error + 4 * self._u) * w.abs() + self._walk * (self.dout.abs() @ v.abs().T))
        return p, w, error, (~self.hidden[:, keys]).double()


class _Head:
    """One query head with its keys."""

    def __init__(self, torch: Any, case: Any, tensors: tuple[Any, ...], b: int, h: int, sum_unit: float) -> None:
        q, k, v, out, dout = tensors
        group = case.q_heads // case.kv_heads
        self.torch, self.case, self.b, self.h = torch, case, b, h
        self.q, self.out, self.dout = q[b, h], out[b, h], dout[b, h]
        self.k, self.v = k[b, h // group].double(), v[b, h // group].double()
        self.scale, self.sum_unit = 1.0 / math.sqrt(case.head_dim), sum_unit

    def visible(self, queries: Any) -> Any:
        keys = self.torch.arange(self.case.kv_len, device=self.q.device)
        begins, ends = ([f(self.b, int(i)) for i in queries] for f in (self.case.visible_begin, self.case.visible_end))
        begins, ends = (self.torch.tensor(one, device=self.q.device)[:, None] for one in (begins, ends))
        return (keys >= begins) & (keys < ends)

    def chunks(self) -> Iterator[_Rows]:
        size = max(int(_CHUNK_BYTES / (8 * self.case.kv_len)), 1)
        for begin in range(0, self.case.q_len, size):
            yield _Rows(self, self.torch.arange(begin, min(begin + size, self.case.q_len)))


def _dq_rows(head: _Head, at: list[int]) -> GradientRows:
    rows, k = _Rows(head, head.torch.tensor(at)), head.k
    p, w, error, seen = rows.pairs(slice(None))
    scale, weight = abs(head.scale), p * w
    return GradientRows(
        "dq", head.b, head.h, at, head.scale * (weight @ k), scale**2 * (weight**2 @ k**2),
        scale * (error @ k.abs() + rows.delta_error * (p @ k).abs()),
        scale * (((1 + w.abs()) * seen) @ k.abs()), seen.sum(1, keepdim=True))


def _key_rows(heads: list[_Head], at: list[int]) -> list[GradientRows]:
    """dk and dv of keys `at` of one KV head, summed over its query heads."""
    first, keys = heads[0], heads[0].torch.tensor(at)
    zeros = [first.torch.zeros(len(at), first.k.shape[1], dtype=first.torch.float64, device=first.k.device)
             for _ in range(5)]
    value, noise, error, mass, walk = zeros
    sums = [first.torch.zeros(len(at), first.v.shape[1], dtype=first.torch.float64, device=first.k.device)
            for _ in range(4)]
    terms = first.torch.zeros(len(at), 1, dtype=first.torch.float64, device=first.k.device)
    scale = abs(first.scale)
    for head in heads:
        for rows in head.chunks():
            p, w, e, seen = rows.pairs(keys)
            q, dout, weight = rows.q, rows.dout, p * w
            value += first.scale * (weight.T @ q)
            noise += scale**2 * ((weight**2).T @ q**2)
            error += scale * (e.T @ q.abs())
            mass += scale * (((1 + w.abs()) * seen).T @ q.abs())
            walk += ((rows.delta_error * p) ** 2).T @ q**2
            for total, more in zip(sums, (p.T @ dout, (p**2).T @ dout**2, (p * rows.score_error).T @ dout.abs(),
                                          seen.T @ dout.abs())):
                total += more
            terms += seen.sum(0)[:, None]
    group = first.case.q_heads // first.case.kv_heads
    error += 4 * scale * walk.sqrt()
    b, h = first.b, first.h // group
    return [GradientRows("dk", b, h, at, value, noise, error, mass, terms),
            GradientRows("dv", b, h, at, sums[0], sums[1], sums[2], sums[3], terms)]


def gradient_rows(torch: Any, case: Any, tensors: tuple[Any, ...], sum_unit: float,
                  seed: int = 1) -> list[GradientRows]:
    """Sampled rows of each gradient. tensors: q, k, v, out and dout, [batch, heads, len, dim]."""
    draw = random.Random(seed)
    group = case.q_heads // case.kv_heads
    found = []
    for b, kv_head in dict.fromkeys([(0, 0), (case.batch - 1, case.kv_heads - 1)]):
        heads = [_Head(torch, case, tensors, b, h, sum_unit) for h in range(kv_head * group, (kv_head + 1) * group)]
        for head in dict.fromkeys([heads[0], heads[-1]]):
            found.append(_dq_rows(head, _sampled(case.q_len, draw)))
        found += _key_rows(heads, _sampled(case.kv_len, draw))
    return found


def compare_gradients(results: dict[str, Any], rows: list[GradientRows], arithmetic: Arithmetic) -> Verdict:
    """results: {"dq": tensor, ...}."""
    verdict, error2, want2 = Verdict(), 0.0, 0.0
    for one in rows:
        got = results[one.name][one.b, one.h][one.at].double()
        error, bound = (got - one.value).abs(), one.bound(arithmetic)
        ratio = (error / bound).nan_to_num(math.inf, math.inf)
        verdict.elements += ratio.numel()
        error2, want2 = error2 + float(error.square().sum()), want2 + float(one.value.square().sum())
        if len(one.at) >= _MEAN_OF_ROWS:
            verdict.worst_head_ratio = max(verdict.worst_head_ratio, 2 * float(ratio.square().mean().sqrt()))
        if float(ratio.max()) >= verdict.worst_ratio:
            verdict.worst_ratio = float(ratio.max())
            row, column = divmod(int(ratio.argmax()), ratio.shape[1])
            verdict.worst = (f"{one.name}[b={one.b}, h={one.h}, row={one.at[row]}, c={column}]: got "
                             f"{float(got[row, column]):.9g}, want {float(one.value[row, column]):.9g}, bound "
                             f"{float(bound[row, column]):.3g}")
    verdict.relative_error = math.sqrt(error2 / want2 if want2 > 0 else error2)
    if not verdict.worst_ratio <= 1:
        verdict.reason = "errors exceed their bounds"
    elif verdict.worst_head_ratio > 1:
        verdict.reason = "the RMS error of a head exceeds half of its bound"
    verdict.ok = not verdict.reason
    return verdict


def relative_errors(results: dict[str, Any], rows: list[GradientRows]) -> float:
    """The largest |got - want| / |want| of the three gradients over the sampled rows."""
    largest = 0.0
    for name in ("dq", "dk", "dv"):
        error2 = want2 = 0.0
        for one in rows:
            if one.name == name:
                got = results[name][one.b, one.h][one.at].double()
                error2 += float((got - one.value).square().sum())
                want2 += float(one.value.square().sum())
        largest = max(largest, math.sqrt(error2 / want2)) if error2 == error2 else math.nan
    return largest
