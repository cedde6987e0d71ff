"""flashcore on JAX arrays: outside jit, and inside jit through the host."""

import os
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed")

import dense_reference as reference
import flashcore
from flashcore.integrations.jax import attention as attention_in_jit


def inputs(dtype=np.float32):
    draw = np.random.default_rng(0).standard_normal
    shapes = (2, 4, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8)
    return [jnp.asarray(draw(shape), dtype) for shape in shapes]


def platform_works():
    platform = jax.devices()[0].platform
    return platform == "cpu" or flashcore.load().cuda_device_count()[0] > 0


@unittest.skipUnless(platform_works(), "JAX is on a GPU that the library cannot use")
class Jax(unittest.TestCase):
    def check(self, got, want):
        self.assertIsInstance(got, jax.Array)
        tolerance = reference.TOLERANCE[str(got.dtype)]
        self.assertLess(reference.error(np.asarray(got, np.float64), want), tolerance)

    def test_types(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            with self.subTest(dtype.__name__):
                q, k, v = inputs(dtype)
                out, lse = flashcore.attention(q, k, v, causal=True, return_lse=True)
                want, want_lse = reference.batch(*(np.asarray(one, np.float64) for one in (q, k, v)),
                                                 causal=True)
                self.assertEqual(out.dtype, q.dtype)
                self.check(out, want)
                self.check(lse, want_lse)

    def test_options(self):
        q, k, v = inputs()
        arrays = [np.asarray(one) for one in (q, k, v)]
        used = jnp.asarray([9, 4], jnp.int32)
        self.check(flashcore.attention(q, k, v, seqused_k=used, causal=True),
                   reference.batch(*arrays, used=np.asarray(used), causal=True)[0])
        self.check(flashcore.attention(q, k, v, causal=True, q_start=0),
                   reference.batch(*arrays, causal=True, q_start=[0])[0])

    def test_merge(self):
        q, k, v = inputs()
        parts = [flashcore.attention(q, k[:, :, one], v[:, :, one], partial=True)
                 for one in (slice(0, 4), slice(4, 9))]
        self.check(flashcore.merge(*zip(*parts)),
                   reference.batch(*(np.asarray(one) for one in (q, k, v)))[0])

    def test_arrays_are_immutable(self):
        q, k, v = inputs()
        with self.assertRaisesRegex(ValueError, "out: is a JAX array, which is immutable"):
            flashcore.attention(q, k, v, out=jnp.zeros((2, 4, 5, 8)))
        with self.assertRaisesRegex(ValueError, "k: is a JAX array"):
            flashcore.append(k, v, k, v, jnp.zeros(2, jnp.int32))

    def test_jit(self):
        q, k, v = inputs()
        with self.assertRaisesRegex(TypeError, "q: is traced by jax.jit"):
            jax.jit(flashcore.attention)(q, k, v)
        mask = jnp.asarray(np.random.default_rng(1).random((5, 9)) > 0.3)
        out, lse = jax.jit(lambda *a: attention_in_jit(*a[:3], mask=a[3], return_lse=True))(
            q, k, v, mask)
        want, want_lse = reference.batch(*(np.asarray(one) for one in (q, k, v)),
                                         mask=np.broadcast_to(mask, (2, 4, 5, 9)))
        self.check(out, want)
        self.check(lse, want_lse)
        stacked = jax.vmap(lambda q: attention_in_jit(q, k, v))(jnp.stack([q, 2 * q]))
        self.check(stacked[1], reference.batch(*(np.asarray(one) for one in (2 * q, k, v)))[0])


if __name__ == "__main__":
    unittest.main()
