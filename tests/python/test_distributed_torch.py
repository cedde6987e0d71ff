"""flashcore.distributed: torch's own context_parallel on FlashCore, on gloo processes, and on a GPU."""

import unittest
from unittest import mock

from distributed_support import Ranks, definition
from torch_support import Case, NO_CUDA, needs_cuda, on_every_device

import torch
import torch.nn.attention

import dense_reference as reference
import flashcore
from flashcore.distributed import torch_context_parallel as on_flashcore
from flashcore.integrations import torch_sdpa

CASES = "distributed_torch_cases"
VERSION = ".".join(torch.__version__.split(".")[:2])
CAN_RESTORE = hasattr(torch.nn.attention, "restore_flash_attention_impl")
known = unittest.skipUnless(VERSION in on_flashcore._VERSIONS, f"torch is {torch.__version__}")


class OtherVersions(unittest.TestCase):
    def test_refusal(self):
        with mock.patch.object(torch, "__version__", "2.99.1"):
            with self.assertRaisesRegex(NotImplementedError, "torch is 2.99.1; FlashCore knows "
                                                             "context_parallel of torch 2.11, 2.12, 2.13. Call"):
                on_flashcore.register()


class Models(unittest.TestCase):
    """For classes with `ranks`."""

    def check(self, *arguments, **options):
        limit = reference.TOLERANCE[arguments[2]] * 4
        for loss, got, want_loss, want, sent, calls in self.ranks.results("model", *arguments, **options):
            self.assertEqual(calls, 2)  # forward and backward are FlashCore's
            self.assertEqual(sent > 0, len(self.ranks.pipes) > 1)
            self.assertLessEqual(abs(loss - want_loss), limit * abs(want_loss))
            for one, other in zip(got, want):
                self.assertLessEqual(reference.error(one, other), limit)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()


@known
class ContextParallel(Models):
    COUNT = 2

    @classmethod
    def setUpClass(cls):
        cls.ranks = Ranks(cls.COUNT, cases=CASES)

    def test_a_model(self):
        """Loss and gradients of a layer."""
        for case in ((32, True, "float32"), (32, False, "float32"), (32, True, "bfloat16")):
            with self.subTest(str(case)):
                self.check(*case)

    @unittest.skipUnless(VERSION == "2.13", "torch shards such lengths from 2.13 on")
    def test_lengths_that_the_ranks_do_not_divide(self):
        for length in (30, 33):
            with self.subTest(length):
                self.check(length, True, "float32")

    @unittest.skipUnless(CAN_RESTORE, f"torch {torch.__version__} cannot deactivate it again")
    def test_the_sdpa_backend_is_active_too(self):
        self.check(32, True, "float32", "cpu", True)

    def test_the_op_of_cuda_tensors(self):
        for is_causal, scale in ((True, None), (False, 0.3)):
            for got, want in self.ranks.results("flash_op", is_causal, scale):
                for one, other in zip(got, want):
                    self.assertLessEqual(reference.error(one, other), 4 * reference.TOLERANCE["float32"])

    def test_arguments_that_are_wrong_on_one_rank(self):
        for kind, wanted in (("dropout", "rank 1: dropout_p is 0.5; FlashCore has no dropout, wanted 0"),
                             ("mask", "rank 1: attn_mask: context_parallel takes is_causal alone"),
                             ("keys", "rank 1: is_causal: 4 queries and 2 keys on this rank")):
            with self.subTest(kind):
                for one in self.ranks.call("disagree", kind, 1):
                    self.assertIsInstance(one, ValueError)
                    self.assertEqual(str(one)[:len(wanted)], wanted)


class ContextParallelOnFour(ContextParallel):
    COUNT = 4


@known
@needs_cuda
class ContextParallelOnNccl(Models):
    """One rank: NCCL wants a GPU for each."""

    @classmethod
    def setUpClass(cls):
        if NO_CUDA:
            raise unittest.SkipTest(NO_CUDA)
        cls.ranks = Ranks(1, cases=CASES, backend="nccl")

    def test_a_model(self):
        for is_causal, dtype in ((True, "bfloat16"), (False, "bfloat16"), (True, "float16")):
            for activate in (False, True)[:1 + CAN_RESTORE]:
                self.check(64, is_causal, dtype, "cuda", activate)


@known
@needs_cuda
class TwoRanksOnOneGpu(Models):
    """Messages go through host memory and gloo: see distributed_torch_cases."""

    @classmethod
    def setUpClass(cls):
        if NO_CUDA:
            raise unittest.SkipTest(NO_CUDA)
        cls.ranks = Ranks(2, timeout=60.0, cases=CASES)

    def test_a_model(self):
        for is_causal, dtype in ((True, "bfloat16"), (False, "float16")):
            self.check(64, is_causal, dtype, "cuda")


@on_every_device
class PartOfTheKeys(Case):
    """Gradients of the flash op with a part of the keys and the LSE of all, as in torch's own ring."""

    def test_scores_of_thousands(self):
        q, k, v, d_out = (self.draw(1, 2, 64, 64, dtype=torch.bfloat16) for _ in range(4))
        q[..., -1] = k[..., -1] = 128.0  # adds 2048 to every score
        want = [one.double().cpu().requires_grad_() for one in (q, k, v)]
        out, lse = definition(*want)
        self.assertGreater(float(lse.detach().abs().min()), 1024 + 512)
        (out * d_out.double().cpu()).sum().backward()
        out, lse = flashcore.attention(q, k, v, return_lse=True)
        parts = [torch_sdpa._backward_cuda(d_out, q, k[:, :, keys], v[:, :, keys], out, lse, None, None, 64,
                                           32, 0.0, False, None, None)
                 for keys in (slice(0, 32), slice(32, 64))]
        dq = parts[0][0].float() + parts[1][0].float()
        dk, dv = (torch.cat([one[i] for one in parts], 2) for i in (1, 2))
        # The last column of dq is 128 times a sum that is 0.
        for one, other in zip((dq[..., :-1], dk, dv), (want[0].grad[..., :-1], want[1].grad, want[2].grad)):
            self.check(one, other, torch.bfloat16, 4)


if __name__ == "__main__":
    unittest.main()
