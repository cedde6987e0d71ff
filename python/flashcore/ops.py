"""Importing this registers torch.ops.flashcore.attention, .attention_lse, .attention_backward and
.append. attention has two overloads, of which torch takes the one that knows the arguments: `default`
with causal and scale, which costs less, and `options` with all."""

import torch

from flashcore import _torch_ops  # noqa: F401 (registers)

attention = torch.ops.flashcore.attention
attention_lse = torch.ops.flashcore.attention_lse
append = torch.ops.flashcore.append
__all__ = ["append", "attention", "attention_lse"]
