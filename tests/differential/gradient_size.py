"""How large the terms are that a gradient is summed from; its rounding errors are shares of that.

With P the probabilities, dP = dO V^T and D the row sums of P dP, the gradient of the scores is
dS = P (dP - D). Where a row looks at one key only, dP - D cancels, and dS is far smaller than what it is
made of. D is computed from the rounded output, so dS is off by up to epsilon P (|dO| |V|^T + P |dO| |V|^T).
The same sums with absolute values bound the gradients of q, k, v and the mask."""

import torch


def probabilities(q, k, mask, is_causal):
    """In f64, of inputs in f64."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def sizes(tensors, weight, is_causal=False):
    """For q, k, v and the mask, where there is one: the sums of absolute values, each of its shape."""
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
    """|got - want| / |size|, Euclidean; infinite where got is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - want).norm() / size.norm())
