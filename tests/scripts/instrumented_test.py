"""Tests cmake/instrumented.cmake: it compiles every file twice whose struct layout depends on the hooks."""
import re
import subprocess
import unittest
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
ROOTS = (TREE / "src", TREE / "include", TREE / "tools" / "flashcore")
HOOKS = TREE / "src" / "core" / "fault.h"  # its struct is a member of the launch arguments
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def included(path):
    """The files of the tree that a file includes."""
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        for root in (path.parent, *ROOTS):
            if (root / name).is_file():
                yield (root / name).resolve()
                break


def sees(path, header):
    found, open_files = set(), [path]
    while open_files:
        one = open_files.pop()
        if one not in found:
            found.add(one)
            open_files += included(one)
    return header in found


def compiled_twice():
    """The pattern of FLASHCORE_INSTRUMENTED_SOURCES, and src/check."""
    text = (TREE / "cmake" / "instrumented.cmake").read_text(encoding="utf-8")
    pattern = re.search(r'set\(FLASHCORE_INSTRUMENTED_SOURCES "(.*)"\)', text)[1]
    return re.compile(f"(?:{pattern})|src/check/")


class Instrumented(unittest.TestCase):
    def test_every_file_that_sees_the_hooks_is_compiled_twice(self):
        files = [path for path in sorted((TREE / "src").rglob("*.cc")) if "cuda" not in path.parts]
        seeing = [path for path in files if sees(path, HOOKS)]
        self.assertGreater(len(seeing), 10)
        missing = [str(path.relative_to(TREE)) for path in seeing
                    if not compiled_twice().match(str(path.relative_to(TREE)))]
        self.assertEqual(missing, [], "add these to FLASHCORE_INSTRUMENTED_SOURCES")

    def test_the_command_has_no_code_of_core(self):
        """flashcore_tool is compiled once, so it must contain no function that depends on core's structs."""
        archive = TREE / "build" / "cpu" / "tools" / "flashcore" / "libflashcore_tool.a"
        if not archive.is_file():
            self.skipTest("the CPU preset is not built")
        names = subprocess.run(["nm", "-C", "--defined-only", archive], text=True, check=True,
                               stdout=subprocess.PIPE).stdout
        self.assertIn("flashcore::tool::", names)
        self.assertEqual([line for line in names.splitlines()
                          if re.search(r" [TtWVu] (\S+ )?flashcore::core::", line)], [])


if __name__ == "__main__":
    unittest.main()
