"""Tests scripts/kernel: kernel lists, choice of cases, summary of ptxas output."""

import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import kernel_build as build  # noqa: E402

# Output of nvcc 13.0 for two architectures, with a kernel that is not attention.
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN9flashcore4cuda4sm809attentionINS1_6ConfigIfEEEvv' for 'sm_80'
ptxas info    : Function properties for _ZN9flashcore4cuda4sm809attentionINS1_6ConfigIfEEEvv
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 1327.025 ms
ptxas info    : Compiling entry function '_ZN9flashcore4cuda7combineEv' for 'sm_90'
ptxas info    : Function properties for _ZN9flashcore4cuda7combineEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN9flashcore4cuda4sm809attentionINS1_6ConfigIfEEEvv' for 'sm_90'
ptxas info    : Function properties for _ZN9flashcore4cuda4sm809attentionINS1_6ConfigIfEEEvv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 206 registers, used 1 barriers
"""


class Lists(unittest.TestCase):
    def setUp(self):
        self.kernels = build.read_kernels()

    def test_every_row_is_read(self):
        for name in ("cuda", "cpu"):
            lines = (ROOT / "src" / name / "kernels.def").read_text().splitlines()
            wanted = sum(line.startswith("FLASHCORE_") for line in lines)
            self.assertEqual(sum(one.device == name for one in self.kernels), wanted)
            self.assertGreater(wanted, 0)

    def test_persistent_kernels_are_grouped_by_inputs(self):
        groups = build.persistent_kernels(self.kernels)
        self.assertEqual(set(groups), {"sm90", "sm90_e4m3"})
        for name, inputs in (("sm90", "native"), ("sm90_e4m3", "fp8")):
            matched = {one.id for one in self.kernels if re.search(groups[name], one.id)}
            self.assertEqual(matched, {one.id for one in self.kernels
                                       if one.family == "sm90" and one.inputs == inputs})

    def test_faults_are_injected_into_every_tile_size_of_every_family(self):
        groups = build.fault_kernels(self.kernels)
        self.assertEqual(set(groups), {"simt", "sm80", "sm80_8bit", "sm90", "sm90_e4m3"})
        matched = [one for one in self.kernels if any(re.search(group, one.id) for group in groups.values())]
        small = [one for one in self.kernels if one.device == "cuda" and one.head_dim == 64]

        def sizes(kernels):
            return {(one.op, one.family, one.inputs, one.tile_q) for one in kernels}

        self.assertEqual(sizes(matched), sizes(small))
        self.assertEqual({one.dtype for one in matched if one.family == "simt"}, {"f32", "f16", "bf16"})
        self.assertEqual({one.dtype for one in matched if one.family != "simt"}, {"bf16"})

    def test_the_fault_of_ping_pong_meets_a_kernel_that_alternates(self):
        schedules = (build.ROOT / "src" / "core" / "step_schedule.h").read_text(encoding="utf-8")
        alternate = {tuple(map(int, shape.split(", ")))
                     for shape in re.findall(r"\{false, (\d+, \d+, \d+), \{true", schedules)}
        self.assertTrue(alternate)
        chosen = build.fault_kernels(self.kernels)["sm90"]
        shapes = {one.shape[:3] for one in self.kernels if re.search(chosen, one.id)}
        self.assertTrue(shapes & alternate, f"no kernel of {chosen} alternates")

    def test_by_name(self):
        for kernel in self.kernels:
            self.assertIs(build.find_kernel(kernel.id, self.kernels), kernel)
        with self.assertRaisesRegex(build.Failure, "some like it are .*fwd_generic_f32"):
            build.find_kernel("generic_f32", self.kernels)
        with self.assertRaisesRegex(build.Failure, "there are fwd_"):
            build.find_kernel("", self.kernels)

    def test_every_kernel_has_cases_of_its_own_type_and_size(self):
        cases = build.load_cases()
        for kernel in self.kernels:
            chosen = build.cases_for(kernel, self.kernels, cases)
            self.assertTrue(1 <= len(chosen) <= 5, kernel)
            for case in chosen:
                eight_bit = kernel.inputs == "kv8"
                self.assertEqual(case["dtype"], kernel.dtype + "/e4m3" * eight_bit)
                self.assertLessEqual(case["head_dim"], kernel.head_dim)
                self.assertEqual(case["suite"], "kernel")

    def test_large_tiles_get_prefill_and_small_tiles_decode(self):
        kernels = [build.Kernel(f"k{tile}", "fwd", "cuda", "sm80", "bf16", 128, tile) for tile in (128, 16)]
        smaller = build.Kernel("k", "fwd", "cuda", "sm80", "bf16", 64, 16)
        cases = build.load_cases()
        many, few = (build.cases_for(kernel, [*kernels, smaller], cases) for kernel in kernels)
        self.assertEqual({case["head_dim"] for case in many + few}, {128})
        self.assertTrue(all(case["q_len"] >= 64 for case in many))
        self.assertIn("decode", {case["name"] for case in few})
        self.assertTrue(all(case["q_len"] <= 64 for case in few))


class Output(unittest.TestCase):
    def test_ptxas(self):
        self.assertEqual(build.ptxas_lines(PTXAS), [
            "sm_80: 255 registers, spills 12 bytes stored and 16 loaded, stack 8 bytes",
            "sm_90: 206 registers, spills 0 bytes stored and 0 loaded, stack 0 bytes"])
        self.assertEqual(build.ptxas_lines("ninja: no work to do.\n"), [])

    def test_an_unknown_kernel_is_refused_before_the_build(self):
        done = subprocess.run([ROOT / "scripts" / "kernel", "fwd_nobody"], capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("there is no kernel \"fwd_nobody\"", done.stderr)


if __name__ == "__main__":
    unittest.main()
