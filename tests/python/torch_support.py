"""Shared code of the tests on torch tensors: devices, inputs, and the reference."""

import os
import sys
import unittest

if os.environ.get("TORCH") == "0":
    raise unittest.SkipTest("TORCH=0 excludes torch")
try:
    import numpy as np
    import torch
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed")

import dense_reference as reference
import flashcore


def why_no_cuda():
    """The reason why no test can run on a GPU; empty if tests can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    count, why = flashcore.load().cuda_device_count()
    return "" if count > 0 else f"the library cannot use a GPU: {why}"


NO_CUDA = why_no_cuda()
needs_cuda = unittest.skipIf(NO_CUDA, NO_CUDA)


class Case(unittest.TestCase):
    """Inputs and comparisons on self.device."""

    device = "cpu"

    def setUp(self):
        torch.manual_seed(0)

    def draw(self, *shape, dtype=torch.float32, grad=False):
        made = torch.randn(shape, dtype=torch.float64).to(self.device, dtype)
        return made.requires_grad_(grad)

    def inputs(self, dtype=torch.float32, batch=2, q_heads=4, kv_heads=2, q_len=5, kv_len=9,
               head_dim=16, v_dim=8, grad=False):
        return (self.draw(batch, q_heads, q_len, head_dim, dtype=dtype, grad=grad),
                self.draw(batch, kv_heads, kv_len, head_dim, dtype=dtype, grad=grad),
                self.draw(batch, kv_heads, kv_len, v_dim, dtype=dtype, grad=grad))

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def check(self, got, want, dtype=None, factor=1.0):
        """Compares got with want (a tensor or an f64 array) at the precision of dtype; default: got's."""
        name = str(dtype or got.dtype).removeprefix("torch.")
        self.assertLessEqual(reference.error(array(got), array(want)),
                             factor * reference.TOLERANCE[name])

    def expected(self, q, k, v, **options):
        """out and lse in f64."""
        options = {name: array(one) if isinstance(one, torch.Tensor) else one
                   for name, one in options.items()}
        return reference.batch(array(q), array(k), array(v), **options)


def array(one):
    if isinstance(one, torch.Tensor):
        one = one.detach().cpu()
        return (one.double() if one.is_floating_point() else one).numpy()
    return np.asarray(one)


def on_every_device(case):
    """Class decorator: adds a class with the same tests on CUDA tensors to the module. They are skipped
    with a reason if there is no GPU."""
    name = case.__name__ + "Cuda"
    made = needs_cuda(type(name, (case,), {"device": "cuda", "__module__": case.__module__}))
    setattr(sys.modules[case.__module__], name, made)
    return case
