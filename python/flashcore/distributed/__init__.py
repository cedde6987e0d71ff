"""Context parallelism: one attention over a sequence that is divided between ranks, on torch.distributed.

docs/distributed.md describes schemes, placement, contracts and costs.
"""

from flashcore.distributed.comm import counted
from flashcore.distributed.placement import position_ids, shard, unshard

__all__ = ["counted", "position_ids", "shard", "unshard"]
