"""Gradients of some rows and keys in plain torch operations, for sums over the ranks.

The attention matrix is recomputed in blocks of rows, so memory is linear in the length.
"""

from typing import Any

import torch

_BLOCK_ELEMENTS = 2**22  # elements of the attention matrix per block


def add_gradients(main: tuple[Any, ...], grad_lse: Any, *, q_start: Any, k_start: Any, causal: bool,
                  window: tuple[int, int], scale: float, softcap: float, lse: Any = None,
                  sinks: Any = None, dsinks: Any = None) -> None:
    """Adds the gradients of some rows and keys to sums in f32 or f64, without rounding.

    main is (grad_out, q, k, v, out, dq, dk, dv), each [batch, heads, len, dim]. With lse, the keys are
    some of the keys that the rows see; out and lse cover all of them and the sinks. Without lse, the
    keys are all that the rows see, and the gradient of sinks is added to dsinks.
    """
    grad_out, q, k, v, out, dq, dk, dv = main
    wide = dq.dtype
    sinks = None if lse is not None else sinks
    scores = _Scores(q, k, q_start, k_start, causal=causal, window=window, scale=scale, softcap=softcap,
                     wide=wide)
    batch, q_heads, q_len, _ = q.shape
    step = max(1, _BLOCK_ELEMENTS // max(batch * q_heads * k.shape[2], 1))
    for begin in range(0, q_len, step):
        end = min(begin + step, q_len)
        rows = slice(begin, end)
        d_out = grad_out[:, :, rows].to(wide)
        # delta = sum_j p_j dp_j. The gradient of the LSE enters each score the same way.
        delta = (d_out * out[:, :, rows].to(wide)).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse[:, :, rows].to(wide)
        s, slope = scores.block(begin, end)
        p, p_sink = _probabilities(
            s, None if sinks is None else sinks.to(wide).reshape(1, *scores.group, 1, 1),
            None if lse is None else scores.grouped(lse[:, :, rows].to(wide))[..., None])
        d_out, row_delta = scores.grouped(d_out), scores.grouped(delta)[..., None]
        lost = ~torch.isfinite(d_out).all(-1, keepdim=True)
        weights = torch.where(lost & (p != 0), float("nan"), p)
        dv += (weights.transpose(-1, -2) @ _finite(d_out)).sum(2)
        dp = d_out @ v.to(wide).unsqueeze(2).transpose(-1, -2)
        ds = torch.where(p == 0, 0.0, p * (dp - row_delta))
        if slope is not None:
            ds = torch.where(ds == 0, 0.0, ds * slope)
        q_rows = scores.grouped(_finite(q[:, :, rows].to(wide)))
        dq[:, :, rows] += (ds @ _finite(k.to(wide)).unsqueeze(2)).flatten(1, 2) * scale
        dk += (ds.transpose(-1, -2) @ q_rows).sum(2) * scale
        if sinks is not None:
            dsinks -= (p_sink.squeeze(-1).flatten(1, 2) * delta).sum((0, 2))


def _column(one: Any, default: int, device: Any) -> torch.Tensor:
    """One number per sequence as [batch, 1, 1, 1, 1]."""
    if one is None:
        one = default
    if not isinstance(one, torch.Tensor):
        one = torch.tensor([one], device=device)
    return one.long().reshape(-1, 1, 1, 1, 1)


class _Scores:
    """Scores and probabilities of a block of rows, [batch, kv_heads, group, rows, kv_len]."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, q_start: Any, k_start: Any, *, causal: bool,
                 window: tuple[int, int], scale: float, softcap: float, wide: torch.dtype) -> None:
        self.q, self.k, self.scale, self.softcap, self.wide = q, k, scale, softcap, wide
        q_heads, q_len = q.shape[1:3]
        self.group = (k.shape[1], q_heads // max(k.shape[1], 1))
        device, kv_len = q.device, k.shape[2]
        self.k_pos = torch.arange(kv_len, device=device) + _column(k_start, 0, device)
        self.q_first = _column(q_start, kv_len - q_len, device)
        self.causal, self.window = causal, window

    def grouped(self, one: torch.Tensor) -> torch.Tensor:
        """[batch, q_heads, ...] as [batch, kv_heads, group, ...]."""
        return one.unflatten(1, self.group)

    def block(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(scores, with -inf for hidden keys; derivative of the softcap, or None)."""
        q = self.grouped(self.q[:, :, begin:end].to(self.wide))
        scores = q @ self.k.to(self.wide).unsqueeze(2).transpose(-1, -2) * self.scale
        slope = None
        if self.softcap > 0:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped * capped
        distance = self.q_first + torch.arange(begin, end, device=q.device)[:, None] - self.k_pos
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            visible = visible & (distance >= 0)
        left, right = self.window
        if left >= 0:
            visible = visible & (distance <= left)
        if right >= 0:
            visible = visible & (distance >= -right)
        return scores.masked_fill(~visible, float("-inf")), slope


def _finite(one: torch.Tensor) -> torch.Tensor:
    """Replaces NaN and infinities by 0, so that their product with a zero factor is 0. Rows that see
    them still become NaN, because the other factor of the product is NaN there."""
    return torch.where(torch.isfinite(one), one, 0.0)


def _probabilities(scores: torch.Tensor, sinks: torch.Tensor | None,
                   lse: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
    """(probabilities of the keys; probability of the sink, or None). With lse, the scores are of some of
    the keys, and lse [..., 1] is over all keys. Otherwise the LSE of the forward pass is not used: a
    large LSE is too inaccurate."""
    if lse is not None:
        return torch.where(scores == float("-inf"), 0.0, torch.exp(scores - lse)), None
    none = torch.full((*scores.shape[:-1], 1), float("-inf"), dtype=scores.dtype,
                      device=scores.device)
    terms = [scores, none if sinks is None else torch.broadcast_to(sinks, none.shape)]
    top = torch.cat([one.amax(-1, keepdim=True) for one in terms if one.shape[-1]], -1).amax(
        -1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    keys, sink = (torch.where(one == float("-inf"), 0.0, torch.exp(one - top)) for one in terms)
    total = keys.sum(-1, keepdim=True) + sink
    total = torch.where(total == 0, 1.0, total)
    return keys / total, None if sinks is None else sink / total
