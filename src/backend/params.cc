#include "backend/params.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "backend/backend.h"
#include "core/assert.h"
#include "core/numeric.h"
#include "core/sm80_traits.h"
#include "core/softcap.h"
#include "plan/block_mask.h"
#include "plan/kernel_traits.h"

namespace flashcore {
namespace {

core::Strides strides_of(const Layout& layout) noexcept {
  return {layout.batch, layout.head, layout.row, layout.column};
}

template <typename T>
T* address(void* base, std::size_t offset) noexcept {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

core::Fault injected_fault() noexcept {
#if defined(FLASHCORE_FAULTS)
  static const int id = [] {
    const char* text = std::getenv("FLASHCORE_FAULT");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  return core::Fault{id};
#else
  return {};
#endif
}

/// True if vector loads and stores can access whole rows.
bool rows_are_vectors(const Problem& problem) noexcept {
  const auto vector = [](const Layout& layout) {
    return layout.column == 1 && layout.alignment_bytes >= 16;
  };
  return problem.head_dim % 4 == 0 && problem.v_dim % 4 == 0 && vector(problem.q) &&
         vector(problem.k) && vector(problem.v) && vector(problem.out);
}

/// True if cp.async can load the rows of q, k and v.
bool rows_are_async(const Problem& problem) noexcept {
  const auto async = [](const Layout& layout) {
    return layout.column == 1 && layout.alignment_bytes >= 16;
  };
  return async(problem.q) && async(problem.k) && async(problem.v);
}

std::uint8_t score_mods_of(const core::AttentionParams& p) noexcept {
  unsigned mods = 0;
  if (p.softcap != 0 || p.alibi_slopes != nullptr || p.bias != nullptr) mods |= core::kElementMods;
  if (p.mask != nullptr || p.block_mask.given()) mods |= core::kMaskMod;
  if (!(p.score_scale > 0)) mods |= core::kNonPositiveScaleMod;
  if (p.q_scale.is_per_block() || p.k_scale.is_per_block() || p.v_scale.is_per_block()) {
    mods |= core::kBlockScalesMod;
  }
  return static_cast<std::uint8_t>(mods);
}

/// True if the kernel's fast path lacks a modification or layout of this call.
bool needs_general_path(const KernelInfo& kernel, const core::AttentionParams& p) noexcept {
  const FamilyTraits& family = traits_of(kernel);
  const unsigned general = family.general_mods & (packs_mask(kernel) ? ~core::kMaskMod : ~0u);
  return (p.score_mods & general) != 0 || (family.general_layouts && !p.fast_layout);
}

/// AttentionParams::fast_layout.
bool has_fast_layout(const Plan& plan, const core::AttentionParams& p) noexcept {
  const KernelInfo& kernel = *plan.kernel;
  const bool fills_dim = p.head_dim == kernel.head_dim && p.v_dim == kernel.head_dim;
  return p.async_rows && p.vector_rows && (fills_dim || core::is_large_tile(kernel.tile_q)) &&
         !injected_fault().is(core::InjectedFault::head_dim_truncated);
}

}  // namespace

core::Element element_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64: return core::Element::f64;
    case DType::f32: return core::Element::f32;
    case DType::f16: return core::Element::f16;
    case DType::bf16: return core::Element::bf16;
    case DType::e4m3: return core::Element::e4m3;
    case DType::e5m2: return core::Element::e5m2;
    case DType::int8: return core::Element::int8;
    case DType::u8: return core::Element::u8;
    default: return core::Element::none;
  }
}

core::Scales scales_of(const TensorView& scale, const Layout& layout,
                       std::int64_t block_rows) noexcept {
  constexpr std::int64_t kAllRows = std::numeric_limits<std::int32_t>::max();
  const std::int64_t rows = scale.rank == 3 ? std::min(block_rows, kAllRows) : kAllRows;
  if (scale.rank == 3 && scale.shape[2] == 0)
    return {nullptr, 0, 0, 0, 1};  // a tensor without rows
  return {static_cast<const float*>(scale.data), layout.batch, layout.head, layout.row,
          static_cast<std::int32_t>(rows)};
}

core::PageTable pages_of(std::int64_t page_size, std::int64_t pages,
                         const TensorView& block_table) noexcept {
  if (!block_table.given()) return {};
  const auto size = static_cast<std::int32_t>(page_size);
  return {static_cast<const std::int32_t*>(block_table.data),
          block_table.shape[0] > 1 ? block_table.strides[0] : 0, size, core::page_shift(size),
          static_cast<std::int32_t>(pages)};
}

namespace {

/// Pointers, strides and formats.
void set_tensors(core::AttentionParams& p, const Problem& problem,
                 const Tensors& tensors) noexcept {
  const Options& options = problem.options;
  p.q = tensors.q.data;
  p.k = tensors.k.data;
  p.v = tensors.v.data;
  p.out = tensors.out.data;
  p.lse = tensors.lse.data;
  p.bias = tensors.bias.data;
  p.mask = static_cast<const std::uint8_t*>(tensors.mask.data);
  p.alibi_slopes = static_cast<const float*>(tensors.alibi_slopes.data);
  // merge() adds the sinks to partial results.
  p.sinks = options.partial ? nullptr : static_cast<const float*>(tensors.sinks.data);
  p.cu_seqlens_q = static_cast<const std::int32_t*>(tensors.cu_seqlens_q.data);
  p.cu_seqlens_k = static_cast<const std::int32_t*>(tensors.cu_seqlens_k.data);
  p.used_k = static_cast<const std::int32_t*>(tensors.seqused_k.data);
  p.q_start = static_cast<const std::int32_t*>(tensors.q_start.data);
  p.k_start = static_cast<const std::int32_t*>(tensors.k_start.data);
  p.q_strides = strides_of(problem.q);
  p.k_strides = strides_of(problem.k);
  p.v_strides = strides_of(problem.v);
  p.out_strides = strides_of(problem.out);
  p.lse_strides = strides_of(problem.lse);
  p.bias_strides = strides_of(problem.bias);
  p.mask_strides = strides_of(problem.mask);
  p.block_mask = block_mask_of(tensors.mask_blocks, tensors.mask_bits);
  p.alibi_batch_stride = problem.alibi_slopes.batch;
  p.alibi_head_stride = problem.alibi_slopes.head;
  p.sinks_stride = problem.sinks.head;
  p.used_k_stride = problem.seqused_k.batch;
  p.q_start_stride = problem.q_start.batch;
  p.k_start_stride = problem.k_start.batch;
  p.pages = pages_of(problem.page_size, problem.pages, tensors.block_table);
  p.out_element = element_of(problem.out.dtype);
  p.bias_element = element_of(problem.bias.dtype);
  p.q_element = element_of(problem.q.dtype);
  p.k_element = element_of(problem.k.dtype);
  p.v_element = element_of(problem.v.dtype);
  p.q_scale = scales_of(tensors.q_scale, problem.q_scale, options.q_scale_block);
  p.k_scale = scales_of(tensors.k_scale, problem.k_scale, options.kv_scale_block);
  p.v_scale = scales_of(tensors.v_scale, problem.v_scale, options.kv_scale_block);
}

}  // namespace

core::AttentionParams make_params(const Plan& plan, const Tensors& tensors,
                                  const Workspace& workspace) noexcept {
  const Problem& problem = plan.problem;
  const Options& options = problem.options;
  core::AttentionParams p{};
  set_tensors(p, problem, tensors);

  const auto narrow = [](std::int64_t extent) { return static_cast<std::int32_t>(extent); };
  p.batch = narrow(problem.batch);
  p.q_heads = narrow(problem.q_heads);
  p.kv_heads = narrow(problem.kv_heads);
  p.group = problem.kv_heads == 0 ? 1 : narrow(problem.q_heads / problem.kv_heads);
  p.q_len = narrow(problem.q_len);
  p.kv_len = narrow(problem.kv_len);
  p.head_dim = narrow(problem.head_dim);
  p.v_dim = narrow(problem.v_dim);
  p.total_q = narrow(problem.total_q);
  p.total_k = narrow(problem.total_k);

  // A larger cap has no effect in f32: scores that it would change have overflowed.
  constexpr double kNoCap = 1e30;
  if (options.softcap > 0 && (options.softcap <= kNoCap || problem.dtype == DType::f64)) {
    p.score_scale = core::softcap_argument(problem.scale, options.softcap);
    p.softcap = options.softcap;
  } else {
    p.score_scale = problem.scale;
  }
  p.softmax_scale_log2 = static_cast<float>(problem.scale * core::kLog2E);
  // A window wider than any distance between positions has no effect, and adding it could overflow.
  const auto window = [](std::int64_t keys) {
    return keys > std::int64_t{4} * core::kMaxStart ? -1 : keys;
  };
  p.window_left = window(options.window_left);
  p.window_right = options.causal ? 0 : window(options.window_right);
  p.vector_rows = rows_are_vectors(problem);
  p.async_rows = rows_are_async(problem);
  p.checked = options.checked;
  p.score_mods = score_mods_of(p);
  p.fast_layout = has_fast_layout(plan, p);
  p.fast_path = !needs_general_path(*plan.kernel, p);
  p.is_varlen = p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.used_k != nullptr ||
                p.q_start != nullptr || p.k_start != nullptr;

  p.tile_q = plan.tile_q;
  p.tile_k = plan.tile_k;
  const std::int64_t tiled_rows = problem.q_len * plan.heads_in_tile;
  p.q_tiles = narrow((tiled_rows + plan.tile_q - 1) / plan.tile_q);
  p.splits = plan.splits;
  p.keys_per_split = plan.keys_per_split;
  p.num_tiles = plan.num_tiles;
  p.group_divmod = core::make_fast_divmod(p.group);
  p.q_tiles_divmod = core::make_fast_divmod(p.q_tiles);
  p.kv_heads_divmod = core::make_fast_divmod(p.kv_heads);
  p.split_keys_divmod = core::make_fast_divmod(
      narrow(std::min<std::int64_t>(p.keys_per_split, std::numeric_limits<std::int32_t>::max())));
  p.cta_divmod = core::make_fast_divmod(narrow(plan.num_tiles / plan.splits));
  // Offsets of the plan include the header, also if it is separate. Offset 0: no partial results.
  const bool separate_header = workspace.header != nullptr;
  void* const header = separate_header ? workspace.header : workspace.data;
  const auto partials = [&](std::size_t offset) -> void* {
    if (offset == 0) return nullptr;
    return address<void>(workspace.data, separate_header ? offset - kWorkspaceHeaderBytes : offset);
  };
  p.partial_out = partials(plan.partial_out_offset);
  p.partial_lse = partials(plan.partial_lse_offset);
  p.packed_mask = partials(plan.packed_mask_offset);
  if (plan.combine == CombineMode::last_cta || plan.combine == CombineMode::cluster) {
    p.counters = address<std::uint32_t>(header, core::kCountersOffset);
  }
  p.error = address<core::ErrorSlot>(header, 0);
  p.fault = injected_fault();
#if defined(FLASHCORE_ASSERTS)
  if (core::assertions_enabled()) std::snprintf(p.kernel, sizeof p.kernel, "%s", plan.kernel->id);
#endif
  return p;
}

WorkList make_work_list(const Plan& plan, const core::AttentionParams& params) noexcept {
  constexpr std::int32_t kSortedWaves = 4;  // last waves whose tiles are sorted by length
  const bool equal_tiles = params.window_right < 0 && params.window_left < 0 && !params.is_varlen;
  const std::int32_t heads = plan.heads_in_tile;
  const auto tail_tiles = static_cast<std::int32_t>(plan.tail_tiles);
  WorkList work{};
  work.heads = {std::countr_zero(static_cast<std::uint32_t>(heads))};
  work.order = core::make_tile_scheduler(params.batch, params.q_heads / heads, params.group / heads,
                                         params.q_tiles,
                                         equal_tiles ? 0 : kSortedWaves * plan.device.sm_count);
  work.tail = {work.order.tiles - tail_tiles,
               static_cast<std::int32_t>(plan.keys_per_tail_split) / plan.tile_k,
               core::make_fast_divmod(plan.tail_splits)};
  if (plan.ranges_apart) work.tail = {0, 0, core::make_fast_divmod(plan.key_ranges)};
  work.tiles_from_window = tiles_from_window(*plan.kernel, plan.problem);
  work.num_scheduled = core::num_scheduled(work.order, work.tail);
  return work;
}

core::CombineParams make_combine_params(const Plan& plan,
                                        const core::AttentionParams& params) noexcept {
  const Problem& problem = plan.problem;
  core::CombineParams c{};
  c.stacked = true;
  c.parts = plan.splits;
  c.q_heads = params.q_heads;
  c.v_dim = params.v_dim;
  // A varlen q is one batch entry of total_q rows: see core::partial_row().
  c.batch = problem.q_varlen ? 1 : params.batch;
  c.rows = problem.q_varlen ? params.total_q : params.q_len;
  c.cu_seqlens_q = params.cu_seqlens_q;
  c.sequences = params.batch;
  const std::int64_t rows = c.rows;
  core::PartialResult& first = c.table[0];
  first.out = params.partial_out;
  first.lse = params.partial_lse;
  first.lse_strides = {c.q_heads * rows, rows, 1, 0};
  first.out_strides = {c.q_heads * rows * c.v_dim, rows * c.v_dim, c.v_dim, 1};
  c.stacked_lse_stride = core::partial_rows(params);
  c.stacked_out_stride = c.stacked_lse_stride * c.v_dim;
  c.out = params.out;
  c.lse = params.lse;
  c.out_strides = params.out_strides;
  c.lse_strides = params.lse_strides;
  c.out_element = params.out_element;
  c.sinks = params.sinks;
  c.sinks_stride = params.sinks_stride;
  c.fault = params.fault;
  return c;
}

}  // namespace flashcore
