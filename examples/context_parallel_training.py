"""Trains two steps of a small transformer on 4 processes, each of which holds a quarter of the sequence,
and gets the losses of one process.

    python3 examples/context_parallel_training.py [ranks]

Only three things differ from a program for one process: the tokens are sharded, rotary embeddings use
position_ids(), and attention is context_parallel_attention(). On GPUs, start it with torchrun and NCCL.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

import flashcore
import flashcore.distributed as fcd

LENGTH, VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS, STEPS = 203, 61, 64, 8, 4, 2, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // HEADS
        self.qkv = torch.nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * self.head_dim)
        self.out, self.up, self.down = (torch.nn.Linear(*shape) for shape in (
            (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)))

    def forward(self, x, positions, attend):
        qkv = self.qkv(F.layer_norm(x, (DIM,))).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        made = attend(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (DIM,)))))


def rotate(x, positions):
    """Rotary embedding of [batch, heads, rows, dim]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def train(shard, positions, attend, sum_over_ranks):
    """The loss of each step. The functions are all that depends on the number of processes."""
    torch.manual_seed(0)
    embed = torch.nn.Embedding(VOCABULARY, DIM)
    layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
    parameters = [*embed.parameters(), *layers.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    text = torch.randint(VOCABULARY, (2, LENGTH + 1))
    tokens, labels = shard(text[:, :-1]), shard(text[:, 1:])
    losses = []
    for _ in range(STEPS):
        x = embed(tokens)
        for layer in layers:
            x = layer(x, positions, attend)
        logits = F.layer_norm(x, (DIM,)) @ embed.weight.T * DIM ** -0.5
        # The sum over this rank's tokens, divided by the number of all tokens: ranks' losses add up.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / text[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        for one in parameters:
            sum_over_ranks(one.grad)
        optimizer.step()
        total = loss.detach()
        sum_over_ranks(total)
        losses.append(float(total))
    return losses


def one_process():
    return train(lambda tokens: tokens, torch.arange(LENGTH),
                 lambda q, k, v: flashcore.attention(q, k, v, causal=True), lambda one: None)


def one_rank(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    losses = train(lambda tokens: fcd.shard(tokens, 1), fcd.position_ids(LENGTH),
                   lambda q, k, v: fcd.context_parallel_attention(q, k, v, causal=True), dist.all_reduce)
    if rank == 0:
        torch.save(losses, os.path.join(folder, "losses"))
    dist.destroy_process_group()


def main(ranks):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (ranks, folder), nprocs=ranks)
        parallel = torch.load(os.path.join(folder, "losses"))
    alone = one_process()
    for step, (one, other) in enumerate(zip(parallel, alone)):
        print(f"step {step}: loss {one:.6f} on {ranks} ranks, {other:.6f} on one")
    if max(abs(a - b) / b for a, b in zip(parallel, alone)) > 1e-5:
        sys.exit("the losses differ")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
