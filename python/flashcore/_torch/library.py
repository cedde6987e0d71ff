"""torch.library definitions of torch.ops.flashcore: schemas and op handles.

The ops use define() and impl(), which have half the overhead of torch.library.custom_op.
"""

from collections.abc import Callable
from typing import Any

import torch

from flashcore._core.options_table import ARRAYS, SCHEMA

TENSORS = tuple(name for _, name in ARRAYS)
_OPTIONAL_SCHEMA = ", ".join(f"Tensor? {name}=None" for name in TENSORS)
COMMON_SCHEMA = f"Tensor q, Tensor k, Tensor v, {_OPTIONAL_SCHEMA}, *, {', '.join(SCHEMA)}"
# torch takes a sixth of a microsecond per argument, even for omitted ones. The usual arguments have
# their own overload; torch.ops.flashcore.attention(...) selects it.
SHORT_SCHEMA = "Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None"

# Op -> its kernel. flashcore._torch.kernels fills this table.
KERNELS: dict[str, Callable[..., Any]] = {}

_grad_is_on = torch.is_grad_enabled


def _direct_keysets():
    """Dispatch key sets of calls that go from the autograd key straight to the kernel, with no mode,
    trace, functorch, negative view or second device in between. Empty if this torch has other
    names for the keys."""
    try:
        key, keyset = torch._C.DispatchKey, torch._C.DispatchKeySet
        return frozenset((keyset(one) | keyset(autograd)).raw_repr() for one, autograd in (
            (key.CPU, key.AutogradCPU), (key.CUDA, key.AutogradCUDA)))
    except (AttributeError, TypeError):
        return frozenset()


DIRECT_KEYSETS = _direct_keysets()


def only_for_gradients(record, kernel):
    """The kernel for torch's key Autograd. record() is torch's own kernel, which dispatches a second
    time. A call without gradients skips it, which halves its overhead."""
    def autograd(keyset, q, k, v, *tensors, **options):
        if keyset.raw_repr() not in DIRECT_KEYSETS or (_grad_is_on() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (tensors and any(one is not None and one.requires_grad for one in tensors)))):
            return record(keyset, q, k, v, *tensors, **options)
        return kernel(q, k, v, *tensors, **options) if tensors or options else kernel(q, k, v)
    return autograd


class _Library(torch.library.Library):
    """A library whose autograd kernels are skipped by calls without gradients."""

    def impl(self, op_name, fn, dispatch_key="", **more):
        if dispatch_key == "Autograd" and op_name in KERNELS:
            fn = only_for_gradients(fn, KERNELS[op_name])
        super().impl(op_name, fn, dispatch_key, **more)


LIBRARY = _Library("flashcore", "DEF")
LIBRARY.define(f"attention({SHORT_SCHEMA}) -> Tensor")
LIBRARY.define(f"attention.options({COMMON_SCHEMA}) -> Tensor")
LIBRARY.define(
    f"attention_lse({COMMON_SCHEMA}, bool partial=False) -> (Tensor out, Tensor lse)")
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_OPTIONAL_SCHEMA}, *, bool causal, SymInt window_left, "
    "SymInt window_right, float? scale, float softcap, str layout, bool partial, "
    "bool[] wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)")
LIBRARY.define(
    "append(Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor seqused_k, "
    "Tensor? block_table=None, Tensor? cu_seqlens_new=None) -> ()")

op_short = torch.ops.flashcore.attention.default
op_options = torch.ops.flashcore.attention.options
op_lse = torch.ops.flashcore.attention_lse.default
op_backward = torch.ops.flashcore.attention_backward.default
op_append = torch.ops.flashcore.append.default
DEFAULTS = {one.name: one.default_value for one in op_options._schema.arguments if one.kwarg_only}
