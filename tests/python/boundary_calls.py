"""Random calls of all public functions, for boundary_fuzz.py."""

from boundary_buffers import FLAGS, FLOATS, INTEGERS, WORDS, Buffers

PROMISED = (ValueError, TypeError, NotImplementedError, MemoryError)


class Maker(Buffers):
    """One call. call() returns the function, its arguments and its options."""

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
        given = dict(is_causal=self.pick(choose.random() < 0.3, FLAGS),
                     enable_gqa=self.pick(False, FLAGS), dropout_p=self.pick(0.0, FLOATS, 0.02))
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
        for name, good, bad in (("softmax_scale", 0.5, FLOATS), ("softcap", 5.0, FLOATS),
                                ("window_size", (2, 0), (3, (1,), None, "ab", (1.5, 0)))):
            if choose.random() < 0.2:
                given[name] = self.pick(good, bad)
        if choose.random() < 0.3:
            packed = [self.array(self.shape(2 * length, 2, 8), "f4") for length in (3, 9, 9)]
            lengths = [self.lengths(range(0, 2 * length + 1, length)) for length in (3, 9)]
            longest = self.pick(3, INTEGERS), self.pick(9, INTEGERS)
            return flash_attn.flash_attn_varlen_func, (*packed, *lengths, *longest), given
        if choose.random() < 0.5:
            given["window_size"] = self.pick((self.pick(2, INTEGERS), 0), (3, (1,), None))
            return flash_attn.flash_attn_func, (q, k, v), given
        given["cache_seqlens"] = self.pick(self.lengths([3, 4]), INTEGERS)
        if choose.random() < 0.5:
            given.update({name: self.array(self.shape(2, 2, 2, 8), "f4") for name in "kv"})
            self.inputs.clear()  # they include the cache, which is written before q is checked
        return flash_attn.flash_attn_with_kvcache, (q, k, v), given

    def op(self):
        """A call of torch.ops.flashcore. torch's check of the schema raises RuntimeError."""
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
