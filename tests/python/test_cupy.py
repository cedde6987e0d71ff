"""flashcore on CuPy arrays, on CuPy's current stream."""

import unittest

try:
    import cupy
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed")

import dense_reference as reference
import flashcore


def why_not():
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no GPU: {error}"
    count, why = flashcore.load().cuda_device_count()
    return "" if count else f"the library cannot use a GPU: {why}"


@unittest.skipIf(why_not(), why_not())
class Cupy(unittest.TestCase):
    def inputs(self, dtype=np.float32):
        draw = np.random.default_rng(0).standard_normal
        return [cupy.asarray(draw(shape).astype(dtype))
                for shape in ((2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8))]

    def check(self, got, want):
        self.assertIsInstance(got, cupy.ndarray)
        self.assertLess(reference.error(cupy.asnumpy(got), want),
                        reference.TOLERANCE[str(got.dtype)])

    def test_values(self):
        for dtype in (np.float32, np.float16):
            q, k, v = self.inputs(dtype)
            used = cupy.asarray([9, 4], dtype=np.int32)
            out, lse = flashcore.attention(q, k, v, causal=True, seqused_k=used, return_lse=True)
            want, want_lse = reference.batch(*map(cupy.asnumpy, (q, k, v)), causal=True, used=[9, 4])
            self.check(out, want)
            self.check(lse, want_lse)

    def test_current_stream(self):
        q, k, v = self.inputs()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            doubled = q * 2
            out = flashcore.attention(doubled, k, v, q_start=0)
        stream.synchronize()
        self.check(out, reference.batch(2 * cupy.asnumpy(q), *map(cupy.asnumpy, (k, v)))[0])

    def test_append_and_merge(self):
        q, k, v = self.inputs()
        caches = [cupy.zeros((2, 2, 12, one.shape[-1]), np.float32) for one in (k, v)]
        flashcore.append(k, v, *caches, cupy.zeros(2, np.int32))
        parts = [flashcore.attention(q, caches[0][:, :, one], caches[1][:, :, one], partial=True)
                 for one in (slice(0, 4), slice(4, 9))]
        self.check(flashcore.merge(*zip(*parts)),
                   reference.batch(*map(cupy.asnumpy, (q, k, v)))[0])

    def test_a_call_with_arrays_on_cpu_and_gpu(self):
        q, k, v = self.inputs()
        with self.assertRaisesRegex(ValueError, "k: is on cpu:0, q is on cuda"):
            flashcore.attention(q, cupy.asnumpy(k), v)


if __name__ == "__main__":
    unittest.main()
