"""Host time of a call of attention with gradients, and the kernels that it launches, beside torch's SDPA.

    PYTHONPATH=python FLASHCORE_LIBRARY=<libflashcore.so> python3 bench/torch_host_time.py [--shape 2 16 2048 128]

A figure is the time in microseconds after which Python can make the next call; the GPU is still at work then. On a CPU
it is the processor time of one thread, kernels included. It is the median of the rounds, and "backward" includes
torch.autograd.grad() itself. The calls are

sdpa           torch.nn.functional.scaled_dot_product_attention
flashcore      flashcore.attention
model, sdpa    the attention function of transformers for models with torch's SDPA, on [batch, heads, len, dim]
               views of [batch, len, heads, dim] memory, as in a model
model          that of flashcore.integrations.transformers, on the same tensors

The last two are omitted if transformers is not installed. "library" is the part of FlashCore's time that is spent in
libflashcore: checks, plan and launches. On a GPU, the kernels, copies and memsets of one forward and
one backward pass follow.
"""
import argparse
import statistics
import time
from collections import Counter
from types import SimpleNamespace

import torch

import flashcore
from flashcore._core.arrays import adapter_of


def calls(kv_groups):
    """{name: function of q, k and v}"""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = {"sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=kv_groups > 1),
             "flashcore": lambda q, k, v: flashcore.attention(q, k, v, causal=True)}
    try:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from flashcore.integrations.transformers import attend
    except ImportError:
        return found
    module = SimpleNamespace(is_causal=True, num_key_value_groups=kv_groups)
    found["model, sdpa"] = lambda q, k, v: sdpa_attention_forward(module, q, k, v, None, dropout=0.0)[0]
    found["model"] = lambda q, k, v: attend(module, q, k, v, None, dropout=0.0)[0]
    return found


def inputs(args, name):
    batch, heads, length, dim = args.shape
    made = []
    for count in (heads, args.kv_heads or heads, args.kv_heads or heads):
        shape = (batch, length, count, dim) if name.startswith("model") else (batch, count, length, dim)
        one = torch.randn(shape, dtype=getattr(torch, args.dtype), device=args.device)
        made.append((one.transpose(1, 2) if name.startswith("model") else one).requires_grad_())
    return made


def host_us(function, args):
    """The median microseconds of a call."""
    on_gpu = args.device == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    times = []
    for _ in range(args.rounds + 2):
        if on_gpu:
            torch.cuda.synchronize()
        begin = clock()
        for _ in range(args.calls):
            function()
        times.append((clock() - begin) / args.calls * 1e6)
    return statistics.median(times[2:])


def kernels_of(function):
    """{name: number} of what a call makes the GPU do."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return Counter(one.name for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA)


def library_us(out, weight, args):
    """The same of the library's part of a forward and a backward pass that FlashCore recorded."""
    node, times = out.grad_fn, []
    q, k, v, made, lse = node.saved_tensors
    adapter = adapter_of("q", q)
    grads = [torch.empty_like(one) for one in (q, k, v)]
    backward = node.record.backward_call((False, True, True, True), False)
    forward = node.record.forward_call(with_lse=True)
    for call, arrays in ((forward, (q, k, v, made, lse)), (backward, (q, k, v, made, lse, weight, *grads))):
        if not getattr(call, "forward", call).has_workspace(adapter, adapter.gpu(q)) or call.run_fast(*arrays) != 0:
            raise AssertionError("the library needs a description of the tensors by Python")
        times.append(host_us(lambda: call.run_fast(*arrays), args))
    return times


def measure(name, function, args):
    q, k, v = inputs(args, name)
    out = function(q, k, v)
    weight = torch.randn_like(out)

    def step():
        return torch.autograd.grad(function(q, k, v), (q, k, v), weight)

    def backward():
        return torch.autograd.grad(out, (q, k, v), weight, retain_graph=True)

    step()
    with torch.no_grad():
        alone = host_us(lambda: function(q, k, v), args)
    print(f"{name:12} without gradients {alone:7.1f} us, forward {host_us(lambda: function(q, k, v), args):7.1f}, "
          f"backward {host_us(backward, args):7.1f}, both {host_us(step, args):7.1f}", flush=True)
    if hasattr(out.grad_fn, "record"):
        forward_us, backward_us = library_us(out, weight, args)
        print(f"  of that, library{'':17} forward {forward_us:7.1f}, backward {backward_us:7.1f}", flush=True)
    if args.device == "cuda":
        for which, one in (("forward", lambda: function(q, k, v)), ("backward", backward)):
            print(f"  {which}")
            for kernel, count in kernels_of(one).items():
                print(f"    {count} x {kernel[:140]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(2, 16, 2048, 128),
                        metavar=("BATCH", "HEADS", "LENGTH", "DIM"))
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=20, help="in a round")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)
    heads = args.shape[1]
    for name, function in calls(heads // (args.kv_heads or heads)).items():
        measure(name, function, args)


if __name__ == "__main__":
    main()
