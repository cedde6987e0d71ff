"""Attention from its definition in f64 NumPy, one sequence at a time, with every option; and tolerances
for results."""

import math

import numpy as np

# |error| / |reference|, Euclidean, of the whole result.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}


def one_sequence(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None,
                 slopes=None, bias=None, mask=None, q_start=None, k_start=0):
    """(out, lse) in f64 for q [heads, q_len, dim], k and v [kv_heads, kv_len, dim]."""
    q, k, v = (np.asarray(one, np.float64) for one in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = q @ k.transpose(0, 2, 1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    first = k.shape[1] - q.shape[1] if q_start is None else q_start
    distance = first + np.arange(q.shape[1])[:, None] - (k_start + np.arange(k.shape[1]))
    if slopes is not None:
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    visible = np.ones(scores.shape, bool)
    if causal:
        visible &= distance >= 0
    if window[0] >= 0:
        visible &= distance <= window[0]
    if window[1] >= 0:
        visible &= distance >= -window[1]
    if mask is not None:
        visible &= np.asarray(mask, bool)
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, extra], -1)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weight = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weight.sum(-1, keepdims=True)
    p = (weight / np.where(total == 0, 1, total))[..., :k.shape[1]]
    with np.errstate(divide="ignore"):
        lse = np.where(total[..., 0] == 0, -np.inf, top[..., 0] + np.log(total[..., 0]))
    return p @ v, lse


def batch(q, k, v, **options):
    """(out, lse) for [batch, heads, len, dim]. Row b of an option belongs to sequence b."""
    per_row = {name: options.pop(name) for name in ("bias", "mask", "q_start", "k_start", "used")
               if options.get(name) is not None}
    outs, lses = [], []
    for b in range(q.shape[0]):
        rows = {name: one[b if len(one) > 1 else 0] for name, one in per_row.items()}
        used = rows.pop("used", k.shape[2])
        for name in ("bias", "mask"):
            if name in rows:
                rows[name] = rows[name][..., :used]
        out, lse = one_sequence(q[b], k[b, :, :used], v[b, :, :used], **options, **rows)
        outs.append(out)
        lses.append(lse)
    return np.stack(outs), np.stack(lses)


def error(got, want):
    """|got - want| / |want|; infinite if non-finite values are at different positions."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return math.inf
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return math.inf
    size = np.linalg.norm(want[finite])
    distance = np.linalg.norm(got[finite] - want[finite])
    return float(distance / size if size > 0 else distance)
