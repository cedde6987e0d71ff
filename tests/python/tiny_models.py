"""Every family of transformers at tiny size, from its config class alone, without downloads.

A family is (kind, model type): "causal", "encoder", "seq2seq" or "vision"."""

import copy
import inspect
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCABULARY = 64
LAYERS = 4
IMAGE = 32
KINDS = {
    "causal": (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
    "seq2seq": (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
    "encoder": (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM"),
    "vision": (modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
               "AutoModelForImageClassification"),
}

# Values of config attributes, if the config has them.
_SIZES = (
    (64, "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim word_embed_proj_dim model_dim "
        "hidden_dim decoder_hidden_size rnn_hidden_size lru_width hidden_size_per_layer_input "
        "attention_hidden_size"),
    (96, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner ffn_hidden_size "
        "shared_intermediate_size dense_intermediate_size shared_expert_intermediate_size "
        "intermediate_size_mlp expert_intermediate_size mlp_dim"),
    (32, "moe_intermediate_size q_lora_rank o_lora_rank index_head_dim mamba_d_head mamba_head_dim "
        "linear_key_head_dim linear_value_head_dim moe_shared_expert_intermediate_size"),
    (16, "head_dim kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv attention_head_dim "
        "global_head_dim swa_head_dim swa_v_head_dim mamba_d_state state_size ssm_state_size "
        "kv_channels patch_size mamba_expand_dim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
            "num_decoder_layers num_encoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
       "num_local_experts num_experts n_routed_experts moe_num_experts index_n_heads linear_num_value_heads "
       "swa_num_attention_heads mamba_n_heads"),
    (2, "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok moe_k moe_topk num_experts_per_token "
       "linear_num_key_heads num_global_key_value_heads swa_num_key_value_heads index_topk_blocks o_groups"),
    (1, "n_group topk_group n_groups mamba_n_groups num_expert_group"),
    (8, "sliding_window window_size attention_window index_topk local_attention attention_chunk_size "
       "block_size local_radius"),
    (128, "max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions n_ctx "
         "max_sequence_length max_seq_length max_encoder_position_embeddings"),
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size "
                "output_vocab_size input_vocab_size"),
    (IMAGE, "image_size"),
    (0, "pad_token_id"),
    (0.2, "initializer_range init_std"),
)
_TOKENS = {"bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": None, "sep_token_id": 2,
           "cls_token_id": 1, "mask_token_id": 3, "forced_eos_token_id": None,
           "forced_bos_token_id": None, "suppress_tokens": None, "begin_suppress_tokens": None}

# Values that single families need in addition.
_SPECIAL = {
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "is_decoder": True,
                 "attn_layers": ["local", "lsh"] * 2, "lsh_attn_chunk_length": 8,
                 "local_attn_chunk_length": 8},
    "falcon": {"num_kv_heads": 4},
    "gptj": {"rotary_dim": 8}, "codegen": {"rotary_dim": 8},
    "longformer": {"attention_window": 8}, "led": {"attention_window": 8},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "num_hidden_layers": 2},
    "xlnet": {"d_inner": 96}, "prophetnet": {"num_encoder_attention_heads": 4,
                                             "num_decoder_attention_heads": 4},
    "funnel": {"d_head": 16, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_inner": 96},
    # Activations of random weights without norms exceed the precision of float32.
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64, "embedding_size": 64,
                   "normalization_type": "layer_norm"},
    "modernbert": {"local_attention": 8}, "modernbert-decoder": {"local_attention": 8},
    "llama4_text": {"attention_chunk_size": 8, "no_rope_layers": [1, 1, 1, 0],
                                  "interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16}, "falcon_h1": {"mamba_d_ssm": 128},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1}, "esmc": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1}, "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
}


def families():
    """Sorted [(kind, model type)]. A model type has the first kind that lists it."""
    found, seen = [], set()
    for kind, (names, _) in KINDS.items():
        for name in sorted(names):
            if name not in seen:
                seen.add(name)
                found.append((kind, name))
    return found


def _has(config, name, value):
    try:
        default = getattr(config, name)
    except AttributeError:
        return False
    except Exception:  # transformers raises for values that differ by layer
        return True
    return not isinstance(default, (list, tuple)) or isinstance(value, (list, tuple))


def _values(defaults, extra):
    values = {}
    for value, names in _SIZES:
        values |= {name: value for name in names.split()}
    values |= _TOKENS
    made = {name: value for name, value in values.items() if _has(defaults, name, value)}
    if "kv_lora_rank" in made and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]  # latent attention has no groups
    for name, value in vars(defaults).items():
        if "dropout" in name and isinstance(value, float):
            made[name] = 0.0
        elif name.startswith(("mlp_layer_types", "layer_types")) and isinstance(value, (list, tuple)):
            # Cycle through all kinds of layers.
            kinds = list(dict.fromkeys(value))
            made[name] = (kinds * LAYERS)[:LAYERS]
    return made | extra


def tiny_config(model_type):
    """A small config of the family. Exceptions of its class propagate."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    defaults = config_class()
    extra = _SPECIAL.get(model_type, {})
    made = _values(defaults, extra)
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(defaults, name, None)
        if part is not None:
            made[name] = tiny_part(part)
    for name in ("encoder", "decoder"):
        if isinstance(getattr(defaults, name, None), transformers.PreTrainedConfig):
            made[name] = tiny_part(getattr(defaults, name))
    accepted = inspect.signature(config_class.__init__).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
        made = {name: value for name, value in made.items() if name in accepted}
    return config_class(**made)


def tiny_part(config):
    try:
        return tiny_config(config.model_type)
    except (KeyError, TypeError):
        return type(config)(**_values(config, {}))


def build(kind, config, implementation, state=None):
    """The model with one attention implementation, with random weights or those of `state`."""
    auto = getattr(transformers, KINDS[kind][1])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(copy.deepcopy(config), attn_implementation=implementation)
    model.float().eval()
    if state is not None:
        model.load_state_dict(state)
        return model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # randomize constants too, such as sinks and biases
        for one in model.parameters():
            if one.numel() and one.is_floating_point() and float(one.max()) == float(one.min()):
                one.add_(0.1 * torch.randn(one.shape, generator=generator))
    return model
