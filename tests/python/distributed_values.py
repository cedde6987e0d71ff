"""Tests of the schemes of flashcore.distributed for any number of ranks, against one process."""

import torch

import distributed_bounds as bounds
from distributed_cases import OPTIONS, draw
from distributed_support import definition

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def cases(count):
    """(name, case) for `count` ranks. On 4 ranks, "2d" is 2 by 2."""
    for name, case in _cases(count):
        if count == 4 and case["scheme"] == "2d":
            case.setdefault("head_ranks", 2)
        yield name, case


def _cases(count):
    """Every scheme with lengths that do and do not divide evenly."""
    heads = {2: (4, 2), 3: (6, 3), 4: (8, 4)}[count]
    schemes = ["ring", "gather", "ulysses"] + (["2d"] if count == 4 else [])
    for scheme in schemes:
        yield f"{scheme}, even", dict(scheme=scheme, length=8 * count, heads=heads, causal=True, batch=2)
        yield f"{scheme}, full mask", dict(scheme=scheme, length=8 * count, heads=heads)
        yield f"{scheme}, uneven", dict(scheme=scheme, length=8 * count + 5, heads=heads, causal=True,
                                        sinks=True, softcap=3.0, scale=0.4)
        yield f"{scheme}, contiguous", dict(scheme=scheme, length=19, heads=heads, causal=True,
                                            sharding="contiguous", lengths=LENGTHS[count])
        yield f"{scheme}, fewer rows than ranks", dict(scheme=scheme, length=1, heads=heads, causal=True,
                                                       sharding="contiguous", sinks=True)
        yield f"{scheme}, window", dict(scheme=scheme, length=40, heads=heads, causal=True, window=(5, -1))
        yield f"{scheme}, more keys", dict(scheme=scheme, length=11, k_length=23, heads=heads, causal=True)
        yield f"{scheme}, documents", dict(scheme=scheme, length=37, heads=heads, causal=True,
                                           documents=[0, 3, 3, 20, 31, 37], sinks=True)
        yield f"{scheme}, documents in uneven and empty shards", dict(
            scheme=scheme, length=19, heads=heads, causal=True, documents=[0, 3, 3, 12, 19], sinks=True,
            sharding="contiguous", lengths=LENGTHS[count])
        yield f"{scheme}, bfloat16", dict(scheme=scheme, length=33, heads=heads, causal=True,
                                          dtype="bfloat16", dims=(16, 16))
    for sharding in ("zigzag", "contiguous"):
        yield f"halo, {sharding}", dict(scheme="halo", length=61, heads=heads, causal=True, window=(7, -1),
                                        sharding=sharding, sinks=True)
        yield f"halo, both sides, {sharding}", dict(scheme="halo", length=61, heads=heads, window=(4, 3),
                                                    sharding=sharding)
    yield "ring, other lengths of keys", dict(scheme="ring", length=19, k_length=23, heads=heads, causal=True,
                                              sharding="contiguous", lengths=LENGTHS[count],
                                              k_lengths=(*LENGTHS[count][:-1], LENGTHS[count][-1] + 4))
    yield "gather, contiguous documents", dict(scheme="gather", length=37, heads=heads, causal=True,
                                               sharding="contiguous", documents=[0, 3, 3, 20, 31, 37])
    yield "halo, documents", dict(scheme="halo", length=37, heads=heads, causal=True, window=(6, 0),
                                  documents=[0, 3, 3, 20, 31, 37])
    yield "ring, rows without keys", dict(scheme="ring", length=21, k_length=9, heads=heads, causal=True)
    yield "gather, rows without keys", dict(scheme="gather", length=21, k_length=9, heads=heads,
                                            causal=True, sinks=True)
    yield "ring, bshd", dict(scheme="ring", length=21, heads=heads, causal=True, layout="bshd")
    yield "auto", dict(scheme="auto", length=29, heads=heads, causal=True)
    if count == 4:
        yield "ulysses, ranks share KV heads", dict(scheme="ulysses", length=29, heads=(8, 2), causal=True)
        yield "2d, ranks share KV heads", dict(scheme="2d", length=29, heads=(8, 1), causal=True)
        yield "2d, four by one", dict(scheme="2d", length=29, heads=heads, causal=True, head_ranks=4)
    if count == 2:
        yield "ulysses, ranks share KV heads", dict(scheme="ulysses", length=29, heads=(4, 1), causal=True,
                                                    sinks=True)
        yield "2d, one by two", dict(scheme="2d", length=29, heads=heads, causal=True, head_ranks=2)
        yield "2d, two by one", dict(scheme="2d", length=29, heads=heads, causal=True, head_ranks=1)


LENGTHS = {2: (19, 0), 3: (2, 0, 17), 4: (1, 13, 0, 5)}  # of contiguous shards


def expected(case):
    """{name: array in f64} from the definition."""
    q, k, v, sinks, d_out, d_lse = draw(case)
    inputs = [one.double().requires_grad_() for one in (q, k, v)]
    if sinks is not None:
        sinks = sinks.double().requires_grad_()
    options = {name: case[name] for name in OPTIONS if name in case}
    out, lse = definition(*inputs, sinks=sinks, documents=case.get("documents"), **options)
    ((out * d_out.double()).sum() + (torch.where(lse.isfinite(), lse, 0.0) * d_lse.double()).sum()).backward()
    made = dict(out=out, lse=lse, dq=inputs[0].grad, dk=inputs[1].grad, dv=inputs[2].grad)
    if sinks is not None:
        made["dsinks"] = sinks.grad
    return {name: one.detach().numpy() for name, one in made.items()}


def limits_of(case, want):
    """{name: error bound} of the results `want`."""
    q, k, v, sinks, d_out, d_lse = (None if one is None else one.double().numpy() for one in draw(case))
    options = {name: case[name] for name in OPTIONS if name in case}
    return bounds.whole(q, k, v, d_out, d_lse, want, case.get("dtype", "float32"), sinks=sinks,
                        documents=case.get("documents"), **options)


class Values:
    """For a unittest.TestCase with `ranks`, a distributed_support.Ranks."""

    def compare(self, got, want, limits):
        self.assertEqual(set(want), set(got) - {"sent", "sent_backward"})
        for part, one in want.items():
            self.assertIsNone(bounds.fault(got[part], one, limits[part]), part)

    def test_values_and_gradients(self):
        for name, case in cases(len(self.ranks.pipes)):
            with self.subTest(name):
                found = self.ranks.results("run", case)
                want = expected(case)
                limits = limits_of(case, want)
                for got in found:
                    self.compare(got, want, limits)

    def test_equal_bits_on_every_run(self):
        count = len(self.ranks.pipes)
        for scheme in ("ring", "gather", "ulysses", "2d", "halo"):
            case = dict(scheme=scheme, length=45, heads=(4 * count, 2 * count), causal=True, sinks=True)
            if scheme == "2d":
                case["head_ranks"] = 1 if count == 3 else 2
            if scheme == "halo":
                case["window"] = (11, -1)
            first, second = (self.ranks.results("run", case)[0] for _ in range(2))
            for part in NAMES:
                self.assertTrue((first[part] == second[part]).all(), (scheme, part))
        for combine in ("all_gather", "all_to_all"):
            self.assertEqual(self.ranks.results("decode_twice", combine), [True] * count)

    def test_bits_of_one_device(self):
        """Batch-invariant gather and Ulysses give the bits of one call on one device."""
        count = len(self.ranks.pipes)
        for scheme in ("gather", "ulysses"):
            for options in (dict(causal=True), dict(causal=True, window=(9, -1)), {},
                            dict(causal=True, documents=[0, 8, 30, 45])):
                case = dict(scheme=scheme, length=45, heads=(2 * count, count), sinks=True,
                            reproducibility="batch_invariant", backward=False, **options)
                with self.subTest(f"{scheme} {options}"):
                    got, want = self.ranks.results("run", case)[0], self.ranks.results("one_device", case)[0]
                    for part in ("out", "lse"):
                        self.assertTrue((got[part] == want[part]).all(), part)

    def test_bits_of_the_same_key_ranges(self):
        """Batch-invariant ring, 2d and halo give the bits of one device that computes the same ranges of
        keys and merges them. 2d on 2 ranks has one range."""
        count = len(self.ranks.pipes)
        for dtype in ("float32", "bfloat16"):
            case = dict(length=45, heads=(4, 2), sinks=True, causal=True, dtype=dtype,
                        reproducibility="batch_invariant", backward=False)
            for own, source in (
                    (dict(scheme="ring"), "merged_ranges"),
                    (dict(scheme="2d", head_ranks=1 if count == 3 else 2),
                     "one_device" if count == 2 else "merged_ranges"),
                    (dict(scheme="halo", window=(9, -1)), "windowed_ranges")):
                got, want = (self.ranks.results(name, {**case, **own})[0] for name in ("run", source))
                for part in ("out", "lse"):
                    self.assertTrue((got[part] == want[part]).all(), (own, dtype, part))

    def test_a_window_skips_ranks(self):
        """With a window shorter than a shard, a rank sends keys to its neighbour alone."""
        count = len(self.ranks.pipes)
        case = dict(scheme="ring", length=16 * count, causal=True, window=(4, -1), sharding="contiguous",
                    backward=False)
        shard_bytes = 2 * 16 * (16 + 8) * 4
        for rank, got in enumerate(self.ranks.results("run", case)):
            sent = sum(got["sent"].values())
            self.assertEqual(sent, shard_bytes if rank + 1 < count else 0)
        for rank, got in enumerate(self.ranks.results("run", {**case, "scheme": "halo"})):
            self.assertEqual(sum(got["sent"].values()), shard_bytes // 4 if rank + 1 < count else 0)


    def test_a_plan_runs(self):
        """Plan.run() gives the bits of the call, and refuses other tensors."""
        for extra in (dict(causal=True), dict(documents=[0, 9, 31], causal=True), dict(layout="bshd")):
            for same, without_header, wrong in self.ranks.results(
                    "plan", dict(scheme="ring", length=31, sinks=True, **extra)):
                self.assertTrue(same)
                self.assertTrue(without_header)
                self.assertIn("Make a new plan with explain() on all ranks", wrong)

    def test_explain_says_the_bytes_that_are_sent(self):
        for name, case in cases(len(self.ranks.pipes)):
            with self.subTest(name):
                plans = self.ranks.results("explain", case)
                for (text, scheme, said, totals), got in zip(plans, self.ranks.results("run", case)):
                    for steps, total, sent in zip(said, totals, (got["sent"], got["sent_backward"])):
                        self.assertEqual({step: n for step, n in steps.items() if n}, sent)
                        self.assertEqual(total, sum(sent.values()))
                    self.assertEqual(text, plans[0][0])
                    self.assertIn(f"scheme    {scheme}", text)


class Decode:
    """For a unittest.TestCase with `ranks`."""

    def test_decode_bits(self):
        """Batch-invariant decode gives the bits of one device that merges the same keys by ranks."""
        for dtype in ("float32", "bfloat16"):
            for combine in ("all_gather", "all_to_all"):
                for equal in self.ranks.results("decode_bits", dtype, combine):
                    self.assertEqual(equal, (True, True))

    def test_decode(self):
        count = len(self.ranks.pipes)
        for options in (dict(), dict(q_len=3, interleave=4), dict(paged=True), dict(paged=True, q_len=2),
                        dict(combine="all_to_all", sinks=True), dict(lengths=(1, 0, 30)),
                        dict(softcap=2.0, layout="bshd", interleave=2), dict(dtype="bfloat16")):
            case = dict(heads=(2 * count, count), lengths=(17, 5, 30), **{
                name: one for name, one in options.items() if name != "lengths"})
            case["lengths"] = options.get("lengths", case["lengths"])
            with self.subTest(str(options)):
                for got, want, limit, sent, said in self.ranks.results("decode", case):
                    for part in want:
                        self.assertIsNone(bounds.fault(got[part], want[part], limit[part]), part)
                    self.assertEqual(sent, said)
