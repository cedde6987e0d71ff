"""flashcore.attention, merge, append and explain on NumPy arrays, compared with the definition in f64.
Every mistake raises an exception that names the argument."""

import doctest
import gc
import threading
import unittest
import weakref

try:
    import numpy as np
except ImportError:
    raise unittest.SkipTest("NumPy is not installed")

import dense_reference as reference
import flashcore
import flashcore._attention
import flashcore.cache
from flashcore._core import call_cache


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(dtype=np.float32, batch=2, q_heads=4, kv_heads=2, q_len=5, kv_len=9, head_dim=16,
           v_dim=8):
    return (draw(batch, q_heads, q_len, head_dim, dtype=dtype, seed=1),
            draw(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=2),
            draw(batch, kv_heads, kv_len, v_dim, dtype=dtype, seed=3))


class Values(unittest.TestCase):
    def check(self, got, want, dtype="float32"):
        self.assertLess(reference.error(got, want), reference.TOLERANCE[dtype])

    def both(self, q, k, v, expected=None, **options):
        out, lse = flashcore.attention(q, k, v, return_lse=True, **options)
        want, want_lse = reference.batch(q, k, v, **(options if expected is None else expected))
        self.check(out, want, str(q.dtype))
        self.check(lse, want_lse)
        return out

    def test_types(self):
        for dtype in (np.float64, np.float32, np.float16):
            with self.subTest(dtype.__name__):
                q, k, v = inputs(dtype)
                out = self.both(q, k, v)
                self.assertEqual((out.dtype, out.shape), (q.dtype, (2, 4, 5, 8)))

    def test_bfloat16_of_ml_dtypes(self):
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        q, k, v = inputs(bfloat16)
        out = self.both(q, k, v, causal=True)
        self.assertEqual(out.dtype, bfloat16)

    def test_options(self):
        q, k, v = inputs()
        for options in (dict(causal=True), dict(window=(2, 1)), dict(window=[2, 0], causal=True),
                        dict(scale=0.3), dict(scale=-1.0), dict(softcap=2.0),
                        dict(sinks=draw(4, seed=5)), dict(causal=True, num_splits=3),
                        dict(reproducibility="batch_invariant")):
            with self.subTest(str(options)):
                expected = {name: value for name, value in options.items()
                            if name not in ("num_splits", "reproducibility")}
                self.both(q, k, v, expected, **options)

    def test_alibi(self):
        q, k, v = inputs()
        slopes = np.abs(draw(4, seed=4))
        self.both(q, k, v, dict(slopes=slopes), alibi_slopes=slopes)

    def test_bias_and_mask_broadcast(self):
        q, k, v = inputs()
        whole = (2, 4, 5, 9)
        for shape in ((2, 4, 5, 9), (1, 4, 1, 9), (5, 9), (9,), (2, 1, 5, 1), (1, 1, 1, 1)):
            with self.subTest(str(shape)):
                bias, mask = draw(*shape, seed=6), draw(*shape, seed=7) > -0.5
                self.both(q, k, v, dict(bias=np.broadcast_to(bias, whole)), bias=bias)
                self.both(q, k, v, dict(mask=np.broadcast_to(mask, whole)), mask=mask)

    def test_a_row_that_sees_no_key(self):
        q, k, v = inputs(q_len=3, kv_len=2)
        out, lse = flashcore.attention(q, k, v, causal=True, return_lse=True)
        self.assertTrue((out[:, :, 0] == 0).all() and (lse[:, :, 0] == -np.inf).all())

    def test_positions(self):
        q, k, v = inputs()
        self.both(q, k, v, dict(causal=True, q_start=[0]), causal=True, q_start=0)
        starts = np.array([1, 3], np.int32)
        self.both(q, k, v, dict(causal=True, q_start=starts), causal=True, q_start=starts)
        self.both(q, k, v, dict(causal=True, k_start=[2]), causal=True, k_start=2)

    def test_used_lengths(self):
        q, k, v = inputs()
        used = np.array([9, 6], np.int32)
        self.both(q, k, v, dict(used=used, causal=True), seqused_k=used, causal=True)

    def test_layout_bshd(self):
        q, k, v = inputs()
        swapped = [np.ascontiguousarray(one.swapaxes(1, 2)) for one in (q, k, v)]
        out, lse = flashcore.attention(*swapped, layout="bshd", causal=True, return_lse=True)
        want, want_lse = reference.batch(q, k, v, causal=True)
        self.check(out, want.swapaxes(1, 2))
        self.check(lse, want_lse)

    def test_varlen_sequences(self):
        q_lens, k_lens = (3, 0, 5), (4, 2, 5)
        q, k, v = draw(8, 4, 16, seed=1), draw(11, 2, 16, seed=2), draw(11, 2, 8, seed=3)
        cu_q, cu_k = (np.cumsum((0, *lens)).astype(np.int32) for lens in (q_lens, k_lens))
        out, lse = flashcore.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True,
                                       max_q_len=5, max_kv_len=5, return_lse=True)
        self.assertEqual((out.shape, lse.shape), ((8, 4, 8), (4, 8)))
        for b in range(3):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            want, want_lse = reference.one_sequence(
                *(one.swapaxes(0, 1) for one in (q[rows], k[keys], v[keys])), causal=True)
            self.check(out[rows].swapaxes(0, 1), want)
            self.check(lse[:, rows], want_lse)

    def test_pages(self):
        q, k, v = inputs(kv_len=12)
        table = np.array([[3, 0, 5], [1, 4, 2]], np.int32)
        pages = [np.full((6, 4, 2, one.shape[-1]), np.nan, np.float32) for one in (k, v)]
        for memory, one in zip(pages, (k, v)):
            for b, row in enumerate(table):
                for place, page in enumerate(row):
                    memory[page] = one[b, :, 4 * place:4 * place + 4].swapaxes(0, 1)
        used = np.array([12, 7], np.int32)
        out = flashcore.attention(q, *pages, block_table=table, seqused_k=used, causal=True)
        self.check(out, reference.batch(q, k, v, used=used, causal=True)[0])
        bias = draw(1, 1, 5, 1)  # one column for all keys of the table
        out = flashcore.attention(q, *pages, block_table=table, seqused_k=used, bias=bias)
        self.check(out, reference.batch(q, k, v, used=used,
                                        bias=np.broadcast_to(bias, (1, 1, 5, 12)))[0])

    def test_strided_read_only_and_sliced_inputs(self):
        q, k, v = inputs()
        want = reference.batch(q, k, v)[0]
        wide = np.zeros((*q.shape[:3], 40), np.float32)
        wide[..., 3:19] = q
        fixed = k.copy()
        fixed.flags.writeable = False
        self.check(flashcore.attention(wide[..., 3:19], fixed, v), want)
        self.check(flashcore.attention(np.broadcast_to(q[:1], q.shape), k, v),
                   reference.batch(np.repeat(q[:1], 2, 0), k, v)[0])

    def test_out(self):
        q, k, v = inputs()
        out = np.full((2, 4, 5, 8), np.nan, np.float32)
        self.assertIs(flashcore.attention(q, k, v, out=out), out)
        self.check(out, reference.batch(q, k, v)[0])
        wide = np.full((2, 4, 5, 8), np.nan, np.float32)
        half = [one.astype(np.float16) for one in (q, k, v)]
        flashcore.attention(*half, out=wide)
        self.check(wide, reference.batch(*half)[0], "float32")

    def test_empty(self):
        q, k, v = inputs()
        self.assertEqual(flashcore.attention(q[:, :, :0], k, v).shape, (2, 4, 0, 8))
        self.assertTrue((flashcore.attention(q, k[:, :, :0], v[:, :, :0]) == 0).all())

    def test_merge(self):
        q, k, v = inputs(kv_len=20)
        sinks = draw(4, seed=8)
        parts = [flashcore.attention(q, k[:, :, one], v[:, :, one], partial=True)
                 for one in (slice(0, 7), slice(7, 8), slice(8, 20))]
        out, lse = flashcore.merge(*zip(*parts), sinks=sinks, return_lse=True)
        want, want_lse = reference.batch(q, k, v, sinks=sinks)
        self.check(out, want)
        self.check(lse, want_lse)

    def test_append(self):
        new = draw(2, 2, 3, 16), draw(2, 2, 3, 8, seed=1)
        used = np.array([4, 0], np.int32)
        for layout in ("bhsd", "bshd"):
            caches = [np.zeros((2, 2, 10, one.shape[-1]), np.float32) for one in new]
            swap = (lambda one: one.swapaxes(1, 2)) if layout == "bshd" else (lambda one: one)
            flashcore.append(*map(swap, new), *map(swap, caches), used, layout=layout)
            for cache, one in zip(caches, new):
                want = np.zeros_like(cache)
                want[0, :, 4:7], want[1, :, :3] = one[0], one[1]
                np.testing.assert_array_equal(cache, want)


class Mistakes(unittest.TestCase):
    def refused(self, kind, pattern, *arguments, **options):
        with self.assertRaisesRegex(kind, pattern):
            flashcore.attention(*arguments, **options)

    def test_every_mistake_names_its_argument(self):
        q, k, v = inputs()
        big_endian = q.astype(">f4")
        fixed = np.zeros((2, 4, 5, 8), np.float32)
        fixed.flags.writeable = False
        for kind, pattern, arguments, options in (
                (ValueError, "k: dtype is f64; wanted f32", (q, k.astype(float), v), {}),
                (ValueError, "k: head_dim is 8, q has 16", (q, k[..., :8], v), {}),
                (ValueError, "v: kv_len is 4, k has 9", (q, k, v[:, :, :4]), {}),
                (ValueError, "q: rank is 3; wanted 4", (q[0], k, v), {}),
                (ValueError, "v: has no dimension", (q, k, np.ones((), np.float32)), {}),
                (ValueError, "q_heads is 3", (q[:, :3], k, v), {}),
                (ValueError, "k: stride 2 is -16; negative", (q, k[:, :, ::-1], v), {}),
                (NotImplementedError, "q: dtype is float32 of another byte order",
                 (big_endian, k, v), {}),
                (NotImplementedError, "q: dtype is complex64, which is none of",
                 (q.astype(np.complex64), k, v), {}),
                (TypeError, "q: is a list; wanted an array of NumPy", ([1.0], k, v), {}),
                (TypeError, "v: is a NoneType", (q, k, None), {}),
                (ValueError, r"seqused_k: dtype is int64; wanted i32 \(int32\)", (q, k, v),
                 dict(seqused_k=np.zeros(2, np.int64))),
                (ValueError, "seqused_k: length is 3", (q, k, v),
                 dict(seqused_k=np.zeros(3, np.int32))),
                (ValueError, "mask: q_len is 2; wanted 5 or 1", (q, k, v),
                 dict(mask=np.ones((2, 9), bool))),
                (ValueError, "mask: dtype is f32; wanted bool", (q, k, v),
                 dict(mask=np.ones((5, 9), np.float32))),
                (ValueError, "layout is 'sbhd'; wanted one of bhsd, bshd", (q, k, v),
                 dict(layout="sbhd")),
                (ValueError, "reproducibility is 'fast'", (q, k, v), dict(reproducibility="fast")),
                (ValueError, r"window is \(3,\)", (q, k, v), dict(window=(3,))),
                (ValueError, "window is 3; wanted", (q, k, v), dict(window=3)),
                (TypeError, "kernel is 3; wanted", (q, k, v), dict(kernel=3)),
                (TypeError, "k: is a masked array", (q, np.ma.masked_array(k), v), {}),
                (ValueError, "q_start is -2147483649; wanted", (q, k, v), dict(q_start=-2**31 - 1)),
                (ValueError, "window_left is -2", (q, k, v), dict(window=(-2, 0))),
                (ValueError, "out: is read-only", (q, k, v), dict(out=fixed)),
                (ValueError, "out: q_len is 4, q has 5", (q, k, v),
                 dict(out=np.zeros((2, 4, 4, 8), np.float32))),
                (ValueError, "out: shares memory with the input q", (v, v, v), dict(out=v)),
                (NotImplementedError, "kernel", (q, k, v), dict(kernel="fwd_simt_f32_d64_q16")),
                (ValueError, "kernel", (q, k, v), dict(kernel="no_such_kernel"))):
            with self.subTest(pattern):
                self.refused(kind, pattern, *arguments, **options)

    def test_outputs_stay_untouched(self):
        q, k, v = inputs()
        out = np.full((2, 4, 5, 8), 7, np.float32)
        self.refused(ValueError, "head_dim", q, k[..., :8], v, out=out)
        self.assertTrue((out == 7).all())

    def test_checked_lengths(self):
        q, k, v = inputs()
        self.refused(ValueError, "seqused_k", q, k, v, seqused_k=np.array([9, 10], np.int32),
                     checked=True)

    def test_elements_that_are_not_aligned(self):
        q, k, v = inputs()
        raw = np.zeros(q.nbytes + 1, np.uint8)
        crooked = raw[1:].view(np.float32).reshape(q.shape)
        self.refused(ValueError, "q: the pointer .* is not aligned", crooked, k, v)

    def test_merge_and_append(self):
        q, k, v = inputs()
        out, lse = flashcore.attention(q, k, v, partial=True)
        with self.assertRaisesRegex(ValueError, "outs: has 2 parts, lses has 1"):
            flashcore.merge([out, out], [lse])
        with self.assertRaisesRegex(ValueError, r"outs\[40\]: an extent"):
            flashcore.merge([out] * 40 + [out[:, :, 1:]], [lse] * 41)
        with self.assertRaisesRegex(ValueError, "k: is read-only"):
            fixed = k.copy()
            fixed.flags.writeable = False
            flashcore.append(k, v, fixed, v, np.zeros(2, np.int32))
        with self.assertRaisesRegex(ValueError, "seqused_k"):
            flashcore.append(k, v, k.copy(), v.copy(), np.array([0, 5], np.int32))

    def test_explain_has_the_arguments_of_attention(self):
        q, k, v = inputs()
        words = flashcore.explain(q, k, v, causal=True, num_splits=2)
        self.assertRegex(words, "kernel +fwd_.*\n(.*\n)*splits +[12]")
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'casual'"):
            flashcore.explain(q, k, v, casual=True)


class Calls(unittest.TestCase):
    def test_threads(self):
        """Concurrent calls of several threads do not affect each other's results."""
        cases = [inputs(q_len=2 + n, kv_len=100 * (n + 1)) for n in range(4)]
        wants = [flashcore.attention(*case) for case in cases]
        wrong = []

        def work(case, want):
            for _ in range(200):
                if not np.array_equal(flashcore.attention(*case), want):
                    wrong.append(case)

        threads = [threading.Thread(target=work, args=one) for one in zip(cases, wants)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_numpy_scalars(self):
        """NumPy scalars and 0-d arrays are accepted as numbers. Arrays are read at every call."""
        q, k, v = inputs()
        want = flashcore.attention(q, k, v, scale=0.25, window=(3, 0), q_start=4)
        scale, window = np.array(0.25, np.float32), np.array([3, 0])
        for start in (np.int64(4), np.array(4, np.int32)):
            np.testing.assert_array_equal(want, flashcore.attention(
                q, k, v, scale=scale, window=window, q_start=start))
        scale[...] = 0.5
        np.testing.assert_array_equal(flashcore.attention(q, k, v, scale=0.5),
                                      flashcore.attention(q, k, v, scale=scale))

    def test_a_call_inside_a_call(self):
        """A prepared call that is in use is not reused."""
        q, k, v = inputs()
        want = flashcore.attention(q, k, v)
        for call in call_cache.thread_state.calls.values():
            call.busy = True
        np.testing.assert_array_equal(flashcore.attention(q, k, v), want)

    def test_arrays_are_released(self):
        q, k, v = inputs()
        flashcore.attention(q, k, v, seqused_k=np.array([9, 9], np.int32))
        watched = weakref.ref(q)
        del q
        gc.collect()
        self.assertIsNone(watched())

    def test_many_options_do_not_fill_the_memory(self):
        q, k, v = inputs()
        for number in range(call_cache.MAX_CALLS + 5):
            flashcore.attention(q, k, v, scale=float(number))
        self.assertLessEqual(len(call_cache.thread_state.calls), call_cache.MAX_CALLS)

    def test_an_unknown_framework_with_dlpack(self):
        """Any array with __dlpack__ is accepted. The result is a NumPy array."""
        class Other:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        q, k, v = inputs()
        out = flashcore.attention(*map(Other, (q, k, v)))
        np.testing.assert_array_equal(out, flashcore.attention(q, k, v))


def load_tests(loader, tests, pattern):
    for module in (flashcore._attention, flashcore.cache):
        tests.addTests(doctest.DocTestSuite(module, optionflags=doctest.ELLIPSIS))
    return tests


if __name__ == "__main__":
    unittest.main()
