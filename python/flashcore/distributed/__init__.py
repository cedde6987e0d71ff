"""Context parallelism: one attention over a sequence that is divided between ranks, on torch.distributed.

    import flashcore.distributed as fcd
    q, k, v = (fcd.shard(one, dim=2) for one in (q, k, v))     # or shard the tokens
    out = fcd.context_parallel_attention(q, k, v, causal=True)  # this rank's rows

docs/distributed.md describes schemes, placement, contracts and costs.
"""

from flashcore.distributed.attention import context_parallel_attention
from flashcore.distributed.comm import counted
from flashcore.distributed.decode import decode_attention, decode_lengths
from flashcore.distributed.placement import position_ids, shard
from flashcore.distributed.plan import Plan, explain, predict
from flashcore.distributed.unsharding import unshard

__all__ = ["Plan", "context_parallel_attention", "counted", "decode_attention", "decode_lengths", "explain",
           "position_ids", "predict", "shard", "unshard"]
