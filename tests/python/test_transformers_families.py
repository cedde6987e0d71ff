"""A dozen families of transformers against "eager", each for a mechanism of its own. The table of all
families is in docs/transformers.md; transformers_families.py makes it."""

import unittest

from torch_support import needs_cuda

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
    "gpt_neo": "local layers of a module in a table",
    "falcon": "a module of its own for flash_attn",
    "gptj": "a module of its own for flash_attn",
    "modernbert": "packed sequences with windows of two sides",
    "deepseek_v32": "latent attention, keys chosen by an indexer",
    "minimax_m3_vl_text": "blocks of keys chosen by an indexer",
    "t5": "position bias, cross attention",
    "bart": "cross attention",
    "vit": "no mask",
}
REFUSED = ("bloom", "mpt", "codegen", "xglm", "mpnet", "big_bird")  # alibi and others


class Families(unittest.TestCase):
    device = "cpu"

    def examine(self, name):
        kinds = dict((name, kind) for kind, name in tiny_models.families())
        if name not in kinds:
            self.skipTest(f"this transformers has no {name}")
        return transformers_families.examine(kinds[name], name, self.device)

    def test_right(self):
        for name, why in RIGHT.items():
            with self.subTest(name, why=why):
                found = self.examine(name)
                self.assertEqual(found.verdict, "right", f"{found.why} {found.cells}")
                self.assertGreater(found.calls, 0)

    def test_packed(self):
        """That the packed column means something: it was reached."""
        for name in ("llama", "modernbert", "gpt_oss"):
            self.assertEqual(self.examine(name).cells["packed"], "yes")

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
