"""cmake/instrumented.cmake compiles every file a second time that sees the layout its hooks change."""
import re
import subprocess
import unittest
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
ROOTS = (TREE / "src", TREE / "include", TREE / "tools" / "flashcore")
HOOKS = TREE / "src" / "core" / "fault.h"  # its struct is part of every other one
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def included(path):
    """The tree's files that one file includes."""
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
    """What the list in cmake/instrumented.cmake matches."""
    text = (TREE / "cmake" / "instrumented.cmake").read_text(encoding="utf-8")
    pattern = re.search(r'set\(FLASHCORE_INSTRUMENTED_SOURCES "(.*)"\)', text)[1]
    return re.compile(f"(?:{pattern})|src/check/")


class Instrumented(unittest.TestCase):
    def test_every_file_that_sees_the_hooks_is_compiled_twice(self):
        files = [path for path in sorted((TREE / "src").rglob("*.cc")) if "cuda" not in path.parts]
        seeing = [path for path in files if sees(path, HOOKS)]
        self.assertGreater(len(seeing), 10)
        left_out = [str(path.relative_to(TREE)) for path in seeing
                    if not compiled_twice().match(str(path.relative_to(TREE)))]
        self.assertEqual(left_out, [], "add these to FLASHCORE_INSTRUMENTED_SOURCES")

    def test_the_command_has_no_code_of_core(self):
        """flashcore_tool sees core's structs and is compiled once: it must hold no function on them."""
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
