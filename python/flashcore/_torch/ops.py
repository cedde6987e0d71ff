"""torch.ops.flashcore: attention, attention_lse, their backward, and append.

Importing this module registers the kernels, gradients, autocast and vmap rules.
"""

from flashcore._torch import autograd as autograd, kernels as kernels, transforms as transforms
