"""python3 -m flashcore.bench --overhead. Its targets are for an idle machine; the wide margin here only
detects a tenfold increase."""

import unittest

try:
    import numpy
except ImportError:
    raise unittest.SkipTest("numpy is not installed")
try:
    from torch_support import NO_CUDA
    import torch
except unittest.SkipTest:
    torch, NO_CUDA = None, "torch is not installed"

from flashcore.bench import overhead


class Overhead(unittest.TestCase):
    def check(self, device):
        rows = overhead.measure(device, torch, numpy)
        over = overhead.above_bare(rows)
        self.assertGreaterEqual(len(over), 1 if torch is None else 2)
        for name, us in over.items():
            self.assertGreater(us, 0, name)
            self.assertLess(us, 10 * overhead.BARS[name], name)
        return over

    def test_cpu(self):
        self.check("cpu")

    @unittest.skipIf(NO_CUDA, NO_CUDA)
    def test_cuda(self):
        over = self.check("cuda")
        self.assertIn("torch.ops.flashcore.attention", over)

    @unittest.skipIf(NO_CUDA, NO_CUDA)
    def test_small_problem(self):
        small = overhead.measure_small(torch)
        self.assertEqual(len(small), 4)
        self.assertGreater(min(small.values()), 0)


if __name__ == "__main__":
    unittest.main()
