"""FlashCore from Python: attention on arrays of NumPy, torch, CuPy and JAX.

    import flashcore
    out = flashcore.attention(q, k, v, causal=True)
    print(flashcore.explain(q, k, v, causal=True))

Also here: BlockMask; attention_backward; merge, append; quantize, dequantize (8-bit q, k and v); verify; for torch sdpa, flash_attn (the
calls of that package) and ops (torch.ops.flashcore); integrations for torch's own attention,
transformers and jax.jit; distributed (one attention over many ranks); python3 -m flashcore.bench.
docs/python.md describes all of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flashcore._attention import attention, explain
from flashcore._backward import attention_backward, explain_backward
from flashcore._core.library import CudaError, Library, StaleLibraryError, load
from flashcore._core.providers import provider_of
from flashcore._core.version import VERSION
from flashcore.block_mask import BlockMask
from flashcore.cache import append, merge
from flashcore.quant import Quantized, dequantize, quantize

if TYPE_CHECKING:
    from flashcore._torch.sdpa import sdpa
    from flashcore._verify import Report as Report, verify as verify

__version__ = VERSION
__all__ = ["BlockMask", "CudaError", "Library", "Quantized", "StaleLibraryError", "append", "attention",
           "attention_backward", "dequantize", "explain", "explain_backward", "load", "merge", "quantize", "sdpa", "__version__"]

# Imported on first use: these modules need a framework, or would double the import time.
_LAZY_MODULES = {"flash_attn": "flashcore.flash_attn", "ops": "flashcore.ops",
                 "integrations": "flashcore.integrations",
                 "distributed": "flashcore.distributed"}
_LAZY_NAMES = {"Report": "flashcore._verify", "verify": "flashcore._verify"}


def __getattr__(name: str) -> Any:
    if name == "sdpa":
        return provider_of("torch").sdpa.sdpa
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'flashcore' has no attribute '{name}'")
    return importlib.import_module(_LAZY_MODULES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), "sdpa", *_LAZY_MODULES, *_LAZY_NAMES})
