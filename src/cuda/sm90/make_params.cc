#include "cuda/sm90/make_params.h"

#include "backend/backend.h"
#include "backend/params.h"
#include "core/error.h"
#include "core/score.h"
#include "cuda/sm90/tensor_map.h"

namespace flashcore::cuda {

core::PackedMask packed_mask(const core::AttentionParams& call) noexcept {
  if (call.mask == nullptr && !call.block_mask.given()) return {};
  const bool by_blocks = call.block_mask.given();
  const core::Strides& strides = by_blocks ? call.block_mask.strides : call.mask_strides;
  core::PackedMask mask =
      core::packed_mask_of(strides.batch, strides.head, by_blocks ? core::kEveryRow : strides.row,
                           call.batch, call.q_heads, call.q_len, call.kv_len);
  mask.words = static_cast<std::uint32_t*>(call.packed_mask);
  // After the words, at the workspace's alignment: plan/workspace.cc.
  const std::int64_t words = (mask.word_count() + 63) / 64 * 64;
  mask.ranges = reinterpret_cast<core::KeyRange*>(mask.words + words);
  return mask;
}

Status make_sm90_params(const Plan& plan, const core::AttentionParams& call,
                        sm90::Params& params) noexcept {
  const DType dtype = plan.problem.q.dtype;  // k's and v's too
  const bool q_varlen = call.cu_seqlens_q != nullptr, kv_varlen = call.cu_seqlens_k != nullptr;
  params.call = call;
  const WorkList work = make_work_list(plan, call);
  const std::int32_t heads = plan.heads_in_tile;
  params.heads = work.heads;
  params.order = work.order;
  const bool paged = call.pages.table != nullptr;
  params.v_tail_dirty = kv_varlen || paged || call.used_k != nullptr;
  if (paged) params.page_box_log2 = core::page_box_log2(call.pages.size, plan.kernel->tile_k);
  params.tile_counter =
      reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(call.error) + core::kCountersOffset);
  params.tail = work.tail;
  params.num_scheduled = work.num_scheduled;
  params.tail_partials = call.partial_out;
  params.tail_arrivals = params.tile_counter + 1;
  params.mask = packed_mask(call);
  params.score_scale = core::score_scale<float>(call);
  params.softcap = static_cast<float>(call.softcap);
  params.batch_invariant = plan.problem.options.reproducibility == Reproducibility::batch_invariant;
  const std::int64_t q_columns =
      call.fault.is(core::InjectedFault::head_dim_truncated) ? call.head_dim - 1 : call.head_dim;
  const std::int64_t q_rows = q_varlen ? call.total_q : call.q_len;
  const std::int64_t kv_rows = paged ? call.pages.size : kv_varlen ? call.total_k : call.kv_len;
  const std::int64_t q_batch = q_varlen ? 1 : call.batch;
  const std::int64_t kv_batch = paged ? call.pages.count : kv_varlen ? 1 : call.batch;
  const int kv_box = paged ? 1 << params.page_box_log2 : plan.kernel->tile_k;
  // An empty tensor has no memory: the kernel reads a row of the workspace header and masks it.
  static_assert(kWorkspaceHeaderBytes >= 2 * core::kSm90MaxHeadDim);
  const auto address = [&](const void* data, std::int64_t rows) {
    return rows > 0 ? const_cast<void*>(data) : static_cast<void*>(call.error);
  };
  FLASHCORE_RETURN_IF_ERROR(make_tensor_map(
      params.q, address(call.q, q_rows * q_batch), dtype, call.q_strides,
      {q_columns, q_rows, call.q_heads, q_batch}, {params.heads.queries(), heads}, "q"));
  FLASHCORE_RETURN_IF_ERROR(
      make_tensor_map(params.k, address(call.k, kv_rows * kv_batch), dtype, call.k_strides,
                      {call.head_dim, kv_rows, call.kv_heads, kv_batch}, {kv_box}, "k"));
  return make_tensor_map(params.v, address(call.v, kv_rows * kv_batch), dtype, call.v_strides,
                         {call.v_dim, kv_rows, call.kv_heads, kv_batch}, {kv_box}, "v");
}

}  // namespace flashcore::cuda
