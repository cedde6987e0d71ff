"""Registers the gradients of torch.ops.flashcore, for the calls that _torch.gradients does not record."""

import torch

from flashcore._torch import gradients
from flashcore._torch.arrays import empty_gradient
from flashcore._torch.backward import backward
from flashcore._torch.kernels import ATTENTION_OPS
from flashcore._torch.library import DEFAULTS, LIBRARY, TENSORS, op_lse


def _setup_context(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *tensors = inputs
    tensors += [None] * (len(TENSORS) - len(tensors))
    ctx.options = {**DEFAULTS, "partial": False, **keyword_only_inputs}
    out, lse = output if isinstance(output, tuple) else (output, None)
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse=None):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    wants = ctx.needs_input_grad  # one flag per argument that was passed
    names = ("q", "k", "v", *gradients.FIELDS)[:len(wants)]
    if grad_out is None and grad_lse is None:
        return (None,) * len(wants)
    if lse is None:  # flashcore::attention returns no LSE
        lse = op_lse(q, k, v, *tensors, **ctx.options)[1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    made = gradients.through_op(grad_out, grad_lse, (q, k, v, out, lse), tensors, ctx.options,
                                dict(zip(names, wants)))
    return tuple(made.get(name) for name in names)


for _name in ATTENTION_OPS:  # their kernels must be in library.KERNELS by now
    torch.library.register_autograd(f"flashcore::{_name}", _backward, setup_context=_setup_context,
                                    lib=LIBRARY)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attention_backward", backward, _key)


def _no_second_backward(ctx, *grads):
    raise NotImplementedError("flashcore.attention has no second derivative; use torch's math "
                              "backend where one is needed")


torch.library.register_autograd("flashcore::attention_backward", _no_second_backward, lib=LIBRARY)


@torch.library.register_fake("flashcore::attention_backward", lib=LIBRARY)
def _fake_backward(grad_out, grad_lse, q, k, v, out, lse, sinks=None, alibi_slopes=None, bias=None,
                   *_, wanted, **__):
    made = [empty_gradient(one) if want else q.new_empty(0)
            for one, want in zip((q, k, v, sinks), wanted)]
    return *made, bias.new_empty(bias.shape) if wanted[4] else q.new_empty(0)
