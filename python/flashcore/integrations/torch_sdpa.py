"""Replaces the flash backend of torch's scaled_dot_product_attention, so that models need no change:

    import flashcore.integrations.torch_sdpa
    flashcore.integrations.torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashcore")

torch then calls FlashCore for its flash backend, on the CPU and on CUDA, forward and backward. torch
still chooses which calls use the flash backend (on CUDA: no mask, f16 and bf16 only).
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from flashcore._attention import attention
from flashcore._backward import attention_backward

NAME = "flashcore"


def register() -> None:
    """Registers the implementation with torch. It does not activate it."""
    from torch.nn import attention as torch_attention
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise NotImplementedError(f"torch is {torch.__version__}; its attention can be replaced from "
                                  "2.10 on. Call flashcore.sdpa instead")
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Handle)


class _Handle:
    """Keeps the kernels registered with torch's dispatcher until remove()."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        kernels = {"_scaled_dot_product_flash_attention_for_cpu": (_forward_cpu, "CPU"),
                   "_scaled_dot_product_flash_attention_for_cpu_backward": (_backward_cpu, "CPU")}
        if torch.backends.cuda.is_built():
            kernels |= {"_scaled_dot_product_flash_attention": (_forward_cuda, "CUDA"),
                        "_scaled_dot_product_flash_attention_backward": (_backward_cuda, "CUDA")}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, (function, key) in kernels.items():
                self._library.impl(name, function, key)

    def remove(self) -> None:
        self._library._destroy()


def _check(dropout_p: float) -> None:
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0")


def _split_mask(attn_mask: Tensor | None) -> dict[str, Any]:
    if attn_mask is None:
        return {}
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _top_left(q: Tensor, k: Tensor, is_causal: bool) -> int | None:
    return 0 if is_causal and q.shape[2] != k.shape[2] else None


def _forward_cpu(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
                 is_causal: bool = False, *, attn_mask: Tensor | None = None,
                 scale: float | None = None) -> tuple[Tensor, Tensor]:
    _check(dropout_p)
    out, lse = attention(query, key, value, causal=is_causal, scale=scale, return_lse=True,
                         q_start=_top_left(query, key, is_causal), **_split_mask(attn_mask))
    # torch's compiler expects this memory order of dimensions.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _gradients(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
               is_causal: bool, attn_mask: Tensor | None, scale: float | None,
               global_lse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = attention_backward(
        grad_out, query, key, value, out, lse, causal=is_causal, scale=scale, global_lse=global_lse,
        q_start=_top_left(query, key, is_causal), **_split_mask(attn_mask))
    return dq, dk, dv


def _backward_cpu(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                  logsumexp: Tensor, dropout_p: float, is_causal: bool, *,
                  attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, ...]:
    _check(dropout_p)
    grads = _gradients(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
    return tuple(one.transpose(1, 2).contiguous().transpose(1, 2) for one in grads)


def _forward_cuda(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
                  is_causal: bool = False, return_debug_mask: bool = False, *,
                  scale: float | None = None) -> tuple[Any, ...]:
    _check(dropout_p)
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: FlashCore keeps no attention matrix")
    out, lse = attention(query, key, value, causal=is_causal, scale=scale, return_lse=True,
                         q_start=_top_left(query, key, is_causal))
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    return (out, lse, None, None, query.shape[2], key.shape[2], seed,
            torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0))


def _backward_cuda(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                   logsumexp: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
                   max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
                   philox_offset: Tensor, *,
                   scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    _check(dropout_p)
    # The ring of torch's context_parallel passes a part of the keys, and the out and LSE of all.
    return _gradients(grad_out, query, key, value, out, logsumexp, is_causal, None, scale, global_lse=True)
