"""The local part of a ring on one device, against plain calls with the same work. Sends no data.

    PYTHONPATH=python FLASHCORE_LIBRARY=<libflashcore.so> python3 bench/distributed_step.py [--backward]

Causal zigzag, on the middle one of three ranks. Two cases:

own    the rank's rows with the keys of its own block, against one causal call
pass   these, then the block before (all rows see the first half of its keys), then the block after (half of
       the rows see all its keys), against one causal call and two without a mask

The local part is that of flashcore.distributed: partial results in f32 and their merge; in the backward
pass gradients and their sums in f32. The plain calls read the same keys and write their results in the
inputs' dtype. Every round times both in turn; a figure is the median of the rounds. The bars are for the
case "own", forward, on an H200.
"""
import argparse
import json
import statistics
import time

import torch

import flashcore
from flashcore.distributed.job import Job
from flashcore.distributed.masks import Mask
from flashcore.distributed.placement import place
from flashcore.distributed.ring_step import BackwardStep, ForwardStep

RANKS, RANK = 3, 1
CASES = {"own": (1,), "pass": (1, 0, 2)}  # blocks, in the order in which they come
BARS = {16384: 0.94, 32768: 0.97}  # wanted ratio by rows


def make_job(rows, heads, dim, dtype):
    """The job of three ranks with this many rows each."""
    length = RANKS * rows
    spans = tuple(tuple(some) for some in place(length, RANKS, "zigzag"))
    mask = Mask((0, length), (0, length), True, (-1, -1))
    return Job(scheme="ring", head_ranks=1, q_spans=spans, k_spans=spans, mask=mask, batch=1,
               q_heads=heads[0], kv_heads=heads[1], dim=dim, v_dim=dim, dtype=dtype, scale=dim ** -0.5,
               softcap=0.0, reproducibility="deterministic")


def visible_pairs(job, block):
    """How many keys of a block the rank's rows see, summed over the rows, by the positions of each."""
    total = 0
    for q_begin, q_end in job.q_spans[RANK]:
        rows = torch.arange(q_begin, q_end)
        total += sum(int((rows - k_begin + 1).clamp(0, k_end - k_begin).sum())
                     for k_begin, k_end in job.k_spans[block])
    return total


class Call:
    """A plain call: these rows, these keys."""

    def __init__(self, count, block):
        half = count // 2
        self.rows = slice(half, count) if block > RANK else slice(0, count)
        self.keys = slice(0, half) if block < RANK else slice(0, count)
        self.causal = block == RANK
        rows, keys = (one.stop - one.start for one in (self.rows, self.keys))
        self.pairs = rows * (rows + 1) // 2 if self.causal else rows * keys


class Case:
    """A rank's tensors, and the blocks that it meets."""

    def __init__(self, job, blocks, device):
        torch.manual_seed(0)
        rows = job.q_rows(RANK)

        def normal(heads):
            return torch.randn(1, heads, rows, job.dim, device=device).to(job.dtype)

        self.job = job
        self.q, self.d_out = normal(job.q_heads), normal(job.q_heads)
        self.blocks = {block: (normal(job.kv_heads), normal(job.kv_heads)) for block in blocks}
        self.calls = {block: Call(rows, block) for block in blocks}
        for block in blocks:
            if self.calls[block].pairs != visible_pairs(job, block):
                raise AssertionError(f"the plain call with block {block} has other work than the ring")
        self.d_lse = torch.zeros(1, job.q_heads, rows, device=device)
        self.out, self.lse = self.local()

    def local(self):
        step = ForwardStep(self.job, RANK, self.q, self.job.v_dim)
        for block, (k, v) in self.blocks.items():
            step.add(block, k, v)
        return step.result(None)

    def plain(self):
        for block, (k, v) in self.blocks.items():
            one = self.calls[block]
            flashcore.attention(self.q[:, :, one.rows], k[:, :, one.keys], v[:, :, one.keys],
                                causal=one.causal, return_lse=True)

    def local_backward(self):
        step = BackwardStep(self.job, RANK, self.q, self.out, self.lse, (self.d_out, self.d_lse))
        for block, (k, v) in self.blocks.items():
            step.add(block, k, v)

    def plain_backward(self):
        for block, (k, v) in self.blocks.items():
            one = self.calls[block]
            flashcore.attention_backward(
                self.d_out[:, :, one.rows], self.q[:, :, one.rows], k[:, :, one.keys],
                v[:, :, one.keys], self.out[:, :, one.rows], self.lse[:, :, one.rows],
                causal=one.causal, global_lse=True)


def seconds(call, repeats, device):
    """Of one call. Several in a row, so that a GPU does not wait for the host."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def measure(name, rows, args):
    """The figures of one case, as a dict."""
    device = torch.device(args.device)
    case = Case(make_job(rows, args.heads, args.dim, getattr(torch, args.dtype)), CASES[name], device)
    calls = (case.local_backward, case.plain_backward) if args.backward else (case.local, case.plain)
    products = 5 if args.backward else 2  # for each pair of a row and a key
    flops = 2 * products * args.heads[0] * args.dim * sum(one.pairs for one in case.calls.values())
    for call in calls:
        call()
    rounds = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {which: seconds(calls[which], args.repeats, device) for which in order}
        rounds.append((found[0], found[1]))
    local, plain = (statistics.median(one) for one in zip(*rounds))
    ratios = [plain_s / local_s for local_s, plain_s in rounds]
    bar = BARS.get(rows) if name == "own" and not args.backward else None
    return dict(case=name, rows=rows, backward=args.backward, flops=flops, local_s=local, plain_s=plain,
                local_tflops=flops / local / 1e12, plain_tflops=flops / plain / 1e12,
                ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios), bar=bar)


def line(one):
    bar = "" if one["bar"] is None else f", bar {one['bar']:.2f}"
    return (f"{one['case']:4} {one['rows']:7,} rows: local {one['local_s'] * 1e3:9.3f} ms "
            f"{one['local_tflops']:7.4g} TFLOP/s, plain {one['plain_s'] * 1e3:9.3f} ms "
            f"{one['plain_tflops']:7.4g} TFLOP/s, ratio {one['ratio']:.3f} "
            f"({one['lowest']:.3f} to {one['highest']:.3f}){bar}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[*BARS], help="rows of a rank, even numbers")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query and KV heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=5, help="calls in a row, in each round")
    parser.add_argument("--backward", action="store_true", help="gradients instead of the forward pass")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    args = parser.parse_args()
    if any(rows < 2 or rows % 2 for rows in args.rows):
        parser.error("--rows: wanted even numbers: a rank has two parts of the same length")
    found = []
    for rows in args.rows:
        for name in CASES:
            found.append(measure(name, rows, args))
            if not args.json:
                print(line(found[-1]), flush=True)
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
