"""flashcore.sdpa: the interface of torch's scaled_dot_product_attention."""

import math

import torch

from flashcore._attention import attention
from flashcore._core import names
from flashcore._core.scalars import flag

_ARGUMENTS = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask",
              "causal": "is_causal"}


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
         attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention with the same arguments and meaning.

    is_causal is aligned top-left, as in torch: query i sees the keys 0 to i, regardless of the number
    of keys. attn_mask is boolean (False hides the key) or is added to the scores. A row that sees no
    key is 0. Leading dimensions broadcast. With enable_gqa, the heads are the third dimension from the
    end. dropout_p must be 0.

    >>> import torch, flashcore
    >>> q = torch.randn(1, 2, 3, 8)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(flashcore.sdpa(q, q, q, is_causal=True), expected, atol=1e-5)
    True
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0")
    if enable_gqa is not False:  # skipped in the usual call
        enable_gqa = flag("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: given together with is_causal; put both into the mask")
    if attn_mask is None and _is_plain(query, key, value):
        return _attend(query, key, value, is_causal, scale, None, None)
    for name, one in (("query", query), ("key", key), ("value", value)):
        _check(name, one, 3 if enable_gqa else 2)
    grouped = False
    if enable_gqa:
        key, value, grouped = _groups(query, key, value)
    heads = query.shape[-3] if grouped else None  # of keys and values after repetition
    scores = _joined("key", tuple(query.shape[:-2]), _leading(key, heads))
    leading = _joined("value", scores, _leading(value, heads))
    if grouped:
        kv_heads = key.shape[-3]
    else:  # a single head is shared without copies
        kv_heads = 1 if _heads(key) == _heads(value) == 1 else leading[-1]
    of_keys = (*leading[:-1], kv_heads) if leading else ()
    bias = mask = None
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask: is a {type(attn_mask).__name__}; wanted a torch.Tensor")
        whole = (*scores, query.shape[-2], key.shape[-2])
        if attn_mask.dim() > len(whole) or _broadcast(whole, tuple(attn_mask.shape)) != whole:
            raise ValueError(f"attn_mask: shape is {tuple(attn_mask.shape)}; wanted one that broadcasts "
                             f"to {tuple(whole)}")
        made = _four_scores(attn_mask, leading)
        bias, mask = (None, made) if attn_mask.dtype == torch.bool else (made, None)
    if query.shape[-1] == 0:  # all scores are 0 for any scale
        query, key = (torch.nn.functional.pad(one, (0, 1)) for one in (query, key))
        scale = 1.0
    if value.shape[-1] == 0:
        return value.new_zeros((*leading, query.shape[-2], 0))
    out = _attend(_four(query, leading), _four(key, of_keys), _four(value, of_keys), is_causal, scale,
                  bias, mask)
    return out if len(leading) == 2 else out.reshape(*leading, *out.shape[-2:])


def _is_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True for the usual call, which needs no broadcasting and no checks here. It must be fast."""
    if not type(query) is type(key) is type(value) is torch.Tensor or query.is_nested:
        return False
    shape = query.shape
    return (query.dim() == 4 and shape[:2] == key.shape[:-2] == value.shape[:-2] and shape[3] != 0
            and value.shape[3] != 0 and query.is_floating_point()
            and query.dtype is key.dtype is value.dtype)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool,
            scale: float | None, bias: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """attention() on [batch, heads, len, dim], with errors that name sdpa's arguments."""
    found: torch.Tensor = names.call(
        _ARGUMENTS, attention, query, key, value, causal=is_causal, scale=scale, bias=bias, mask=mask,
        q_start=0 if is_causal and query.shape[2] != key.shape[2] else None)
    return found


def _check(name: str, one: torch.Tensor, dimensions: int) -> None:
    if not isinstance(one, torch.Tensor):
        raise TypeError(f"{name}: is a {type(one).__name__}; wanted a torch.Tensor")
    if one.is_nested:
        raise NotImplementedError(f"{name}: is a nested tensor; give a padded batch with attn_mask, or "
                                  "varlen sequences to flashcore.attention")
    if one.dim() < dimensions:
        raise ValueError(f"{name}: has {one.dim()} dimensions; wanted {dimensions} or more")
    if not one.is_floating_point():
        raise ValueError(f"{name}: dtype is {str(one.dtype).removeprefix('torch.')}; wanted a float "
                         "type")


def _groups(query: torch.Tensor, key: torch.Tensor,
            value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(key, value, True if groups of query heads share a KV head). key and value have equally many heads."""
    heads, of_keys, of_values = (one.shape[-3] for one in (query, key, value))
    if heads == of_keys == of_values:
        return key, value, False
    for name, own in (("key", of_keys), ("value", of_values)):
        if own == 0 or heads % own != 0:
            raise ValueError(f"{name}: has {own} heads, query has {heads}; with enable_gqa query's number "
                             "must be a multiple")
    if of_keys != of_values:
        key, value = (one.repeat_interleave(heads // one.shape[-3], -3) for one in (key, value))
    return key, value, True


def _heads(one: torch.Tensor) -> int:
    return one.shape[-3] if one.dim() > 2 else 1


def _leading(one: torch.Tensor, heads: int | None) -> tuple[int, ...]:
    """The shape without [len, dim]. `heads` is the number of heads after repetition."""
    return tuple(one.shape[:-2]) if heads is None else (*one.shape[:-3], heads)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The broadcast shape; None if there is none. torch.broadcast_shapes takes longer than a small call."""
    if one == other:
        return one
    rank = max(len(one), len(other))
    one, other = ((1,) * (rank - len(shape)) + shape for shape in (one, other))
    if any(a != b and a != 1 and b != 1 for a, b in zip(one, other)):
        return None
    return tuple(b if a == 1 else a for a, b in zip(one, other))


def _joined(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast batch and heads of `one` and of the argument `name`."""
    found = _broadcast(one, other)
    if found is not None:
        return found
    if one[-1] != other[-1] and 1 not in (one[-1], other[-1]):
        raise ValueError(f"{name}: has {other[-1]} heads, query has {one[-1]}; give equally many, or "
                         "enable_gqa=True")
    raise ValueError(f"{name}: batch and heads are {other}, which do not broadcast with {one}")


def _four(one: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    """[..., len, dim] as [batch, heads, len, dim]. `leading` is the shape of batch and heads."""
    if len(leading) == 2 and one.shape[:-2] == leading:
        return one
    batch, heads = (math.prod(leading[:-1]), leading[-1]) if leading else (1, 1)
    return one.expand(*leading, *one.shape[-2:]).reshape(batch, heads, *one.shape[-2:])


def _four_scores(one: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    """The mask with four dimensions. Dimensions of size 1 keep that size if possible."""
    if one.dim() == 4 and len(leading) == 2:
        return one
    rank = max(len(leading), 1)
    one = one.reshape((1,) * (rank + 2 - one.dim()) + tuple(one.shape))
    batch = one.shape[:rank - 1]
    if math.prod(batch) == 1:
        return one.reshape(1, *one.shape[-3:])
    return one.expand(*leading[:-1], *one.shape[-3:]).reshape(math.prod(leading[:-1]), *one.shape[-3:])
