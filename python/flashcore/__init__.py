"""FlashCore from Python: attention on arrays of NumPy, torch, CuPy and JAX.

    import flashcore
    out = flashcore.attention(q, k, v, causal=True)
    print(flashcore.explain(q, k, v, causal=True))

Also here: merge, append; quantize, dequantize (8-bit q, k and v); for torch sdpa, flash_attn (the calls of that package) and ops
(torch.ops.flashcore); integrations for torch's own attention, transformers and jax.jit;
python3 -m flashcore.bench. docs/python.md has all of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashcore._attention import attention, explain
from flashcore._cache import append, merge
from flashcore._library import CudaError, Library, StaleLibraryError, load
from flashcore._quant import Quantized, dequantize, quantize
from flashcore._verify import Report as Report, verify as verify

if TYPE_CHECKING:
    from flashcore._sdpa import sdpa

__version__ = "0.1.0"
__all__ = ["CudaError", "Library", "Quantized", "StaleLibraryError", "append", "attention",
           "dequantize", "explain", "load", "merge", "quantize", "sdpa", "__version__"]

# What needs a framework is imported when it is first asked for.
_LATER = {"sdpa": "flashcore._sdpa", "flash_attn": "flashcore.flash_attn", "ops": "flashcore.ops",
          "integrations": "flashcore.integrations"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'flashcore' has no attribute '{name}'")
    module = importlib.import_module(_LATER[name])
    return module.sdpa if name == "sdpa" else module
