"""Tests scripts/lib/gen_options: the generated files are current, and a stale file is found."""
import importlib.machinery
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "lib", "gen_options")

sys.dont_write_bytecode = True  # no __pycache__ next to the script
sys.path.insert(0, os.path.join(TREE, "python"))
loader = importlib.machinery.SourceFileLoader("gen_options", SCRIPT)
script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(script)
FILES = (script.TABLE, script.HEADER, script.PYTHON, script.DOCS, script.LAYOUT)


def run(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def read(tree, path):
    with open(os.path.join(tree, path), encoding="utf-8") as file:
        return file.read()


def replace(tree, path, old, new):
    text = read(tree, path)
    assert old in text, (path, old)
    with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
        file.write(text.replace(old, new, 1))


class GenOptions(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = folder.name
        for path in FILES:
            os.makedirs(os.path.dirname(os.path.join(self.tree, path)), exist_ok=True)
            shutil.copy(os.path.join(TREE, path), os.path.join(self.tree, path))

    def test_the_files_of_this_tree_are_current(self):
        code, said = run("--check")
        self.assertEqual(code, 0, said)

    def test_a_stale_file_is_found_and_rewritten(self):
        for path, old, new in ((script.PYTHON, "causal", "casual"), (script.DOCS, "| `softcap`", "| cap"),
                               (script.LAYOUT, "FIELD(flashcore_params, q);\n", ""),
                               (script.TABLE, "false hides the key", "hides the key"),
                               (script.HEADER, "int32_t threads;", "int64_t threads;")):
            with self.subTest(path):
                replace(self.tree, path, old, new)
                code, said = run("--check", self.tree)
                self.assertEqual(code, 1, said)
                self.assertIn("stale", said)
                self.assertEqual(run(self.tree)[0], 0)
                self.assertEqual(run("--check", self.tree)[0], 0)

    def test_a_new_option_is_written_to_all_files(self):
        replace(self.tree, script.TABLE, "FLASHCORE_OPTION(q_scale_block,",
                'FLASHCORE_OPTION(sharpness, f64, 0.5, 0, "a number", score, "sharp", "doc of it")\n'
                "FLASHCORE_OPTION(q_scale_block,")
        code, said = run(self.tree)
        self.assertIn("flashcore_params has no field sharpness", said)
        self.assertNotEqual(code, 0)
        replace(self.tree, script.HEADER, "mask_bits;\n} flashcore_params;",
                "mask_bits;\n  double sharpness;\n} flashcore_params;")
        self.assertEqual(run(self.tree)[0], 0)
        self.assertIn("| `sharpness` | `0.5` | doc of it |", read(self.tree, script.DOCS))
        self.assertIn("FIELD(flashcore_params, sharpness);", read(self.tree, script.LAYOUT))
        names = {}
        exec(read(self.tree, script.PYTHON), names)  # noqa: S102: written above
        self.assertEqual(names["PARAMS"][-1], ("sharpness", "double"))
        self.assertEqual(names["OPTIONS"][-1], "sharpness")
        self.assertIn("sharpness", names["SCORE_OPTIONS"])
        self.assertIn("float sharpness=0.5", names["SCHEMA"])
        self.assertEqual(names["from_schema"](sharpness=2.0)[-1], 2.0)
        self.assertEqual(names["to_schema"](names["from_schema"](sharpness=3.0))["sharpness"], 3.0)

    def test_a_bad_row_is_reported(self):
        replace(self.tree, script.TABLE, "FLASHCORE_OPTION(kernel, text,", "FLASHCORE_OPTION(kernel,")
        code, said = run(self.tree)
        self.assertNotEqual(code, 0)
        self.assertIn("FLASHCORE_OPTION(kernel", said)

    def test_attention_has_the_keywords_of_the_table(self):
        try:
            from flashcore._attention import attention
        except ImportError as error:
            self.skipTest(f"the package cannot be imported: {error}")
        rows = script.read_rows(read(TREE, script.TABLE))
        wanted = {row.name for row in script.keywords(rows)} | {
            row.name for row in rows if row.kind == "TENSOR" and row.role in ("optional", "offsets")}
        keywords = {name for name, one in inspect.signature(attention).parameters.items()
                    if one.kind is inspect.Parameter.KEYWORD_ONLY}
        self.assertEqual(keywords, wanted | {"out"})


if __name__ == "__main__":
    unittest.main()
