"""Random calls of everything public with buffers that end at guard pages:

    python3 boundary_fuzz.py [--seconds 300] [--seed 1]     # new cases until the time is over
    python3 boundary_fuzz.py --seed 1 --case 4711           # one of them again, in this process

A call is mostly right, and spoilt here and there: a type, a shape, strides, a length, a number. It must
return, or raise what docs/python.md promises with a message that names an argument. Inputs must stay as
they were, outputs too where it raised. Cases run in children, a batch each: what kills one is reported
with its seed and arguments."""

import argparse
import os
import random
import re
import subprocess
import sys
import time

FOLDER = os.path.dirname(os.path.abspath(__file__))
BATCH = 2000
PROMISED = (ValueError, TypeError, NotImplementedError, MemoryError)
INTEGERS = (-2**64, -2**63 - 1, -2**63, -2**32, -2**31, -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32,
            2**32 + 3, 2**63 - 1, 2**63, 2**64, 10**400, True, 1.0, 2.5, "3", None, float("nan"), [1], ())
FLOATS = (0.0, 1.0, -1.0, 0.3, 1e-320, 1e-38, 1e30, 3e38, 1e300, float("nan"), float("inf"),
          -float("inf"), 10**400, "x", None, True, 1j, [1.0])
FLAGS = (True, False, 0, 1, 2, "no", None, 0.5, [])
WORDS = ("bhsd", "bshd", "sbhd", "", "batch_invariant", "deterministic", "fwd_plain_f32", "a\0b", 3, None)
# Names that an argument has in some message; one of them must be in every refusal.
NAMES = re.compile(
    r"\b(q|k|v|x|out|outs|lse|lses|sinks|alibi_slopes|bias|mask|q_start|k_start|cu_seqlens_q|"
    r"cu_seqlens_k|cu_seqlens_new|cu_seqlens|seqused_k|block_table|layout|num_splits|reproducibility|"
    r"return_lse|max_q_len|max_kv_len|partial|checked|kernel|window|window_left|window_right|causal|scale|"
    r"softcap|codes|dtype|block_rows|rotated|rotate|per|saturated|return_saturated|k_new|v_new|query|key|"
    r"value|attn_mask|dropout_p|is_causal|enable_gqa|softmax_scale|window_size|k_cache|v_cache|"
    r"cache_seqlens|max_seqlen_q|max_seqlen_k|return_attn_probs|head_dim|v_dim)\b")


class Maker:
    """Arguments of one case."""

    def __init__(self, seed, number, torch):
        import numpy as np
        import flashcore
        import guarded
        self.np, self.fc, self.guarded, self.torch = np, flashcore, guarded, torch
        self.choose = random.Random(f"{seed}:{number}")
        self.values = np.random.default_rng(self.choose.getrandbits(32))
        # How much is spoilt: mostly one thing, behind which nothing else hides.
        self.spoils = self.choose.choice((0, 0, 1, 1, 1, 100))
        self.inputs, self.outputs = [], []  # (array, its bytes before)

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
        """An array of this shape: compact, or with strides of its own."""
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
        """int32 numbers, mostly those."""
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
        except (TypeError, ValueError):  # strides or types that torch has not
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

    # --- The calls.

    def options(self):
        given = {}
        for name, good, bad in (
                ("causal", (True, False), FLAGS), ("scale", (None, 0.3, 2.0), FLOATS),
                ("softcap", (0.0, 5.0), FLOATS), ("num_splits", (0, 1, 3), INTEGERS),
                ("max_q_len", (0,), INTEGERS), ("max_kv_len", (0,), INTEGERS),
                ("return_lse", (True, False), FLAGS), ("partial", (False, True), FLAGS),
                ("checked", (False, True), FLAGS), ("kernel", (None,), WORDS),
                ("reproducibility", ("deterministic", "batch_invariant"), WORDS)):
            if self.choose.random() < 0.15:
                given[name] = self.pick(self.choose.choice(good), bad)
        if self.choose.random() < 0.3:
            given["window"] = self.pick(tuple(self.pick(self.choose.choice((-1, 0, 2, 2**40)), INTEGERS)
                                              for _ in range(2)), (3, (1,), (1, 2, 3), None, "ab", [2, 1]))
        return given

    def attention(self):
        choose = self.choose
        batch, kv_heads, group = choose.choice((1, 2, 3)), choose.choice((1, 2)), choose.choice((1, 2, 4))
        q_heads, dim, v_dim = kv_heads * group, choose.choice((1, 7, 8, 16, 33)), choose.choice((1, 8, 16))
        q_len, kv_len = choose.choice((1, 2, 5, 17)), choose.choice((1, 3, 9, 40))
        dtype = choose.choice(("f4", "f4", "f2", "f8"))
        given, swapped = self.options(), choose.random() < 0.3
        form = choose.choice(("fixed", "fixed", "packed", "paged"))
        q_packed = form == "packed" or choose.random() < 0.1

        def four(heads, length, width):
            return (batch, length, heads, width) if swapped else (batch, heads, length, width)

        if swapped or self.sometimes():
            given["layout"] = self.pick("bshd" if swapped else "bhsd", WORDS)
        total_q, total_k = batch * q_len, batch * kv_len
        q_shape = (total_q, q_heads, dim) if q_packed else four(q_heads, q_len, dim)
        out_shape = (*q_shape[:-1], v_dim)
        if form == "packed":
            shapes = (total_k, kv_heads, dim), (total_k, kv_heads, v_dim)
            given["cu_seqlens_k"] = self.lengths(range(0, total_k + 1, kv_len))
        elif form == "paged":
            pages, size = choose.choice((1, 4, 9)), choose.choice((1, 4, 16))
            columns = choose.choice((1, 3))
            kv_len = columns * size
            shapes = (pages, size, kv_heads, dim), (pages, size, kv_heads, v_dim)
            given["block_table"] = self.table(batch, columns, pages)
        else:
            shapes = four(kv_heads, kv_len, dim), four(kv_heads, kv_len, v_dim)
        if q_packed:
            given["cu_seqlens_q"] = self.lengths(range(0, total_q + 1, q_len))
            q_len = total_q
        if form == "packed":
            kv_len = total_k
        eight = dtype != "f8" and choose.random() < 0.25
        q = self.array(self.shape(*q_shape), dtype)
        if eight:
            k, v = (self.quantized(self.shape(*one), batch, kv_heads, kv_len) for one in shapes)
            if choose.random() < 0.3:
                q = self.quantized(self.shape(*q_shape), batch, q_heads, q_len)
        else:
            k, v = (self.array(self.shape(*one), dtype) for one in shapes)
        for name, make in (
                ("sinks", lambda: self.array(self.shape(q_heads), "f4")),
                ("alibi_slopes", lambda: self.array(self.shape(q_heads), "f4")),
                ("bias", lambda: self.array(self.shape(batch, q_heads, q_len, kv_len)[
                    choose.randrange(4):], dtype)),
                ("mask", lambda: self.array(self.shape(1, 1, q_len, kv_len), "?")),
                ("q_start", lambda: self.pick(self.lengths([3] * batch), INTEGERS)),
                ("k_start", lambda: self.pick(2, INTEGERS)),
                ("seqused_k", lambda: self.lengths([choose.randrange(kv_len + 1) for _ in range(batch)])),
                ("out", lambda: self.array(self.shape(*out_shape), dtype, written=True))):
            if choose.random() < 0.12:
                given[name] = make()
        function = self.fc.explain if choose.random() < 0.1 else self.fc.attention
        return function, (q, k, v), given

    def append(self):
        choose = self.choose
        batch, heads, dim = choose.choice((1, 2, 3)), choose.choice((1, 2)), choose.choice((1, 8, 16))
        new, capacity = choose.choice((1, 2, 5)), choose.choice((5, 8, 40))
        dtype, given = choose.choice(("f4", "f2", "f8")), {}
        swapped = choose.random() < 0.3
        if swapped or self.sometimes():
            given["layout"] = self.pick("bshd" if swapped else "bhsd", WORDS)

        def four(length):
            return (batch, length, heads, dim) if swapped else (batch, heads, length, dim)

        cache, fresh = four(capacity), four(new)
        if choose.random() < 0.4:
            pages, size = choose.choice((4, 9)), choose.choice((1, 4))
            columns = -(-capacity // size)
            capacity, cache = columns * size, (pages, size, heads, dim)
            given["block_table"] = self.table(batch, columns, pages)
        if choose.random() < 0.3:
            fresh = batch * new, heads, dim
            given["cu_seqlens_new"] = self.lengths(range(0, batch * new + 1, new))
        if choose.random() < 0.4:
            caches = [self.quantized(self.shape(*cache), batch, heads, capacity, True) for _ in range(2)]
            caches[1] = caches[1]._replace(block_rows=self.pick(caches[0].block_rows, INTEGERS))
        else:
            caches = [self.array(self.shape(*cache), dtype, written=True) for _ in range(2)]
        news = [self.array(self.shape(*fresh), dtype) for _ in range(2)]
        if choose.random() < 0.1:
            news = [self.quantized(self.shape(*fresh), batch, heads, new) for _ in range(2)]
        used = self.lengths([choose.randrange(max(capacity - new, 0) + 1) for _ in range(batch)])
        return self.fc.append, (*news, *caches, used), given

    def merge(self):
        choose = self.choose
        shape = choose.choice(((2, 2, 3, 8), (5, 2, 8), (1, 1, 1, 1)))
        lse = shape[:-1] if len(shape) == 4 else (shape[1], shape[0])
        dtype, parts = choose.choice(("f4", "f8")), choose.choice((1, 2, 5))
        given = {}
        if choose.random() < 0.2:
            given["sinks"] = self.array(self.shape(shape[1]), "f4")
        if choose.random() < 0.3:
            given["out"] = self.array(self.shape(*shape), choose.choice(("f4", "f2", "f8")), True)
        if choose.random() < 0.3:
            given["return_lse"] = self.pick(True, FLAGS)
        outs = [self.array(self.shape(*shape), dtype) for _ in range(parts)]
        lses = [self.array(self.shape(*lse), dtype) for _ in range(self.pick(parts, (0, 1, 33)))]
        return self.fc.merge, (self.pick(outs, (3, None, [])), lses), given

    def quantize(self):
        choose = self.choose
        shape = (2, 2, 9, 16)[choose.randrange(4):]
        rows = shape[-2] if len(shape) > 1 else 1
        x = self.array(self.shape(*shape), choose.choice(("f4", "f2")))
        given = dict(per=self.pick(choose.choice(("tensor", "head", "block")), ("row", 3, None)),
                     block_rows=self.pick(4, INTEGERS))
        for name in ("rotate", "return_saturated", "checked"):
            if choose.random() < 0.2:
                given[name] = self.pick(True, FLAGS)
        if choose.random() < 0.2:
            four = (1,) * (4 - len(shape)) + shape
            given["scale"] = self.array(self.shape(*choose.choice(
                ((1,), four[:2], (*four[:2], -(-rows // 4))))), "f4")
        dtype = self.pick(choose.choice(("e4m3", "e5m2", "int8", "byte")), ("int4", 3, None, "f32"))
        return self.fc.quantize, (x, dtype), given

    def dequantize(self):
        shape = (2, 2, 9, 16)[self.choose.randrange(4):]
        four = (1,) * (4 - len(shape)) + shape
        given = {}
        if self.choose.random() < 0.3:
            given["out"] = self.array(self.shape(*shape), self.choose.choice(("f4", "f2")), True)
        one = self.quantized(self.shape(*shape), four[0], four[1], four[2])
        return self.fc.dequantize, (one, self.pick("f32", ("f16", "bf16", "f64", "int4", 3, None))), given

    def sdpa(self):
        choose = self.choose
        front = (2, 3, 4)[choose.randrange(4):]
        three = [self.array(self.shape(*front, length, 8), "f4") for length in (3, 5, 5)]
        given = dict(is_causal=self.pick(choose.random() < 0.3, FLAGS))
        if not given["is_causal"] and choose.random() < 0.4:
            given["attn_mask"] = self.array(self.shape(3, 5), choose.choice(("f4", "?")))
        if choose.random() < 0.2:
            given["scale"] = self.pick(0.5, FLOATS)
        return self.fc.sdpa, three, given

    def flash_attn(self):
        from flashcore import flash_attn
        choose = self.choose
        q, k, v = (self.array(self.shape(2, length, 2, 8), "f4") for length in (3, 9, 9))
        given = dict(causal=self.pick(True, FLAGS))
        if choose.random() < 0.5:
            given["window_size"] = self.pick((self.pick(2, INTEGERS), 0), (3, (1,), None))
            return flash_attn.flash_attn_func, (q, k, v), given
        given["cache_seqlens"] = self.pick(self.lengths([3, 4]), INTEGERS)
        if choose.random() < 0.5:
            given.update({name: self.array(self.shape(2, 2, 2, 8), "f4") for name in "kv"})
            self.inputs.clear()  # among them the cache, which is written before q is looked at
        return flash_attn.flash_attn_with_kvcache, (q, k, v), given

    def op(self):
        """torch.ops.flashcore; torch's own check of the schema raises RuntimeError."""
        import flashcore.ops as ops
        choose = self.choose
        new, cache = (2, 2, 3, 8), (2, 2, 9, 8)
        self.promised = (*PROMISED, RuntimeError)
        if choose.random() < 0.3:
            arguments = [self.array(self.shape(*one), "f4", written=one is cache)
                         for one in (new, new, cache, cache)]
            return ops.append, (*arguments, self.lengths([3, 0])), {}
        q, k, v = (self.array(self.shape(2, 2, length, 8), "f4") for length in (3, 9, 9))
        given = {name: self.pick(1, INTEGERS) for name in (
            "window_left", "window_right", "num_splits", "max_q_len") if choose.random() < 0.3}
        if choose.random() < 0.3:
            given["seqused_k"] = self.lengths([9, 2])
        return choose.choice((ops.attention, ops.attention_lse)), (q, k, v), given

    promised = PROMISED

    def call(self):
        makers = [self.attention] * 6 + [self.append] * 3 + [self.merge, self.quantize, self.dequantize]
        if self.torch is not None:
            makers += [self.sdpa, self.flash_attn, self.op]
        make = self.choose.choice(makers)
        self.uses_torch = make in (self.sdpa, self.flash_attn, self.op) or (
            self.torch is not None and self.choose.random() < 0.3)
        return make()


def words(value):
    """An argument, short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        strides = value.stride() if callable(getattr(value, "stride", None)) else value.strides
        return f"{type(value).__name__}({tuple(value.shape)}, {value.dtype}, strides {tuple(strides)})"
    if type(value).__name__ == "Quantized":
        return f"Quantized({', '.join(map(words, value))})"
    if isinstance(value, (list, tuple)) and any(hasattr(one, "shape") for one in value):
        return "[" + ", ".join(map(words, value)) + "]"
    return repr(value)[:80]


def torch_or_none():
    if os.environ.get("TORCH") == "0":
        return None
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def unchanged(np, pairs):
    return all(np.array_equal(array.view("u1") if array.flags.c_contiguous else array,
                              before.view("u1") if array.flags.c_contiguous else before,
                              equal_nan=not array.flags.c_contiguous and array.dtype.kind in "fc")
               for array, before in pairs if array.size and array.ndim)


def run_case(seed, number, torch, say):
    """None, or what is wrong."""
    import warnings
    maker = Maker(seed, number, torch)
    function, arguments, options = maker.call()
    say(f"{number}: {getattr(function, '__name__', function)}({', '.join(map(words, arguments))}"
        + "".join(f", {name}={words(one)}" for name, one in options.items()) + ")")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*arguments, **options)
    except maker.promised as error:
        if "unexpected keyword" in str(error):
            return f"the fuzzer is wrong: {error}"
        if maker.promised is PROMISED and not NAMES.search(str(error)):
            return f"names no argument: {type(error).__name__}: {error}"
        if not unchanged(maker.np, maker.outputs):
            return f"wrote, and raised {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001: that is what is looked for
        return f"raised {type(error).__name__}: {error}"
    if not unchanged(maker.np, maker.inputs):
        return "changed an input"
    return None


def child(seed, first, count):
    torch = torch_or_none()
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "python"))

    def say(line):
        os.write(1, (line + "\n").encode())

    for number in range(first, first + count):
        wrong = run_case(seed, number, torch, say)
        if wrong is not None:
            say(f"WRONG {wrong}")


def run(seconds, seed, batch=BATCH):
    """(cases run, findings): children until the time is over."""
    ends, first, findings, done = time.monotonic() + seconds, 0, [], 0
    while time.monotonic() < ends and len(findings) < 20:
        left = max(ends - time.monotonic(), 1)
        command = [sys.executable, os.path.abspath(__file__), "--child", str(seed), str(first), str(batch)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   errors="replace")
        try:
            out, err = process.communicate(timeout=left)
            over = False
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            over = True
        lines = out.splitlines()
        cases = [line for line in lines if not line.startswith("WRONG ")]
        done += len(cases)
        for at, line in enumerate(lines):
            if line.startswith("WRONG ") and not any(one.startswith(line[6:] + "\n")
                                                     for one in findings):
                findings.append(f"{line[6:]}\n    --seed {seed} --case {lines[at - 1]}")
        next_first = first + batch
        if not over and process.returncode != 0:
            last = cases[-1] if cases else f"{first}: before the first call"
            findings.append(f"the process ended with {process.returncode}: {err.strip()[-400:]}\n"
                            f"    --seed {seed} --case {last}")
            next_first = int(last.partition(":")[0]) + 1
        first = next_first
    return done, findings


def main():
    if sys.argv[1:2] == ["--child"]:
        child(*map(int, sys.argv[2:5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    if options.case is not None:
        torch = torch_or_none()
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "python"))
        wrong = run_case(options.seed, options.case, torch, print)
        print(wrong or "right")
        return 1 if wrong else 0
    done, findings = run(options.seconds, options.seed)
    print("\n".join(findings + [f"{done} calls, {len(findings)} findings"]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
