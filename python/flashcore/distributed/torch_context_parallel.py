"""torch's own context_parallel on FlashCore, on the CPU, for models that need no change:

    import flashcore.distributed.torch_context_parallel as on_flashcore
    on_flashcore.register()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        model(x)  # its F.scaled_dot_product_attention runs FlashCore's ring

torch's context_parallel fails on CPU tensors without this. On CUDA it calls torch's flash kernels on
each rank; flashcore.integrations.torch_sdpa replaces those.
"""

from typing import Any

import torch
from torch import Tensor

from flashcore.distributed import ring
from flashcore.distributed.attention import make_job
from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job
from flashcore.distributed.schemes import Attention

_VERSIONS = ("2.13",)  # whose private names this module uses
_OPTIONS: dict[str, Any] = dict(
    scheme="ring", layout="bhsd", window=(-1, -1), softcap=0.0, sinks=None,
    reproducibility="deterministic", node=None, head_ranks=None)


def register() -> None:
    """Makes torch's context_parallel run FlashCore on CPU tensors, until unregister()."""
    _module().custom_ops.update(_handlers())


def unregister() -> None:
    for op in _handlers():
        _module().custom_ops.pop(op, None)


def _module() -> Any:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in _VERSIONS:
        raise NotImplementedError(
            f"torch is {torch.__version__}; FlashCore knows context_parallel of torch "
            f"{', '.join(_VERSIONS)}. Call flashcore.distributed.context_parallel_attention instead")
    from torch.distributed.tensor.experimental._context_parallel import _attention
    return _attention


def _handlers() -> dict[Any, Any]:
    """The entries for torch's table of ops that context_parallel runs itself."""
    aten = torch.ops.aten
    return {aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward}


def _job(mesh: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool,
         attn_mask: Any, scale: float | None) -> tuple[Job, Comm]:
    error: Exception | None = None
    if dropout_p > 0.0:
        error = NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0")
    elif attn_mask is not None:
        error = NotImplementedError("attn_mask: context_parallel takes is_causal alone; call "
                                    "flashcore.distributed.context_parallel_attention with window, sinks "
                                    "or cu_seqlens for other masks")
    balanced = _module()._cp_options.enable_load_balance  # torch then shards as zigzag does
    comm = Comm(mesh.get_group(), "context_parallel")
    job, _, _ = make_job(comm, "attention", q, k, v, causal=is_causal, scale=scale,
                         sharding="zigzag" if balanced else "contiguous", error=error, **_OPTIONS)
    return job, comm


def _wrapped(like: Any, tensors: Any) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor, Shard
    return tuple(DTensor.from_local(one, like.device_mesh, [Shard(2)], run_check=False)
                 for one in tensors)


def _forward(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    q, k, v = (one.to_local() for one in args[:3])
    dropout_p, is_causal = args[3] if len(args) > 3 else 0.0, args[4] if len(args) > 4 else False
    job, comm = _job(args[0].device_mesh, q, k, v, dropout_p, is_causal, kwargs.get("attn_mask"),
                     kwargs.get("scale"))
    return _wrapped(args[0], Attention.apply(job, comm, q, k, v, None))


def _backward(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    grad_out, q, k, v, out, lse = (one.to_local() for one in args[:6])
    job, comm = _job(args[1].device_mesh, q, k, v, args[6], args[7], kwargs.get("attn_mask"),
                     kwargs.get("scale"))
    grads = ring.backward(job, comm, (q, k, v, out, lse), None, (grad_out, torch.zeros_like(lse)))
    return _wrapped(args[1], [one.to(q.dtype) for one in grads if one is not None])
