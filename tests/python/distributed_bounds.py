"""The error bounds of docs/numerics.md for a forward pass and the gradients that follow it, in f64.

The oracle of the library takes D and P of gradients from out and lse as stored. Here both have errors of
their own. sum(dO out) is the result of attention for the values dP = dO v, so the bound of such a result,
and the rounding of out, are added to E; T_lse is added to the error of a weight.
"""

import numpy as np

U = 2.0 ** -24
UNITS = {"float32": 2.0 ** -24, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}


class Weights:
    """Scores and weights of one sequence: arrays are [batch, q_heads, rows, keys], sums over keys [..., 1]."""

    def __init__(self, q, k, *, sinks=None, causal=False, window=(-1, -1), scale=None, softcap=0.0):
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        z = q @ k.swapaxes(-1, -2) * self.scale
        self.t = np.tanh(z / softcap) if softcap else np.zeros_like(z)
        scores = softcap * self.t if softcap else z
        distance = k.shape[2] - q.shape[2] + np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
        visible = np.ones_like(distance, bool)
        for limit, one in ((0 if causal else window[1], -distance), (window[0], distance)):
            if limit >= 0:
                visible &= one <= limit
        scores = np.where(visible, scores, -np.inf)
        sums = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * abs(self.scale) + softcap
        self.a = np.where(visible, sums, 0.0).max(-1, keepdims=True, initial=0.0)
        extra = np.full((*scores.shape[:3], 1), -np.inf)
        if sinks is not None:
            extra = np.broadcast_to(sinks[:, None, None], extra.shape)
            self.a = np.maximum(self.a, np.abs(extra))
        top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), extra)
        base = np.where(np.isfinite(top), top, 0.0)
        weight, sink = np.exp(scores - base), np.exp(extra - base)
        total = weight.sum(-1, keepdims=True) + sink
        some = np.where(total > 0, total, 1.0)
        self.p, self.sink = weight / some, sink / some
        with np.errstate(divide="ignore"):
            self.lse = base + np.log(total)
        self.delta = U * (4 + q.shape[-1] ** 0.5) * self.a
        # How an error of a score, relative to the sum of its products, shows in a weight.
        self.steep = 1 + 2 * np.abs(self.t) / softcap if softcap else 1.0


def _total(u_out, u_p, x, root, terms, rest):
    return 2 * u_out * abs(x) + 4 * (u_p + U * terms ** 0.5) * np.maximum(root, abs(x)) + rest + 1e-35


def _stored_weights(dtype):
    """The roundoff of P: AMX kernels round it to bf16."""
    return UNITS[dtype] if dtype == "bfloat16" else U


def forward(w, v, dtype):
    """(T of out, T of lse [..., 1]) for v of every query head."""
    keys = v.shape[2]
    u_p = _stored_weights(dtype)
    out = w.p @ v
    spread = np.stack([(w.p * abs(v[..., c][:, :, None] - out[..., c, None])).sum(-1)
                       for c in range(v.shape[-1])], -1) + w.sink * abs(out)
    t_out = _total(UNITS[dtype], u_p, out, ((w.p ** 2) @ (v ** 2)) ** 0.5, keys, w.delta * spread)
    lse = np.where(np.isfinite(w.lse), np.abs(w.lse), 0.0)
    return t_out, 2e-6 + U * keys ** 0.5 + w.delta + 2 * U * lse


def gradients(w, q, k, v, d_out, d_lse, t_lse, dtype):
    """{name: T}, of k and v for each query head: the caller adds up the heads of a group. d_lse is [..., 1]."""
    out = w.p @ v
    rows, keys, v_dim = q.shape[2], k.shape[2], v.shape[-1]
    d_lse = np.where(np.isfinite(w.lse), d_lse, 0.0)
    walk = U * (2 + v_dim ** 0.5)
    of_out, d_p = (d_out * out).sum(-1, keepdims=True), d_out @ v.swapaxes(-1, -2)
    big_d = of_out - d_lse
    pi = walk * (abs(d_out) @ abs(v).swapaxes(-1, -2))
    spread = (w.p * abs(d_p - of_out)).sum(-1, keepdims=True) + w.sink * abs(of_out)
    root = ((w.p * d_p) ** 2).sum(-1, keepdims=True) ** 0.5
    e_row = (walk * ((abs(d_out * out)).sum(-1, keepdims=True) + abs(d_lse)) + w.delta * spread
             + 4 * (_stored_weights(dtype) + U * keys ** 0.5) * np.maximum(root, abs(of_out))
             + 4 * UNITS[dtype] * ((d_out * out) ** 2).sum(-1, keepdims=True) ** 0.5)
    lse = np.where(np.isfinite(w.lse), np.abs(w.lse), 0.0)
    delta = w.delta + 2 * U * lse + t_lse
    distance = abs(d_p - big_d)
    slope = 1 - w.t ** 2
    error = w.p * ((delta * w.steep + 4 * U) * distance + pi)
    if np.any(w.t):
        error = error * slope + 18 * U * w.p * (distance + pi + e_row)
    dz = w.p * distance * slope  # its size
    scale = abs(w.scale)
    pulled = w.p * slope
    made = {
        "dq": (scale * (dz ** 2 @ k ** 2) ** 0.5, keys,
               scale * (error @ abs(k) + e_row * abs(pulled @ k))),
        "dk": (scale * (dz.swapaxes(-1, -2) ** 2 @ q ** 2) ** 0.5, rows,
               scale * (error.swapaxes(-1, -2) @ abs(q)
                        + 4 * ((e_row * pulled).swapaxes(-1, -2) ** 2 @ q ** 2) ** 0.5)),
        "dv": ((w.p.swapaxes(-1, -2) ** 2 @ d_out ** 2) ** 0.5, rows,
               (w.p * delta).swapaxes(-1, -2) @ abs(d_out)),
        "dsinks": ((w.sink ** 2 * big_d ** 2).sum((0, 2, 3)) ** 0.5, rows * q.shape[0],
                   (w.sink * ((delta + 4 * U) * abs(big_d) + e_row)).sum((0, 2, 3))),
    }
    return made


def _groups(one, heads):
    """Adds up the query heads that share a KV head."""
    return one.reshape(one.shape[0], heads, one.shape[1] // heads, *one.shape[2:]).sum(2)


def whole(q, k, v, d_out, d_lse, want, dtype, *, sinks=None, documents=None, **options):
    """{name: T} for `want`, the exact results of a pass: out, lse, and gradients if it has them. Arrays
    are [batch, heads, rows, dim] in f64; d_lse [batch, heads, rows]. Documents: [0, ..., length]."""
    q_docs, k_docs = documents or [0, q.shape[2]], documents or [0, k.shape[2]]
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    u = UNITS[dtype]
    made = {name: np.zeros(one.shape) for name, one in want.items()}
    sink_parts = [0.0, 0, 0.0]
    for i in range(len(q_docs) - 1):
        rows, keys = slice(q_docs[i], q_docs[i + 1]), slice(k_docs[i], k_docs[i + 1])
        one_q, one_k, one_v = q[:, :, rows], *(np.repeat(one[:, :, keys], group, 1) for one in (k, v))
        w = Weights(one_q, one_k, sinks=sinks, **options)
        t_out, t_lse = forward(w, one_v, dtype)
        made["out"][:, :, rows], made["lse"][:, :, rows] = t_out, t_lse[..., 0]
        if "dq" not in want:
            continue
        parts = gradients(w, one_q, one_k, one_v, d_out[:, :, rows], d_lse[:, :, rows, None], t_lse, dtype)
        made["dq"][:, :, rows] = _total(u, U, want["dq"][:, :, rows], *parts["dq"])
        for name in ("dk", "dv"):
            root, terms, rest = parts[name]
            made[name][:, :, keys] = _total(u, U, want[name][:, :, keys], _groups(root ** 2, heads) ** 0.5,
                                            terms * group, _groups(rest, heads))
        sink_parts = [sink_parts[0] + parts["dsinks"][0] ** 2, sink_parts[1] + parts["dsinks"][1],
                      sink_parts[2] + parts["dsinks"][2]]
    if "dsinks" in want:
        made["dsinks"] = _total(U, U, want["dsinks"], sink_parts[0] ** 0.5, *sink_parts[1:])
    return made


def fault(got, want, bound):
    """None if got is within the bound, element by element, and in every head as a whole; else words."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return f"shape {got.shape}, wanted {want.shape}, or other non-finite values"
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]):
        return "other infinities"
    share = np.where(finite, np.abs(np.where(finite, got, 0.0) - np.where(finite, want, 0.0)) / bound, 0.0)
    if share.size == 0:
        return None
    if share.max() > 1:
        at = np.unravel_index(share.argmax(), share.shape)
        return f"{got[at]} at {at} instead of {want[at]}: {share[at]:.3g} of the bound"
    heads = share.reshape(*share.shape[:2], -1) if share.ndim > 2 else share.reshape(1, -1)
    root = np.sqrt((heads ** 2).mean(-1)).max() if heads.shape[-1] >= 8 else 0.0
    return f"a head's errors are {root:.3g} of the bound" if root > 0.5 else None
