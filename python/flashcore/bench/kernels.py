"""The kernel that a benchmark case asks for by the start of its id."""

import re
from pathlib import Path

from flashcore._core import library as core_library

_ROW = re.compile(r"^FLASHCORE_KERNEL\((\w+),", re.MULTILINE)


def kernel_ids(root: Path | None) -> list[str]:
    """The ids of the CUDA kernels in the source tree; none without a tree."""
    if root is None:
        return []
    return _ROW.findall((root / "src" / "cuda" / "kernels.def").read_text(encoding="utf-8"))


def requested(wanted: str) -> str | None:
    """The id for `wanted`, an id or the start of one with * after it; None for "". Raises
    NotImplementedError if the tree has no such kernel."""
    if not wanted.endswith("*"):
        return wanted or None
    found = [one for one in kernel_ids(core_library.tree_root()) if one.startswith(wanted[:-1])]
    if not found:
        raise NotImplementedError(f"there is no kernel {wanted}")
    return found[0]
