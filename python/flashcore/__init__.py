"""FlashCore from Python: attention on arrays of NumPy, torch, CuPy and JAX.

    import flashcore
    out = flashcore.attention(q, k, v, causal=True)
    print(flashcore.explain(q, k, v, causal=True))

    python3 -m flashcore.bench --help
"""

from flashcore._attention import attention, explain
from flashcore._cache import append, merge
from flashcore._library import CudaError, Library, StaleLibraryError, load

__version__ = "0.1.0"
__all__ = ["CudaError", "Library", "StaleLibraryError", "append", "attention", "explain", "load",
           "merge", "__version__"]
