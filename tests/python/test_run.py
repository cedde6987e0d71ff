"""run.py over several modules: its counts, and that a module which fails, crashes or is skipped is always
reported."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

RUN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.py")
MODULES = {
    "good": "class T(unittest.TestCase):\n    def test_one(self): pass\n    def test_two(self): pass\n",
    "skips": "class T(unittest.TestCase):\n    def test(self): self.skipTest('torch finds no GPU')\n",
    "fails": "class T(unittest.TestCase):\n    def test(self): self.fail('wrong')\n",
    "crashes": "import os\nclass T(unittest.TestCase):\n    def test(self): os._exit(3)\n",
    "typo": "this is no Python\n",
    "missing": "raise unittest.SkipTest('jax is not installed')\n",
    "empty": "",
    "group_a": "class T(unittest.TestCase):\n    def test(self): pass\n",
    "group_b": "class T(unittest.TestCase):\n    def test(self): pass\n",
}


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "tests", "python")
        os.makedirs(self.folder)
        shutil.copy(RUN, self.folder)
        for name, body in MODULES.items():
            with open(os.path.join(self.folder, f"test_{name}.py"), "w", encoding="utf-8") as file:
                file.write("import unittest\n" + body)

    def python(self, *arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=self.folder, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout.rstrip().splitlines()

    def package(self, *names):
        """(exit code, lines) of run.py without arguments, with these as the package's tests."""
        return self.python("-c", f"import sys, run; run.PACKAGE_TESTS = {names[:-1]}; "
                                 f"run.ALONE = {names[-1:]}; sys.exit(run.main([]))")

    def test_all_good(self):
        code, lines = self.package("good", "group_a", "group_b")
        self.assertEqual((code, lines[-1]), (0, "4 tests run, 0 failed"))

    def test_skipped_tests_and_modules(self):
        code, lines = self.package("missing", "skips", "good")
        self.assertEqual((code, lines[-1]),
                         (0, "2 tests run, 0 failed; NOT TESTED: missing (jax is not installed)"))
        self.assertIn("1 tests skipped: torch finds no GPU", lines)
        self.assertEqual(self.package("missing", "skips")[0], 77)

    def test_failures(self):
        for names, last in ((("fails", "good"), "3 tests run, 1 failed"),
                            (("good", "crashes"), "2 tests run, 1 failed"),
                            (("typo", "good"), "2 tests run, 1 failed"),
                            (("empty", "good"), "2 tests run, 1 failed")):
            with self.subTest(str(names)):
                code, lines = self.package(*names)
                self.assertEqual((code, lines[-1]), (1, last))
        self.assertIn("crashes ended with exit code 3", self.package("good", "crashes")[1])

    def test_names(self):
        self.assertEqual(self.python("run.py", "group")[1][-1], "2 tests run, 0 failed")
        self.assertEqual(self.python("run.py", "test_group_a")[1][-1], "1 tests run, 0 failed")
        code, lines = self.python("run.py", "nothing")
        self.assertEqual(code, 1)
        self.assertIn("there is no test_nothing.py", lines[-1])


if __name__ == "__main__":
    unittest.main()
