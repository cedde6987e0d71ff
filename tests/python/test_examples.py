"""The Python programs of examples/ run and compute the documented results."""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest

import torch_support  # noqa: F401 (skips without torch)

import torch

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples")


def run(name, *arguments, cwd=None):
    package = os.path.join(FOLDER, "..", "python")
    done = subprocess.run([sys.executable, os.path.join(FOLDER, name), *arguments], cwd=cwd,
                          env={**os.environ, "PYTHONPATH": package}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


class Examples(unittest.TestCase):
    def test_paged_generation_matches_generation_without_a_cache(self):
        names = runpy.run_path(os.path.join(FOLDER, "generate_paged.py"))
        tokens, dim = names["tokens"], names["dim"]
        self.assertEqual(tokens.shape, (names["batch"], 5 + names["steps"]))
        x = names["embed"][tokens[:, :-1]]
        q, k, v = ((x @ names[one]).unflatten(-1, (-1, dim)).transpose(1, 2)
                   for one in ("to_q", "to_k", "to_v"))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                               enable_gqa=True)
        logits = (x + out.transpose(1, 2).flatten(2) @ names["to_out"]) @ names["head"]
        self.assertTrue(torch.equal(tokens[:, 5:], logits[:, 4:].argmax(-1)))
        self.assertGreater(len(set(tokens[:, 5:].flatten().tolist())), 5)  # not one token repeated

    def test_error_by_dtype(self):
        with tempfile.TemporaryDirectory() as folder:
            code, said = run("error_by_dtype.py", "picture.svg", cwd=folder)
            rows = [line.split() for line in said.splitlines() if line.startswith(("float", "bfloat"))]
            self.assertEqual([row[0] for row in rows], ["float32", "float16", "bfloat16"], said)
            largest = [max(map(float, row[1:])) for row in rows]
            self.assertTrue(0 < largest[0] < 2e-6 < largest[1] < 1e-3 < largest[2] < 6e-3, said)
            if "no plot" not in said:
                self.assertEqual(code, 0, said)
                with open(os.path.join(folder, "picture.svg"), encoding="utf-8") as picture:
                    self.assertIn("<svg", picture.read())

    def test_context_parallel_training(self):
        code, said = run("context_parallel_training.py", "4")
        self.assertEqual(code, 0, said)
        lines = re.findall(r"step \d: loss ([0-9.]+) on 4 ranks, ([0-9.]+) on one", said)
        self.assertEqual(len(lines), 2, said)
        for parallel, alone in lines:
            self.assertAlmostEqual(float(parallel), float(alone), delta=2e-5)
        self.assertLess(float(lines[1][0]), float(lines[0][0]))  # it learns


if __name__ == "__main__":
    unittest.main()
