import os
import re
import shutil
import unittest

from flashcore_command import FAILED, SOURCE, CommandTest


class Info(CommandTest):
    def test_version(self):
        self.assertRegex(self.call("--version").stdout, r"\Aflashcore \d+\.\d+\.\d+ \([0-9a-f]+\)\n\Z")

    def test_help_has_examples_and_exit_codes(self):
        self.assertIn("130 interrupted", self.call("--help").stdout)
        for command in ("info", "run", "explain", "check", "verify", "quantize", "bench"):
            text = self.call(command, "--help").stdout
            self.assertIn("Examples:", text)
            self.assertIn("Exit codes:", text)
            self.assertIn(f"  flashcore {command}", text)

    def test_wrong_usage(self):
        message = self.refuse("frobnicate", about='unknown command "frobnicate"; known: ')
        known = re.split(", | and ", message.strip().partition("known: ")[2])
        shown = re.findall(r"^  (\w+)  ", self.call("--help").stdout.partition("Subcommands:")[2], re.M)
        self.assertEqual(known, shown)
        self.assertIn("quantize", known)
        self.refuse("info", "--frobnicate", about="flashcore info --help")
        self.refuse("--frobnicate", about="flashcore --help")
        done = self.call(code=2)
        self.assertIn("Usage", done.stderr)

    def test_devices(self):
        text = self.call("info").stdout
        self.assertRegex(text, r"cpu +\S.*, \d+ threads?, instruction set (neon|avx2|avx512|vnni|amx|generic)")
        self.assertRegex(text, r"cuda(:\d+| +not used: \S)")
        self.assertRegex(text, r"source +[0-9a-f]{16} whole library")

    def test_json(self):
        info = self.call_json("info", "--peak")
        self.assertRegex(info["fingerprint"], r"\A[0-9a-f]{16}\Z")
        self.assertIn("cpu", info["families"])
        self.assertGreater(info["cpu"]["threads"], 0)
        self.assertGreater(info["cpu"]["f32_tflops"], 0)
        self.assertGreater(info["cpu"]["memory_gbs"], 0)
        self.assertTrue(info["cuda"]["device_count"] > 0 or info["cuda"]["reason"])

    def test_flashcore_isa_limits_the_instruction_set(self):
        widest = self.call_json("info")["cpu"]["isa"]
        for isa in {"generic", widest}:
            info = self.call_json("info", "--kernels", env={"FLASHCORE_ISA": isa})
            self.assertEqual(info["cpu"]["isa"], isa)
            used = {kernel["isa"] for kernel in info["kernels"] if kernel["runs_here"] and "isa" in kernel}
            self.assertIn(isa, used)
            if isa == "generic":
                self.assertEqual(used, {"generic"})
        other = "avx2" if widest == "neon" else "neon"
        for wrong in (other, "sse2", ""):
            self.assertEqual(self.call_json("info", env={"FLASHCORE_ISA": wrong})["cpu"]["isa"], widest)

    def test_lists_the_kernels_of_the_def_files(self):
        wanted = set()
        with open(os.path.join(SOURCE, "src/cuda/kernels.def")) as file:
            wanted |= set(re.findall(r"^FLASHCORE_KERNEL\((\w+)", file.read(), re.M))
        with open(os.path.join(SOURCE, "src/cpu/kernels.def")) as file:
            rows = re.findall(r"^FLASHCORE_CPU_(ROWS_)?KERNEL\((\w+), (\w+), (\w+)\)", file.read(), re.M)
            wanted |= {"_".join(row) + ("_q16" if few else "") for few, *row in rows}
        kernels = self.call_json("info", "--kernels")["kernels"]
        self.assertEqual({kernel["id"] for kernel in kernels}, wanted)
        self.assertTrue(any(kernel["runs_here"] for kernel in kernels))
        for kernel in kernels:
            self.assertTrue(kernel["compiled"] or not kernel["runs_here"])
            self.assertRegex(kernel["fingerprint"], r"\A[0-9a-f]{16}\Z")
            self.assertIn(kernel["inputs"], ("native", "kv8", "fp8"))
            self.assertIn(kernel["probability_dtype"], ("f64", "f32", "f16", "bf16", "e4m3"))
            self.assertEqual("paged KV" in kernel["features"], not kernel["id"].startswith("bwd_"))
        text = self.call("info", "--kernels").stdout
        for name in wanted:
            self.assertIn(name, text)


class Tree(CommandTest):
    def copy_of_sources(self):
        tree = self.path("a tree; with 'odd' name")
        for part in ("bindings", "include", "src", "cmake", "scripts"):
            shutil.copytree(os.path.join(SOURCE, part), os.path.join(tree, part))
        shutil.copy(os.path.join(SOURCE, "CMakeLists.txt"), tree)
        return tree

    def test_fresh(self):
        self.assertIn("matches this binary",
                      self.call("info", "--tree", SOURCE).stdout)
        self.assertFalse(self.call_json("info", "--tree", SOURCE)["tree"]["stale"])

    def test_stale_after_a_change(self):
        tree = self.copy_of_sources()
        self.call("info", "--tree", tree)
        with open(os.path.join(tree, "src/core/mask.h"), "a") as file:
            file.write("// one more line\n")
        done = self.call("info", "--tree", tree, code=FAILED)
        self.assertRegex(done.stderr, r"flashcore: stale: .*changed: cpu, simt, sm80, sm90, tree.*rebuild it")
        found = self.call_json("info", "--tree", tree, code=FAILED)["tree"]
        self.assertTrue(found["stale"])

    def test_stale_after_a_new_file(self):
        tree = self.copy_of_sources()
        with open(os.path.join(tree, "src/plan/new.cc"), "w"):
            pass
        self.call("info", "--tree", tree, code=FAILED)

    def test_rejects_other_folders(self):
        self.refuse("info", "--tree", self.folder, about="is --tree a FlashCore source tree?")


if __name__ == "__main__":
    unittest.main()
