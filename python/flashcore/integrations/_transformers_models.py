"""Decides which models of transformers FlashCore supports, and under which of its two names.

A model reads the name of the attention from its config and branches on that name. Three cases matter:
- Some attention modules never call the attention function, but would add its boolean masks to scores.
  Such a model is rejected.
- transformers assumes that a name with "flash" in it is a build of flash_attn: hub kernels, no chunks,
  sometimes 2-D masks. Most models therefore run under PLAIN_NAME, even if NAME was requested.
- Some models need a name with "flash" in it. They pass varlen sequences to such names only, or have
  their own module that calls flash_attn.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

NAME = "flashcore"
PLAIN_NAME = "fc_attention"

# Configs of models whose attention modules call flash_attn's functions and expect its masks.
_CALL_FLASH_ATTN = {"falcon", "gptj", "semantic", "coarse_acoustics", "fine_acoustics"}
# Attention modules whose mask does not come from the mask function of transformers.
_MAKE_THEIR_MASK = re.compile(
    "MultiscaleDeformableAttention$|MHAttentionMap$|^LongT5|^PegasusXGlobalLocal|^Gemma3nAudio|"
    "^EsmFold2RowAttentionPooling$")

# Models whose decoder modules have is_causal=False and rely on the mask instead.
_FORGET_IS_CAUSAL = {"pegasus_x"}
# Config classes of models that support eager masks only.
_want_eager_masks: set[type] = set()


def calls_flash_attn(config: Any) -> bool:
    return getattr(config, "model_type", None) in _CALL_FLASH_ATTN


def wants_eager_masks(config: Any) -> bool:
    """True if the model needs additive masks that are never replaced by is_causal."""
    return type(config) in _want_eager_masks


def watch(attend: Callable[..., Any]) -> None:
    """Hooks PreTrainedModel, so that every model that uses one of our names is checked."""
    from transformers import PreTrainedModel
    wanted = ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation", "post_init")
    missing = [name for name in wanted if not hasattr(PreTrainedModel, name)]
    if missing:
        import transformers
        raise NotImplementedError(f"transformers is {transformers.__version__}, whose PreTrainedModel has "
                                  f"no {missing[0]}: FlashCore cannot tell which models it supports; "
                                  "wanted 5.17 to 5.23")
    if getattr(PreTrainedModel.post_init, "knows_flashcore", False):
        return
    check, correct, post_init = (getattr(PreTrainedModel, name) for name in wanted)

    def checked(self: Any, attn_implementation: str | None, *arguments: Any, **options: Any) -> Any:
        return check(self, name_for(self, attn_implementation, attend), *arguments, **options)

    def corrected(self: Any, requested_attention: str | None, is_init_check: bool = False) -> Any:
        name = correct(self, name_for(self, requested_attention, attend), is_init_check)
        if not is_init_check:  # the modules do not exist yet at an init check
            refuse_own_attention(self, {id(self.config): name}, name)
        return name

    def finished(self: Any) -> None:
        post_init(self)
        refuse_own_attention(self, {}, None)

    setattr(finished, "knows_flashcore", True)
    PreTrainedModel._check_and_adjust_attn_implementation = checked
    PreTrainedModel.get_correct_attn_implementation = corrected
    PreTrainedModel.post_init = finished


def name_for(model: Any, name: str | None, attend: Callable[..., Any]) -> str | None:
    """The name under which the model runs. Names that are not ours are returned unchanged."""
    if name not in (NAME, PLAIN_NAME):
        return name
    if model.config.model_type == "gpt_neo":
        _add_gpt_neo(attend)
    if calls_flash_attn(model.config):
        _add_flash_attn(sys.modules[type(model).__module__])
    if (model.config.model_type in _FORGET_IS_CAUSAL
            or not (model._supports_sdpa or model._supports_flash_attn or model._supports_flex_attn)):
        _want_eager_masks.add(type(model.config))
    chosen = NAME if _wants_flash(model) else PLAIN_NAME
    _refuse_table(type(model), chosen)
    return chosen


def _wants_flash(model: Any) -> bool:
    if calls_flash_attn(model.config):
        return True
    if getattr(model, "_compatible_flash_implementations", None) is not None:
        return False  # transformers would replace the name by one of these
    if getattr(model.config, "attention_chunk_size", None) is not None:
        return False  # flash_attn has no chunks
    source = _source_of_model(model.__class__)
    return "is_flash_attention_requested(" in source and (
        "cu_seq_lens_q" in source or '_attn_implementation == "sdpa"' in source)


@functools.cache
def _source_of_model(model_class: Any) -> str:
    modules = dict.fromkeys(one.__module__ for one in model_class.__mro__
                            if one.__module__ != "transformers.modeling_utils")
    return "".join(_source(sys.modules.get(name)) for name in modules if "modeling" in name)


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # defined in an interactive session
        return ""


def _tables(module: Any) -> dict[str, dict[str, type]]:
    """The tables in which a model looks up its attention module by the implementation's name."""
    return {name: one for name, one in getattr(module, "__dict__", {}).items()
            if name.endswith("ATTENTION_CLASSES") and isinstance(one, dict)}


def _refuse_table(model_class: type, name: str) -> None:
    for table, classes in _tables(sys.modules.get(model_class.__module__)).items():
        if name not in classes:
            _refuse(model_class, f"its {table} knows only {', '.join(classes)}")


def refuse_own_attention(module: torch.nn.Module, new_names: dict[int, str],
                         name: str | None) -> None:
    """Raises if a module that runs under one of our names computes attention itself. The name comes from
    the module's config, or from the module that contains it. new_names, by the config's id, holds names
    that are not yet in the configs."""
    config = getattr(module, "config", None)
    name = new_names.get(id(config), getattr(config, "_attn_implementation", name))
    if name in (NAME, PLAIN_NAME) and _computes_its_own(module.__class__):
        _refuse(type(module), "it computes attention by itself and would misread the masks")
    for child in module.children():
        refuse_own_attention(child, new_names, name)


@functools.cache
def _computes_its_own(module_class: Any) -> bool:
    name = module_class.__name__
    if not re.search("Attention|Attn", name) or _MAKE_THEIR_MASK.search(name):
        return False
    bases = [one for one in module_class.__mro__ if not one.__module__.startswith(("torch.", "builtins"))]
    if any(one.__module__.startswith("flashcore.") for one in bases):
        return False
    source = "".join(_source(one) for one in bases)
    if "ALL_ATTENTION_FUNCTIONS" in source or "_flash_attention_forward(" in source:
        return False
    takes_mask = any("mask" in one for one in inspect.signature(module_class.forward).parameters)
    return takes_mask and bool(re.search(r"oftmax\(|scaled_dot_product_attention\(", source))


def _refuse(where: type, why: str) -> None:
    raise ValueError(f"{where.__name__} cannot use attn_implementation=\"{NAME}\": {why}. Use \"eager\", or "
                     "for a part of a model attn_implementation={\"\": \"" + NAME + "\", "
                     "\"name_of_sub_config\": \"eager\"}")


def _add_flash_attn(module: Any) -> None:
    """Adds two functions that a modelling file imports only if flash_attn is installed, and our name to
    its table of attention modules."""
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.modeling_flash_attention_utils import _flash_attention_forward
    for function in (get_target_dtype, _flash_attention_forward):
        if not hasattr(module, function.__name__):
            setattr(module, function.__name__, function)
    for classes in _tables(module).values():
        classes.setdefault(NAME, classes["flash_attention_2"])


def _add_gpt_neo(attend: Callable[..., Any]) -> None:
    """Adds an attention module for GPT-Neo, whose own module for flash_attn ignores the windows of local
    layers."""
    from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
    if PLAIN_NAME in gpt_neo.GPT_NEO_ATTENTION_CLASSES:
        return

    class GPTNeoFlashCoreAttention(gpt_neo.GPTNeoSelfAttention):  # type: ignore[misc]
        def _attn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  attention_mask: torch.Tensor | None = None, *unused: Any) -> tuple[torch.Tensor, None]:
            q_len, kv_len = query.shape[2], key.shape[2]
            if attention_mask is None:
                attention_mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(
                    kv_len - q_len if q_len == 1 else 0)[None, None]
            if self.attention_type == "local":
                # A query's position is the last key that it sees. A static cache has keys after it.
                row = torch.arange(kv_len, device=query.device)
                position = torch.where(attention_mask, row, 0).amax(-1, keepdim=True)
                attention_mask = attention_mask & (row > position - self.config.window_size)
            out, _ = attend(self, query.to(value.dtype), key.to(value.dtype), value, attention_mask,
                            scaling=1.0, dropout=self.attn_dropout.p if self.training else 0.0)
            return out.transpose(1, 2), None

    gpt_neo.GPT_NEO_ATTENTION_CLASSES[PLAIN_NAME] = GPTNeoFlashCoreAttention
