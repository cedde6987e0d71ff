"""A dozen families of transformers compared with "eager", each for a different mechanism. The table of all
families is in docs/transformers.md; transformers_families.py writes it."""

import unittest

from torch_support import needs_cuda

import torch

try:
    import transformers  # noqa: F401
except ImportError:
    raise unittest.SkipTest("transformers is not installed")

import tiny_models
import transformers_families

RIGHT = {
    "llama": "padding masks, grouped heads",
    "gemma2": "sliding windows, softcap",
    "gpt_oss": "sinks; transformers would replace a name with flash in it",
    "llama4_text": "chunks, which transformers refuses to names with flash in them",
    "gpt_neo": "local layers, and a table of attention modules",
    "falcon": "its own module for flash_attn",
    "modernbert": "varlen sequences with two-sided windows",
    "deepseek_v32": "latent attention, keys chosen by an indexer",
    "deepseek_v4": "eager masks only, extended by its own keys; no varlen",
    "minimax_m3_vl_text": "blocks of keys chosen by an indexer",
    "t5": "position bias, cross attention",
    "pegasus_x": "modules that rely on the mask to be causal",
    "vit": "no mask",
}
PACKED = ("llama", "gemma2", "gpt_oss", "modernbert")
REFUSED = ("bloom", "mpt", "codegen", "xglm", "mpnet", "big_bird")  # alibi and others


class Families(unittest.TestCase):
    device = "cpu"

    def setUp(self):
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # the tensors are tiny

    def examine(self, name):
        kinds = dict((name, kind) for kind, name in tiny_models.families())
        if name not in kinds:
            self.skipTest(f"this transformers has no {name}")
        return transformers_families.examine(kinds[name], name, self.device)

    def test_right(self):
        for name, why in RIGHT.items():
            with self.subTest(name, why=why):
                found = self.examine(name)
                verdict = "right, with refusals" if name == "deepseek_v4" else "right"
                self.assertEqual(found.verdict, verdict, f"{found.why} {found.cells}")
                self.assertGreater(found.calls, 0)
                if name in PACKED:  # otherwise "-" is correct too
                    self.assertEqual(found.cells["packed"], "yes")

    def test_refused(self):
        for name in REFUSED:
            with self.subTest(name):
                found = self.examine(name)
                self.assertEqual(found.verdict, "refused", f"{found.why} {found.cells}")

    def test_every_family_has_a_kind(self):
        self.assertGreater(len(tiny_models.families()), 200)


@needs_cuda
class FamiliesCuda(Families):
    device = "cuda"


if __name__ == "__main__":
    unittest.main()
