"""Finding and loading the library, refusing a stale library, errors as exceptions."""

import ctypes
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import flashcore
from flashcore._core import abi, library as core_library

ROOT = Path(__file__).resolve().parents[2]


def copy_of_the_tree(folder):
    """Copies the files that the fingerprint covers, and the script that computes it."""
    for name in ("bindings", "include", "src", "cmake", "scripts"):
        shutil.copytree(ROOT / name, Path(folder) / name)
    shutil.copy(ROOT / "CMakeLists.txt", folder)


class Loading(unittest.TestCase):
    def test_the_build_of_this_tree(self):
        library = flashcore.load()
        self.assertEqual(library.version, flashcore.__version__)
        self.assertEqual(library.fingerprint(), core_library.tree_fingerprint(ROOT))
        self.assertRegex(library.fingerprint("cpu"), "^[0-9a-f]{16}$")
        self.assertNotEqual(library.fingerprint("cpu"), library.fingerprint())
        self.assertIsNone(library.fingerprint("no such family"))

    def test_a_stale_library_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            copy_of_the_tree(folder)
            self.assertEqual(flashcore.load(root=folder).version, flashcore.__version__)
            source = Path(folder) / "src" / "api" / "version.cc"
            source.write_text(source.read_text() + "// edited, not built\n")
            with self.assertRaisesRegex(flashcore.StaleLibraryError, "other sources.*build it"):
                flashcore.load(root=folder)

    def test_outside_a_tree_the_fingerprint_is_not_compared(self):
        with mock.patch.object(core_library, "tree_root", return_value=None):
            self.assertEqual(flashcore.load().version, flashcore.__version__)

    def test_a_library_of_another_version_is_refused(self):
        with mock.patch.object(core_library, "tree_root", return_value=None), \
                mock.patch.object(core_library, "VERSION", "9.9.9"):
            with self.assertRaisesRegex(flashcore.StaleLibraryError,
                                        "has version 0.*Python files have version 9.9.9; install both"):
                flashcore.load()

    def test_the_version_equals_that_of_cmake(self):
        """pip reads its version from there too."""
        text = (ROOT / "CMakeLists.txt").read_text()
        self.assertIn(f"project(flashcore VERSION {flashcore.__version__} ", text)

    def test_the_search_skips_stale_builds(self):
        built = os.environ["FLASHCORE_LIBRARY"]
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(os.environ, {"FLASHCORE_LIBRARY": ""}), \
                mock.patch.object(core_library.ctypes.util, "find_library", return_value=None):
            copy_of_the_tree(folder)
            with self.assertRaisesRegex(FileNotFoundError, "build it.*FLASHCORE_LIBRARY"):
                flashcore.load(root=folder)
            for preset in ("cpu", "cuda"):
                target = Path(folder) / "build" / preset / "libflashcore.so"
                target.parent.mkdir(parents=True)
                shutil.copy(built, target)
                self.assertEqual(flashcore.load(root=folder).path, str(target))
            first, second = (Path(folder) / "build" / preset / "libflashcore.so"
                             for preset in ("cuda", "cpu"))
            wanted = core_library.tree_fingerprint(folder)
            real = core_library.Library.fingerprint

            def pretend(library, family=""):
                return "0" * 16 if library.path == str(first) else real(library, family)

            with mock.patch.object(core_library.Library, "fingerprint", pretend):
                library = flashcore.load(root=folder)
                self.assertEqual((library.path, library.fingerprint()), (str(second), wanted))
                self.assertEqual(library.stale_paths, [str(first)])

    def test_a_missing_file_is_reported(self):
        with mock.patch.dict(os.environ, {"FLASHCORE_LIBRARY": "/no/such/libflashcore.so"}):
            with self.assertRaisesRegex(FileNotFoundError, "/no/such/libflashcore.so"):
                flashcore.load()


class PublicNames(unittest.TestCase):
    def test_functions_are_not_hidden_by_modules(self):
        import flashcore._attention
        import flashcore._verify
        import flashcore.cache
        import flashcore.quant
        for name in ("append", "attention", "dequantize", "explain", "load", "merge", "quantize", "verify"):
            self.assertTrue(inspect.isfunction(getattr(flashcore, name)), name)
        with self.assertRaisesRegex(AttributeError, "no attribute 'no_such_name'"):
            flashcore.no_such_name

    def test_importing_the_package_imports_no_framework(self):
        program = ("import sys, flashcore\n"
                   "print(*{'torch', 'numpy', 'jax', 'cupy', 'flashcore._torch'} & set(sys.modules))")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(done.stdout.strip(), "")


class Calls(unittest.TestCase):
    """Attention of one query over two keys with equal scores: the mean of the values."""

    def setUp(self):
        self.library = flashcore.load()
        floats = ctypes.c_float * 4
        self.q, self.k = floats(1, 0, 0, 0), (ctypes.c_float * 8)(*[1, 0, 0, 0] * 2)
        self.v, self.out = (ctypes.c_float * 8)(1, 2, 3, 4, 3, 6, 9, 12), floats(*[-1] * 4)
        self.params = self.library.params()
        for name, shape in (("q", (1, 1, 1, 4)), ("k", (1, 1, 2, 4)), ("v", (1, 1, 2, 4)),
                            ("out", (1, 1, 1, 4))):
            memory = getattr(self, name)
            setattr(self.params, name, ctypes.pointer(
                abi.tensor(ctypes.addressof(memory), shape, "f32")))

    def give_workspace(self):
        plan = self.library.plan(self.params)
        self.memory = ctypes.create_string_buffer(plan.workspace_bytes + 256)
        start = ctypes.addressof(self.memory)
        self.params.workspace = start + -start % 256
        self.params.workspace_bytes = plan.workspace_bytes
        self.library.workspace_init(self.params.workspace, plan.workspace_bytes)
        return plan

    def test_a_call(self):
        plan = self.give_workspace()
        self.assertRegex(plan.kernel.decode(), "^fwd_[a-z0-9]+_f32(_q16)?$")
        self.assertEqual(plan.family, b"cpu")
        self.library.attention(self.params)
        self.library.workspace_status(self.params.workspace, plan.workspace_bytes)
        for got, want in zip(self.out, (2, 4, 6, 8)):
            self.assertAlmostEqual(got, want, delta=1e-5)
        self.assertIn(plan.kernel.decode(), self.library.explain(self.params))

    def test_errors_become_exceptions(self):
        with self.assertRaisesRegex(ValueError, "workspace"):
            self.library.attention(self.params)
        self.assertEqual(list(self.out), [-1] * 4)
        self.params.kernel = b"fwd_none"
        with self.assertRaisesRegex(ValueError, "fwd_none"):
            self.library.plan(self.params)
        self.params.kernel = None
        self.params.q.contents.dtype.bits = 8
        with self.assertRaisesRegex(NotImplementedError, "q: dtype"):
            self.library.plan(self.params)

    def test_merge(self):
        lse = (ctypes.c_float * 2)(0.5, 0.5)
        parts = (abi.Tensor * 2)(abi.tensor(ctypes.addressof(self.v), (1, 1, 1, 4), "f32"),
                                  abi.tensor(ctypes.addressof(self.v) + 16, (1, 1, 1, 4), "f32"))
        lses = (abi.Tensor * 2)(abi.tensor(ctypes.addressof(lse), (1, 1, 1), "f32"),
                                 abi.tensor(ctypes.addressof(lse) + 4, (1, 1, 1), "f32"))
        params = abi.MergeParams(outs=parts, lses=lses, parts=2, out=self.params.out)
        self.library.merge(params)
        for got, want in zip(self.out, (2, 4, 6, 8)):
            self.assertAlmostEqual(got, want, delta=1e-5)

    def test_a_missing_gpu_has_a_reason(self):
        count, reason = self.library.cuda_device_count()
        self.assertTrue(count > 0 or len(reason) > 10)


if __name__ == "__main__":
    unittest.main()
