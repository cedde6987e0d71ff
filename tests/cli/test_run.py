import math
import random
import unittest

from flashcore_command import COULD_NOT_RUN, CommandTest, read_npy, write_npy


def attention(q, k, v, shape_q, shape_k, v_dim, causal):
    """Attention by its definition, on flat lists of [heads, len, dim]."""
    heads, q_len, dim = shape_q
    kv_len = shape_k[1]
    out, lse = [], []
    for h in range(heads):
        for i in range(q_len):
            row = q[(h * q_len + i) * dim:][:dim]
            scores = []
            for j in range(kv_len):
                key = k[(h * kv_len + j) * dim:][:dim]
                hidden = causal and j > i + kv_len - q_len
                scores.append(-math.inf if hidden else
                              sum(a * b for a, b in zip(row, key)) / math.sqrt(dim))
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights)
            lse.append(top + math.log(total))
            for c in range(v_dim):
                out.append(sum(w * v[(h * kv_len + j) * v_dim + c]
                               for j, w in enumerate(weights)) / total)
    return out, lse


class Random(CommandTest):
    def test_prints_error_kernel_and_time(self):
        text = self.call("run", "--shape", "1,2,64,32", "--device", "cpu").stdout
        self.assertRegex(text, r"kernel +fwd_\w+_f32")
        self.assertRegex(text, r"error +max \S+, relative \S+")
        self.assertIn("passed (128 of 128 rows", text)
        self.assertRegex(text, r"time +\S+ [um]?s \(spread")

    def test_every_option(self):
        for options in (["--causal"], ["--window=3,-1"], ["--scale", "-0.5"], ["--softcap", "5"],
                        ["--bias", "random", "--mask", "random", "--alibi", "random", "--sinks",
                         "random", "--lse"],
                        ["--cu-seqlens-q", "random", "--cu-seqlens-k", "random", "--max-q-len",
                         "9"],
                        ["--used-k", "random", "--q-start", "random", "--k-start", "random",
                         "--checked"],
                        ["--page-size", "20"], ["--page-size", "7", "--used-k", "random", "--bias",
                                                "random", "--checked", "--layout", "bshd"],
                        ["--partial", "--splits", "3"], ["--layout", "bshd"],
                        ["--reproducibility", "batch_invariant"], ["--dtype", "f16", "--out-f32"],
                        ["--dtype", "bf16"], ["--dtype", "f64"], ["--threads", "1"],
                        ["--sigma", "10"], ["--kernel", "generic_f32"]):
            result = self.call_json("run", "--shape", "2,4/2,9/300,16/24", "--device", "cpu",
                                    "--samples", "0", *options)
            self.assertTrue(result["passed"], options)
            self.assertNotIn("us", result)

    def test_separate_sizes(self):
        result = self.call_json("run", "--batch", 2, "--q-heads", 4, "--kv-heads", 2, "--q-len", 3,
                                "--kv-len", 7, "--head-dim", 5, "--v-dim", 6, "--device", "cpu",
                                "--seed", 7)
        self.assertEqual(result["rows"], 2 * 4 * 3)
        self.assertEqual(result["seed"], 7)
        self.assertEqual(len(result["samples"]), 10)
        self.assertGreater(result["us"], 0)

    def test_seed_determines_the_data(self):
        outputs = []
        for seed in (1, 1, 2):
            self.call("run", "--shape", "1,1,4,8", "--device", "cpu", "--samples", 0, "--seed",
                      seed, "--out", self.path("out.npy"))
            outputs.append(read_npy(self.path("out.npy"))[2])
        self.assertEqual(outputs[0], outputs[1])
        self.assertNotEqual(outputs[0], outputs[2])

    def test_cases_and_suites(self):
        one = self.call_json("run", "--case", "regression-one-tile#2", "--device", "cpu")
        self.assertEqual(one["case"], "regression-one-tile#2")
        both = self.call_json("run", "--case", "regression-one-tile", "--device", "cpu")
        self.assertEqual([r["case"] for r in both["results"]],
                         ["regression-one-tile#1", "regression-one-tile#2"])
        few = self.call("run", "--suite", "regression", "--device", "cpu", "--time-limit", "0.001")
        self.assertIn("the time limit of 0.001 s was reached", few.stderr)
        self.refuse("run", "--case", "nope", about="known: prefill-b1-h1")
        self.refuse("run", "--suite", "nope", about="known: anchors, regression, cpu, serving, simt")

    def test_large_problems_are_sampled(self):
        result = self.call_json("run", "--shape", "1,8,4096,64", "--device", "cpu", "--samples", 0)
        self.assertTrue(result["passed"])
        self.assertLess(result["rows_checked"], result["rows"])

    def test_refusals(self):
        self.refuse("run", about="give one of --shape")
        self.refuse("run", "--shape", "1,2,3", about="wanted batch,heads,length,head_dim")
        self.refuse("run", "--shape", "1,3/2,4,8", about="q_heads must be a multiple")
        self.refuse("run", "--shape", "1,1,4,577", about="577")
        self.refuse("run", "--shape", "1,1,100,8", "--page-size", "16", about="not whole pages")
        self.refuse("run", "--shape", "1,1,4,8", "--page-size", "257", about="256")
        self.refuse("run", "--shape", "1,1,16,8", "--page-size", "16", "--cu-seqlens-k", "random",
                    about="together with cu_seqlens_k")
        self.refuse("run", "--shape", "1,1,4,8", "--block-table", "t.npy", about="--page-size")
        self.refuse("run", "--shape", "1,1,4,8", "--window", "3", about="--window=128,0")
        self.refuse("run", "--shape", "1,1,4,8", "--dtype", "f8", about="f16")
        self.refuse("run", "--shape", "1,1,4,8", "--device", "tpu", about="wanted auto, cpu, cuda")
        self.refuse("run", "--shape", "1,1,4,8", "--kernel", "no_such", about="info --kernels")
        self.refuse("run", "--shape", "1,1,4,8", "--kernel", "(", about="regular expression")
        self.refuse("run", "--shape", "1,1,4,8", "--bias", "b.npy", about="--bias random")
        self.refuse("run", "--shape", "1,1,4,8", "--plan-for", "cpux", about="h200")
        self.refuse("run", "--shape", "1,1,4,8", "--device", "cpu", "--plan-for", "l4",
                    about="explain needs no device")
        self.refuse("run", "--shape", "1,1,4,8", "--device", "cpu", "--out",
                    self.path("no/such/folder.npy"), about="cannot be written")

    def test_missing_gpu(self):
        if self.call_json("info")["cuda"]["device_count"] > 0:
            self.skipTest("there is a GPU")
        self.refuse("run", "--shape", "1,1,4,8", "--device", "cuda", about="use --device cpu")


class Files(CommandTest):
    HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 3, 5, 4, 6

    def setUp(self):
        super().setUp()
        source = random.Random(3)
        draw = lambda n: [source.gauss(0, 1) for _ in range(n)]
        self.q = draw(self.HEADS * self.Q_LEN * self.DIM)
        self.k = draw(self.HEADS * self.KV_LEN * self.DIM)
        self.v = draw(self.HEADS * self.KV_LEN * self.V_DIM)

    def save(self, descr="<f4"):
        shapes = {"q": (1, self.HEADS, self.Q_LEN, self.DIM),
                  "k": (1, self.HEADS, self.KV_LEN, self.DIM),
                  "v": (1, self.HEADS, self.KV_LEN, self.V_DIM)}
        for name, shape in shapes.items():
            write_npy(self.path(f"{name}.npy"), descr, shape, getattr(self, name))
        return [part for name in shapes for part in (f"--{name}", self.path(f"{name}.npy"))]

    def want(self, causal=False):
        return attention(self.q, self.k, self.v, (self.HEADS, self.Q_LEN, self.DIM),
                         (self.HEADS, self.KV_LEN, self.DIM), self.V_DIM, causal)

    def assert_close(self, got, want, tolerance):
        self.assertEqual(len(got), len(want))
        self.assertLess(max(abs(a - b) for a, b in zip(got, want)), tolerance)

    def test_output_and_lse(self):
        for descr, tolerance in (("<f4", 1e-5), ("<f8", 1e-12), ("<f2", 1e-2)):
            for causal in (False, True):
                self.call("run", *self.save(descr), "--device", "cpu", "--samples", 0, "--out",
                          self.path("out.npy"), "--lse-out", self.path("lse.npy"),
                          *(["--causal"] if causal else []))
                out, lse = self.want(causal)
                got_descr, shape, values = read_npy(self.path("out.npy"))
                self.assertEqual(got_descr, descr)
                self.assertEqual(shape, (1, self.HEADS, self.Q_LEN, self.V_DIM))
                self.assert_close(values, out, tolerance)
                _, shape, values = read_npy(self.path("lse.npy"))
                self.assertEqual(shape, (1, self.HEADS, self.Q_LEN))
                self.assert_close(values, lse, tolerance)

    def test_dtype_converts(self):
        self.call("run", *self.save(), "--device", "cpu", "--dtype", "bf16", "--out",
                  self.path("out.npy"))
        descr, _, bits = read_npy(self.path("out.npy"))
        self.assertEqual(descr, "<V2")
        import struct
        values = [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in bits]
        self.assert_close(values, self.want()[0], 0.05)

    def test_uint16_with_dtype_bf16(self):
        files = self.save()
        ones = [0x3f80] * (self.HEADS * self.Q_LEN * self.DIM)
        write_npy(self.path("q.npy"), "<u2", (1, self.HEADS, self.Q_LEN, self.DIM), ones)
        self.refuse("run", *files, about="--dtype bf16")
        self.call("run", *files, "--device", "cpu", "--dtype", "bf16")

    def test_layout_bshd(self):
        files = self.save()
        self.call("run", *files, "--device", "cpu", "--out", self.path("a.npy"))
        for name, length, dim in (("q", self.Q_LEN, self.DIM), ("k", self.KV_LEN, self.DIM),
                                  ("v", self.KV_LEN, self.V_DIM)):
            flat = getattr(self, name)
            swapped = [flat[(h * length + i) * dim + c] for i in range(length)
                       for h in range(self.HEADS) for c in range(dim)]
            write_npy(self.path(f"{name}.npy"), "<f4", (1, length, self.HEADS, dim), swapped)
        self.call("run", *files, "--device", "cpu", "--layout", "bshd", "--out", self.path("b.npy"))
        _, shape, a = read_npy(self.path("a.npy"))
        _, swapped_shape, b = read_npy(self.path("b.npy"))
        self.assertEqual(swapped_shape, (1, self.Q_LEN, self.HEADS, self.V_DIM))
        index = lambda h, i, c: (i * self.HEADS + h) * self.V_DIM + c
        self.assertEqual(a, [b[index(h, i, c)] for h in range(shape[1]) for i in range(shape[2])
                             for c in range(shape[3])])

    def test_optional_tensors(self):
        files = self.save()
        write_npy(self.path("bias.npy"), "<f4", (1, self.HEADS, 1, self.KV_LEN),
                  [0.5] * self.HEADS * self.KV_LEN)
        write_npy(self.path("mask.npy"), "|b1", (1, 1, self.Q_LEN, self.KV_LEN),
                  [i % 3 > 0 for i in range(self.Q_LEN * self.KV_LEN)])
        write_npy(self.path("heads.npy"), "<f8", (self.HEADS,), [0.25] * self.HEADS)
        write_npy(self.path("used.npy"), "<i4", (1,), [4])
        result = self.call_json("run", *files, "--device", "cpu", "--bias", self.path("bias.npy"),
                                "--mask", self.path("mask.npy"), "--alibi", self.path("heads.npy"),
                                "--sinks", self.path("heads.npy"), "--used-k",
                                self.path("used.npy"))
        self.assertTrue(result["passed"])

    def test_pages(self):
        """The same keys, in shuffled pages of two."""
        files = self.save()
        self.call("run", *files, "--device", "cpu", "--out", self.path("a.npy"))
        table = [3, 0, 2]
        for name, dim in (("k", self.DIM), ("v", self.V_DIM)):
            pages = [math.nan] * (4 * 2 * self.HEADS * dim)
            for j in range(self.KV_LEN):
                for h in range(self.HEADS):
                    row = (table[j // 2] * 2 + j % 2) * self.HEADS + h
                    from_row = h * self.KV_LEN + j
                    pages[row * dim:(row + 1) * dim] = \
                        getattr(self, name)[from_row * dim:(from_row + 1) * dim]
            write_npy(self.path(f"{name}.npy"), "<f4", (4, 2, self.HEADS, dim), pages)
        write_npy(self.path("used.npy"), "<i4", (1,), [self.KV_LEN])
        write_npy(self.path("table.npy"), "<i4", (1, 3), table)
        paged = [*files, "--device", "cpu", "--block-table", self.path("table.npy"), "--used-k",
                 self.path("used.npy")]
        self.call("run", *paged, "--out", self.path("b.npy"))
        self.assertEqual(read_npy(self.path("a.npy")), read_npy(self.path("b.npy")))
        self.refuse("run", *paged, "--page-size", 2, about="--block-table FILE")
        for bad in (-1, 4, 2**31 - 1):
            write_npy(self.path("table.npy"), "<i4", (1, 3), [3, bad, 2])
            self.refuse("run", *paged, about=f"block_table[0, 1] is {bad}")

    def test_lengths_from_files_are_checked(self):
        files = self.save()
        for length in (-1, self.KV_LEN + 1, 2**31 - 1):
            write_npy(self.path("used.npy"), "<i4", (1,), [length])
            self.refuse("run", *files, "--device", "cpu", "--used-k", self.path("used.npy"),
                        about=f"used_k[0] is {length}")

    def test_bad_files(self):
        files = self.save()
        self.refuse("run", "--q", self.path("q.npy"), about="give all three files")
        self.refuse("run", *files[:-1], self.path("none.npy"), about="No such file")
        self.refuse("run", *files[:-1], self.folder, about="cannot be read")
        write_npy(self.path("v.npy"), "<f4", (1, self.HEADS, self.KV_LEN + 1, self.V_DIM),
                  [0.0] * self.HEADS * (self.KV_LEN + 1) * self.V_DIM)
        self.refuse("run", *files, about="v: ")
        write_npy(self.path("v.npy"), "<i8", (1,), [1])
        self.refuse("run", *files, about="int32")
        for content in (b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff{", b"not a file" * 100):
            with open(self.path("v.npy"), "wb") as file:
                file.write(content)
            self.refuse("run", *files, about="--v ")

    def test_small_file_with_a_large_shape(self):
        files = self.save()
        write_npy(self.path("v.npy"), "<f4", (2147483647, 2147483647, 1, 1), [1.0])
        self.refuse("run", *files, about="its shape needs")
        for name in ("q", "k", "v"):  # no elements, but a huge output
            write_npy(self.path(f"{name}.npy"), "<f4", (2147483647, 2147483647, 1, 0), [])
        write_npy(self.path("v.npy"), "<f4", (0, 1, 1, 2147483647), [])
        done = self.call("run", *files, code=COULD_NOT_RUN)
        self.assertIn("flashcore: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
