"""flashcore.distributed: torch's own context_parallel on FlashCore, on gloo processes."""

import unittest
from unittest import mock

from distributed_support import Ranks

import torch

import dense_reference as reference
from flashcore.distributed import torch_context_parallel as on_flashcore


def version_known():
    return ".".join(torch.__version__.split(".")[:2]) in on_flashcore._VERSIONS


class OtherVersions(unittest.TestCase):
    def test_refusal(self):
        with mock.patch.object(torch, "__version__", "2.99.1"):
            with self.assertRaisesRegex(NotImplementedError, "torch is 2.99.1; FlashCore knows "
                                                             "context_parallel of torch 2.13. Call"):
                on_flashcore.register()


@unittest.skipUnless(version_known(), f"torch is {torch.__version__}")
class ContextParallel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(2)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()

    def test_a_model(self):
        """Loss and gradients of a layer; the last length is not a multiple of 2 * ranks."""
        for length, is_causal, dtype in ((32, True, "float32"), (32, False, "float32"),
                                         (32, True, "bfloat16"), (30, True, "float32"),
                                         (33, True, "float32")):
            with self.subTest(f"{length} {is_causal} {dtype}"):
                for loss, got, want_loss, want, sent in self.ranks.results(
                        "torch_context_parallel", length, is_causal, dtype):
                    limit = reference.TOLERANCE[dtype] * 4
                    self.assertGreater(sent, 0)  # FlashCore's messages
                    self.assertLessEqual(abs(loss - want_loss), limit * abs(want_loss))
                    for one, other in zip(got, want):
                        self.assertLessEqual(reference.error(one, other), limit)


if __name__ == "__main__":
    unittest.main()
