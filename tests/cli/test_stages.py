"""flashcore run --stage and --trace on correct kernels. test_faults.py has wrong ones."""

import math
import unittest

from flashcore_command import CommandTest, write_npy

STAGES = ["scores", "probabilities", "pv", "partials", "combine"]


class Stages(CommandTest):
    def test_all_stages(self):
        result = self.call_json("run", "--shape", "1,2,16/290,16", "--device", "cpu", "--kernel",
                                "generic_f32", "--stage", "all")
        self.assertTrue(result["passed"])
        self.assertEqual([stage["stage"] for stage in result["stages"]], STAGES)
        for stage in result["stages"]:
            self.assertTrue(stage["passed"])
            self.assertEqual((stage["wrong"], stage["unmeasured"]), (0, 0))
            self.assertLessEqual(stage["worst_ratio"], 1)
            self.assertGreater(stage["elements"], 0)
            self.assertIn("batch", stage["worst"])
        # Every score and the LSE of every row; every P, in blocks of v_dim keys; out twice.
        counts = {stage["stage"]: stage["elements"] for stage in result["stages"]}
        self.assertEqual(counts["scores"], 2 * 16 * (290 + 1))
        self.assertEqual(counts["probabilities"], 2 * 16 * math.ceil(290 / 16) * 16)
        self.assertEqual(counts["pv"], 2 * 2 * 16 * 16)
        self.assertNotIn("us", result)

    def test_every_option(self):
        for options in (["--causal"], ["--window=3,-1"], ["--scale", "-0.5"], ["--softcap", "5"],
                        ["--bias", "random", "--mask", "random", "--alibi", "random", "--sinks",
                         "random", "--lse"],
                        ["--cu-seqlens-q", "random", "--cu-seqlens-k", "random"],
                        ["--used-k", "random", "--q-start", "random", "--k-start", "random",
                         "--checked"],
                        ["--partial", "--splits", "3"], ["--layout", "bshd"],
                        ["--dtype", "f16", "--out-f32"], ["--dtype", "bf16"], ["--dtype", "f64"],
                        ["--sigma", "10"], ["--sigma", "0.01"], ["--scale", "0"]):
            result = self.call_json("run", "--shape", "2,4/2,9/300,16/24", "--device", "cpu",
                                    "--stage", "all", *options)
            self.assertTrue(result["passed"], (options, result))
            self.assertFalse([s for s in result["stages"] if "skipped" in s], options)

    def test_8_bit_inputs(self):
        for options in (["--dtype", "e4m3"], ["--dtype", "int8", "--scales", "block",
                                              "--scale-block", "70"],
                        ["--dtype", "bf16", "--kv-dtype", "e5m2", "--scales", "tensor"],
                        ["--kv-dtype", "byte", "--causal"]):
            result = self.call_json("run", "--shape", "2,4/2,9/300,16/24", "--device", "cpu",
                                    "--stage", "all", *options)
            self.assertTrue(result["passed"], (options, result))
            self.assertEqual([stage["stage"] for stage in result["stages"]], ["dequant", *STAGES])
        self.refuse("run", "--shape", "1,2,8,16", "--device", "cpu", "--stage", "dequant",
                    about="not 8-bit")
        self.assertTrue(self.call_json("run", "--shape", "1,2,8/64,16", "--device", "cpu", "--dtype",
                                       "f16", "--kv-dtype", "e4m3", "--page-size", 16,
                                       "--samples", 0)["passed"])

    def test_text(self):
        text = self.call("run", "--shape", "1,2,8/300,16", "--device", "cpu", "--stage",
                         "all").stdout
        for stage in STAGES:
            self.assertRegex(text, rf"(?m)^{stage} +correct +\d+ +0 ")

    def test_one_stage(self):
        result = self.call_json("run", "--shape", "1,2,8,16", "--device", "cpu", "--stage", "pv")
        self.assertEqual([stage["stage"] for stage in result["stages"]], ["pv"])

    def test_missing_stage(self):
        """--stage all skips it with a reason; requested by name, it is an error."""
        result = self.call_json("run", "--shape", "1,2,8,16", "--device", "cpu", "--stage", "all")
        self.assertTrue(result["passed"])
        skipped = {s["stage"]: s["skipped"] for s in result["stages"] if "skipped" in s}
        self.assertEqual(set(skipped), {"partials", "combine"})
        self.refuse("run", "--shape", "1,2,8,16", "--device", "cpu", "--stage", "partials",
                    about="one tile")

    def test_files(self):
        values = [math.sin(i) for i in range(2 * 40 * 8)]
        for name in "qkv":
            write_npy(self.path(name), "<f4", (1, 2, 40, 8), values)
        files = ["--q", self.path("q"), "--k", self.path("k"), "--v", self.path("v")]
        self.assertTrue(self.call_json("run", *files, "--device", "cpu", "--stage",
                                       "all")["passed"])
        write_npy(self.path("q"), "<f4", (1, 2, 40, 8), [math.nan] + values[1:])
        self.refuse("run", *files, "--device", "cpu", "--stage", "scores", about="finite inputs")

    def test_refusals(self):
        self.refuse("run", "--shape", "1,2,8,16", "--stage", "softmax", about="--stage")
        self.refuse("run", "--shape", "1,2,8,16", "--device", "cpu", "--stage", "pv", "--out",
                    self.path("out.npy"), about="--out")
        self.refuse("run", "--shape", "1,64,4096,8", "--device", "cpu", "--stage", "scores",
                    about="fewer heads or shorter lengths")

    def test_num_splits_is_an_alias(self):
        result = self.call_json("run", "--shape", "1,2,8/300,16", "--device", "cpu", "--num-splits",
                                2, "--stage", "partials")
        self.assertEqual(result["plan"]["splits"], 2)


class Trace(CommandTest):
    def test_tiles_and_keys(self):
        result = self.call_json("run", "--shape", "2,2,8/300,16", "--device", "cpu", "--causal",
                                "--trace", "1,0,3")
        trace = result["trace"]
        self.assertTrue(result["passed"] and trace["passed"])
        self.assertEqual((trace["batch"], trace["head"], trace["row"]), (1, 0, 3))
        keys = [key for tile in trace["tiles"] for key in tile["keys"]]
        self.assertEqual([key["key"] for key in keys], list(range(300)))
        last = trace["tiles"][-1]
        self.assertEqual(last["end"], 300)
        for key in keys:
            hidden = key["key"] > 3 + 300 - 8
            self.assertEqual(key["score"]["want"] == "-inf", hidden)
            self.assertEqual(key["score"]["got"] == "-inf", hidden)
        for tile in trace["tiles"]:
            self.assertAlmostEqual(tile["max"]["got"], tile["max"]["want"], places=4)
            self.assertAlmostEqual(tile["sum"]["got"], tile["sum"]["want"], places=3)
            self.assertAlmostEqual(tile["max"]["got"] + math.log(tile["sum"]["got"]),
                                   tile["lse"]["got"], places=9)
            self.assertEqual(len(tile["out"]), 16)
        # Within a split the maximum never decreases.
        seen = [tile["max"]["want"] for tile in trace["tiles"]]
        self.assertEqual(seen, sorted(seen))

    def test_splits(self):
        trace = self.call_json("run", "--shape", "1,1,8/300,16", "--device", "cpu", "--splits", 2,
                               "--trace", "0,0,7")["trace"]
        self.assertEqual(sorted({tile["split"] for tile in trace["tiles"]}), [0, 1])

    def test_text(self):
        text = self.call("run", "--shape", "1,2,8/300,16", "--device", "cpu", "--trace",
                         "0,1,5").stdout
        self.assertIn("batch 0, head 1, row 5", text)
        self.assertIn("measured: ", text)
        self.assertNotIn("WRONG", text)

    def test_stage_and_trace(self):
        result = self.call_json("run", "--shape", "1,2,8/300,16", "--device", "cpu", "--stage",
                                "scores", "--trace", "0,1,5")
        self.assertIn("stages", result)
        self.assertIn("trace", result)

    def test_pages_are_refused(self):
        for what in (["--stage", "all"], ["--trace", "0,0,0"]):
            self.refuse("run", "--shape", "1,2,8/64,16", "--device", "cpu", "--page-size", "16",
                        *what, about="pages")

    def test_no_such_row(self):
        for row in ("0,2,0", "1,0,0", "0,0,8", "0,0,-1"):
            self.refuse("run", "--shape", "1,2,8,16", "--device", "cpu", f"--trace={row}",
                        about="does not exist")
        for row in ("0,0", "a,b,c", "0,0,0,0"):
            self.refuse("run", "--shape", "1,2,8,16", "--device", "cpu", f"--trace={row}",
                        about="wanted batch,head,row")


if __name__ == "__main__":
    unittest.main()
