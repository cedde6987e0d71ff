"""Functions that test_distributed_torch runs on every rank (see distributed_support.Ranks)."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashcore.distributed as fcd
from flashcore.distributed import comm, torch_context_parallel as on_flashcore
from flashcore.integrations import torch_sdpa


class Block(torch.nn.Module):
    """One transformer layer with torch's attention."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x, is_causal=True):
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for one in self.qkv(x).chunk(3, -1))
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return x + self.out(made.transpose(1, 2).flatten(2))


class _Staged:
    """Messages of GPU tensors through host memory: gloo has none of its own."""

    def __init__(self, pending, device):
        self._pending, self._device = pending, device

    def wait(self):
        return {peer: [one.to(self._device) for one in tensors]
                for peer, tensors in self._pending.wait().items()}


@contextlib.contextmanager
def _through_host():
    exchange, all_gather = comm.Comm.exchange, comm.Comm.all_gather

    def staged(self, sends, shapes, like, step, dtypes=None):
        sends = {peer: [one.cpu() for one in tensors] for peer, tensors in sends.items()}
        host = torch.empty(0, dtype=like.dtype)
        return _Staged(exchange(self, sends, shapes, host, step, dtypes), like.device)

    with mock.patch.object(comm.Comm, "exchange", staged), \
            mock.patch.object(comm.Comm, "all_gather", lambda self, one: all_gather(self, one.cpu())):
        yield


@contextlib.contextmanager
def _activated():
    """FlashCore as the flash backend of torch's scaled_dot_product_attention."""
    from torch.nn import attention
    torch_sdpa.register()
    attention.activate_flash_attention_impl(torch_sdpa.NAME)
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def model(length, is_causal, dtype, device="cpu", activate=False):
    """(loss and gradients under torch's context_parallel, the same in one process, bytes sent, calls of
    FlashCore's ring)."""
    torch.manual_seed(0)
    layer = Block(64, 4).to(getattr(torch, dtype))
    x, weight = (torch.randn(2, length, 64).to(getattr(torch, dtype)) for _ in range(2))

    def loss_of(x, weight):
        return (layer(x, is_causal).float() * weight.float()).sum()

    want_loss = loss_of(x, weight)
    want = torch.autograd.grad(want_loss, list(layer.parameters()))
    layer, x, weight = layer.to(device), x.to(device), weight.to(device)
    on_flashcore.register()
    with contextlib.ExitStack() as stack:
        stack.callback(on_flashcore.unregister)
        if activate:
            stack.enter_context(_activated())
        if device == "cuda":
            stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            if dist.get_backend() == "gloo":
                stack.enter_context(_through_host())
        calls = stack.enter_context(mock.patch.object(on_flashcore, "_job", wraps=on_flashcore._job))
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        sent = stack.enter_context(fcd.counted())
        stack.enter_context(context_parallel(mesh, buffers=[x, weight], buffer_seq_dims=[1, 1]))
        loss = loss_of(x, weight)
        loss.backward()
    got = [loss.detach()] + [one.grad.float() for one in layer.parameters()]
    got = [one.cpu() if dist.get_backend() == "gloo" else one for one in got]
    for one in got:
        dist.all_reduce(one)
    return (float(got[0]), [one.cpu().numpy() for one in got[1:]], float(want_loss.detach()),
            [one.float().numpy() for one in want], sum(sent.values()), calls.call_count)


def flash_op(is_causal, scale):
    """(out, lse, dq, dk, dv of this rank's rows; the same in f64 from the definition): the op that torch
    calls for CUDA tensors, whose DTensor handler runs on CPU tensors too."""
    import distributed_support
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, 24, 16) for _ in range(4)]
    want = [one.double().requires_grad_() for one in whole[:3]]
    out, lse = distributed_support.definition(*want, causal=is_causal, scale=scale)
    (out * whole[3].double()).sum().backward()
    expected = [out, lse[..., None], *(one.grad for one in want)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = [fcd.shard(one, 2).requires_grad_() for one in whole[:3]]
    on_flashcore.register()
    try:
        with context_parallel(mesh, buffers=[torch.zeros(2, 24)], buffer_seq_dims=[1]):
            q, k, v = (DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in shards)
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, is_causal, scale=scale)
            (out.to_local() * fcd.shard(whole[3], 2)).sum().backward()
    finally:
        on_flashcore.unregister()
    got = [out.to_local(), lse.to_local()[..., None], *(one.grad for one in shards)]
    return ([one.detach().numpy() for one in got],
            [fcd.shard(one.detach(), 2).numpy() for one in expected])


def disagree(kind, wrong):
    """A model of which rank `wrong` passes an argument that the ring does not take."""
    odd = dist.get_rank() == wrong
    x = torch.zeros(1, 8, 4, 16)
    options = {"dropout": dict(dropout_p=0.5 if odd else 0.0),
               "mask": dict(attn_mask=torch.ones(1, 8, 4, 4) if odd else None),
               "keys": dict(is_causal=True)}[kind]
    keys = x[:, :, :2] if odd and kind == "keys" else x
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    on_flashcore.register()
    try:
        with context_parallel(mesh, buffers=[torch.zeros(1, 8)], buffer_seq_dims=[1]):
            q, k, v = (DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in (x, keys, keys))
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
    finally:
        on_flashcore.unregister()
