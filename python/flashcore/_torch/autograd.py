"""Registers the gradients of torch.ops.flashcore."""

import torch

from flashcore._core.options_table import SCORE_OPTIONS
from flashcore._torch.backward import backward
from flashcore._torch.kernels import ATTENTION_OPS
from flashcore._torch.library import DEFAULTS, LIBRARY, TENSORS, op_backward, op_lse

# Score options that backward() knows.
_KNOWN = ("causal", "window_left", "window_right", "scale", "softcap")


def _setup_context(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *tensors = inputs
    tensors += [None] * (len(TENSORS) - len(tensors))
    ctx.options = {**DEFAULTS, **keyword_only_inputs}
    out, lse = output if isinstance(output, tuple) else (output, None)
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse=None):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = ctx.options
    # One flag per argument that was passed.
    wants = ctx.needs_input_grad
    count = len(wants)
    if count > 4 and wants[4]:
        raise NotImplementedError("alibi_slopes: requires grad; gradients are computed for q, k, v, "
                                  "sinks and bias")
    if grad_out is None and grad_lse is None:
        return (None,) * count
    if lse is None:  # flashcore::attention returns no LSE
        lse = op_lse(q, k, v, *tensors, **options)[1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [*wants[:3], count > 3 and wants[3], count > 5 and wants[5]]
    for name in SCORE_OPTIONS:
        if name not in _KNOWN and options[name] != DEFAULTS[name]:
            raise NotImplementedError(f"{name}: gradients with this option are not supported")
    dq, dk, dv, dsinks, dbias = op_backward(
        grad_out, grad_lse, q, k, v, out, lse, *tensors,
        **{name: options[name] for name in (*_KNOWN, "layout")}, partial=options.get("partial", False),
        wanted=wanted)
    grads = [dq, dk, dv, dsinks, None, dbias] + [None] * (count - 6)
    return tuple(one if want else None for one, want in zip(grads, wants))


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
    made = []
    for one, want in zip((q, k, v, sinks, bias), wanted):
        made.append(one.new_empty(one.shape) if want else q.new_empty(0))
    return tuple(made)
