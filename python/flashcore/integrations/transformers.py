"""attn_implementation="flashcore" for models of transformers:

    import flashcore.integrations.transformers
    flashcore.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashcore")

register() registers the attention function and its mask function. Without the mask function,
transformers would drop padding and windows silently. A model that uses the masks but never calls the
attention function is rejected; see _transformers_models.py.
"""

from typing import Any

import torch

from flashcore._attention import attention
from flashcore._core.options import NO_WINDOW
from flashcore._torch.dispatch import to_rows
from flashcore.compat import flash_attn
from flashcore.integrations import _transformers_models as models

NAME = models.NAME
PLAIN_NAME = models.PLAIN_NAME


def register() -> None:
    """Registers attn_implementation="flashcore" with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    for name in (NAME, PLAIN_NAME):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, make_mask)
    models.watch(attend)
    _answer_for_flash()


def make_mask(*arguments: Any, config: Any = None, **options: Any) -> torch.Tensor | None:
    """Makes the mask for attend(). It is boolean, except for models that need eager masks, and for
    models that call flash_attn themselves, which get that package's masks."""
    from transformers import masking_utils
    make: Any = masking_utils.sdpa_mask
    if models.calls_flash_attn(config):
        make = masking_utils.flash_attention_mask
    elif models.wants_eager_masks(config):
        make = masking_utils.eager_mask
    made: torch.Tensor | None = make(*arguments, config=config, **options)
    return made


def _answer_for_flash() -> None:
    """Provides the functions of flashcore.flash_attn to transformers, which assumes that every name with
    "flash" in it is a build of flash_attn and looks up the functions of that package."""
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


# Options that the usual call does not have.
_SPECIAL = frozenset(("head_mask", "cache", "output_attentions", "cu_seq_lens_q", "indices",
                      "block_indices"))


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
           position_bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
           **options: Any) -> tuple[torch.Tensor, None]:
    """The attention function. query, key and value are [batch, heads, len, dim]; the result is
    [batch, len, heads, dim]. s_aux has one sink per head, sinks one per query, [batch, heads, len, 1]."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if (not torch.compiler.is_compiling() and (q_len == kv_len or q_len == 1) and not dropout > 0.0
            and attention_mask is s_aux is position_bias is sinks is None and _SPECIAL.isdisjoint(options)):
        causal = q_len > 1 and bool(is_causal)
        window = (sliding_window - 1, -1) if causal and sliding_window else NO_WINDOW
        made = to_rows(query, key, value, causal, window, scaling, softcap or 0.0)
        if made is not None:
            return made, None
    _refuse(dropout, options)
    common: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, return_lse=sinks is not None,
                                  sinks=None if s_aux is None else s_aux.float())
    if options.get("cu_seq_lens_q") is not None:
        if attention_mask is None and position_bias is None and sinks is None:
            return _varlen(query, key, value, bool(is_causal), sliding_window, common, options), None
        if attention_mask is None:
            attention_mask = _varlen_mask(query, key, bool(is_causal), sliding_window, options)
        else:  # the mask already includes causality and the window
            attention_mask = _join(attention_mask, _varlen_mask(query, key, False, None, options))
    attention_mask = _selected_keys(module, attention_mask, query, kv_len, options)
    # Without a mask, transformers expects top-left causal alignment, and a single query to see all keys.
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
    # A mask already includes the window. Without a mask there are too few keys for a window to matter.
    window = (sliding_window - 1, -1) if causal and sliding_window else (-1, -1)
    found = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                      causal=causal, window=window, bias=bias, mask=mask, layout="bshd",
                      q_start=0 if causal and q_len != kv_len else None, **common)
    if sinks is None:
        return found.contiguous(), None
    out, lse = found
    # Each row's denominator gets the additional term exp(sink).
    share = torch.sigmoid(lse - sinks.squeeze(-1).float()).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype).contiguous(), None


def _join(mask: torch.Tensor | None, keep: torch.Tensor) -> torch.Tensor:
    """The mask, boolean or additive, that also hides the keys where `keep` is False."""
    if mask is None:
        return keep
    if mask.dtype == torch.bool:
        return mask & keep
    return mask.masked_fill(~keep, torch.finfo(mask.dtype).min)


def _selected_keys(module: torch.nn.Module, mask: torch.Tensor | None, query: torch.Tensor,
                   kv_len: int, options: dict[str, Any]) -> torch.Tensor | None:
    """The mask combined with the keys that an indexer selects. Sparse models combine both themselves only
    for "eager" and "sdpa"; other implementations get the indices of the keys or key blocks."""
    indices, block_indices = options.get("indices"), options.get("block_indices")
    if indices is not None:
        if mask is None:
            raise NotImplementedError("indices: is given without an attention mask; wanted a 4-D mask")
        keep = torch.zeros((*indices.shape[:2], kv_len), dtype=torch.bool, device=query.device)
        return _join(mask[..., :kv_len], keep.scatter(-1, indices.long(), True).unsqueeze(1))
    if block_indices is not None:
        positions = options.get("position_ids")
        if positions is None:
            positions = torch.arange(kv_len - query.shape[2], kv_len, device=query.device)
        build: Any = getattr(module, "indexer").build_block_mask
        made = build(block_indices, mask, kv_len, query.dtype, query.device,
                     positions.expand(query.shape[0], -1))
        return torch.eq(made, 0)
    return mask


def _windows(causal: bool, sliding_window: int | None) -> tuple[int, int]:
    if not sliding_window:
        return -1, -1
    return sliding_window - 1, -1 if causal else sliding_window - 1


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool,
            sliding_window: int | None, common: dict[str, Any],
            options: dict[str, Any]) -> torch.Tensor:
    """Varlen sequences in a batch of one, as vision models pass them."""
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    out: torch.Tensor = attention(
        q, k, v, causal=causal, window=_windows(causal, sliding_window),
        cu_seqlens_q=options["cu_seq_lens_q"].int(), cu_seqlens_k=options["cu_seq_lens_k"].int(),
        max_q_len=int(options.get("max_length_q") or 0),
        max_kv_len=int(options.get("max_length_k") or 0), **common)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _varlen_mask(query: torch.Tensor, key: torch.Tensor, causal: bool, sliding_window: int | None,
                 options: dict[str, Any]) -> torch.Tensor:
    """A mask that separates varlen sequences. Varlen kernels take neither mask nor bias."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"cu_seq_lens_q: is given with a mask or a bias for a batch of "
                                  f"{query.shape[0]}, {query.shape[2]} queries and {key.shape[2]} keys; "
                                  "wanted a batch of 1 and as many keys as queries")
    cu_q, cu_k = (options[name].to(query.device).long() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    q_row = torch.arange(query.shape[2], device=query.device)
    k_row = torch.arange(key.shape[2], device=query.device)
    q_sequence = torch.bucketize(q_row, cu_q[1:], right=True)
    k_sequence = torch.bucketize(k_row, cu_k[1:], right=True)
    # Positions relative to the last key of a sequence, with which its last query is aligned.
    ends = torch.cat((cu_q[1:], cu_q[-1:])), torch.cat((cu_k[1:], cu_k[-1:]))
    distance = (q_row - ends[0][q_sequence])[:, None] - (k_row - ends[1][k_sequence])[None]
    keep = q_sequence[:, None] == k_sequence[None]
    left, right = _windows(causal, sliding_window)
    if causal:
        keep &= distance >= 0
    if left >= 0:
        keep &= distance <= left
    if right >= 0:
        keep &= distance >= -right
    return keep[None, None]
