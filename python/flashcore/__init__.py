"""FlashCore from Python: for now the loader of the library and the benchmark.

    import flashcore
    library = flashcore.load()
    print(library.version, library.fingerprint())

    python3 -m flashcore.bench --help
"""

from flashcore._library import CudaError, Library, StaleLibraryError, load

__version__ = "0.1.0"
__all__ = ["CudaError", "Library", "StaleLibraryError", "load", "__version__"]
