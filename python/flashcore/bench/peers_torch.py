"""torch's scaled_dot_product_attention with one fixed backend, or torch's choice."""

import contextlib
from typing import Any

from flashcore.bench.inputs import Codes
from flashcore.bench.peers_base import Peer, gradients_of, torch_dtype

_MATH_BYTES = 4e9  # limit of its attention matrix; larger cases take too long
_WIDENED_FLOPS = 1e10  # limit of 8-bit cases that torch runs in 16 bits; larger ones have 8-bit peers


class Sdpa(Peer):
    module = distribution = "torch"
    kinds = ("fwd", "bwd")

    def __init__(self, backend: str = "", math_bytes: float = _MATH_BYTES) -> None:
        self.backend, self.math_bytes = backend, math_bytes

    def missing(self) -> str | None:
        reason = super().missing()
        if reason is None and self.backend:
            from torch.nn.attention import SDPBackend
            if not hasattr(SDPBackend, self.backend):
                reason = f"this torch has no SDPBackend.{self.backend}"
        return reason

    def refusal(self, case: Any) -> str | None:
        if case.causal and case.q_len != case.kv_len:
            return "torch's is_causal is top-left: not the same problem"
        if case.used_k or case.packed or case.page_size or case.window:
            return "torch's SDPA takes neither lengths nor pages nor windows"
        matrix_bytes = 4.0 * case.batch * case.q_heads * case.q_len * case.kv_len
        if self.backend == "MATH" and matrix_bytes > self.math_bytes:
            return f"its matrix would have {matrix_bytes / 1e9:.0f} GB: not timed"
        if case.eight_bit and (case.cold_l2 or case.flops() > _WIDENED_FLOPS):
            return "torch's SDPA takes no 8-bit tensors"
        return None

    def computes_in(self, case: Any) -> str:
        return str(case.out_dtype)

    def note(self, case: Any) -> str | None:
        return f"on the same values in {case.out_dtype}" if case.eight_bit else None

    def _attention(self, inputs: Any, q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        chosen = sdpa_kernel([getattr(SDPBackend, self.backend)]) if self.backend else contextlib.nullcontext()
        with chosen:
            return inputs.torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=inputs.case.causal, enable_gqa=inputs.case.q_heads != inputs.case.kv_heads)

    def bind_gradients(self, inputs: Any) -> Any:
        leaves = [[one.clone() for one in three] for three in zip(inputs.q, inputs.k, inputs.v)]
        return gradients_of(lambda *three: self._attention(inputs, *three), inputs, leaves, inputs.dout)

    def bind(self, inputs: Any) -> Any:
        torch, case = inputs.torch, inputs.case
        dtype = torch_dtype(torch, case.out_dtype)
        sets = [[one.widened(dtype) if isinstance(one, Codes) else one for one in three]
                for three in zip(inputs.q, inputs.k, inputs.v)]

        def call(index: int) -> Any:
            with torch.inference_mode():
                return self._attention(inputs, *sets[index])

        return call
