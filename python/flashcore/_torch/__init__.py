"""FlashCore for torch: the adapter of its tensors, torch.ops.flashcore, gradients and sdpa.

_core.providers imports this package when the first torch tensor arrives, and uses ADAPTER.
"""

from flashcore._torch import dispatch, ops as ops, sdpa as sdpa
from flashcore._torch.arrays import ADAPTER

ADAPTER.dispatcher = dispatch
