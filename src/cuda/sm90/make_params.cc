#include "cuda/sm90/make_params.h"

#include <algorithm>

#include "backend/backend.h"
#include "backend/params.h"
#include "core/error.h"
#include "core/score.h"
#include "cuda/sm90/tensor_map.h"

namespace flashcore::cuda {

namespace {

void set_softcap(const core::AttentionParams& call, sm90::Params& params) {
  params.softcap = static_cast<float>(call.softcap);
  params.caps_exponents = params.softcap > 0.f && params.score_scale > 0.f &&
                          call.alibi_slopes == nullptr && !params.batch_invariant;
  const double cap = call.softcap * core::kLog2E, scale = params.score_scale;
  params.shortest_cap_polynomial = core::kShortestCapPolynomial.scaled(cap, scale);
  params.short_cap_polynomial = core::kShortCapPolynomial.scaled(cap, scale);
  params.cap_polynomial = core::kCapPolynomial.scaled(cap, scale);
}

/// Params::stages_bias.
bool stages_bias(const Plan& plan, const core::AttentionParams& call) noexcept {
  const Layout& bias = plan.problem.bias;
  return call.bias != nullptr && bias.dtype == plan.problem.dtype && bias.column == 1 &&
         bias.alignment_bytes >= 16 && call.softcap == 0 && call.alibi_slopes == nullptr &&
         !call.has_mask();
}

/// The order of (batch, head, tile); nothing if a gradient is not wanted.
core::TileScheduler order_of(bool wanted, std::int32_t batch, std::int32_t heads,
                             std::int32_t group, std::int32_t tiles, std::int32_t last_tiles) {
  if (!wanted || batch * heads * tiles == 0) return {};
  return core::make_tile_scheduler(batch, heads, group, tiles, last_tiles);
}

/// The maps of q, k, v and dout.
Status make_maps(const Problem& problem, const core::BackwardParams& call, int box_rows,
                 sm90::BwdParams& params) noexcept {
  const core::AttentionParams& f = call.fwd;
  const std::int64_t q_rows = problem.q_varlen ? f.total_q : f.q_len;
  const std::int64_t kv_rows = problem.kv_varlen ? f.total_k : f.kv_len;
  const std::int64_t q_batch = problem.q_varlen ? 1 : f.batch;
  const std::int64_t kv_batch = problem.kv_varlen ? 1 : f.batch;
  const auto make = [&](CUtensorMap& map, const void* data, const core::Strides& strides,
                        const MapShape& shape, const char* name) {
    // An empty tensor has no memory: its map has one row, of the workspace header.
    const bool empty = shape.rows * shape.heads * shape.batch == 0;
    void* const address = empty ? static_cast<void*>(f.error) : const_cast<void*>(data);
    return make_tensor_map(map, address, problem.dtype, strides, shape, {box_rows}, name);
  };
  FLASHCORE_RETURN_IF_ERROR(
      make(params.q, f.q, f.q_strides, {f.head_dim, q_rows, f.q_heads, q_batch}, "q"));
  FLASHCORE_RETURN_IF_ERROR(
      make(params.k, f.k, f.k_strides, {f.head_dim, kv_rows, f.kv_heads, kv_batch}, "k"));
  FLASHCORE_RETURN_IF_ERROR(
      make(params.v, f.v, f.v_strides, {f.v_dim, kv_rows, f.kv_heads, kv_batch}, "v"));
  return make(params.dout, call.dout, call.dout_strides, {f.v_dim, q_rows, f.q_heads, q_batch},
              "dout");
}

}  // namespace

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
  if (paged) {
    params.page_box_log2 = core::page_box_log2(call.pages.size, plan.kernel->tile_k);
    const KernelInfo& kernel = *plan.kernel;
    const core::Sm90Traits shape{kernel.head_dim, kernel.tile_q, kernel.tile_k, 0,
                                 static_cast<int>(size_of(dtype))};
    params.gathers_pages =
        shape.gathers_pages(1 << params.page_box_log2, call.head_dim, call.v_dim);
  }
  params.tile_counter =
      reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(call.error) + core::kCountersOffset);
  params.tail = work.tail;
  params.num_scheduled = work.num_scheduled;
  params.tail_partials = call.partial_out;
  params.tail_arrivals = params.tile_counter + 1;
  params.keys_per_range = static_cast<std::int32_t>(plan.keys_per_range);
  params.ranges_apart = plan.ranges_apart;
  params.mask = core::packed_mask(call);
  params.score_scale = core::score_scale<float>(call);
  params.batch_invariant = plan.problem.options.reproducibility == Reproducibility::batch_invariant;
  params.tiles_from_window = work.tiles_from_window;
  params.stages_bias = stages_bias(plan, call);
  // The rows of a warp decide together, so a batch-invariant call may not.
  params.adds_alibi = call.alibi_slopes != nullptr && call.softcap == 0 &&
                      !params.batch_invariant && !call.fault.is(core::InjectedFault::alibi_signed);
  set_softcap(call, params);
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

bool takes_plain_sm90_path(const core::BackwardParams& p) noexcept {
  if (p.k_chunks > 0) return true;  // fused kernels have one path
  const auto is_f32 = [](const void* g_to, core::Element element) {
    return g_to != nullptr && element == core::Element::f32;
  };
  return p.fwd.fast_path && !is_f32(p.dq, p.dq_element) && !is_f32(p.dk, p.dk_element) &&
         !is_f32(p.dv, p.dv_element);
}

Status make_sm90_bwd_params(const BackwardPlan& plan, const core::BackwardParams& call,
                            sm90::BwdParams& params) noexcept {
  const core::AttentionParams& f = call.fwd;
  params.call = call;
  const bool causal = f.window_left >= 0 || f.window_right >= 0;
  // Tiles of several lengths: the shortest ones of the last heads come last.
  const std::int32_t last_tiles = causal ? 4 * plan.device.sm_count : 0;
  const bool fused = call.k_chunks > 0;  // takes a scale that is not positive, too
  const core::Sm90BwdTraits shape{plan.kernel->head_dim, plan.kernel->v_dim, 0,
                                  !takes_plain_sm90_path(call)};
  const bool dq = call.dq != nullptr, dv = shape.splits_dkdv() && call.dv != nullptr;
  const bool dkdv = call.dk != nullptr || (call.dv != nullptr && !dv);
  const bool dkdv_last = shape.splits_dkdv() ? !dv : !dq, dq_last = !shape.splits_dkdv();
  params.dkdv_order =
      order_of(dkdv, f.batch, f.kv_heads, 1, call.k_tiles, dkdv_last ? last_tiles : 0);
  params.dq_order = order_of(dq, f.batch, f.q_heads, std::max(call.group, 1), f.q_tiles,
                             dq_last || !(dkdv || dv) ? last_tiles : 0);
  params.dv_order = order_of(dv, f.batch, f.kv_heads, 1, call.k_tiles, last_tiles);
  params.num_scheduled = params.dkdv_order.tiles + params.dq_order.tiles + params.dv_order.tiles;
  params.tile_counter = call.nonfinite_heads + std::int64_t{f.batch} * f.kv_heads;  // BackwardPlan
  params.q_tail_dirty = f.cu_seqlens_q != nullptr;
  params.k_tail_dirty = f.cu_seqlens_k != nullptr || f.used_k != nullptr;
  params.score_scale = core::score_scale<float>(f);
  params.softcap = static_cast<float>(f.softcap);
  return make_maps(plan.problem.forward, call, fused ? core::kFusedStepRows : shape.box_rows(),
                   params);
}

Status make_sm90_fused_params(const BackwardPlan& plan, const core::BackwardParams& call,
                              sm90::FusedParams& params) noexcept {
  FLASHCORE_RETURN_IF_ERROR(make_sm90_bwd_params(plan, call, params));
  const core::AttentionParams& f = call.fwd;
  const bool masked = f.window_left >= 0 || f.window_right >= 0;
  const std::int64_t rows = std::int64_t{f.q_len} * std::max(call.group, 1) / (masked ? 2 : 1);
  const std::int64_t dq_bytes = rows * plan.kernel->head_dim * 4;
  const std::int32_t heads = core::fused_section_heads(dq_bytes, call.k_tiles);
  params.order = core::make_fused_order(f.batch, f.kv_heads, call.k_tiles, heads);
  params.reads_sums_ahead = heads * dq_bytes > core::kDqBytesInL2;
  params.num_scheduled = params.order.tiles;
  params.turns = reinterpret_cast<std::uint32_t*>(static_cast<char*>(call.dq_partials) +
                                                  (plan.dq_turns_offset - plan.dq_partials_offset));
  return {};
}

}  // namespace flashcore::cuda
