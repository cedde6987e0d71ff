"""A generation loop with a paged KV cache, on a tiny model with random weights (torch)."""
import torch

import flashcore

torch.manual_seed(0)
vocab, heads, kv_heads, dim, page_size, batch, steps = 100, 4, 2, 16, 8, 2, 20
embed, head = torch.randn(vocab, heads * dim), torch.randn(heads * dim, vocab)
to_q, to_out = (torch.randn(heads * dim, heads * dim) / 8 for _ in range(2))
to_k, to_v = (torch.randn(heads * dim, kv_heads * dim) / 8 for _ in range(2))

# Two sequences share a pool of pages. The block table assigns pages to sequences.
pages_k, pages_v = torch.zeros(2, 16, page_size, kv_heads, dim).unbind(0)
block_table = torch.randperm(16, dtype=torch.int32).reshape(batch, 8)
used = torch.zeros(batch, dtype=torch.int32)


def forward(tokens):
    """Appends tokens [batch, new] to the cache and returns the logits of the last one."""
    x = embed[tokens]
    q, k, v = (x @ w for w in (to_q, to_k, to_v))
    q, k, v = (one.unflatten(-1, (-1, dim)).transpose(1, 2) for one in (q, k, v))
    flashcore.append(k, v, pages_k, pages_v, used, block_table=block_table)
    used.add_(tokens.shape[1])
    out = flashcore.attention(q, pages_k, pages_v, causal=True, seqused_k=used,
                              block_table=block_table)
    return (x + out.transpose(1, 2).flatten(2) @ to_out)[:, -1] @ head


tokens = torch.randint(vocab, (batch, 5))
new = tokens
for _ in range(steps):
    new = forward(new).argmax(-1, keepdim=True)
    tokens = torch.cat([tokens, new], 1)
print(tokens.tolist())
