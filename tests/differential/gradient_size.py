"""Magnitude of the terms of a gradient. The rounding error of a gradient is proportional to it.

With P the probabilities, dP = dO V^T and D the row sums of P dP, the gradient of the scores is
dS = P (dP - D). In a row with one dominant key, dP - D cancels, and dS is far smaller than its terms. D is
computed from the rounded output, so the error of dS is up to epsilon P (|dO| |V|^T + P |dO| |V|^T). The
same sums with absolute values bound the gradients of q, k, v and the mask."""

import torch


def probabilities(q, k, mask, is_causal):
    """P in f64, from f64 inputs."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def sizes(tensors, weight, is_causal=False):
    """The sums of absolute values for q, k, v and the mask if any, each in the shape of its tensor."""
    q, k, v = (one.detach().double() for one in tensors[:3])
    mask = tensors[3].detach().double() if len(tensors) > 3 else None
    p = probabilities(q, k, mask, is_causal)
    d_p = weight.double().abs() @ v.abs().transpose(-2, -1)
    d_s = p * (d_p + (p * d_p).sum(-1, keepdim=True))
    scale = q.shape[-1] ** -0.5
    found = [scale * d_s @ k.abs(), scale * d_s.transpose(-2, -1) @ q.abs(),
             p.transpose(-2, -1) @ weight.double().abs(), d_s]
    return [one.sum_to_size(like.shape) for one, like in zip(found, tensors)]


def error(got, want, size):
    """|got - want| / |size| in the Euclidean norm. Infinite if got is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want).norm() / size.norm())
