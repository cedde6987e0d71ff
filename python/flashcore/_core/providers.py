"""Registry of array adapters: one provider module per framework, imported on first use.

A provider has an attribute ADAPTER. providers.torch is the adapter of torch, and so on. The lookup is a
module attribute because torch.compile can trace that, but not importlib.
"""

import importlib
from types import ModuleType
from typing import Any

# Framework -> provider. This table is the only link from _core to the layers above it.
PROVIDERS = {"torch": "flashcore._torch", "numpy": "flashcore._core.numpy_arrays",
             "cupy": "flashcore._core.cupy_arrays", "jax": "flashcore._core.jax_arrays",
             "dlpack": "flashcore._core.dlpack_arrays"}


def provider_of(framework: str) -> ModuleType:
    """The provider of a framework."""
    return importlib.import_module(PROVIDERS[framework])


def __getattr__(name: str) -> Any:
    if name not in PROVIDERS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    adapter = globals()[name] = provider_of(name).ADAPTER
    return adapter
