"""Arguments of random calls: buffers that end at guard pages, and numbers. Most are valid, some are
not."""

INTEGERS = (-2**64, -2**63 - 1, -2**63, -2**32, -2**31, -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32,
            2**32 + 3, 2**63 - 1, 2**63, 2**64, 10**400, True, 1.0, 2.5, "3", None, float("nan"), [1], ())
FLOATS = (0.0, 1.0, -1.0, 0.3, 1e-320, 1e-38, 1e30, 3e38, 1e300, float("nan"), float("inf"),
          -float("inf"), 10**400, "x", None, True, 1j, [1.0])
FLAGS = (True, False, 0, 1, 2, "no", None, 0.5, [])
WORDS = ("bhsd", "bshd", "sbhd", "", "batch_invariant", "deterministic", "fwd_generic_f32", "a\0b", 3, None)


class Buffers:
    """Arguments of one case. `choose` has the methods of random.Random. It may come from Hypothesis, which
    then records every choice."""

    def __init__(self, choose, torch):
        import numpy as np
        import flashcore
        import guarded
        self.np, self.fc, self.guarded, self.torch = np, flashcore, guarded, torch
        self.choose = choose
        self.values = np.random.default_rng(self.choose.getrandbits(32))
        # Number of invalid arguments: mostly one, so that it is not hidden by another.
        self.spoils = self.choose.choice((0, 0, 1, 1, 1, 100))
        self.inputs, self.outputs = [], []  # (array, its bytes before the call)

    def sometimes(self, chance=0.06):
        if self.spoils == 0 or self.choose.random() >= chance:
            return False
        self.spoils -= 1
        return True

    def pick(self, good, bad, chance=0.06):
        return self.choose.choice(bad) if self.sometimes(chance) else good

    def maybe(self, value, chance=0.3):
        return value if self.choose.random() < chance else None

    def shape(self, *extents):
        extents = list(extents)
        if self.sometimes():
            at = self.choose.randrange(len(extents))
            change = self.choose.choice(("extent", "drop", "add", "none"))
            if change == "extent":
                extents[at] = self.choose.choice((0, 1, extents[at] + 1, max(extents[at] - 1, 0), 600))
            elif change == "drop":
                del extents[at]
            elif change == "add":
                extents.insert(at, self.choose.choice((0, 1, 2)))
            else:
                extents = []
        if self.np.prod(extents, dtype=self.np.int64) > 2**20:
            extents = [min(one, 8) for one in extents]
        return tuple(extents)

    def array(self, shape, dtype, written=False):
        np = self.np
        if self.sometimes():
            dtype = self.choose.choice(("f8", "f4", "f2", "i4", "i8", "i2", "u1", "i1", "?", "c8", ">f4",
                                        "u8"))
        dtype = np.dtype(dtype)
        made = self.layout(shape, dtype)
        if dtype.kind in "fc" and made.size:
            values = self.values.standard_normal(made.shape)
            if self.choose.random() < 0.1:
                values.flat[self.choose.randrange(values.size)] = self.choose.choice(
                    (np.nan, np.inf, -np.inf, 1e30))
            with np.errstate(all="ignore"):
                made[...] = values
        else:
            made[...] = self.values.integers(0, 2 if dtype.kind == "b" else 100, made.shape)
        return self.given(made, written)

    def layout(self, shape, dtype):
        """An array of this shape, compact or strided."""
        np, kind = self.np, self.choose.random()
        at_start = self.choose.random() < 0.3
        if kind < 0.6 or not shape:
            return self.guarded.empty(shape, dtype, at_start)
        if kind < 0.75:  # part of wider rows
            wide = self.guarded.empty((*shape[:-1], shape[-1] + 3), dtype, at_start)
            begin = self.choose.choice((0, 3))
            return wide[..., begin:begin + shape[-1]]
        if kind < 0.9:  # axes in another order
            order = self.choose.sample(range(len(shape)), len(shape))
            made = self.guarded.empty(tuple(shape[axis] for axis in order), dtype, at_start)
            return made.transpose(np.argsort(order))
        step = self.choose.choice((2, 2, -1)) if self.spoils > 1 else 2
        axis = self.choose.randrange(len(shape))
        base = list(shape)
        base[axis] *= abs(step)
        made = self.guarded.empty(tuple(base), dtype, at_start)
        return made[(slice(None),) * axis + (slice(None, None, step),)]

    def lengths(self, good):
        """int32 numbers, mostly the given ones."""
        np = self.np
        good = list(good)
        if self.sometimes(0.1) and good:
            good[self.choose.randrange(len(good))] = self.choose.choice(
                (-1, -2**31, 2**31 - 1, 0, 1, 10**6))
        made = self.guarded.empty(self.shape(len(good)), self.pick("i4", ("i8", "f4", "u4", "i2")))
        flat = np.resize(np.array(good or [0], np.int64), made.shape)
        with np.errstate(all="ignore"):
            made[...] = flat.astype(made.dtype)
        return self.given(made, False)

    def table(self, batch, columns, pages):
        np = self.np
        made = self.guarded.empty(self.shape(batch, columns), self.pick("i4", ("i8", "f4")))
        if made.size:
            made[...] = self.values.integers(0, max(pages, 1), made.shape).astype(made.dtype)
            if self.sometimes(0.1):
                made.flat[self.choose.randrange(made.size)] = self.choose.choice((-1, 2**31 - 1, pages))
        return self.given(made, False)

    def given(self, made, written):
        if self.sometimes(0.02):
            return self.choose.choice((None, [1.0], 3, "x", made.tolist(), self.fc.Quantized(made)))
        if self.sometimes(0.03):
            made.flags.writeable = False
        before = made.copy()
        (self.outputs if written else self.inputs).append((made, before))
        if (self.torch is None or not made.flags.writeable
                or self.choose.random() < (0.1 if self.uses_torch else 0.97)):
            return made
        try:
            return self.torch.from_numpy(made)
        except (TypeError, ValueError):  # torch does not support these strides or this type
            return made

    uses_torch = False

    def quantized(self, shape, batch, heads, rows, written=False):
        dtype = self.choose.choice(("e4m3", "e5m2", "int8", "byte"))
        codes = self.array(shape, "i1" if dtype == "int8" else "u1", written)
        block_rows, scale = 0, None
        per = self.choose.choice(("none", "tensor", "head", "block"))
        if per == "tensor":
            scale = self.array(self.shape(1), "f4")
        elif per == "head":
            scale = self.array(self.shape(batch, heads), "f4")
        elif per == "block":
            block_rows = 4
            scale = self.array(self.shape(batch, heads, -(-rows // 4)), "f4")
        claims = ("f32", "f32", "f64", "f16", "bf16", "i32", "int8", "byte", "e4m3", "int4", None, 3)
        return self.fc.Quantized(codes, scale, self.pick(dtype, claims, 0.3), self.pick(block_rows, INTEGERS),
                                 self.pick(False, FLAGS))
