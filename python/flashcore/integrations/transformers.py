"""attn_implementation="flashcore" for models of transformers:

    import flashcore.integrations.transformers
    flashcore.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashcore")

register() gives transformers the attention and the mask function that belongs to it. Without the
second one it would drop padding and windows silently."""

from typing import Any

import torch

from flashcore import flash_attn
from flashcore._attention import attention

NAME = "flashcore"


def register() -> None:
    """Makes attn_implementation="flashcore" known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _answer_for_flash()


def _answer_for_flash() -> None:
    """transformers takes every name with "flash" in it for a build of flash_attn and looks for that
    package's calls. For ours it finds those of flashcore.flash_attn."""
    from transformers import modeling_flash_attention_utils as utils
    original = getattr(utils, "_lazy_imports", None)
    if original is None or getattr(original, "knows_flashcore", False):
        return

    def lazy_imports(implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if implementation != NAME:
            return original(implementation, *arguments, **options)
        return (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func,
                flash_attn.flash_attn_with_kvcache, utils._pad_input, utils._unpad_input)

    setattr(lazy_imports, "knows_flashcore", True)
    utils._lazy_imports = lazy_imports


def _refuse(dropout: float, options: dict[str, Any]) -> None:
    if dropout > 0.0:
        raise NotImplementedError(f"dropout is {dropout}; FlashCore has no dropout: call "
                                  "model.eval(), or set attention_dropout to 0")
    for name in ("head_mask", "cache"):
        if options.get(name) is not None:
            raise NotImplementedError(f"{name}: is given, which attn_implementation=\"flashcore\" "
                                      "cannot honour; use \"eager\"")
    if options.get("output_attentions"):
        raise NotImplementedError("output_attentions: FlashCore keeps no attention matrix; use "
                                  "attn_implementation=\"eager\"")


def attend(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
           is_causal: bool | None = None, sliding_window: int | None = None,
           softcap: float | None = None, s_aux: torch.Tensor | None = None,
           position_bias: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    """query [batch, heads, len, dim], key and value with their own heads; [batch, len, heads, dim]."""
    _refuse(dropout, options)
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if options.get("cu_seq_lens_q") is not None:
        return _packed(query, key, value, scaling, is_causal, sliding_window, softcap, options), None
    # Where it gives no mask, transformers relies on a causal mask aligned top-left, and on one query
    # seeing everything.
    causal = q_len > 1 and attention_mask is None and bool(is_causal)
    bias = mask = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :kv_len]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    # A mask holds the window already; without a mask the keys are too few for it to matter.
    window = (sliding_window - 1, -1) if causal and sliding_window else (-1, -1)
    out = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal,
                    window=window, scale=scaling, softcap=softcap or 0.0, bias=bias, mask=mask,
                    sinks=None if s_aux is None else s_aux.float(), layout="bshd",
                    q_start=0 if causal and q_len != kv_len else None)
    return out.contiguous(), None


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None,
            causal: bool, sliding_window: int | None, softcap: float | None,
            options: dict[str, Any]) -> torch.Tensor:
    """Sequences one after the other in a batch of one, as vision models give them."""
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    window = (sliding_window - 1, -1) if causal and sliding_window else (-1, -1)
    out = attention(q, k, v, causal=causal, window=window, scale=scaling, softcap=softcap or 0.0,
                    cu_seqlens_q=options["cu_seq_lens_q"].int(),
                    cu_seqlens_k=options["cu_seq_lens_k"].int(),
                    max_q_len=int(options.get("max_length_q") or 0),
                    max_kv_len=int(options.get("max_length_k") or 0))
    return out.unflatten(0, (query.shape[0], query.shape[2]))
