"""Drop-in for the flash_attn package: the same functions with the same order of arguments.

    from flashcore.flash_attn import flash_attn_func

Tensors are [batch, len, heads, dim], and causal is aligned to the last key. An argument that FlashCore
does not support raises; no argument is ignored. Results are always deterministic.
"""

from collections.abc import Sequence
from typing import Any

import torch

from flashcore._attention import attention
from flashcore._core import names
from flashcore._core.scalars import integer
from flashcore.cache import append

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

# FlashCore's argument names -> the names in this interface.
_NAMES = {"scale": "softmax_scale", "window": "window_size", "max_q_len": "max_seqlen_q",
          "max_kv_len": "max_seqlen_k", "return_lse": "return_attn_probs"}
_CACHE_NAMES = {"k_new": "k", "v_new": "v", "k": "k_cache", "v": "v_cache", "scale": "softmax_scale",
                "seqused_k": "cache_seqlens", "window": "window_size",
                "return_lse": "return_softmax_lse"}


def _pair(window_size: Sequence[int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}; wanted (left, right)") from None
    return left, right


def _refuse(**arguments: tuple[Any, Any, str]) -> None:
    """Raises if an unsupported argument differs from its neutral value."""
    for name, (value, neutral, instead) in arguments.items():
        if value is not neutral and value != neutral:
            raise NotImplementedError(f"{name}: is given, which FlashCore does not support; {instead}")


def _no_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0.0")


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False,
                    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """Returns out, or with return_attn_probs (out, lse, None). Without dropout there is no dropout mask."""
    _no_dropout(dropout_p)
    found = names.call(_NAMES, attention, q, k, v, causal=causal, window=_pair(window_size),
                        scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes,
                        layout="bshd", return_lse=return_attn_probs)
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                           cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False,
                           block_table: torch.Tensor | None = None) -> Any:
    """Attention on varlen sequences. With block_table, k and v are paged and cu_seqlens_k gives the lengths."""
    _no_dropout(dropout_p)
    lengths: dict[str, Any] = dict(cu_seqlens_k=cu_seqlens_k, max_kv_len=max_seqlen_k)
    if block_table is not None:
        lengths = dict(block_table=block_table, seqused_k=cu_seqlens_k[1:] - cu_seqlens_k[:-1])
    found = names.call(_NAMES, attention, q, k, v, cu_seqlens_q=cu_seqlens_q,
                        max_q_len=max_seqlen_q, causal=causal, window=_pair(window_size),
                        scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes,
                        return_lse=return_attn_probs, **lengths)
    return (*found, None) if return_attn_probs else found


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                            k: torch.Tensor | None = None, v: torch.Tensor | None = None,
                            rotary_cos: torch.Tensor | None = None,
                            rotary_sin: torch.Tensor | None = None,
                            cache_seqlens: torch.Tensor | int | None = None,
                            cache_batch_idx: torch.Tensor | None = None,
                            cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False,
                            window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True,
                            alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """Attention over a KV cache, [batch, capacity, heads, dim] or paged. If k and v are given, they are
    first written into the cache at cache_seqlens. They stay there, past the keys in use, if the
    attention call then raises."""
    _refuse(rotary_cos=(rotary_cos, None, "rotate q and k before the call"),
            rotary_sin=(rotary_sin, None, "rotate q and k before the call"),
            rotary_interleaved=(rotary_interleaved, True, "rotate q and k before the call"),
            cache_batch_idx=(cache_batch_idx, None, "index the cache, or use block_table"),
            cache_leftpad=(cache_leftpad, None, "start the sequences at the cache's beginning"))
    if not isinstance(q, torch.Tensor) or q.dim() == 0:
        raise TypeError("q: wanted a torch.Tensor [batch, len, heads, dim]")
    batch = q.shape[0]
    if isinstance(cache_seqlens, int):
        cache_seqlens = integer("cache_seqlens", cache_seqlens, 32)
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if (k is None) != (v is None):
        raise ValueError("k and v: only one of them is given; wanted both or neither")
    if k is not None:
        if cache_seqlens is None:
            raise ValueError("cache_seqlens: not given; it says where new k and v are written")
        names.call(_CACHE_NAMES, append, k, v, k_cache, v_cache, cache_seqlens,
                    block_table=block_table, layout="bshd")
        cache_seqlens = cache_seqlens + k.shape[1]
    return names.call(_CACHE_NAMES, attention, q, k_cache, v_cache, causal=causal,
                       window=_pair(window_size), scale=softmax_scale, softcap=softcap,
                       alibi_slopes=alibi_slopes, seqused_k=cache_seqlens, block_table=block_table,
                       layout="bshd", num_splits=num_splits, return_lse=return_softmax_lse)
