"""The local part of the ring: which pairs of a row and a key its calls have, and its benchmark."""

import json
import os
import subprocess
import sys
import unittest
from dataclasses import replace
from unittest import mock

import torch_support  # noqa: F401 (skips without torch)

import torch

from flashcore.distributed import local, masks, placement, ring_step
from flashcore.distributed.job import Job
from flashcore.distributed.ring_step import tiles

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make_job(q_spans, k_spans, mask):
    return Job(scheme="ring", head_ranks=1, q_spans=q_spans, k_spans=k_spans, mask=mask, batch=1, q_heads=1,
               kv_heads=1, dim=8, v_dim=8, dtype=torch.float32, scale=1.0, softcap=0.0,
               reproducibility="deterministic")


def frozen(spans):
    return tuple(tuple(some) for some in spans)


def jobs():
    for sharding in placement.SHARDINGS:
        for ranks in (2, 3):
            for q_len, k_len in ((12, 12), (11, 11), (2, 2), (5, 9)):
                spans = [frozen(placement.place(one, ranks, sharding)) for one in (q_len, k_len)]
                for causal in (False, True):
                    for window in ((-1, -1), (4, -1), (2, 3)):
                        yield make_job(*spans, masks.Mask((0, q_len), (0, k_len), causal, window))
    spans = frozen(placement.place(16, 2, "zigzag"))
    yield make_job(spans, spans, masks.Mask((0, 5, 16), (0, 5, 16), True, (-1, -1)))


def positions(spans):
    return [row for begin, end in spans for row in range(begin, end)]


def visible(mask, rows, keys):
    """{(index of a row, index of a key)} of pairs that the definition of the mask shows."""
    left, right = mask.reach
    shift = mask.k_docs[-1] - mask.q_docs[-1]
    found = set()
    for i, row in enumerate(rows):
        for j, key in enumerate(keys):
            same = all((row >= end) == (key >= other) for end, other in zip(mask.q_docs, mask.k_docs))
            distance = row + (shift if len(mask.q_docs) == 2 else 0) - key
            if same and (left < 0 or distance <= left) and (right < 0 or -distance <= right):
                found.add((i, j))
    return found


def computed(tile):
    """[(index of a row, index of a key)] that a call computes."""
    left, right = tile.mask.reach
    for one in tile.segments:
        for i in range(one.q_begin, one.q_end):
            for j in range(one.k_begin, one.k_end):
                distance = one.q_start + i - one.q_begin - (one.k_start + j - one.k_begin)
                if (left < 0 or distance <= left) and (right < 0 or -distance <= right):
                    yield tile.rows[0] + i, tile.keys[0] + j


class Tiles(unittest.TestCase):
    def test_every_visible_pair_is_computed_once(self):
        for job in jobs():
            for mode in ("deterministic", "batch_invariant"):
                job = replace(job, reproducibility=mode)
                for rank in range(job.ranks):
                    for block in range(job.ranks):
                        found = [pair for tile in tiles(job, rank, block) for pair in computed(tile)]
                        want = visible(job.mask, positions(job.q_spans[rank]),
                                       positions(job.k_spans[block]))
                        self.assertEqual((len(found), set(found)), (len(want), want),
                                         (job, rank, block))

    def test_a_causal_zigzag_step_is_one_call(self):
        spans = frozen(placement.place(48, 4, "zigzag"))
        job = make_job(spans, spans, masks.Mask((0, 48), (0, 48), True, (-1, -1)))
        for rank in range(4):
            for block in range(4):
                made = tiles(job, rank, block)
                self.assertEqual([one.mask.segment_sees_all(one.segments[0]) for one in made],
                                 [rank != block])
                if block < rank:
                    self.assertEqual((made[0].rows, made[0].keys), ((0, 12), (0, 6)))
                if block > rank:
                    self.assertEqual((made[0].rows, made[0].keys), ((6, 12), (0, 12)))


class Merges(unittest.TestCase):
    """Spans of rows with the same parts are merged in one launch, and get the bits of a merge of each."""

    RANKS, LENGTH = 4, 53

    def setUp(self):
        torch.manual_seed(0)
        self.spans = frozen(placement.place(self.LENGTH, self.RANKS, "zigzag"))
        self.whole = [torch.randn(1, 2, self.LENGTH, 8) for _ in range(3)]
        self.sinks = torch.randn(2)

    def run_blocks(self, rank, blocks, reproducibility, apart=False):
        """(out, lse, calls of merge). `apart`: every span of rows has Partials of its own."""
        job = replace(make_job(self.spans, self.spans, masks.Mask((0, self.LENGTH), (0, self.LENGTH), True,
                                                                  (-1, -1))),
                      q_heads=2, kv_heads=2, reproducibility=reproducibility)
        q, k, v = ([torch.cat([one[:, :, a:b] for a, b in some], 2) for some in self.spans]
                   for one in self.whole)
        with mock.patch.object(local, "merge", wraps=local.merge) as merges:
            step = ring_step.ForwardStep(job, rank, q[rank], 8)
            if apart:
                step._partials = Apart(step._out, step._lse, step._partials._spans, job.in_order)
            for block in blocks:
                step.add(block, k[block], v[block])
            out, lse = step.result(self.sinks)
        return out, lse, merges.call_count

    def test_number_of_merges(self):
        for rank, blocks, wanted in ((1, [1], 1), (3, [3], 1), (1, [1, 0], 1), (1, [1, 0, 3], 2),
                                     (3, [3, 2, 1, 0], 1)):
            self.assertEqual(self.run_blocks(rank, blocks, "deterministic")[2], wanted, (rank, blocks))

    def test_bits(self):
        for rank in range(self.RANKS):
            blocks = [(rank - step) % self.RANKS for step in range(self.RANKS)]
            for mode in ("deterministic", "batch_invariant"):
                for some in (blocks[:1], blocks[:2], blocks, blocks * 3):  # more parts than wait for a merge
                    got, want = (self.run_blocks(rank, some, mode, apart) for apart in (False, True))
                    self.assertTrue(torch.equal(got[0], want[0]), (rank, mode, len(some)))
                    self.assertTrue(torch.equal(got[1], want[1]), (rank, mode, len(some)))
                    self.assertLessEqual(got[2], want[2])


class Apart:
    """Partials of each span of rows by itself."""

    def __init__(self, out, lse, spans, in_order):
        self.each = {(a, b): local.Partials(out[:, :, a:b], lse[:, :, a:b], [(0, b - a)], in_order)
                     for a, b in spans}

    def add(self, first_key, rows, out, lse):
        for (a, b), one in self.each.items():
            if rows[0] <= a and b <= rows[1]:
                own = slice(a - rows[0], b - rows[0])
                one.add(first_key, (0, b - a), out[:, :, own], lse[:, :, own])

    def finish(self, sinks):
        for one in self.each.values():
            one.finish(sinks)


class Benchmark(unittest.TestCase):
    def run_it(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": os.path.join(TREE, "python")}
        return subprocess.run(
            [sys.executable, os.path.join(TREE, "bench", "distributed_step.py"), "--device", "cpu",
             "--heads", "4", "2", "--dim", "16", "--rounds", "2", "--repeats", "1", *arguments],
            text=True, env=environment, capture_output=True)

    def test_figures(self):
        done = self.run_it("--rows", "32", "64", "--json", "--backward")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual([(one["case"], one["rows"]) for one in found],
                         [("own", 32), ("pass", 32), ("own", 64), ("pass", 64)])
        for one in found:
            rows = one["rows"]
            pairs = rows * (rows + 1) // 2 + (rows * rows if one["case"] == "pass" else 0)
            self.assertEqual(one["flops"], 2 * 5 * 4 * 16 * pairs)
            self.assertGreater(one["ratio"], 0)
            self.assertAlmostEqual(one["local_tflops"], one["flops"] / one["local_s"] / 1e12)

    def test_text(self):
        done = self.run_it("--rows", "8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?s)^own +8 rows: local .* TFLOP/s, plain .*, ratio .*\npass ")


if __name__ == "__main__":
    unittest.main()
