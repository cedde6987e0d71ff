"""Checks results against the element-wise error bound of docs/numerics.md.

The bound is that of src/verify/inputs/compare.cc. This is a separate implementation in plain Python, without
NumPy and torch.
"""

import math
from dataclasses import dataclass, field
from typing import Any

_UNITS = {"f64": 2.0**-52, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}
_LARGEST = {"f64": 1.7976931348623157e308, "f16": 65504.0}  # others: f32's


@dataclass
class Arithmetic:
    """Unit roundoffs of the output, of P and of the sums, and the smallest values of the formats."""

    out_unit: float
    p_unit: float
    sum_unit: float
    out_smallest: float
    p_smallest: float
    score_unit: float = 0.0
    product_unit: float = 0.0
    cuts_sums: bool = False  # tensor cores cut the sum of a score


def _smallest(dtype):
    # 16-bit formats keep subnormals; f32 and f64 arithmetic may flush them. e4m3 is used for P only,
    # which is stored times 2^8.
    return {"f64": 2.0**-1022, "f16": 2.0**-24, "e4m3": 2.0**-17}.get(dtype, 2.0**-126)


def arithmetic_of(out, probability):
    sum_unit = 2.0**-52 if probability == "f64" else 2.0**-24
    # Weights up to 2^8 are multiplied by a factor that is flushed below 2^-126 (docs/numerics.md).
    p_smallest = _smallest(probability) * (2.0**8 if probability == "bf16" else 1)
    # 8-bit tensor cores truncate each of 32 products 13 bits below the largest one.
    score_unit = 2.0**-13 if probability == "e4m3" else 0.0
    return Arithmetic(_UNITS[out], _UNITS[probability], sum_unit, _smallest(out), p_smallest,
                      score_unit, 32 * score_unit, probability in ("f16", "bf16"))


# Printed family name -> dtype of P; None: the kernel's dtype. `flashcore info --kernels --json` prints it
# as probability_dtype; tests/python/test_bound.py compares both.
_PROBABILITY_DTYPES = {"cpu": "f32", "simt": "f32", "sm80": None, "sm80_8bit": "f16", "sm90": None,
                       "sm90_e4m3": "e4m3"}


def probability_dtype(family, dtype, kernel=""):
    """The dtype in which a kernel of a family stores P. Kernels of tensor cores store it in their operand
    format, and so does AMX for bf16; for f16 and f32 it stores all bits of f32."""
    if kernel == "fwd_amx_bf16":
        return dtype
    return _PROBABILITY_DTYPES[family] or dtype if dtype != "f64" else "f64"


@dataclass
class ReferenceRow:
    """The f64 result of query i of batch b and head h, and the terms of its bound."""

    b: int
    h: int
    i: int
    out: list[float]  # [v_dim]
    lse: float
    magnitude: float  # max over keys of |scale| * sum |q_d k_d|
    largest_product: float  # max over keys and d of |scale * q_d k_d|
    largest_cut: float  # what tensor cores may cut from a score, in units of 2^-24 (cut_sums.py)
    spread: list[float]  # [v_dim]: sqrt(sum p^2 v^2)
    deviation: list[float]  # [v_dim]: sum p |v - out|
    v_mass: list[float]  # [v_dim]: sum |v| / sum of the softmax
    kv_len: int


def score_bound(row, head_dim, a):
    walk = math.sqrt(head_dim) * row.magnitude
    cut = row.largest_cut if a.cuts_sums else 0.0
    return a.sum_unit * (4 * row.magnitude + max(walk, cut))


def _score_error(row, head_dim, a):
    return (score_bound(row, head_dim, a)
            + 0.5 * math.expm1(2 * (a.score_unit * row.magnitude
                                    + a.product_unit * row.largest_product)))


def out_bound(row, column, head_dim, a):
    want = abs(row.out[column])
    return (2 * a.out_unit * want
            + 4 * (a.p_unit + a.sum_unit * math.sqrt(row.kv_len)) * max(row.spread[column], want)
            + _score_error(row, head_dim, a) * row.deviation[column]
            + a.out_smallest + a.p_smallest * row.v_mass[column])


def lse_bound(row, head_dim, a):
    return (a.sum_unit * (2e-6 * 2.0**24 + math.sqrt(row.kv_len) + 2 * abs(row.lse))
            + score_bound(row, head_dim, a)
            + a.score_unit * (row.magnitude + abs(row.lse) + 1)
            + a.product_unit * row.largest_product)


@dataclass
class Verdict:
    ok: bool = False
    reason: str = ""
    relative_error: float = 0.0  # |got - want| / |want|, Euclidean; informative only
    worst_ratio: float = 0.0  # max |error| / bound
    worst_head_ratio: float = 0.0  # max over heads of |error| / (half of |bound|), Euclidean
    worst: str = ""
    elements: int = 0


@dataclass
class _Tally:
    error2: float = 0.0
    want2: float = 0.0
    over: int = 0
    misplaced: int = 0
    worst_ratio: float = -1.0
    worst: str = ""
    elements: int = 0
    heads: dict[Any, Any] = field(default_factory=dict)

    def note(self, ratio, name, got, want, bound):
        if ratio > self.worst_ratio:
            self.worst_ratio = ratio
            self.worst = f"{name}: got {got:.9g}, want {want:.9g}, bound {bound:.3g}"


def compare(rows, got, got_lse, head_dim, arithmetic, out_dtype):
    """The Verdict on a result. got has the output values of each ReferenceRow, got_lse the LSE or is None."""
    tally = _Tally()
    largest = _LARGEST.get(out_dtype, 3.4028234663852886e38)
    for row, values, r in zip(rows, got, range(len(rows))):
        head = tally.heads.setdefault((row.b, row.h), [0.0, 0.0])
        for column, value in enumerate(values):
            want = row.out[column]
            if abs(want) > largest:
                want = math.copysign(math.inf, want)
            bound = out_bound(row, column, head_dim, arithmetic)
            name = f"out[b={row.b}, h={row.h}, i={row.i}, c={column}]"
            tally.elements += 1
            if not (math.isfinite(want) and math.isfinite(value)):
                if math.isfinite(want) != math.isfinite(value):
                    tally.misplaced += 1
                    tally.note(math.inf, name, value, want, bound)
                continue
            error = abs(value - want)
            tally.error2 += error * error
            tally.want2 += want * want
            head[0] += error * error
            head[1] += bound * bound
            tally.over += not error <= bound
            tally.note(error / bound, name, value, want, bound)
        if got_lse is not None:
            _compare_lse(tally, row, got_lse[r], lse_bound(row, head_dim, arithmetic))
    return _verdict(tally)


def _compare_lse(tally, row, value, bound):
    name = f"lse[b={row.b}, h={row.h}, i={row.i}]"
    if math.isfinite(row.lse) and math.isfinite(value):
        error = abs(value - row.lse)
        tally.over += not error <= bound
        tally.note(error / bound, name, value, row.lse, bound)
    elif not (value == row.lse or (math.isnan(value) and math.isnan(row.lse))):
        tally.misplaced += 1
        tally.note(math.inf, name, value, row.lse, bound)


def _verdict(tally):
    verdict = Verdict(elements=tally.elements, worst_ratio=max(tally.worst_ratio, 0.0),
                      worst=tally.worst)
    verdict.relative_error = math.sqrt(tally.error2 / tally.want2 if tally.want2 > 0
                                       else tally.error2)
    for error2, bound2 in tally.heads.values():
        if bound2 > 0:
            verdict.worst_head_ratio = max(verdict.worst_head_ratio,
                                           2 * math.sqrt(error2 / bound2))
    if tally.elements == 0:
        verdict.reason = "nothing was compared"
    elif tally.misplaced:
        verdict.reason = "non-finite values are at other positions"
    elif tally.over:
        verdict.reason = "errors exceed their bounds"
    elif verdict.worst_head_ratio > 1:
        verdict.reason = "a head's error as a whole exceeds half its bound"
    verdict.ok = not verdict.reason
    return verdict
