// Counts of heads, rows and work tiles. Inline, because the planner needs them for every candidate.
#pragma once

#include <algorithm>

#include "plan/divide.h"
#include "plan/kernel_traits.h"

namespace flashcore {

/// PackGQA: number of query heads that have rows in one tile. They share K and V.
inline std::int64_t heads_in_tile(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (problem.q_heads <= problem.kv_heads || problem.kv_heads == 0) return 1;
  const GqaPacking packing = traits_of(kernel).gqa_packing;
  if (packing == GqaPacking::none) return 1;
  const std::int64_t group = divide(problem.q_heads, problem.kv_heads);
  if (packing == GqaPacking::group) return group;
  if (!sm90_shape(kernel).packs_gqa()) return 1;
  return std::min<std::int64_t>(group & -group, core::kMaxHeadsInTile);
}

/// Rows of these heads together. Query tiles divide them.
inline std::int64_t packed_rows(const KernelInfo& kernel, const Problem& problem) noexcept {
  return problem.q_len * heads_in_tile(kernel, problem);
}

/// Work tiles of a kernel before split-KV.
inline std::int64_t tile_count(const KernelInfo& kernel, const Problem& problem,
                               std::int32_t tile_q) noexcept {
  const std::int64_t heads = heads_in_tile(kernel, problem);
  return problem.batch * divide(problem.q_heads, heads) * ceil_div(problem.q_len * heads, tile_q);
}
inline std::int64_t tile_count(const KernelInfo& kernel, const Problem& problem) noexcept {
  return tile_count(kernel, problem, kernel.tile_q);
}

}  // namespace flashcore
