"""Gloo processes that stay alive between tests, and the single-process reference in f64."""

import multiprocessing
import os
import socket
import tempfile
import time
import unittest

import torch_support  # noqa: F401 (skips without torch)

import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    raise unittest.SkipTest("torch has no gloo")


class Ranks:
    """Processes of one group. call() runs a function of the module `cases` in all of them."""

    def __init__(self, count, timeout=30.0, cases="distributed_cases", backend="gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", cases])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, daemon=True, args=(
                theirs, rank, count, os.path.join(self.folder.name, "store"), timeout, cases, backend))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, name, *arguments, each=None):
        """[result of each rank]. A result is an Exception if the function raised one, and None if the
        process ended. `each`: one more argument for each rank."""
        for rank, pipe in enumerate(self.pipes):
            pipe.send((name, (*arguments, *([] if each is None else [each[rank]]))))
        found = []
        for rank, pipe in enumerate(self.pipes):
            try:
                found.append(pipe.recv() if pipe.poll(90) else TimeoutError(f"rank {rank} hangs"))
            except EOFError:
                found.append(None)
        return found

    def results(self, name, *arguments, each=None):
        """call(), where no rank may raise."""
        found = self.call(name, *arguments, each=each)
        for rank, one in enumerate(found):
            if isinstance(one, Exception):
                raise AssertionError(f"rank {rank}: {one!r}")
        return found

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _serve(pipe, rank, count, store, timeout, cases, backend):
    """One rank: runs functions until the pipe closes."""
    import datetime
    import importlib

    import torch.distributed as dist

    functions = importlib.import_module(cases)
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name resolution
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count,
                            timeout=datetime.timedelta(seconds=timeout))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for ranks that ended
        try:
            result = getattr(functions, name)(*arguments)
        except Exception as error:
            result = type(error)(str(error)) if type(error) in (
                ValueError, TypeError, RuntimeError, NotImplementedError) else RuntimeError(repr(error))
        pipe.send(result)


def elapsed(function):
    """(result, seconds)."""
    begin = time.monotonic()
    return function(), time.monotonic() - begin


def definition(q, k, v, *, sinks=None, causal=False, window=(-1, -1), softcap=0.0, scale=None,
               documents=None):
    """(out, lse) in f64 from the definition, with gradients. Documents are [0, ..., length]."""
    q_docs = documents or [0, q.shape[2]]
    k_docs = documents or [0, k.shape[2]]
    outs, lses = [], []
    for i in range(len(q_docs) - 1):
        rows, keys = slice(q_docs[i], q_docs[i + 1]), slice(k_docs[i], k_docs[i + 1])
        q_len, k_len = rows.stop - rows.start, keys.stop - keys.start
        group = q.shape[1] // k.shape[1]
        one_k, one_v = (one[:, :, keys].repeat_interleave(group, 1) for one in (k, v))
        scores = q[:, :, rows] @ one_k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (k_len - q_len + torch.arange(q_len))[:, None] - torch.arange(k_len)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if window[0] >= 0:
            hidden |= distance > window[0]
        if window[1] >= 0:
            hidden |= distance < -window[1]
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, extra], -1)
        # A row without keys has out 0 and no gradient.
        empty = (scores == float("-inf")).all(-1, keepdim=True)
        p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        outs.append(p[..., :k_len] @ one_v)
        lses.append(scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], float("-inf")))
    return torch.cat(outs, 2), torch.cat(lses, 2)
