"""Stand-ins for attention libraries that are not installed: the functions that the benchmark's adapters
call, with the parameters of the real ones (FlashAttention-3 3.0, FlashInfer 0.3, xFormers 0.0.30),
computed by dense torch. They show that an adapter passes the right problem in the right layout. They do
not test the libraries."""

import itertools
import math
import types

import torch


def dense(q, k, v, causal=False, window=(-1, -1), scale=None):
    """Attention of one sequence, [len, heads, dim], in f32. Masks are aligned to the last key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (one.float().transpose(0, 1) for one in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * (scale or 1 / math.sqrt(q.shape[-1]))
    distance = (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]) - torch.arange(k.shape[1])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window[0] >= 0:
        hidden |= distance > window[0]
    if window[1] >= 0:
        hidden |= distance < -window[1]
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return (p @ v).transpose(0, 1)


def packed(q, k, v, q_starts, k_starts, **options):
    parts = zip(itertools.pairwise(q_starts.tolist()), itertools.pairwise(k_starts.tolist()))
    return torch.cat([dense(q[a:b], k[c:d], v[c:d], **options) for (a, b), (c, d) in parts])


def _compact(*tensors):
    assert all(one.is_contiguous() for one in tensors), "wanted the library's own layout"


def _descaled(one, scale, heads):
    """[batch, len, heads, dim] in f32; scale [batch, kv_heads]."""
    if one.dtype != torch.float8_e4m3fn:
        assert scale is None
        return one
    assert scale.shape[0] == one.shape[0] and scale.dtype == torch.float32
    return one.float() * scale.repeat_interleave(heads // scale.shape[1], 1)[:, None, :, None]


def _fa3_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
              v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
              pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    _compact(q, k, v)
    if q.dtype == torch.float8_e4m3fn:
        assert q_descale.shape == k_descale.shape == (q.shape[0], k.shape[2])
    out_dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    heads, kv_heads = q.shape[2], k.shape[2]
    q, k, v = (_descaled(one, scale, count) for one, scale, count in (
        (q, q_descale, heads), (k, k_descale, kv_heads), (v, v_descale, kv_heads)))
    return torch.stack([dense(*three, causal=causal, window=window_size, scale=softmax_scale)
                        for three in zip(q, k, v)]).to(out_dtype)


def _fa3_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                     seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
                     k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                     softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                     return_attn_probs=False):
    _compact(q, k, v)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window_size).to(q.dtype)


def _fa3_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                      cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
                      cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
                      rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                      softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                      softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
                      pack_gqa=None, sm_margin=0, return_softmax_lse=False):
    _compact(q, k_cache, v_cache)
    if page_table is not None:
        k_cache, v_cache = (one[page_table.long()].flatten(1, 2) for one in (k_cache, v_cache))
    lengths = [k_cache.shape[1]] * q.shape[0] if cache_seqlens is None else cache_seqlens.tolist()
    out = [_fa3_func(q[b:b + 1], k_cache[b:b + 1, :n].contiguous(), v_cache[b:b + 1, :n].contiguous(),
                     softmax_scale, causal, None, *(None if one is None else one[b:b + 1] for one in (
                         q_descale, k_descale, v_descale)), window_size)
           for b, n in enumerate(lengths)]
    assert bool(torch.isfinite(k_cache.float()).all()), "masked values must be finite"
    return torch.cat(out)


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", **options):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"


class _Ragged(_Wrapper):
    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
             custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
             use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
             rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None):
        self.starts = qo_indptr, kv_indptr
        self.options = dict(causal=causal, window=(window_left, -1))
        self.planned = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type

    def run(self, q, k, v):
        _compact(q, k, v)
        assert self.planned == (q.shape[1], k.shape[1], q.shape[2], q.dtype, k.dtype)
        return packed(q, k, v, *self.starts, **self.options).to(q.dtype)


class _PagedDecode(_Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
             kv_data_type=None):
        self.pages = [indices[a:b] for a, b in itertools.pairwise(indptr.tolist())]
        self.last, self.page_size = last_page_len.tolist(), page_size
        self.planned = num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type

    def run(self, q, paged_kv_cache):
        k_cache, v_cache = paged_kv_cache
        _compact(q, k_cache, v_cache)
        assert self.planned == (q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, k_cache.dtype)
        out = []
        for one, pages, last in zip(q, self.pages, self.last):
            count = (len(pages) - 1) * self.page_size + last
            k, v = (cache[pages.long()].flatten(0, 1)[:count] for cache in (k_cache, v_cache))
            out.append(dense(one[None], k, v)[0])
        return torch.stack(out).to(q.dtype)


class _BottomRight:
    pass


class _BlockDiagonal:
    def __init__(self, lengths, causal=False):
        self.starts = torch.tensor([0, *itertools.accumulate(lengths)])
        self.causal = causal
        self.lengths = lengths

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        return cls(q_seqlen)

    def make_causal(self):
        return _BlockDiagonal(self.lengths, True)


def _memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == 5:
        assert query.shape[3] == key.shape[3] and key.stride(3) == value.stride(3) == 0
        query, key, value = (one.flatten(2, 3) for one in (query, key, value))
    if isinstance(attn_bias, _BlockDiagonal):
        assert query.shape[0] == 1
        starts = attn_bias.starts
        out = packed(query[0], key[0], value[0], starts, starts, causal=attn_bias.causal)[None]
    else:
        out = torch.stack([dense(*three, causal=isinstance(attn_bias, _BottomRight))
                           for three in zip(query, key, value)])
    return out.to(query.dtype).reshape(shape)


def _module(name, **contents):
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    module.__spec__ = types.SimpleNamespace(name=name)  # find_spec requires it of imported modules
    return module


def modules():
    """{name: module}, for sys.modules."""
    return {
        "flash_attn_interface": _module("flash_attn_interface", flash_attn_func=_fa3_func,
                                        flash_attn_varlen_func=_fa3_varlen_func,
                                        flash_attn_with_kvcache=_fa3_with_kvcache),
        "flashinfer": _module("flashinfer", __version__="0.3", BatchPrefillWithRaggedKVCacheWrapper=_Ragged,
                              BatchDecodeWithPagedKVCacheWrapper=_PagedDecode),
        "xformers": _module("xformers", __version__="0.0.30"),
        "xformers.ops": _module("xformers.ops",
                                memory_efficient_attention=_memory_efficient_attention),
        "xformers.ops.fmha.attn_bias": _module(
            "xformers.ops.fmha.attn_bias", LowerTriangularFromBottomRightMask=_BottomRight,
            BlockDiagonalMask=_BlockDiagonal),
    }
