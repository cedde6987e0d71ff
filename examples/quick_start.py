"""Causal grouped-query attention on NumPy arrays: 8 query heads share 2 KV heads. No torch needed."""
import numpy as np

import flashcore

random = np.random.default_rng(0)
q = random.standard_normal((1, 8, 512, 64), dtype=np.float32)  # batch, heads, length, head_dim
k, v = random.standard_normal((2, 1, 2, 512, 64), dtype=np.float32)

options = dict(causal=True, reproducibility="batch_invariant")  # a row's bits depend on its own data alone
out, lse = flashcore.attention(q, k, v, return_lse=True, **options)
print(flashcore.explain(q, k, v, **options).splitlines()[2])

# The same with a KV cache of capacity 1024, 512 keys in use, and the last query alone.
cache_k, cache_v = np.zeros((2, 1, 2, 1024, 64), np.float32)
used = np.array([0], np.int32)
flashcore.append(k, v, cache_k, cache_v, used)
step = flashcore.attention(q[:, :, -1:], cache_k, cache_v, seqused_k=used + 512, **options)
print("query 511 through the cache differs by", float(np.abs(step - out[:, :, -1:]).max()))
