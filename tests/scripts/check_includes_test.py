"""Tests scripts/checks/includes: a clean tree is accepted, and a violation of each rule is rejected."""
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "includes")

# A small tree with every allowed include.
CLEAN = {
    "bindings/python/fastcall.h": '#include "flashcore/plan.h"\n',
    "bindings/python/fastcall.cc": '#include <thread>\n#include "bindings/python/fastcall.h"\n',
    "include/flashcore/status.h": "#include <string>\n",
    "include/flashcore/plan.h": '#include <stdint.h>\n#include "flashcore/status.h"\n',
    "src/core/mask.h": "#include <cstdint>\n",
    "src/core/error.h": '#include "flashcore/status.h"\n',
    "src/plan/planner.cc": '#include <algorithm>\n#include "core/error.h"\n'
                           '#include "flashcore/plan.h"\n#include "plan/planner.h"\n',
    "src/plan/planner.h": '#include "flashcore/plan.h"\n',
    "src/plan/kernel_table.cc": '#include "cuda/kernels.def"\n#include "cpu/kernels.def"\n'
                                '#include "generated/compiled_kernels.inc"\n',
    "src/api/attention.cc": '#include "backend/backend.h"\n#include "core/error.h"\n',
    "src/api/options.def": "",
    "src/api/c_convert.cc": '#include "api/options.def"\n',
    "src/api/version.cc": '#include "generated/fingerprint.h"\n',
    "src/backend/backend.h": '#include "core/mask.h"\n#include "flashcore/plan.h"\n',
    "src/backend/private.h": "",
    "src/cpu/kernels.def": "",
    "src/cpu/kernels/simd.h": "#include <immintrin.h>\n#include <cstdint>\n",
    "src/cpu/kernels/target_avx2.cc": '#include "cpu/kernels/simd.h"\n#include "core/mask.h"\n',
    "src/cpu/backend.cc": '#include <pthread.h>\n#include "backend/backend.h"\n',
    "src/cuda/kernels.def": "",
    "src/cuda/registry.h": '#include "flashcore/plan.h"\n',
    "src/cuda/registry.cc": '#include "cuda/registry.h"\n'
                            '#include "generated/compiled_kernels.inc"\n',
    "src/cuda/backend.cc": '#include <cuda_runtime_api.h>\n#include "core/error.h"\n'
                                '#include "backend/backend.h"\n',
    "src/cuda/primitives/ptx.cuh": "#include <cuda_fp16.h>\n",
    "src/cuda/simt/fwd.cuh": '#include "cuda/primitives/ptx.cuh"\n#include "core/mask.h"\n',
    "src/cuda/sm80/prefill.cuh": '#include "cuda/primitives/ptx.cuh"\n',
    "src/cuda/sm90/prefill.cuh": '#include "cuda/primitives/ptx.cuh"\n',
    "src/reference/oracle.h": '#include "flashcore/plan.h"\n',
    "src/verify/api.cc": '#include "backend/backend.h"\n#include "reference/oracle.h"\n',
    "src/check/check.h": "",
    "src/check/check.cc": '#include "check/check.h"\n#include "verify/inputs/case.h"\n',
    "src/verify/inputs/case.h": "",
    "tools/flashcore/data/npy.h": "#include <fmt/format.h>\n",
    "tools/flashcore/main.cc": '#include "data/npy.h"\n#include "backend/backend.h"\n',
    "tests/cli/npy_test.cc": '#include <gtest/gtest.h>\n#include "data/npy.h"\n',
    "tests/unit/simd_test.cc": '#include <gtest/gtest.h>\n#include "cpu/kernels/simd.h"\n',
    "tests/gpu/api/graph_test.cc": '#include <cuda_runtime_api.h>\n#include "backend/backend.h"\n',
    "tests/consumer/c/main.c": "#include <flashcore/plan.h>\n#include <stdio.h>\n",
    "examples/quick_start.cc": "#include <flashcore/plan.h>\n#include <vector>\n",
}

# (file, line that breaks a rule, part of the expected message)
VIOLATIONS = [
    ("bindings/python/fastcall.cc", '#include "core/mask.h"', "bindings/python may include"),
    ("bindings/python/fastcall.cc", "#include <Python.h>", "bindings include the standard library"),
    ("src/api/attention.cc", '#include "bindings/python/fastcall.h"', "src/api may include"),
    ("src/api/attention.cc", '#include "api/options.def"', "a table may be included"),
    ("include/flashcore/plan.h", '#include "core/mask.h"', "include may include"),
    ("include/flashcore/plan.h", "#include <pthread.h>", "public headers"),
    ("include/flashcore/plan.h", "#include <fmt/format.h>", "public headers"),
    ("src/core/mask.h", '#include "flashcore/plan.h"', "src/core may include"),
    ("src/core/mask.h", '#include "plan/planner.h"', "src/core may include"),
    ("src/core/mask.h", "#include <algorithm>", "kernel code"),
    ("src/core/mask.h", '#include "core/error.h"', "host code only"),
    ("src/plan/planner.cc", '#include "backend/backend.h"', "src/plan may include"),
    ("src/plan/planner.cc", "#include <cuda_runtime_api.h>", "CUDA headers"),
    ("src/plan/planner.cc", '#include "cuda/kernels.def"', "a table may be included"),
    ("src/plan/planner.cc", '#include "generated/compiled_kernels.inc"', "is for"),
    ("src/api/attention.cc", '#include "cpu/kernels/simd.h"', "src/api may include"),
    ("src/api/attention.cc", '#include "backend/private.h"', "src/backend has two headers"),
    ("src/api/attention.cc", "#include <fmt/format.h>", "standard library only"),
    ("src/backend/backend.h", '#include "cpu/kernels/simd.h"', "src/backend may include"),
    ("src/cpu/backend.cc", '#include "cuda/registry.h"', "src/cpu may include"),
    ("src/cpu/backend.cc", '#include "plan/planner.h"', "src/cpu may include"),
    ("src/cpu/kernels/target_avx2.cc", "#include <algorithm>", "kernel code"),
    ("src/cuda/sm80/prefill.cuh", "#include <algorithm>", "kernel code"),
    ("src/cpu/kernels/simd.h", '#include "core/error.h"', "host code only"),
    ("src/cuda/backend.cc", '#include "cpu/kernels/simd.h"', "src/cuda may include"),
    ("src/cuda/registry.cc", '#include "cuda/simt/fwd.cuh"', "src/cuda may include"),
    ("src/cuda/simt/fwd.cuh", '#include "cuda/registry.h"', "src/cuda/simt may include"),
    ("src/cuda/sm80/prefill.cuh", '#include "cuda/sm90/prefill.cuh"', "src/cuda/sm80 may"),
    ("src/cuda/sm90/prefill.cuh", '#include "cuda/sm80/prefill.cuh"', "src/cuda/sm90 may"),
    ("src/cuda/primitives/ptx.cuh", '#include "cuda/simt/fwd.cuh"', "primitives may"),
    ("src/reference/oracle.h", '#include "core/mask.h"', "src/reference may include"),
    ("src/check/check.cc", '#include "cpu/kernels/simd.h"', "src/check may include"),
    ("src/verify/api.cc", '#include "check/check.h"', "src/verify may include"),
    ("src/cuda/sm90/prefill.cuh", '#include "flashcore/plan.h"', "its family, primitives and core"),
    ("src/check/check.cc", "#include <torch/torch.h>", "use torch"),
    ("tools/flashcore/main.cc", "#include <cuda_runtime_api.h>", "CUDA headers"),
    ("tools/flashcore/main.cc", '#include "cuda/registry.h"', "tools may include"),
    ("tests/unit/simd_test.cc", '#include "cuda/registry.h"', "tests may include"),
    ("tests/unit/simd_test.cc", "#include <cuda_fp16.h>", "CUDA headers"),
    ("tests/consumer/c/main.c", '#include "core/mask.h"', "tests/consumer may include"),
    ("examples/quick_start.cc", '#include "backend/backend.h"', "examples may include"),
    ("src/plan/planner.cc", '#include "../core/mask.h"', "without .."),
    ("src/plan/planner.cc", '#include "core/no_such.h"', "no such file"),
    ("src/new_folder/file.cc", "", "no include rule"),
]

# A small package with every allowed import.
CLEAN_PYTHON = {
    "python/flashcore/__init__.py": "from flashcore._attention import attention\n"
                                    'LAZY = {"integrations": "flashcore.integrations"}\n'
                                    "if TYPE_CHECKING:\n"
                                    "    from flashcore._torch.sdpa import sdpa\n",
    "python/flashcore/_attention.py": "import numpy\nfrom flashcore._core import arrays\n",
    "python/flashcore/cache.py": "from flashcore import _attention\n"
                                 "def late():\n    from flashcore._core.arrays import adapter\n",
    "python/flashcore/flash_attn.py": "from flashcore.compat.flash_attn import func\n",
    "python/flashcore/_core/__init__.py": "",
    "python/flashcore/_core/abi.py": "import ctypes\n",
    "python/flashcore/_core/arrays.py": "from flashcore._core import abi\n",
    "python/flashcore/_core/providers.py": 'PROVIDERS = {"torch": "flashcore._torch"}\n',
    "python/flashcore/_torch/__init__.py": "from flashcore._torch import ops\n",
    "python/flashcore/_torch/ops.py": "import torch\nfrom flashcore.cache import append\n",
    "python/flashcore/_torch/sdpa.py": "from ..cache import append\nfrom . import ops\n",
    "python/flashcore/compat/__init__.py": "",
    "python/flashcore/compat/flash_attn.py": "from flashcore._torch import ops\n",
    "python/flashcore/integrations/__init__.py": "",
    "python/flashcore/integrations/models.py": "from flashcore.compat import flash_attn\n",
    "python/flashcore/bench/__init__.py": "",
    "python/flashcore/bench/cuda.py": "import flashcore.integrations.models\n"
                                      "from flashcore._core.abi import Params\n",
}

# (module, line that breaks a rule, part of the expected message)
WRONG_IMPORTS = [
    ("_core/abi.py", "import flashcore.cache", "imports flashcore.cache: _core may import _core only"),
    ("_core/abi.py", "from flashcore import _attention", "_core may import"),
    ("_core/abi.py", "from flashcore import attention", "imports flashcore: _core may import"),
    ("_core/abi.py", "from .. import cache", "imports flashcore.cache: _core may import"),
    ("_core/abi.py", 'import_module("flashcore._torch.ops")', "_core may import"),
    ("_core/arrays.py", "from flashcore._torch import ops", "_core may import"),
    ("_core/arrays.py", 'PROVIDERS = {"torch": "flashcore._torch"}', "_core may import"),
    ("_core/providers.py", "from flashcore import _torch", "_core may import"),
    ("cache.py", "from flashcore._torch import ops", "public may import public, _core only"),
    ("cache.py", "def late():\n    if True:\n        from flashcore._torch import ops",
     "public may import"),
    ("cache.py", "class A:\n    import flashcore.compat.flash_attn", "public may import"),
    ("cache.py", "from flashcore import flash_attn", "imports flashcore.flash_attn: public may"),
    ("_torch/ops.py", "from flashcore.compat import flash_attn", "_torch may import"),
    ("compat/flash_attn.py", "import flashcore.integrations.models", "compat may import"),
    ("integrations/models.py", "import flashcore.bench.cuda", "integrations may import"),
    ("integrations/models.py", "import flashcore", "imports flashcore: integrations may import"),
    ("flash_attn.py", "from flashcore import integrations", "compat may import"),
    ("__init__.py", "from flashcore._torch.ops import append", "flashcore may import"),
    ("cache.py", "import flashcore._old", "imports flashcore._old: there is no such module"),
    ("cache.py", "from flashcore._old import append", "there is no such module"),
    ("new/part.py", "", "no import rule"),
]

# ([(module, line that closes a cycle)], expected message)
CYCLES = [
    ([("_core/abi.py", "from flashcore._core.arrays import adapter")],
     "import cycle: flashcore._core.abi -> flashcore._core.arrays -> flashcore._core.abi"),
    ([("_attention.py", "def late():\n    from flashcore import cache")],
     "import cycle: flashcore._attention -> flashcore.cache -> flashcore._attention"),
    ([("_torch/ops.py", "from flashcore._torch import sdpa")],
     "import cycle: flashcore._torch.ops -> flashcore._torch.sdpa -> flashcore._torch.ops"),
    ([("_torch/ops.py", "from flashcore._torch import ADAPTER")],
     "import cycle: flashcore._torch -> flashcore._torch.ops -> flashcore._torch"),
    ([("bench/a.py", "import flashcore.bench.b"), ("bench/b.py", "import flashcore.bench.c"),
      ("bench/c.py", 'import_module("flashcore.bench.a")')],
     "import cycle: flashcore.bench.a -> flashcore.bench.b -> flashcore.bench.c -> flashcore.bench.a"),
    ([("_core/abi.py", "import flashcore._core.abi")],
     "import cycle: flashcore._core.abi -> flashcore._core.abi"),
]


sys.dont_write_bytecode = True  # no __pycache__ next to the script
loader = importlib.machinery.SourceFileLoader("check_includes", SCRIPT)
script = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(script)


def exit_code(tree):
    return subprocess.run([sys.executable, SCRIPT, tree], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode


def write(tree, files):
    for path, text in files.items():
        full = os.path.join(tree, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as out:
            out.write(text)


class CheckIncludes(unittest.TestCase):
    def test_this_tree_is_clean(self):
        self.assertEqual(script.check_tree(TREE)[2], [])
        files, imports, broken = script.check_python(TREE)
        self.assertEqual(broken, [])
        self.assertGreater(files, 40)
        self.assertGreater(imports, 2 * files)

    def test_a_clean_tree_is_accepted(self):
        with tempfile.TemporaryDirectory() as tree:
            write(tree, CLEAN)
            self.assertEqual(script.check_tree(tree)[2], [])
            self.assertEqual(exit_code(tree), 0)

    def test_each_violation_is_rejected(self):
        for path, line, words in VIOLATIONS:
            with self.subTest(path=path, line=line), tempfile.TemporaryDirectory() as tree:
                write(tree, CLEAN)
                write(tree, {path: CLEAN.get(path, "") + line + "\n"})
                broken = script.check_tree(tree)[2]
                self.assertEqual(len(broken), 1, broken)
                self.assertTrue(broken[0].startswith(path), broken)
                self.assertIn(words, broken[0])

    def test_files_that_see_the_launch_arguments_are_counted(self):
        with tempfile.TemporaryDirectory() as tree:
            write(tree, CLEAN)
            write(tree, {"src/core/params.h": "", "src/plan/direct.cc": '#include "core/params.h"\n',
                         "src/core/append.h": '#include "core/params.h"\n',
                         "src/plan/indirect.cc": '#include "core/append.h"\n',
                         "src/cuda/simt/kernel.cu": '#include "core/params.h"\n'})
            self.assertEqual(script.params_users(tree), ["src/plan/direct.cc", "src/plan/indirect.cc"])
            self.assertEqual(exit_code(tree), 0)
            write(tree, {f"src/plan/user{i}.cc": '#include "core/params.h"\n' for i in range(30)})
            self.assertEqual(exit_code(tree), 1)

    def python_tree(self, tree, added):
        write(tree, CLEAN)
        write(tree, CLEAN_PYTHON)
        for name, line in added:
            path = "python/flashcore/" + name
            write(tree, {path: CLEAN_PYTHON.get(path, "") + line + "\n"})

    def test_a_clean_package_is_accepted(self):
        with tempfile.TemporaryDirectory() as tree:
            self.python_tree(tree, [])
            self.assertEqual(script.check_python(tree)[2], [])
            self.assertEqual(exit_code(tree), 0)

    def test_each_wrong_import_is_rejected(self):
        for name, line, words in WRONG_IMPORTS:
            with self.subTest(name=name, line=line), tempfile.TemporaryDirectory() as tree:
                self.python_tree(tree, [(name, line)])
                broken = [one for one in script.check_python(tree)[2] if "import cycle" not in one]
                self.assertEqual(len(broken), 1, broken)
                self.assertTrue(broken[0].startswith("python/flashcore/" + name), broken)
                self.assertIn(words, broken[0])
                self.assertEqual(exit_code(tree), 1)

    def test_each_import_cycle_is_reported(self):
        for added, words in CYCLES:
            with self.subTest(added=added), tempfile.TemporaryDirectory() as tree:
                self.python_tree(tree, added)
                broken = script.check_python(tree)[2]
                self.assertEqual(len(broken), 1, broken)
                self.assertTrue(broken[0].endswith(words), broken)
                self.assertEqual(exit_code(tree), 1)

    def test_a_violation_sets_the_exit_code(self):
        path, line, _ = VIOLATIONS[0]
        with tempfile.TemporaryDirectory() as tree:
            write(tree, CLEAN)
            write(tree, {path: line + "\n"})
            self.assertEqual(exit_code(tree), 1)

    def test_an_empty_tree_is_an_error(self):
        with tempfile.TemporaryDirectory() as tree:
            self.assertEqual(exit_code(tree), 2)


if __name__ == "__main__":
    unittest.main()
