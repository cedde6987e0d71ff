"""flashcore.sdpa: torch's scaled_dot_product_attention, computed by FlashCore."""

import torch

from flashcore._attention import attention


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
         attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention with the same arguments and meaning.

    is_causal is aligned top-left, as in torch: query i sees the keys 0 to i, whatever the number of
    keys. attn_mask is boolean (False hides the key) or is added to the scores. A row that sees no
    key gives 0. dropout_p must be 0.

    >>> import torch, flashcore
    >>> q = torch.randn(1, 2, 3, 8)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(flashcore.sdpa(q, q, q, is_causal=True), expected, atol=1e-5)
    True
    """
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: given together with is_causal; put both into the mask")
    leading = query.shape[:-2]
    query, key, value = (_four(one) for one in (query, key, value))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"key: has {key.shape[1]} heads, query has {query.shape[1]}; give as many, "
                         "or enable_gqa=True")
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dim() > 4:
            attn_mask = _four(attn_mask.expand(*leading, *attn_mask.shape[-2:]))
        elif attn_mask.dim() == 3:  # beside a three-dimensional query, whose batch is the first
            attn_mask = attn_mask.unsqueeze(1 if len(leading) == 1 else 0)
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    out: torch.Tensor = attention(query, key, value, causal=is_causal, scale=scale, bias=bias, mask=mask,
                                  q_start=0 if is_causal and query.shape[2] != key.shape[2] else None)
    return out if len(leading) == 2 else out.reshape(*leading, *out.shape[-2:])


def _four(one: torch.Tensor) -> torch.Tensor:
    """[..., len, dim] as [batch, heads, len, dim]."""
    if one.dim() == 4:
        return one
    if one.dim() < 2:
        raise ValueError(f"query, key, value: one has {one.dim()} dimensions; wanted 2 or more")
    if one.dim() == 3:
        return one.unsqueeze(1)
    return one.reshape(-1, *one.shape[-3:]) if one.dim() > 4 else one[None, None]
