"""README's Python program as printed, with the tree's package. wheel_test.py runs it with the installed
package. A README that differs from the example is detected."""

import os
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy  # noqa: F401 (the program needs it)
except ImportError:
    raise unittest.SkipTest("numpy is not installed")

import wheel_test


def copy_of_tree(folder, change):
    """Copies the files that readme_blocks() reads, with a changed README."""
    os.mkdir(os.path.join(folder, "examples"))
    for path in ("README.md", os.path.join("examples", "quick_start.py")):
        with open(os.path.join(wheel_test.TREE, path), encoding="utf-8") as file:
            text = file.read()
        with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
            file.write(change(text) if path == "README.md" else text)


class Readme(unittest.TestCase):
    def test_the_program_as_printed(self):
        install, program, start = wheel_test.readme_blocks()
        self.assertEqual(install, "pip install .\n")
        self.assertNotIn("import torch", program)
        self.assertEqual(start.split(), ["python3", "quick_start.py"])
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "quick_start.py"), "w", encoding="utf-8") as file:
                file.write(program)
            done = subprocess.run(
                [sys.executable, "quick_start.py"], cwd=folder, capture_output=True, text=True,
                env={**os.environ, "PYTHONPATH": os.path.join(wheel_test.TREE, "python")})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, wheel_test.SAYS)

    def test_a_readme_that_differs_is_rejected(self):
        for change, complaint in (
                (lambda text: text.replace("causal=True", "causal=False"), "copy it there"),
                (lambda text: text.replace("<!-- python run in the source tree -->", ""), "wanted"),
                (lambda text: text.replace("```python\n", "```python\n\n", 1), "copy it there")):
            with tempfile.TemporaryDirectory() as folder:
                copy_of_tree(folder, change)
                with self.assertRaisesRegex(SystemExit, complaint):
                    wheel_test.readme_blocks(folder)
        with tempfile.TemporaryDirectory() as folder:
            copy_of_tree(folder, lambda text: text)
            self.assertEqual(wheel_test.readme_blocks(folder), wheel_test.readme_blocks())


if __name__ == "__main__":
    unittest.main()
