"""flashcore.attention inside jax.jit. The compiled program calls back to the host.

    from flashcore.integrations.jax import attention
    out = jax.jit(lambda q, k, v: attention(q, k, v, causal=True))(q, k, v)

Outside jit, flashcore.attention takes JAX arrays directly, without the callback. It has no gradients.
"""

from typing import Any

import jax
import numpy

from flashcore import _attention


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """flashcore.attention for dense arrays. Options are fixed when the program is compiled."""
    if options.get("out") is not None:
        raise ValueError("out: is given; JAX arrays are immutable, use the returned array")
    varlen = options.get("cu_seqlens_q") is not None
    heads_last = options.get("layout", "bhsd") == "bshd"
    wide = numpy.float64 if q.dtype == numpy.float64 else numpy.float32
    partial = options.get("partial", False)
    result: Any = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), wide if partial else q.dtype)
    if options.get("return_lse") or partial:
        shape = (q.shape[1], q.shape[0]) if varlen else \
            (q.shape[0], q.shape[2], q.shape[1]) if heads_last else q.shape[:3]
        result = (result, jax.ShapeDtypeStruct(shape, wide))
    # Arrays among the options become arguments of the callback, because jit may trace them.
    names = [name for name, one in options.items() if hasattr(one, "__array__")]
    fixed = {name: one for name, one in options.items() if name not in names}

    def on_host(*arrays: Any) -> Any:
        q, k, v, *more = (numpy.asarray(one) for one in arrays)
        given: dict[str, Any] = {**fixed, **dict(zip(names, more))}
        return _attention.attention(q, k, v, **given)

    return jax.pure_callback(on_host, result, q, k, v, *(options[name] for name in names),
                             vmap_method="sequential")
