import os
import subprocess
import unittest

from flashcore_command import PROGRAM, SOURCE, CommandTest

DEVICES = ("h200", "h100", "a100", "l4", "t4", "cpu", "cpu-neon", "cpu-avx2", "cpu-avx512",
           "cpu-amx", "cpu-generic")


class Explain(CommandTest):
    def test_every_named_device(self):
        for device in DEVICES:
            plan = self.call_json("explain", "--shape", "1,8,512,64", "--dtype", "bf16",
                                  "--plan-for", device)
            family = "fwd_" if device.startswith("cpu") else \
                "fwd_simt_bf16" if device == "t4" else "fwd_sm80_bf16"
            self.assertTrue(plan["kernel"].startswith(family), plan["kernel"])
            self.assertGreater(plan["floor_us"], 0)
            self.assertIn(plan["kernel"], plan["text"])
            self.assertIn("not used", plan["text"])

    def test_text(self):
        text = self.call("explain", "--shape", "1,32/8,1/65536,128", "--dtype", "bf16", "--plan-for",
                         "h200").stdout
        for word in ("problem ", "device ", "kernel ", "tiles ", "splits ", "workspace ", "roofline ",
                     "bound ", "not used"):
            self.assertIn(word, text)
        self.assertIn("NVIDIA H200", text)

    def test_measures_this_machine(self):
        text = self.call("explain", "--shape", "1,8,512,64", "--device", "cpu").stdout
        self.assertIn("roofline   arithmetic", text)

    def test_plans_problems_larger_than_memory(self):
        plan = self.call_json("explain", "--shape", "64,128,1048576,128", "--plan-for", "h200")
        self.assertGreater(plan["flops"], 1e18)

    def test_options(self):
        plan = self.call_json("explain", "--shape", "1,1,1/4096,64", "--plan-for", "cpu-generic",
                              "--splits", 4)
        self.assertEqual(plan["splits"], 4)
        text = self.call("explain", "--shape", "1,4,16,64", "--plan-for", "l4", "--causal",
                         "--bias", "random", "--mask", "random", "--sinks", "random", "--alibi",
                         "random", "--lse", "--cu-seqlens-q", "random", "--reproducibility",
                         "batch_invariant").stdout
        for word in ("causal", "ALiBi", "bias", "mask", "sinks", "variable lengths", "LSE",
                     "batch-invariant"):
            self.assertIn(word, text)

    def test_pages(self):
        text = self.call("explain", "--shape", "8,32/8,1/4096,128", "--plan-for", "h200",
                         "--page-size", 16).stdout
        self.assertIn("pages of 16 keys", text)

    def test_kernel_by_id(self):
        plan = self.call_json("explain", "--shape", "1,1,64,64", "--dtype", "f16", "--plan-for",
                              "h200", "--kernel", "fwd_simt_f16_d256_q32")
        self.assertEqual(plan["kernel"], "fwd_simt_f16_d256_q32")
        self.refuse("explain", "--shape", "1,1,64,64", "--plan-for", "h200", "--kernel",
                    "fwd_simt_f16_d256_q32", about="takes f16, q is f32")

    def test_cases(self):
        one = self.call_json("explain", "--case", "decode#2", "--plan-for", "h200")
        self.assertEqual(one["shape"], "1,32/8,1/8192,128")
        for device, family in (("h200", "sm90_e4m3_f16"), ("a100", "sm80_8bit_f16")):
            eight = self.call_json("explain", "--case", "fp8#1", "--plan-for", device)
            self.assertRegex(eight["kernel"], family)
        several = self.call_json("explain", "--suite", "simt", "--plan-for", "h200")
        self.assertEqual(len(several["plans"]), 2)

    def test_ranks(self):
        shape = ("--shape", "1,64/8,1048576,128", "--dtype", "bf16", "--causal")
        text = self.call("explain", *shape, "--ranks", 64).stdout
        for line in ("scheme    2d, zigzag, 64 ranks, 8 ranks divide the heads", "reason    several machines",
                     "rows      1,048,576, 16,384 on rank 0; 64/8 heads of 128, bf16", "forward ",
                     "backward ", "7 x ring step: 67,108,864 bytes", "not measured"):
            self.assertIn(line, text)
        ring = self.call_json("explain", *shape, "--ranks", 64, "--scheme", "ring")
        rows = (1 << 20) // 64
        self.assertEqual(ring["scheme"], "ring")
        self.assertEqual(ring["forward"]["bytes"], [63 * rows * 4096] * 64)
        self.assertEqual(ring["backward"]["bytes"], [63 * rows * 4096 + 64 * rows * 8192] * 64)
        self.assertEqual(ring["forward"]["hidden"], 1.0)
        self.assertEqual(len(ring["forward"]["steps"]), 63)

    def test_links_of_ranks(self):
        shape = ("--shape", "1,8,8192,64", "--ranks", 4, "--scheme", "ring")
        slow = self.call_json("explain", *shape, "--link", "1e8,0")
        self.assertLess(slow["forward"]["hidden"], 0.5)
        step = slow["forward"]["steps"][0]
        self.assertAlmostEqual(step[2], step[1] / 1e8)
        fast = self.call_json("explain", *shape, "--link", "nvlink", "--plan-for", "cpu")
        self.assertEqual(fast["forward"]["hidden"], 1.0)
        self.refuse("explain", *shape, "--link", "string", about="wanted nvlink, pcie")
        self.refuse("explain", *shape, "--plan-for", "t4", about="wanted one of h200")
        self.refuse("explain", *shape[:4], "--scheme", "halo", about="needs a window")
        self.refuse("explain", "--ranks", 4, about="--shape")

    def test_decode_of_ranks(self):
        shape = ("--shape", "8,32/8,1/65536,128", "--dtype", "bf16", "--ranks", 8)
        plan = self.call_json("explain", *shape, "--decode")
        self.assertEqual((plan["scheme"], plan["forward"]["bytes"]), ("decode", [7 * 8 * 32 * 129 * 4] * 8))
        by_heads = self.call_json("explain", *shape, "--decode", "--by-heads")
        self.assertEqual(by_heads["forward"]["bytes"], [7 * 8 * 4 * 129 * 4] * 8)
        self.assertIn("--decode plans", self.call("explain", *shape).stdout)
        self.refuse("explain", *shape, "--decode", "--causal", about="--causal")
        self.refuse("explain", *shape, "--decode", "--scheme", "ring", about="--scheme")
        self.refuse("explain", *shape[:4], "--decode", about="--ranks")

    def test_options_that_ranks_do_not_take(self):
        shape = ("--shape", "1,8,64,64", "--ranks", 4)
        for option in (("--page-size", 16), ("--used-k", "random"), ("--cu-seqlens-q", "random"),
                       ("--splits", 2), ("--kernel", "x"), ("--bias", "random"), ("--max-q-len", 3)):
            self.refuse("explain", *shape, *option, about=": --ranks does not take it")
        self.refuse("explain", *shape, "--dtype", "int8", about="--dtype")
        self.refuse("explain", "--shape", "1,8,64,64", "--net", "1e9", about="--net requires --ranks")

    def test_documents_of_ranks(self):
        shape = ("--shape", "1,8,64,64", "--ranks", 4, "--sharding", "contiguous")
        plan = self.call_json("explain", *shape, "--documents", "0,16,32,64", "--causal")
        self.assertEqual(plan["scheme"], "gather")
        # Ranks 0, 1 and 3 hold no key that another rank sees.
        self.assertEqual([n > 0 for n in plan["forward"]["bytes"]], [False, False, True, False])
        self.refuse("explain", *shape, "--documents", "0,16,32", about="ends with 32")
        self.refuse("explain", *shape, "--documents", "0,x", about="--documents is")

    def test_documented_predictions(self):
        done = subprocess.run([os.path.join(SOURCE, "scripts", "lib", "distributed_table"), "--check", PROGRAM],
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_refusals(self):
        self.refuse("explain", "--shape", "2147483647,2147483647,1073741824,576", about="fit")
        self.refuse("explain", about="--shape 1,8,512,64")
        self.refuse("explain", "--shape", "1,1,4,8", "--plan-for", "h300", about="wanted cpu, h200")
        self.refuse("explain", "--shape", "1,1,4,8", "--case", "decode", about="either")


if __name__ == "__main__":
    unittest.main()
