"""Bounds of what tensor cores cut from sums of products (docs/numerics.md, "Cut sums").

A separate implementation of src/reference/cut_sums.cc, with torch.
"""

from typing import Any

_STEP = 16  # products that are aligned to one another
_UNITS = 2.0**24
_EXPONENT, _MANTISSA = 0x7FF0000000000000, 0x000FFFFFFFFFFFFF
_LEAST = {"f16": 2.0**-14, "e4m3": 2.0**-6, "e5m2": 2.0**-14}  # alignment of the smallest values


def _power_of_two(torch: Any, x: Any) -> Any:
    """The largest power of two that |x| reaches."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)


def _last_bit(torch: Any, x: Any) -> Any:
    """The power of two that x is an odd multiple of."""
    bits = x.view(torch.int64)
    digits = (bits & _MANTISSA) | (_MANTISSA + 1)
    return (digits & -digits).double() * 2.0**-52 * _power_of_two(torch, x)


def _factor(torch: Any, x: Any, dtype: str) -> tuple[Any, Any]:
    """The powers of two that factors are aligned by, or above, and those that they are multiples of."""
    is_16_bit = dtype in ("f16", "bf16")
    aligned = _power_of_two(torch, x) if is_16_bit else x.abs()
    aligned = aligned.clamp(min=_LEAST.get(dtype, 0.0))
    last = _last_bit(torch, x) if is_16_bit else torch.zeros_like(x)
    return torch.where(x == 0, 0.0, aligned), torch.where(x == 0, 0.0, last)


def largest_cut(torch: Any, q: Any, keys: Any, q_dtype: str, k_dtype: str) -> float:
    """The most that tensor cores may cut from the sum of q * key, q [dim], keys [keys, dim], in units of
    2^-24."""
    dim, count = q.shape[0], keys.shape[0]
    pad = (0, -dim % _STEP)
    q, keys = (torch.nn.functional.pad(x.double(), pad).contiguous() for x in (q, keys))
    (q_aligned, q_last), (k_aligned, k_last) = _factor(torch, q, q_dtype), _factor(torch, keys, k_dtype)
    shape = (count, -1, _STEP)
    product = (q * keys).view(shape)
    sums = _power_of_two(torch, (q * keys).cumsum(-1)).view(shape)
    end, middle = sums[..., -1], sums[..., _STEP // 2 - 1]
    start = torch.nn.functional.pad(end[:, :-1], (1, 0))
    if 0 < dim % _STEP <= _STEP // 2:  # the last step has one result
        middle = middle.clone()
        middle[:, -1] = 0.0
    top = torch.maximum((q_aligned * k_aligned).view(shape).amax(-1), torch.maximum(start, middle))
    last = _UNITS * (q_last * k_last).view(shape)
    cut = torch.minimum(_UNITS * product.abs(), (top.unsqueeze(-1) - last).clamp(min=0.0))
    positive = torch.where(product > 0, cut, 0.0).sum((-2, -1))
    negative = torch.where(product < 0, cut, 0.0).sum((-2, -1))
    before = sum(torch.where(s > 0, (top - 2 * s).clamp(min=0.0), 0.0) for s in (start, middle))
    return float((torch.maximum(positive, negative) + (2 * (end + middle) + before).sum(-1)).max())
