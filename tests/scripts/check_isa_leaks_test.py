"""Tests scripts/checks/isa_leaks on small objects compiled here: clean objects pass, leaks are found."""
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import unittest

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SCRIPT = os.path.join(TREE, "scripts", "checks", "isa_leaks")
CXX = shlex.split(os.environ.get("CXX", "g++"))

TABLE = """
namespace flashcore::cpu {
namespace { float add(float a, float b) { return a + b; } }
struct IsaKernels { float (*f)(float, float); };
extern const IsaKernels kGenericKernels; const IsaKernels kGenericKernels{add};
}
"""
INLINE = "inline float leaked(float x) { return x * x; }\nfloat (*escape)(float) = leaked;\n"
LOOP = "void scale(float* x) { for (int i = 0; i < 1024; ++i) x[i] *= 2; }\n"
WIDE_FLAG = {"aarch64": ["-march=armv8.2-a+sve", "-msve-vector-bits=256"], "x86_64": ["-mavx2"]}
NARROW_AVX = "float twice(float x) { return x + x; }\n"


class CheckIsaLeaks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.build = self.folder.name
        self.compile("flashcore_cpu_generic", TABLE)
        self.compile("flashcore_objects", LOOP)

    def compile(self, target, text, flags=()):
        directory = os.path.join(self.build, "CMakeFiles", target + ".dir")
        os.makedirs(directory, exist_ok=True)
        output = os.path.join(directory, "file.cc.o")
        subprocess.run([*CXX, "-std=c++20", "-O3", *flags, "-x", "c++", "-", "-c", "-o", output],
                       input=text, text=True, check=True)

    def check(self):
        done = subprocess.run([sys.executable, SCRIPT, self.build], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_clean_objects_pass(self):
        code, said = self.check()
        self.assertEqual(code, 0, said)

    def test_an_inline_function_next_to_the_table(self):
        self.compile("flashcore_cpu_generic", TABLE + INLINE)
        code, said = self.check()
        self.assertEqual(code, 1, said)
        self.assertIn("leaked", said)
        self.assertIn("escape", said)
        self.assertNotIn("kGenericKernels", said)

    @unittest.skipUnless(platform.machine() == "x86_64", "the oracle has one instruction set elsewhere")
    def test_loops_of_the_oracle(self):
        loops = TABLE.replace("kGenericKernels", "kAvx2Sums").replace(
            "namespace {", "namespace { " + LOOP).replace("return a + b", "scale(&a); return a + b")
        for text, leaks in ((loops, False), (loops + INLINE, True)):
            self.compile("flashcore_reference_avx2", text, ["-mavx2"])
            code, said = self.check()
            self.assertEqual(code, 1 if leaks else 0, said)
            self.assertEqual("leaked" in said, leaks)

    def test_wide_instructions_outside_the_kernels(self):
        self.compile("flashcore_objects", LOOP, WIDE_FLAG[platform.machine()])
        code, said = self.check()
        self.assertEqual(code, 1, said)
        self.assertIn("flashcore_objects", said)

    def test_wide_instructions_in_the_generic_kernel(self):
        self.compile("flashcore_cpu_generic", TABLE.replace("namespace {", "namespace { " + LOOP)
                     .replace("return a + b", "scale(&a); return a + b"),
                     WIDE_FLAG[platform.machine()])
        code, said = self.check()
        self.assertEqual(code, 1, said)
        self.assertIn("flashcore_cpu_generic", said)

    @unittest.skipUnless(platform.machine() == "x86_64", "VEX encoding exists on x86-64 only")
    def test_a_scalar_avx_instruction(self):
        self.compile("flashcore_objects", NARROW_AVX, ["-mavx"])
        code, said = self.check()
        self.assertEqual(code, 1, said)
        self.assertIn("vaddss", said)

    @unittest.skipUnless(platform.machine() == "x86_64", "EVEX encoding exists on x86-64 only")
    def test_avx512_in_the_avx2_kernel(self):
        self.compile("flashcore_cpu_avx2", TABLE.replace("Plain", "Avx2").replace(
            "namespace {", "namespace { " + LOOP).replace("return a + b", "scale(&a); return a + b"),
            ["-mavx512f", "-mprefer-vector-width=512"])
        code, said = self.check()
        self.assertEqual(code, 1, said)
        self.assertIn("zmm", said)

    @unittest.skipUnless(platform.machine() == "x86_64", "AMX exists on x86-64 only")
    def test_amx_in_other_kernels_and_in_its_own(self):
        table = TABLE.replace("return a + b", 'asm volatile("tilerelease"); return a + b')
        for isa, leaks in (("avx512", True), ("amx", False)):
            self.compile("flashcore_cpu_" + isa, table.replace("kGeneric", "k" + isa.capitalize()),
                         ["-mavx512f"])
            code, said = self.check()
            self.assertEqual(code, 1 if leaks else 0, said)
            self.assertEqual("tilerelease" in said, leaks)
            os.remove(os.path.join(self.build, "CMakeFiles", f"flashcore_cpu_{isa}.dir", "file.cc.o"))

    @unittest.skipUnless(platform.machine() == "x86_64", "VNNI exists on x86-64 only")
    def test_dot_products_in_other_kernels_and_in_their_own(self):
        table = TABLE.replace("return a + b",
                              'asm volatile("vpdpbusd %zmm0, %zmm1, %zmm2"); return a + b')
        for isa, leaks in (("avx512", True), ("vnni", False)):
            self.compile("flashcore_cpu_" + isa, table.replace("kGeneric", "k" + isa.capitalize()),
                         ["-mavx512f"])
            code, said = self.check()
            self.assertEqual(code, 1 if leaks else 0, said)
            self.assertEqual("vpdpbusd" in said, leaks)
            os.remove(os.path.join(self.build, "CMakeFiles", f"flashcore_cpu_{isa}.dir", "file.cc.o"))

    def test_a_folder_without_a_build_is_an_error(self):
        with tempfile.TemporaryDirectory() as empty:
            self.build = empty
            self.assertEqual(self.check()[0], 2)


if __name__ == "__main__":
    unittest.main()
