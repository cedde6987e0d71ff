"""Gradients of attention in plain torch operations.

The attention matrix is recomputed in blocks of rows, so memory is linear in the length.
"""

from types import SimpleNamespace

import torch

_BLOCK_ELEMENTS = 2**22  # elements of the attention matrix per block


def backward(grad_out, grad_lse, q, k, v, out, lse, sinks=None, alibi_slopes=None, bias=None,
             mask=None, q_start=None, k_start=None, cu_seqlens_q=None, cu_seqlens_k=None,
             seqused_k=None, block_table=None, *, causal, window_left, window_right, scale, softcap,
             layout, partial, wanted):
    """(dq, dk, dv, dsinks, dbias). Gradients that are not `wanted` are empty tensors."""
    if block_table is not None:
        raise NotImplementedError("block_table: gradients through pages are not supported; gather "
                                  "the pages first")
    options = dict(causal=causal, window=(window_left, window_right), softcap=softcap,
                   scale=q.shape[-1] ** -0.5 if scale is None else scale)
    grads = _Grads(q, k, v, sinks, bias, wanted)
    if partial:  # a partial result ignores sinks, so their gradient is zero
        sinks = None
    if cu_seqlens_q is None and cu_seqlens_k is None:
        main = [one.transpose(1, 2) if layout == "bshd" else one
                for one in (grad_out, q, k, v, out, grads.q, grads.k, grads.v)]
        _dense(main, grad_lse, grads, grads.bias, sinks, alibi_slopes, bias, mask, q_start, k_start,
               seqused_k, **options)
    else:
        _varlen(grad_out, grad_lse, q, k, v, out, grads, sinks, alibi_slopes, bias, mask,
                q_start, k_start, cu_seqlens_q, cu_seqlens_k, seqused_k, layout, options)
    return grads.results()


def add_gradients(main, grad_lse, *, q_start, k_start, causal, window, scale, softcap, lse=None,
                  sinks=None, dsinks=None):
    """Adds the gradients of some rows and keys to sums in f32 or f64, without rounding.

    main is (grad_out, q, k, v, out, dq, dk, dv), each [batch, heads, len, dim]. With lse, the keys are
    some of the keys that the rows see; out and lse cover all of them and the sinks. Without lse, the
    keys are all that the rows see, and the gradient of sinks is added to dsinks.
    """
    grads = SimpleNamespace(wide=main[5].dtype, sinks=dsinks)
    _dense(main, grad_lse, grads, None, None if lse is not None else sinks, None, None, None, q_start,
           k_start, None, causal=causal, window=window, scale=scale, softcap=softcap, lse=lse)


class _Grads:
    """Gradient sums in the precision of the computation. results() rounds them to the input dtypes."""

    def __init__(self, q, k, v, sinks, bias, wanted):
        self.wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        self.inputs, self.wanted = (q, k, v, sinks, bias), wanted
        self.q, self.k, self.v = (torch.zeros(one.shape, dtype=self.wide, device=one.device)
                                  for one in (q, k, v))
        self.sinks = None if sinks is None else torch.zeros_like(sinks, dtype=self.wide)
        self.bias = None if bias is None or not wanted[4] else torch.zeros(
            bias.shape, dtype=self.wide, device=bias.device)

    def results(self):
        sums = (self.q, self.k, self.v, self.sinks, self.bias)
        empty = self.inputs[0].new_empty(0)
        return tuple(total.to(one.dtype) if want and total is not None else empty.clone()
                     for total, one, want in zip(sums, self.inputs, self.wanted))


def _varlen(grad_out, grad_lse, q, k, v, out, grads, sinks, alibi_slopes, bias, mask, q_start,
            k_start, cu_seqlens_q, cu_seqlens_k, seqused_k, layout, options):
    """Varlen gradients, one sequence at a time. The host reads the lengths."""
    starts_q = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    starts_k = None if cu_seqlens_k is None else cu_seqlens_k.tolist()
    batch = (cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q).shape[0] - 1

    def one_of(tensor, starts, b):
        """Sequence b as [1, heads, len, dim]."""
        if starts is not None:
            return tensor[starts[b]:starts[b + 1]].transpose(0, 1).unsqueeze(0)
        return tensor[b:b + 1].transpose(1, 2) if layout == "bshd" else tensor[b:b + 1]

    def lse_of(tensor, b):
        if tensor is None or starts_q is None:
            return None if tensor is None else tensor[b:b + 1]
        return tensor[:, starts_q[b]:starts_q[b + 1]].unsqueeze(0)

    def row_of(tensor, b):
        return None if tensor is None else tensor[b:b + 1] if tensor.shape[0] > 1 else tensor

    def scores_of(tensor, b, q_len, kv_len):
        if tensor is None:
            return None
        tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape)
        return tensor[b if tensor.shape[0] > 1 else 0][None, :, :q_len, :kv_len]

    for b in range(batch):
        main = [one_of(one, starts, b) for one, starts in (
            (grad_out, starts_q), (q, starts_q), (k, starts_k), (v, starts_k), (out, starts_q),
            (grads.q, starts_q), (grads.k, starts_k), (grads.v, starts_k))]
        lengths = main[1].shape[2], main[2].shape[2]
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            slopes = alibi_slopes[b:b + 1]
        else:
            slopes = alibi_slopes
        _dense(main, lse_of(grad_lse, b), grads, scores_of(grads.bias, b, *lengths),
               sinks, slopes, scores_of(bias, b, *lengths), scores_of(mask, b, *lengths),
               row_of(q_start, b), row_of(k_start, b), row_of(seqused_k, b), **options)


def _column(one, default, device):
    """One number per sequence as [batch, 1, 1, 1, 1]."""
    if one is None:
        one = default
    if not isinstance(one, torch.Tensor):
        one = torch.tensor([one], device=device)
    return one.long().reshape(-1, 1, 1, 1, 1)


class _Scores:
    """Scores and probabilities of a block of rows, [batch, kv_heads, group, rows, kv_len]."""

    def __init__(self, q, k, alibi_slopes, bias, mask, q_start, k_start, seqused_k, *, causal,
                 window, scale, softcap, wide):
        self.q, self.k, self.scale, self.softcap, self.wide = q, k, scale, softcap, wide
        batch, q_heads, q_len, _ = q.shape
        self.group = (k.shape[1], q_heads // max(k.shape[1], 1))
        device, kv_len = q.device, k.shape[2]
        used = _column(seqused_k, kv_len, device)
        keys = torch.arange(kv_len, device=device)
        self.in_use = keys < used
        self.k_pos = keys + _column(k_start, 0, device)
        self.q_first = _column(q_start, used.flatten() - q_len, device)
        self.causal, self.window = causal, window
        self.bias, self.mask = (None if one is None else self._five(one) for one in (bias, mask))
        self.slopes = None
        if alibi_slopes is not None:
            self.slopes = alibi_slopes.to(wide).reshape(-1, *self.group, 1, 1)

    def _five(self, one):
        one = one.reshape((1,) * (4 - one.dim()) + one.shape)
        heads = self.group if one.shape[1] > 1 else (1, 1)
        return one.reshape(one.shape[0], *heads, *one.shape[2:])

    def grouped(self, one):
        """[batch, q_heads, ...] as [batch, kv_heads, group, ...]."""
        return one.unflatten(1, self.group)

    def _rows(self, one, begin, end):
        return one if one.shape[3] == 1 else one[:, :, :, begin:end]

    def block(self, begin, end):
        """(scores, with -inf for hidden keys; derivative of the softcap, or None)."""
        q = self.grouped(self.q[:, :, begin:end].to(self.wide))
        scores = q @ self.k.to(self.wide).unsqueeze(2).transpose(-1, -2) * self.scale
        slope = None
        if self.softcap > 0:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped * capped
        distance = self.q_first + torch.arange(begin, end, device=q.device)[:, None] - self.k_pos
        if self.slopes is not None:
            scores = scores - self.slopes * distance.abs()
        if self.bias is not None:
            scores = scores + self._rows(self.bias, begin, end).to(self.wide)
        visible = self.in_use
        if self.causal:
            visible = visible & (distance >= 0)
        left, right = self.window
        if left >= 0:
            visible = visible & (distance <= left)
        if right >= 0:
            visible = visible & (distance >= -right)
        if self.mask is not None:
            visible = visible & self._rows(self.mask, begin, end).bool()
        return scores.masked_fill(~visible, float("-inf")), slope


def _finite(one):
    """Replaces NaN and infinities by 0, so that their product with a zero factor is 0. Rows that see
    them still become NaN, because the other factor of the product is NaN there."""
    return torch.where(torch.isfinite(one), one, 0.0)


def _probabilities(scores, sinks, lse=None):
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


def _dense(main, grad_lse, grads, bias_grad, sinks, alibi_slopes, bias, mask, q_start, k_start,
           seqused_k, *, causal, window, scale, softcap, lse=None):
    """Adds the gradients of [batch, heads, len, dim] tensors to dq, dk, dv, bias_grad and grads. `main`
    is (grad_out, q, k, v, out, dq, dk, dv). `lse`: see add_gradients()."""
    grad_out, q, k, v, out, dq, dk, dv = main
    wide = grads.wide
    scores = _Scores(q, k, alibi_slopes, bias, mask, q_start, k_start, seqused_k, causal=causal,
                     window=window, scale=scale, softcap=softcap, wide=wide)
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
        if bias_grad is not None:
            _add_bias(bias_grad, ds.flatten(1, 2), begin, end)
        if slope is not None:
            ds = torch.where(ds == 0, 0.0, ds * slope)
        q_rows = scores.grouped(_finite(q[:, :, rows].to(wide)))
        dq[:, :, rows] += (ds @ _finite(k.to(wide)).unsqueeze(2)).flatten(1, 2) * scale
        dk += (ds.transpose(-1, -2) @ q_rows).sum(2) * scale
        if sinks is not None:
            grads.sinks -= (p_sink.squeeze(-1).flatten(1, 2) * delta).sum((0, 2))


def _add_bias(total, ds, begin, end):
    """Adds rows begin to end of ds, [batch, heads, rows, kv_len], summed over broadcast dimensions."""
    shape = (1,) * (4 - total.dim()) + total.shape
    total = total.view(shape) if total.is_contiguous() else total
    for dim in (0, 1, 3):
        if shape[dim] == 1 and ds.shape[dim] != 1:
            ds = ds.sum(dim, keepdim=True)
    if shape[2] == 1:
        total += ds.sum(2, keepdim=True)
    else:
        total[:, :, begin:end] += ds
