"""Tests scripts/checks/vocabulary: it finds old identifiers, as whole words, in the files of their prefix."""
import importlib.machinery
import importlib.util
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "checks" / "vocabulary"
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("vocabulary", str(SCRIPT))
script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(script)
WORDS = {"RingPlace": ("", "PipelineState"), "codes.cuh": ("", "dequant.cuh"),
         "few_rows": ("src/cuda/", "swap_ab")}


class Vocabulary(unittest.TestCase):
    def found(self, text, path="src/cuda/sm90/mainloop.cuh"):
        with tempfile.TemporaryDirectory() as tree:
            file = Path(tree, path)
            file.parent.mkdir(parents=True)
            file.write_text(text, encoding="utf-8")
            return script.check(Path(tree), WORDS)[1]

    def test_an_old_word_is_reported_with_its_line(self):
        self.assertEqual(self.found("int a;\nRingPlace at;\n"),
                         ["src/cuda/sm90/mainloop.cuh:2: RingPlace is now PipelineState"])
        self.assertEqual(len(self.found('#include "cuda/sm80/codes.cuh"\n')), 1)
        self.assertEqual(len(self.found("text about `RingPlace`.\n", "docs/architecture.md")), 1)

    def test_only_whole_words(self):
        self.assertEqual(self.found("RingPlaces myRingPlace RingPlace_ codes.cuhx codes\n"), [])

    def test_a_prefix_limits_the_files(self):
        self.assertEqual(len(self.found("few_rows\n")), 1)
        self.assertEqual(self.found("few_rows\n", "src/verify/layout.cc"), [])

    def test_experiments_are_exempt(self):
        self.assertEqual(self.found("RingPlace\n", "docs/experiments/2026-01-01-ring.md"), [])

    def test_the_list_is_well_formed(self):
        words = script.read_list()
        self.assertGreater(len(words), 100)
        self.assertEqual(words["RingPlace"], ("", "PipelineState"))
        for line in ("one two\n", "a -> b\na -> c\n"):
            with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit):
                path = Path(folder, "list.txt")
                path.write_text(line, encoding="utf-8")
                script.read_list(path)

    def test_exit_codes(self):
        for text, code in (("PipelineState\n", 0), ("RingPlace\n", 1)):
            with tempfile.TemporaryDirectory() as tree:
                Path(tree, "src").mkdir()
                Path(tree, "src", "a.h").write_text(text, encoding="utf-8")
                done = subprocess.run([SCRIPT, tree], stdout=subprocess.DEVNULL)
                self.assertEqual(done.returncode, code)
        with tempfile.TemporaryDirectory() as tree:
            self.assertEqual(subprocess.run([SCRIPT, tree], stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL).returncode, 2)


if __name__ == "__main__":
    unittest.main()
