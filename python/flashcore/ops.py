"""Ops of torch.ops.flashcore: attention, attention_lse, attention_backward and append.

Importing this module registers them. attention has two overloads, and torch chooses by the arguments:
`default` takes causal and scale and has less overhead, `options` takes all options.
"""

import torch

from flashcore._core.providers import provider_of

provider_of("torch")  # registers the ops

attention = torch.ops.flashcore.attention
attention_lse = torch.ops.flashcore.attention_lse
append = torch.ops.flashcore.append
__all__ = ["append", "attention", "attention_lse"]
