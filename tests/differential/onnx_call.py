"""The ONNX operator Attention (opsets 23 to 25) by calls of FlashCore, on NumPy arrays."""

import common  # noqa: F401: finds the package
import numpy as np

import flashcore

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
ATTRIBUTES = ("is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap",
              "softmax_precision", "left_window_size", "right_window_size")


def as_4d(one, heads):
    """View of [batch, len, heads * dim] as [batch, heads, len, dim]."""
    return one if one.ndim == 4 else one.reshape(*one.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def appended(past, new):
    """K and V of the cache: the past keys, then the new keys."""
    batch, _, length, _ = past[0].shape
    caches = []
    for one, other in zip(past, new):
        shape = (batch, one.shape[1], length + other.shape[2], one.shape[3])
        caches.append(np.zeros(shape, one.dtype))
        caches[-1][:, :, :length] = one
    flashcore.append(*new, *caches, np.full(batch, length, np.int32))
    return caches


def masked(mask, kv_len):
    """{"bias" or "mask": the array}. Keys past the end of a shorter mask are hidden."""
    boolean = mask.dtype == np.bool_
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, kv_len - mask.shape[-1])]
    mask = np.pad(mask, missing, constant_values=False if boolean else -np.inf)
    return {"mask" if boolean else "bias": mask}


def attend(inputs, attributes, attention=flashcore.attention):
    """{output: array}, without qk_matmul_output, which FlashCore never stores."""
    unknown = set(attributes) - set(ATTRIBUTES)
    if unknown:
        raise NotImplementedError(f"attributes {', '.join(sorted(unknown))}")
    q, k, v = (inputs[name] for name in "QKV")
    flat = q.ndim == 3
    q, (k, v) = as_4d(q, attributes.get("q_num_heads")), (
        as_4d(one, attributes.get("kv_num_heads")) for one in (k, v))
    past_len = 0
    if "past_key" in inputs:
        past_len = inputs["past_key"].shape[2]
        k, v = appended((inputs["past_key"], inputs["past_value"]), (k, v))
    options = {"causal": bool(attributes.get("is_causal", 0)), "scale": attributes.get("scale"),
               "softcap": attributes.get("softcap", 0.0),
               "window": tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))}
    if "attn_mask" in inputs:
        options |= masked(inputs["attn_mask"], k.shape[2])
    if "nonpad_kv_seqlen" in inputs:  # bottom-right alignment, the default of FlashCore
        options["seqused_k"] = inputs["nonpad_kv_seqlen"].astype(np.int32)
    else:
        options["q_start"] = past_len
    y = attention(q, k, v, **options)
    if flat:
        y = y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)
    return {"Y": y, "present_key": k, "present_value": v}
