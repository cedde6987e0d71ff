"""Tests scripts/checks/doc_links: a clean tree is accepted, and each kind of error is rejected."""
import os
import subprocess
import sys
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "doc_links")

# A small tree that uses every form of reference.
CLEAN = {
    "README.md": "# Title\n\n[docs](docs/a.md), [part](docs/a.md#two-words-and-code), [own](#title), "
                 "[web](https://example.com/none.md)\n\n`src/core/mask.h`, `core/mask.h`, `mask.h`\n",
    "docs/a.md": "# A\n\n## Two words, and `code`\n\n## Twice\n\n## Twice\n\n[second](#twice-1) "
                 "[up](../README.md)\n\n```\n# not a heading: src/core/\nscripts/test --all\n```\n"
                 "`src/cpu/kernels/target_<isa>.cc`, `src/{core,cpu}`, `tests/*_test.cc`, "
                 "`build/cpu/none.h`\n| " + "wide " * 40 + "|\n",
    "docs/deep/b.md": "`../a.md` and `a.md`; a short line of exactly\n" + "x" * 120 + "\n",
    "src/core/mask.h": "// As in src/core/mask.h and core/mask.h; #include <cstdint>, stdint.h\n"
                       'const char* name = "src/none.h";  /* mask.h\n tests/a_test.cc */\n',
    "src/cpu/kernels/target_neon.cc": "",
    "tests/a_test.cc": "",
    "tests/b_test.py": '"""tests/a_test.cc, mask.h."""\nINJECTED = "src/none.h"  # src/core\n',
    "scripts/test": "#!/usr/bin/env bash\n# scripts/test and docs/a.md\necho src/none.h\n",
    "CHANGELOG.md": "- `src/gone.h` is now `src/core/mask.h`\n",
}

# (file, text added to it, part of the expected message)
FAULTS = [
    ("README.md", "[gone](docs/gone.md)\n", "link to docs/gone.md"),
    ("README.md", "[gone](docs/a.md#three)\n", "docs/a.md has no such heading"),
    ("README.md", "[gone](#heading)\n", "README.md has no such heading"),
    ("docs/a.md", "[gone](#not-a-heading-srccore)\n", "no such heading"),
    ("docs/a.md", "[gone](#twice-2)\n", "no such heading"),
    ("README.md", "`src/gone.h`\n", "src/gone.h is not in the tree"),
    ("README.md", "`core/gone.h`\n", "core/gone.h is not in the tree"),
    ("README.md", "`gone.h`\n", "gone.h is not in the tree"),
    ("README.md", "`scripts/gone --all`\n", "scripts/gone is not in the tree"),
    ("README.md", "`src/{core,gone}`\n", "src/{core,gone} is not in the tree"),
    ("README.md", "`src/cpu/gone_<isa>.cc`\n", "src/cpu/gone_<isa>.cc is not in the tree"),
    ("docs/a.md", "```\nscripts/gone\n```\n", "scripts/gone is not in the tree"),
    ("docs/a.md", "x" * 121 + "\n", "121 characters"),
    ("CHANGELOG.md", "[gone](docs/gone.md)\n", "link to docs/gone.md"),
    ("CHANGELOG.md", "x" * 121 + "\n", "121 characters"),
    ("src/core/mask.h", "// see gone.h\n", "gone.h is not in the tree"),
    ("src/core/mask.h", "int x;  // see core/gone.h:12\n", "core/gone.h is not in the tree"),
    ("src/core/mask.h", "/* see\n   tests/gone_test.cc. */\n", "tests/gone_test.cc is not in the tree"),
    ("tests/b_test.py", "# see src/gone.h\n", "src/gone.h is not in the tree"),
    ("tests/b_test.py", 'def f():\n    """See gone.h."""\n', "gone.h is not in the tree"),
    ("scripts/test", "true  # see scripts/gone\n", "scripts/gone is not in the tree"),
]


def run(tree):
    done = subprocess.run([sys.executable, SCRIPT, tree], stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout


class DocLinks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = folder.name
        for path, text in CLEAN.items():
            self.write(path, text)

    def write(self, path, text):
        target = os.path.join(self.tree, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8") as out:
            out.write(text)

    def test_a_clean_tree_passes(self):
        code, said = run(self.tree)
        self.assertEqual((code, said), (0, "doc_links: 4 documents, 5 sources, 0 faults\n"))

    def test_each_error_is_reported(self):
        for path, text, words in FAULTS:
            with self.subTest(path=path, text=text):
                self.write(path, CLEAN[path] + text)
                code, said = run(self.tree)
                self.assertEqual(code, 1, said)
                self.assertIn(words, said)
                line = (CLEAN[path] + text).rstrip("\n").count("\n") + 1
                self.assertRegex(said, rf"^{path}:\d+: ")
                self.assertLessEqual(abs(int(said.split(":")[1]) - line), 1)
                self.assertIn("1 faults", said)
                self.write(path, CLEAN[path])

    def test_a_missing_tree_exits_2(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run([sys.executable, SCRIPT, empty], stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("has no README.md", done.stderr)


if __name__ == "__main__":
    unittest.main()
