"""torch's own context_parallel on FlashCore, for models that need no change:

    import flashcore.distributed.torch_context_parallel as on_flashcore
    on_flashcore.register()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        model(x)  # its F.scaled_dot_product_attention runs FlashCore's ring

Without this torch's context_parallel fails on CPU tensors, and on CUDA runs its own ring. On CUDA it is
the flash backend that FlashCore's ring replaces: choose it with torch.nn.attention.sdpa_kernel.
"""

from typing import Any

import torch
from torch import Tensor

from flashcore.distributed import ring
from flashcore.distributed.attention import make_job
from flashcore.distributed.comm import Comm
from flashcore.distributed.job import Job
from flashcore.distributed.schemes import Attention

_VERSIONS = ("2.11", "2.12", "2.13")  # whose private names this module uses
_OPTIONS: dict[str, Any] = dict(
    scheme="ring", layout="bhsd", window=(-1, -1), softcap=0.0, sinks=None,
    reproducibility="deterministic", node=None, head_ranks=None)

_replaced: dict[Any, Any] = {}  # {op: torch's own handler, or None}


def register() -> None:
    """Makes torch's context_parallel run FlashCore, until unregister()."""
    table = _module().custom_ops
    for op, handler in _handlers().items():
        if table.get(op) is not handler:
            _replaced[op] = table.get(op)
            table[op] = handler


def unregister() -> None:
    table = _module().custom_ops
    while _replaced:
        op, before = _replaced.popitem()
        table.pop(op)
        if before is not None:
            table[op] = before


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
    return {aten._scaled_dot_product_flash_attention_for_cpu.default: _forward_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward_cpu,
            aten._scaled_dot_product_flash_attention.default: _forward_cuda,
            aten._scaled_dot_product_flash_attention_backward.default: _backward_cuda}


def _job(mesh: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool,
         scale: float | None, attn_mask: Any = None, return_debug_mask: bool = False) -> tuple[Job, Comm]:
    error: Exception | None = None
    if dropout_p > 0.0:
        error = NotImplementedError(f"dropout_p is {dropout_p}; FlashCore has no dropout, wanted 0")
    elif attn_mask is not None:
        error = NotImplementedError("attn_mask: context_parallel takes is_causal alone; call "
                                    "flashcore.distributed.context_parallel_attention with window, sinks "
                                    "or cu_seqlens for other masks")
    elif return_debug_mask:
        error = NotImplementedError("return_debug_mask: FlashCore keeps no attention matrix")
    elif is_causal and q.shape[2] != k.shape[2]:
        error = NotImplementedError(f"is_causal: {q.shape[2]} queries and {k.shape[2]} keys on this rank; "
                                    "wanted equally many")
    balanced = _module()._cp_options.enable_load_balance  # torch then shards as zigzag does
    comm = Comm(mesh.get_group(), "context_parallel")
    job, _, _ = make_job(comm, "attention", q, k, v, causal=is_causal, scale=scale,
                         sharding="zigzag" if balanced else "contiguous", error=error, **_OPTIONS)
    return job, comm


def _wrapped(like: Any, tensors: Any, shards: bool = True) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    return tuple(DTensor.from_local(one, like.device_mesh, [Shard(2) if shards else Replicate()],
                                    run_check=False) for one in tensors)


def _forward(args: tuple[Any, ...], **options: Any) -> tuple[Any, ...]:
    """(out, lse). args: q, k, v and then, if given, dropout_p and is_causal."""
    q, k, v = (one.to_local() for one in args[:3])
    dropout_p, is_causal = args[3] if len(args) > 3 else 0.0, args[4] if len(args) > 4 else False
    job, comm = _job(args[0].device_mesh, q, k, v, dropout_p, is_causal, **options)
    return _wrapped(args[0], Attention.apply(job, comm, q, k, v, None))


def _backward(args: tuple[Any, ...], dropout_p: float, is_causal: bool, **options: Any) -> tuple[Any, ...]:
    """(dq, dk, dv). args: dout, q, k, v, out and lse."""
    grad_out, q, k, v, out, lse = (one.to_local() for one in args)
    job, comm = _job(args[1].device_mesh, q, k, v, dropout_p, is_causal, **options)
    grads = ring.backward(job, comm, (q, k, v, out, lse), None, (grad_out, torch.zeros_like(lse)))
    return _wrapped(args[1], [one.to(q.dtype) for one in grads if one is not None])


def _forward_cpu(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _forward(args, scale=kwargs.get("scale"), attn_mask=kwargs.get("attn_mask"))


def _backward_cpu(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return _backward(args[:6], args[6], args[7], scale=kwargs.get("scale"),
                     attn_mask=kwargs.get("attn_mask"))


def _forward_cuda(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    out, lse = _forward(args[:5], scale=kwargs.get("scale"),
                        return_debug_mask=args[5] if len(args) > 5 else False)
    # The op also returns offsets of packed sequences, lengths, and the state of dropout.
    device = lse.to_local().device
    seed, unused = _wrapped(out, [torch.empty(size, dtype=torch.uint64, device=device) for size in ((2,), ())],
                            shards=False)
    return (out, lse, None, None, args[0].shape[2], args[1].shape[2], seed, unused, None)


def _backward_cuda(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    # args[6:10] are offsets and lengths, args[12:14] the state of dropout.
    return _backward(args[:6], args[10], args[11], scale=kwargs.get("scale"))
