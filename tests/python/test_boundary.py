"""Invalid types, sizes and numbers are refused before they reach the library. Buffers end at a guard page,
so an access past the end kills the process."""

import unittest

try:
    import numpy as np
except ImportError:
    raise unittest.SkipTest("NumPy is not installed")

import flashcore
import guarded
from flashcore import Quantized

F32 = np.float32
EIGHT_BIT = {"e4m3": np.uint8, "e5m2": np.uint8, "int8": np.int8, "byte": np.uint8}


def draw(*shape, dtype=F32, seed=0):
    return guarded.copy(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def zeros(*shape, dtype=np.uint8):
    return guarded.copy(np.zeros(shape, dtype))


class Refusals(unittest.TestCase):
    def refused(self, kind, pattern, function, *arguments, **options):
        with self.assertRaisesRegex(kind, pattern):
            function(*arguments, **options)


class Codes(Refusals):
    """The dtype of a Quantized must agree with its array."""

    def setUp(self):
        self.q, self.new = draw(1, 1, 4, 8), draw(1, 1, 3, 8)
        self.used = zeros(1, dtype=np.int32)

    def every_call(self, bad):
        good = Quantized(zeros(1, 1, 512, 8, dtype=np.int8))
        yield "k", flashcore.attention, (self.q, bad, good), {}
        yield "v", flashcore.attention, (self.q, good, bad), {}
        yield "q", flashcore.attention, (bad, good, good), {}
        yield "k", flashcore.explain, (self.q, bad, good), {}
        yield "k", flashcore.append, (self.new, self.new, bad, good, self.used), {}
        yield "v", flashcore.append, (self.new, self.new, good, bad, self.used), {}
        yield "k_new", flashcore.append, (bad, good, good, good, self.used), {}
        yield "x", flashcore.dequantize, (bad,), {}

    def test_a_dtype_that_does_not_match_the_array(self):
        for stored, claims in ((np.uint8, ("f64", "f32", "f16", "bf16", "i32", "bool", "int64")),
                               (np.int8, ("f32",))):
            codes = zeros(1, 1, 512, 8, dtype=stored)
            for claim in claims:
                for name, function, arguments, options in self.every_call(
                        Quantized(codes, None, claim)):
                    with self.subTest(f"{function.__name__} {name} {claim}"):
                        self.refused(ValueError, rf"{name}.dtype is '{claim}'; wanted one of e4m3",
                                     function, *arguments, **options)
        for stored in (F32, np.float16, np.int32, np.bool_):
            for claim in (*EIGHT_BIT, None):
                bad = Quantized(zeros(1, 1, 512, 8, dtype=stored), None, claim)
                for name, function, arguments, options in self.every_call(bad):
                    with self.subTest(f"{function.__name__} {name} {claim} {stored.__name__}"):
                        self.refused(ValueError, rf"{name}.codes: dtype is .*; wanted an 8-bit type",
                                     function, *arguments, **options)

    def test_other_8_bit_dtypes(self):
        for claim, stored in (("int8", np.uint8), ("byte", np.int8), ("e4m3", np.int8)):
            bad = Quantized(zeros(1, 1, 512, 8, dtype=stored), None, claim)
            for name, function, arguments, options in self.every_call(bad):
                self.refused(ValueError, rf"{name}.dtype is '{claim}', {name}.codes are ", function,
                             *arguments, **options)

    def test_matching_dtypes(self):
        for claim, stored in EIGHT_BIT.items():
            one = Quantized(zeros(1, 1, 512, 8, dtype=stored), np.ones(1, F32), claim)
            self.assertEqual(flashcore.attention(self.q, one, one).shape, (1, 1, 4, 8))
            other = Quantized(zeros(1, 1, 512, 8, dtype=stored), np.ones(1, F32), claim)
            flashcore.append(self.new, self.new, one, other, self.used)
            np.testing.assert_allclose(flashcore.dequantize(one)[:, :, :3], self.new, rtol=0.2,
                                       atol=4)

    def test_numbers_of_a_quantized(self):
        codes = zeros(1, 1, 512, 8, dtype=np.int8)
        for rows, kind in ((2**64 + 3, ValueError), (2.0, TypeError), (True, TypeError),
                           ("4", TypeError)):
            for name, function, arguments, options in self.every_call(
                    Quantized(codes, None, "int8", rows)):
                self.refused(kind, rf"{name}.block_rows is ", function, *arguments, **options)

    def test_a_block_with_a_huge_number_of_rows(self):
        """The computation of the number of blocks must not overflow to 0."""
        k = Quantized(zeros(1, 1, 5, 8, dtype=np.int8), np.empty((1, 1, 0), F32), "int8", 2**63 - 1)
        self.refused(ValueError, "k.scale: has 0 blocks; 5 rows", flashcore.attention, self.q, k, k)
        self.refused(ValueError, "x.scale: has 0 blocks; 5 rows", flashcore.dequantize, k)
        self.refused(ValueError, "k.scale: has 0 blocks; 5 rows", flashcore.append, self.new, self.new,
                     k, k._replace(codes=k.codes.copy()), self.used)

    def test_arguments_that_are_not_quantized(self):
        self.refused(TypeError, "x: is a ndarray; wanted a flashcore.Quantized", flashcore.dequantize,
                     self.q)
        self.refused(TypeError, "k.codes: is a list; wanted an array", flashcore.attention, self.q,
                     Quantized([1, 2]), self.q)
        self.refused(ValueError, "k: dtype is f32, q is int8; with an 8-bit q", flashcore.attention,
                     Quantized(zeros(1, 1, 4, 8, dtype=np.int8)), self.q, self.q)

    def test_plain_8_bit_arrays(self):
        """The result is float16, as for torch tensors."""
        q = guarded.copy(np.random.default_rng(0).integers(-3, 4, (1, 1, 4, 8), np.int8))
        want = flashcore.attention(Quantized(q), Quantized(q), Quantized(q))
        np.testing.assert_array_equal(flashcore.attention(q, q, q), want)
        self.assertEqual(want.dtype, np.float16)

    def test_given_outputs_are_writable(self):
        fixed = np.zeros((1, 1, 4, 8), F32)
        fixed.flags.writeable = False
        self.refused(ValueError, "out: is read-only", flashcore.dequantize,
                     flashcore.quantize(self.q), out=fixed)
        self.refused(ValueError, "out: its shape differs from that of x.codes", flashcore.dequantize,
                     flashcore.quantize(self.q), out=zeros(1, 1, 4, 7, dtype=F32))


class Numbers(Refusals):
    """Numbers that do not fit their C type raise instead of wrapping."""

    def setUp(self):
        self.q = draw(1, 2, 4, 8)

    def call(self, **options):
        return flashcore.attention(self.q, self.q, self.q, **options)

    def test_integers(self):
        for name, options in (
                ("window_left", lambda x: dict(window=(x, 0))),
                ("window_right", lambda x: dict(window=(0, x))),
                ("num_splits", lambda x: dict(num_splits=x)),
                ("max_q_len", lambda x: dict(max_q_len=x)),
                ("max_kv_len", lambda x: dict(max_kv_len=x)),
                ("q_start", lambda x: dict(q_start=x)), ("k_start", lambda x: dict(k_start=x))):
            self.call(**options(1))  # prepares a call whose key equals True and 1.0
            self.call(**options(np.int64(1)))
            for bad in (2**64, -2**64, 2**63, 10**400):
                with self.subTest(f"{name} {bad:.3e}" if bad < 10**300 else name):
                    self.refused(ValueError, f"{name} is .*; wanted a number of (32|64) bits",
                                 self.call, **options(bad))
            for bad in (True, 1.0, "1", 1.5):
                with self.subTest(f"{name} {bad!r}"):
                    self.refused(TypeError, f"{name}.* is (a )?.*; wanted an ", self.call,
                                 **options(bad))
        for bad in (2**32 + 3, 2**31, -2**31 - 1):
            self.refused(ValueError, f"num_splits is {bad}; wanted a number of 32 bits", self.call,
                         num_splits=bad)

    def test_large_numbers_that_fit(self):
        want = self.call()
        for window in ((2**63 - 1, 2**63 - 1), (2**31, 2**31), (2**62, -1)):
            np.testing.assert_array_equal(self.call(window=window), want)
        self.call(num_splits=2**31 - 1)
        self.call(max_q_len=2**63 - 1, max_kv_len=2**63 - 1)

    def test_floats(self):
        for name in ("scale", "softcap"):
            for bad, kind in ((float("nan"), ValueError), (float("inf"), ValueError),
                              (10**400, ValueError), ("0.5", TypeError), (1j, TypeError),
                              (self.q, TypeError)):
                with self.subTest(f"{name} {str(bad)[:20]}"):
                    self.refused(kind, f"{name} is ", self.call, **{name: bad})
        for large in (1e39, 1e300):
            self.refused(ValueError, "scale is ", self.call, scale=large)
            np.testing.assert_array_equal(self.call(softcap=large), self.call())  # no cap
        self.refused(ValueError, "softcap is 1e-300", self.call, softcap=1e-300)
        double = self.q.astype(np.float64)
        self.assertTrue(np.isfinite(flashcore.attention(double, double, double, softcap=1e300)).all())

    def test_flags_and_words(self):
        for name in ("causal", "return_lse", "partial", "checked"):
            self.assertEqual(type(self.call(**{name: np.bool_(True)})), type(self.call(**{name: 1})))
            for bad in (2, "no", None, 0.5, [True]):
                self.refused(TypeError, f"{name} is .*; wanted True or False", self.call, **{name: bad})
        for name in ("layout", "reproducibility"):
            self.refused(ValueError, f"{name} is 3; wanted one of", self.call, **{name: 3})
        self.refused(TypeError, "kernel is .*; wanted the id of a kernel", self.call,
                     kernel="fwd_generic_f32\0x")

    def test_quantize(self):
        for bad, kind in ((2**64, ValueError), (1.0, TypeError), (True, TypeError)):
            self.refused(kind, "block_rows is ", flashcore.quantize, self.q, per="block",
                         block_rows=bad)
        self.refused(ValueError, "x: has 5 dimensions; wanted 1 to 4", flashcore.quantize,
                     self.q[None])
        self.refused(ValueError, "x: has 0 dimensions; wanted 1 to 4", flashcore.quantize,
                     np.array(1.0, F32))
        self.refused(ValueError, "x: dtype is i32; wanted f32, f16 or bf16", flashcore.quantize,
                     np.zeros(3, np.int32))
        self.refused(TypeError, "scale: is a float; wanted an array", flashcore.quantize, self.q,
                     scale=0.5, return_saturated=True)
        self.refused(TypeError, "checked is 'yes'", flashcore.quantize, self.q, checked="yes")

    def test_verify(self):
        for options in (dict(seed=-1), dict(seed=2**64), dict(seed=1.5),
                        dict(supports={"head_dims": [2**64]}), dict(supports={"head_dims": [True]}),
                        dict(supports={"head_dims": list(range(1, 10))}), dict(quick="yes"),
                        dict(layout="sbhd"), dict(only="no\0such"), dict(only=3), dict(name="a\0b")):
            with self.subTest(str(options)), self.assertRaisesRegex(
                    (ValueError, TypeError), next(iter(options.get("supports", options)))):
                flashcore.verify(flashcore.attention, **options)


class Arrays(Refusals):
    def setUp(self):
        self.q = draw(1, 2, 4, 8)

    def test_arrays_without_dimensions(self):
        """0-d arrays are refused. Their first extent must not be read."""
        one = np.array(3, np.int32)
        bias = draw(4, 1)
        for options, name in ((dict(cu_seqlens_q=one, q_start=0), "cu_seqlens_q"),
                              (dict(block_table=one, bias=bias), "block_table"),
                              (dict(seqused_k=one), "seqused_k"), (dict(bias=np.array(1, F32)), "bias"),
                              (dict(mask=np.array(True)), "mask"), (dict(sinks=np.array(1, F32)), "sinks")):
            with self.subTest(name):
                self.refused(ValueError, f"{name}: ndim is 0|q: rank", flashcore.attention, self.q,
                             self.q, self.q, **options)
        for place, name in enumerate("qkv"):
            three = [self.q] * 3
            three[place] = np.array(1, F32)
            for function in (flashcore.attention, flashcore.explain):
                self.refused(ValueError, f"{name}: has no dimension|{name}: ndim is 0", function, *three,
                             bias=bias)

    def test_checked_calls(self):
        """The first checked call and one after a mistake report no error."""
        used, wrong = np.array([4], np.int32), np.array([5], np.int32)
        for _ in range(2):
            for scale in (None, 0.7):
                flashcore.attention(self.q, self.q, self.q, checked=True, scale=scale)
                flashcore.attention(self.q, self.q, self.q, checked=True, scale=scale, seqused_k=used)
            self.refused(ValueError, r"seqused_k\[0\] is 5", flashcore.attention, self.q, self.q, self.q,
                         checked=True, seqused_k=wrong)

    def test_merge_and_append(self):
        out, lse = flashcore.attention(self.q, self.q, self.q, partial=True)
        self.refused(TypeError, "outs: is a int; wanted a sequence", flashcore.merge, 3, [lse])
        self.refused(ValueError, r"lses\[1\]: rank is 2", flashcore.merge, [out, out], [lse, lse[0]])
        self.refused(ValueError, r"outs\[1\]: dtype is f16", flashcore.merge,
                     [out, out.astype(np.float16)], [lse, lse])
        self.refused(ValueError, r"lses\[0\]: dtype is int64; wanted f32", flashcore.merge, [out],
                     [lse.astype(np.int64)])
        self.refused(TypeError, "return_lse is 'no'", flashcore.merge, [out], [lse], return_lse="no")
        used = np.zeros(1, np.int32)
        for layout in ("bhsd", "bshd"):
            self.refused(ValueError, "k: rank is 3", flashcore.append, self.q, self.q, self.q[0],
                         self.q, used, layout=layout)
            self.refused(TypeError, "k: is a list", flashcore.append, self.q, self.q, [1], self.q, used,
                         layout=layout)
        self.refused(ValueError, "layout is 4", flashcore.append, self.q, self.q, self.q, self.q, used,
                     layout=4)
        self.refused(ValueError, r"seqused_k: dtype is int64; wanted i32 \(int32\)", flashcore.append,
                     self.q, self.q, self.q.copy(), self.q.copy(), np.zeros(1, np.int64))


class UnownedRows(unittest.TestCase):
    """Rows of a varlen q that belong to no sequence: 0 and -inf in new results, unchanged in `out`."""

    def test_attention(self):
        k = draw(6, 2, 8, seed=1)
        ends = np.array([0, 3, 6], np.int32)
        codes = flashcore.quantize(k, "int8")
        for starts, longest, owned in (([2, 3, 5], 0, [2, 3, 4]), ([0, 0, 0], 0, []),
                                       ([0, 2, 4], 2, [0, 1, 2, 3]), ([0], 0, [])):
            for dtype in (F32, np.float16, np.float64):
                for values in (k, codes) if dtype is F32 else (k.astype(dtype),):
                    q = draw(8, 2, 8, dtype=dtype)
                    options = dict(cu_seqlens_q=np.array(starts, np.int32), max_q_len=longest,
                                   cu_seqlens_k=ends[:len(starts)], causal=True)
                    for partial in (False, True):
                        for _ in range(3):  # results may reuse dirty memory
                            out, lse = flashcore.attention(q, values, values, return_lse=True,
                                                           partial=partial, **options)
                            rest = np.setdiff1d(np.arange(8), owned)
                            self.assertTrue((out[rest] == 0).all())
                            self.assertTrue((lse[:, rest] == -np.inf).all())
                            self.assertTrue(np.isfinite(lse[:, owned]).all())
                            del out, lse
                            np.full((8, 2, 8), np.nan, dtype), np.full((2, 8), np.nan, dtype)

    def test_out_is_unchanged(self):
        q = draw(8, 2, 8)
        out = np.full((8, 2, 8), 7, F32)
        starts = np.array([2, 5], np.int32)
        flashcore.attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, out=out)
        self.assertTrue((out[[0, 1, 5, 6, 7]] == 7).all() and (out[2:5] != 7).all())


if __name__ == "__main__":
    unittest.main()
