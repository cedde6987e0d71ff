"""Written by scripts/lib/gen_options from src/api/options.def and
include/flashcore/flashcore.h. Do not edit."""

from typing import Any

from flashcore._core.scalars import flag, integer, number, one_of, word

# Fields of flashcore_params and their C types, in order.
PARAMS = (("struct_size", "size_t"), ("q", "const flashcore_tensor*"),
          ("k", "const flashcore_tensor*"), ("v", "const flashcore_tensor*"),
          ("out", "const flashcore_tensor*"), ("lse", "const flashcore_tensor*"),
          ("bias", "const flashcore_tensor*"), ("mask", "const flashcore_tensor*"),
          ("alibi_slopes", "const flashcore_tensor*"), ("sinks", "const flashcore_tensor*"),
          ("cu_seqlens_q", "const flashcore_tensor*"),
          ("cu_seqlens_k", "const flashcore_tensor*"), ("used_k", "const flashcore_tensor*"),
          ("block_table", "const flashcore_tensor*"), ("q_start", "const flashcore_tensor*"),
          ("k_start", "const flashcore_tensor*"), ("window_left", "int64_t"),
          ("window_right", "int64_t"), ("max_q_len", "int64_t"), ("max_kv_len", "int64_t"),
          ("scale", "double"), ("softcap", "double"), ("has_scale", "int32_t"),
          ("causal", "int32_t"), ("partial", "int32_t"), ("checked", "int32_t"),
          ("num_splits", "int32_t"), ("reproducibility", "int32_t"), ("threads", "int32_t"),
          ("layout", "int32_t"), ("kernel", "const char*"), ("workspace", "void*"),
          ("workspace_bytes", "size_t"), ("stream", "void*"),
          ("q_scale", "const flashcore_tensor*"), ("k_scale", "const flashcore_tensor*"),
          ("v_scale", "const flashcore_tensor*"), ("q_scale_block", "int64_t"),
          ("kv_scale_block", "int64_t"), ("workspace_header", "void*"),
          ("cancel", "const int32_t*"), ("mask_blocks", "const flashcore_tensor*"),
          ("mask_bits", "const flashcore_tensor*"))
# Optional arrays in the order in which they are passed around: (field of flashcore_params,
# Python keyword).
ARRAYS = (("sinks", "sinks"), ("alibi_slopes", "alibi_slopes"), ("bias", "bias"),
          ("mask", "mask"), ("q_start", "q_start"), ("k_start", "k_start"),
          ("cu_seqlens_q", "cu_seqlens_q"), ("cu_seqlens_k", "cu_seqlens_k"),
          ("used_k", "seqused_k"), ("block_table", "block_table"))
# The other keywords, in the order in which they are passed around.
OPTIONS = ("causal", "window", "scale", "softcap", "layout", "num_splits", "reproducibility",
           "return_lse", "max_q_len", "max_kv_len", "partial", "checked", "kernel")
# Options that define the result. A backward pass must know them all.
SCORE_OPTIONS = ("causal", "window_left", "window_right", "scale", "softcap")
CHOICES = {"layout": {"bhsd": 0, "bshd": 1},
           "reproducibility": {"deterministic": 0, "batch_invariant": 1}}
# Arguments of the torch ops.
SCHEMA = ("bool causal=False", "SymInt window_left=-1", "SymInt window_right=-1",
          "float? scale=None", "float softcap=0.0", 'str layout="bhsd"', "SymInt num_splits=0",
          'str reproducibility="deterministic"', "SymInt max_q_len=0", "SymInt max_kv_len=0",
          "bool checked=False", "str? kernel_id=None")


def normalize_options(causal: Any, window: Any, scale: Any, softcap: Any, layout: Any,
                      num_splits: Any, reproducibility: Any, return_lse: Any, max_q_len: Any,
                      max_kv_len: Any, partial: Any, checked: Any,
                      kernel: Any) -> tuple[Any, ...]:
    """Converts the options to plain Python values. Raises if a value has the wrong type."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window is {window!r}; wanted (left, right)") from None
    return (flag("causal", causal),
            (integer("window_left", left), integer("window_right", right)),
            None if scale is None else number("scale", scale), number("softcap", softcap),
            one_of("layout", layout, CHOICES["layout"]), integer("num_splits", num_splits, 32),
            one_of("reproducibility", reproducibility, CHOICES["reproducibility"]),
            flag("return_lse", return_lse), integer("max_q_len", max_q_len),
            integer("max_kv_len", max_kv_len), flag("partial", partial),
            flag("checked", checked),
            None if kernel is None else word("kernel", kernel, "the id of a kernel"))


def set_options(params: Any, causal: Any, window: Any, scale: Any, softcap: Any, layout: Any,
                num_splits: Any, reproducibility: Any, return_lse: Any, max_q_len: Any,
                max_kv_len: Any, partial: Any, checked: Any, kernel: Any) -> None:
    """Writes normalized options into a params struct."""
    params.causal = causal
    params.window_left, params.window_right = window
    params.has_scale = scale is not None
    params.scale = 0.0 if scale is None else scale
    params.softcap = softcap
    params.layout = CHOICES["layout"][layout]
    params.num_splits = num_splits
    params.reproducibility = CHOICES["reproducibility"][reproducibility]
    params.max_q_len = max_q_len
    params.max_kv_len = max_kv_len
    params.partial = partial
    params.checked = checked
    params.kernel = None if kernel is None else kernel.encode()


def to_schema(options: tuple[Any, ...]) -> dict[str, Any]:
    """Options as keyword arguments of the torch ops, without partial."""
    (causal, window, scale, softcap, layout, num_splits, reproducibility, return_lse, max_q_len,
     max_kv_len, partial, checked, kernel) = options
    window_left, window_right = window
    return {"causal": causal, "window_left": window_left, "window_right": window_right,
            "scale": scale, "softcap": softcap, "layout": layout, "num_splits": num_splits,
            "reproducibility": reproducibility, "max_q_len": max_q_len, "max_kv_len": max_kv_len,
            "checked": checked, "kernel_id": kernel}


def from_schema(causal: Any = False, window_left: Any = -1, window_right: Any = -1,
                scale: Any = None, softcap: Any = 0.0, layout: Any = "bhsd", num_splits: Any = 0,
                reproducibility: Any = "deterministic", max_q_len: Any = 0, max_kv_len: Any = 0,
                checked: Any = False, kernel_id: Any = None, partial: Any = False,
                return_lse: Any = False) -> tuple[Any, ...]:
    """Keyword arguments of the torch ops as options."""
    return (causal, (window_left, window_right), scale, softcap, layout, num_splits,
            reproducibility, return_lse, max_q_len, max_kv_len, partial, checked, kernel_id)
