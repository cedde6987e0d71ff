"""The overhead of a ring on one machine: ranks of one core each, against one process on all of them.

    PYTHONPATH=python python3 bench/distributed_overhead.py [--rows 8192] [--ranks 2] [--rounds 7]

Both do the same total work: f32, 8 heads of 64. Each rank is pinned to its own core, and the single process
to all these cores; FlashCore uses as many threads as the process may use. Each round times one call of the
ring (the slowest rank, between barriers) and one call of the single process, one after the other, so that
both see the same machine. The figure is the median of the rounds' ratios. On a busy machine read the second
figure, which compares the CPU seconds of all threads.
"""
import argparse
import multiprocessing
import os
import statistics
import time


def _pin(cores):
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


def _timed(call):
    """(wall, CPU) seconds."""
    begin = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def _rank(pipe, rank, cores, port, rows):
    _pin({cores[rank]})
    import torch
    import torch.distributed as dist

    import flashcore.distributed as fcd
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(cores))
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, rows, 64) for _ in range(3)]
    shards = [fcd.shard(one, 2) for one in whole]
    plans = {causal: fcd.explain(*shards, scheme="ring", causal=causal) for causal in (False, True)}
    while True:
        causal = pipe.recv()
        if causal is None:
            break
        dist.barrier()
        pipe.send(_timed(lambda: plans[causal].run(*shards)))
    dist.destroy_process_group()


def _single(pipe, cores, rows):
    _pin(set(cores))
    import torch

    import flashcore
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, rows, 64) for _ in range(3))
    while True:
        causal = pipe.recv()
        if causal is None:
            break
        pipe.send(_timed(lambda: flashcore.attention(q, k, v, causal=causal)))


def _start(context, target, *arguments):
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    return ours


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=29561)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:args.ranks]
    if len(cores) < args.ranks:
        raise SystemExit(f"this process may use {len(cores)} cores; --ranks is {args.ranks}")
    context = multiprocessing.get_context("spawn")
    ranks = [_start(context, _rank, rank, cores, args.port, args.rows) for rank in range(args.ranks)]
    single = _start(context, _single, cores, args.rows)

    def ask(pipes, causal):
        for pipe in pipes:
            pipe.send(causal)
        wall, cpu = zip(*[pipe.recv() for pipe in pipes])
        return max(wall), sum(cpu)

    for causal in (False, True):
        found = []
        for number in range(args.rounds + 1):
            ring, one = ask(ranks, causal), ask([single], causal)
            if number:  # the first round warms up
                found.append((ring, one))
        print("causal:" if causal else "full mask:")
        for i, name in enumerate(("wall", "CPU")):
            ratios = [ring[i] / one[i] - 1 for ring, one in found]
            print(f"  {name:4} ring {statistics.median(ring[i] for ring, _ in found) * 1e3:.0f} ms, one process "
                  f"{statistics.median(one[i] for _, one in found) * 1e3:.0f} ms, overhead "
                  f"{statistics.median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%}, "
                  f"{args.rounds} rounds)", flush=True)
    for pipe in [*ranks, single]:
        pipe.send(None)


if __name__ == "__main__":
    main()
