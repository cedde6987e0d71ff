"""FlashAttention-2 (package flash_attn) and FlashAttention-3 (flash_attn_interface).

Both take tensors as [batch, len, heads, dim], or varlen as [total, heads, dim], and align causal and window
to the last key, as FlashCore does. Prefill cases call flash_attn_func, or flash_attn_varlen_func if they are
varlen. Cases over a KV cache call flash_attn_with_kvcache, which chooses the number of splits. Tuning options
have their defaults.
"""

import importlib
from typing import Any

from flashcore.bench.inputs import Codes
from flashcore.bench.peers_base import Peer, gradients_of


def by_length(torch: Any, one: Any, paged: bool) -> Any:
    """A contiguous copy of [batch, heads, len, dim] as [batch, len, heads, dim]. Pages and varlen sequences
    have that order already. NaN in rows past a length becomes 0, because these libraries multiply those
    rows by weights of 0."""
    if one.dim() == 3 or paged:
        return one
    moved = one.transpose(1, 2).contiguous()
    return moved if moved.element_size() == 1 else torch.nan_to_num_(moved, nan=0.0)


class _FlashAttention(Peer):
    kinds: tuple[str, ...] = ("fwd", "bwd")
    table_name = ""  # the parameter of flash_attn_with_kvcache for the block table

    def __init__(self, deterministic: bool = False) -> None:
        """deterministic: the mode of the gradients. Forward calls always are."""
        self.deterministic = deterministic
        if deterministic:
            self.kinds = ("bwd",)

    def refusal(self, case: Any) -> str | None:
        if case.head_dim > 256 or case.head_dim % 8:
            return f"head_dim is {case.head_dim}; it takes multiples of 8 up to 256"
        return None

    def scales(self, inputs: Any, index: int) -> dict[str, Any]:
        return {}

    def bind(self, inputs: Any) -> Any:
        torch, case = inputs.torch, inputs.case
        library = importlib.import_module(self.module)
        paged = inputs.block_table is not None

        def native(one: Any, is_paged: bool) -> Any:
            return by_length(torch, one.codes if isinstance(one, Codes) else one, is_paged)

        sets = [(native(q, False), native(k, paged), native(v, paged))
                for q, k, v in zip(inputs.q, inputs.k, inputs.v)]
        options: list[dict[str, Any]] = [
            {"causal": case.causal, **self.scales(inputs, index)} for index in range(len(sets))]
        if case.window:
            for one in options:
                one["window_size"] = (case.window, 0)
        lengths: tuple[Any, ...] = ()
        if case.packed:
            function = library.flash_attn_varlen_func
            lengths = (inputs.cu_seqlens, inputs.cu_seqlens, case.q_len, case.kv_len)
        else:
            cached = case.q_len != case.kv_len or case.used_k or paged
            function = library.flash_attn_with_kvcache if cached else library.flash_attn_func
            for one in options:
                if inputs.used_k is not None:
                    one["cache_seqlens"] = inputs.used_k
                elif paged:
                    one["cache_seqlens"] = inputs.int32([case.kv_len] * case.batch)
                if paged:
                    one[self.table_name] = inputs.block_table

        def call(index: int) -> Any:
            with torch.inference_mode():
                return function(*sets[index], *lengths, **options[index])

        return call

    def bind_gradients(self, inputs: Any) -> Any:
        library = importlib.import_module(self.module)

        def native(*tensors: Any) -> list[Any]:
            return [by_length(inputs.torch, one, False) for one in tensors]

        def forward(q: Any, k: Any, v: Any) -> Any:
            return library.flash_attn_func(q, k, v, causal=inputs.case.causal, deterministic=self.deterministic)

        leaves = [native(*three) for three in zip(inputs.q, inputs.k, inputs.v)]
        return gradients_of(forward, inputs, leaves, native(*inputs.dout))

    def as_ours(self, inputs: Any, result: Any) -> Any:
        out = result[0] if isinstance(result, tuple) else result
        return out if inputs.case.packed else out.transpose(1, 2)


class FlashAttention2(_FlashAttention):
    module, distribution, table_name = "flash_attn", "flash_attn", "block_table"

    def refusal(self, case: Any) -> str | None:
        if case.dtype not in ("f16", "bf16"):
            return f"dtype is {case.dtype}; it takes f16 and bf16"
        if case.v_dim and case.v_dim != case.head_dim:
            return "v_dim is not head_dim"
        if case.page_size % 256:
            return f"page_size is {case.page_size}; it takes multiples of 256"
        return super().refusal(case)


class FlashAttention3(_FlashAttention):
    module, distribution, table_name = "flash_attn_interface", "flash_attn_3", "page_table"

    def refusal(self, case: Any) -> str | None:
        if case.dtype not in ("f16", "bf16", "e4m3"):
            return f"dtype is {case.dtype}; it takes f16, bf16 and e4m3, the same for q, k and v"
        if case.eight_bit and case.head_dim % 16:
            return f"head_dim is {case.head_dim}; it takes multiples of 16 in e4m3"
        if case.v_dim and case.v_dim != case.head_dim and not (
                (128 < case.head_dim <= 192 and 96 < case.v_dim <= 128)
                or (case.head_dim <= 64 and 256 <= case.v_dim <= 512)):
            return f"head_dim {case.head_dim} with v_dim {case.v_dim} is not among its pairs"
        return super().refusal(case)

    def scales(self, inputs: Any, index: int) -> dict[str, Any]:
        """One scale per KV head, also for q, whose heads of a group share a scale."""
        if not inputs.case.eight_bit:
            return {}
        group = inputs.case.q_heads // inputs.case.kv_heads
        return {"q_descale": inputs.q[index].scale[:, ::group].contiguous(),
                "k_descale": inputs.k[index].scale, "v_descale": inputs.v[index].scale}
