"""torch.library definitions of torch.ops.flashcore: schemas and op handles.

The ops use define() and impl(), which have half the overhead of torch.library.custom_op.
"""

from collections.abc import Callable, Sequence
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
# Op -> a function that runs it and records its gradients. flashcore._torch.gradients fills this table.
RECORDERS: dict[str, Callable[..., Any]] = {}

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
is_compiling = torch.compiler.is_compiling
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
is_traced = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)  # by torch.jit.trace
in_functorch = torch._C._are_functorch_transforms_active
_is_negative = torch.Tensor.is_neg
_grad_is_on = torch.is_grad_enabled


def are_plain(tensors: Sequence[Any]) -> bool:
    """True if the library may read the tensors, and torch need not see what it does with them."""
    if is_compiling() or dispatch_modes() > 0 or is_traced() or in_functorch():
        return False
    # The memory of a negative view holds the negated values.
    return PLAIN_TYPES.issuperset(map(type, tensors)) and not any(map(_is_negative, tensors))


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


def only_for_gradients(dispatch, record, kernel):
    """The kernel for torch's key Autograd. dispatch() is torch's own kernel, which dispatches a second
    time. A usual call skips it, which halves its overhead: record() if it has gradients, else kernel()."""
    def autograd(keyset, q, k, v, *tensors, **options):
        if keyset.raw_repr() not in DIRECT_KEYSETS:
            return dispatch(keyset, q, k, v, *tensors, **options)
        if _grad_is_on() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (tensors and any(one is not None and one.requires_grad for one in tensors))):
            return record(q, k, v, tensors, options)
        return kernel(q, k, v, *tensors, **options) if tensors or options else kernel(q, k, v)
    return autograd


class _Library(torch.library.Library):
    """A library whose usual calls skip the autograd kernels."""

    def impl(self, op_name, fn, dispatch_key="", **more):
        if dispatch_key == "Autograd" and op_name in KERNELS:
            fn = only_for_gradients(fn, RECORDERS[op_name], KERNELS[op_name])
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
