"""FlashInfer and xFormers. The adapters use the libraries' public functions; docs/benchmarks.md lists the
versions that have been run."""

import importlib
from typing import Any

from flashcore.bench.peers_base import Peer
from flashcore.bench.peers_flash_attn import by_length

_WORKSPACE_BYTES = 128 * 1024 * 1024  # as recommended by FlashInfer's documentation
_SIXTEEN_BITS = ("f16", "bf16")


class FlashInfer(Peer):
    """Varlen sequences use BatchPrefillWithRaggedKVCacheWrapper; paged decode with one query per sequence
    uses BatchDecodeWithPagedKVCacheWrapper. A wrapper is planned once per case."""

    module, distribution = "flashinfer", "flashinfer-python"

    def refusal(self, case: Any) -> str | None:
        if case.dtype not in _SIXTEEN_BITS:
            return f"dtype is {case.dtype}; the adapter takes f16 and bf16"
        if case.head_dim not in (64, 128, 256) or case.value_dim != case.head_dim:
            return f"head_dim {case.head_dim}, v_dim {case.value_dim}; the adapter takes 64, 128, 256"
        if case.used_k:
            return "used_k: its ragged K and V have no room between sequences"
        if case.page_size and (case.q_len != 1 or case.causal):
            return "pages: the adapter has one query for each sequence"
        return None

    def bind(self, inputs: Any) -> Any:
        torch, case = inputs.torch, inputs.case
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
        dtype = inputs.q[0].dtype
        if inputs.block_table is not None:
            return self._paged(inputs, workspace, dtype)
        library = importlib.import_module(self.module)
        wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        q_starts, k_starts = (
            inputs.cu_seqlens if case.packed else
            inputs.int32(range(0, (case.batch + 1) * length, length))
            for length in (case.q_len, case.kv_len))
        wrapper.plan(q_starts, k_starts, case.q_heads, case.kv_heads, case.head_dim,
                     causal=case.causal, window_left=case.window or -1, q_data_type=dtype,
                     kv_data_type=dtype)
        sets = [[one if case.packed else by_length(torch, one, False).flatten(0, 1) for one in three]
                for three in zip(inputs.q, inputs.k, inputs.v)]

        def call(index: int) -> Any:
            with torch.inference_mode():
                return wrapper.run(*sets[index])

        return call

    def _paged(self, inputs: Any, workspace: Any, dtype: Any) -> Any:
        torch, case = inputs.torch, inputs.case
        library = importlib.import_module(self.module)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = case.kv_len // case.page_size
        wrapper.plan(inputs.int32(range(0, (case.batch + 1) * pages, pages)),
                     inputs.block_table.flatten(), inputs.int32([case.page_size] * case.batch),
                     case.q_heads, case.kv_heads, case.head_dim, case.page_size, q_data_type=dtype,
                     kv_data_type=dtype)
        sets = [(q[:, :, 0].contiguous(), (k, v))
                for q, k, v in zip(inputs.q, inputs.k, inputs.v)]

        def call(index: int) -> Any:
            with torch.inference_mode():
                return wrapper.run(*sets[index])

        return call

    def as_ours(self, inputs: Any, result: Any) -> Any:
        case = inputs.case
        if case.packed:
            return result
        return result.unflatten(0, (case.batch, case.q_len)).transpose(1, 2)


class Xformers(Peer):
    """memory_efficient_attention on [batch, len, heads, dim]. GQA uses a fifth dimension,
    [batch, len, kv_heads, group, dim], in which K and V are expanded views."""

    module, distribution = "xformers.ops", "xformers"

    def refusal(self, case: Any) -> str | None:
        if case.dtype not in (*_SIXTEEN_BITS, "f32"):
            return f"dtype is {case.dtype}; it takes f16, bf16 and f32"
        if case.used_k or case.page_size or case.window:
            return "the adapter takes neither lengths of a cache nor pages nor windows"
        return None

    def version(self) -> str:
        return str(getattr(importlib.import_module("xformers"), "__version__", "unknown"))

    def bind(self, inputs: Any) -> Any:
        torch, case = inputs.torch, inputs.case
        library = importlib.import_module(self.module)
        bias = self._bias(case)
        group = case.q_heads // case.kv_heads

        def native(one: Any, is_query: bool) -> Any:
            moved = one[None] if case.packed else by_length(torch, one, False)
            if group == 1:
                return moved
            if is_query:
                return moved.unflatten(2, (case.kv_heads, group))
            return moved.unsqueeze(3).expand(-1, -1, -1, group, -1)

        sets = [(native(q, True), native(k, False), native(v, False))
                for q, k, v in zip(inputs.q, inputs.k, inputs.v)]

        def call(index: int) -> Any:
            with torch.inference_mode():
                return library.memory_efficient_attention(*sets[index], attn_bias=bias)

        return call

    def _bias(self, case: Any) -> Any:
        masks = importlib.import_module("xformers.ops.fmha.attn_bias")
        if case.packed:
            bias = masks.BlockDiagonalMask.from_seqlens(list(case.packed))
            return bias.make_causal() if case.causal else bias
        return masks.LowerTriangularFromBottomRightMask() if case.causal else None

    def as_ours(self, inputs: Any, result: Any) -> Any:
        case = inputs.case
        out = result.flatten(2, 3) if result.dim() == 5 else result
        return out[0] if case.packed else out.transpose(1, 2)
