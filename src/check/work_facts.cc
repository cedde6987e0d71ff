#include "check/work_facts.h"

#include <algorithm>
#include <cstddef>

#include "backend/backend.h"
#include "backend/params.h"
#include "core/seq_info.h"
#include "core/sm90_traits.h"
#include "plan/planner.h"

namespace flashcore::verify {
namespace {

/// Query rows of a tile, computed as the sm90 kernels do.
struct TileRows {
  core::Mask mask;
  std::int32_t first, end;  // end <= first: none

  bool sees_keys(std::int32_t from, std::int32_t to) const {
    return !core::keys_seen_by_any(mask, from, to - 1).empty();
  }
};

TileRows rows_of(const core::AttentionParams& params, const WorkList& work,
                 std::int32_t scheduled) {
  const core::TileCoord coord =
      core::coord_of(work.order, core::scheduled_tile(work.tail, scheduled).tile);
  const core::SeqInfo sequence =
      params.is_varlen ? core::seq_info_of(params, coord.batch) : core::dense_seq_info(params);
  const std::int32_t queries = params.tile_q >> work.heads.log2;
  const std::int32_t first = coord.q_tile * queries;
  return {sequence.mask, first, std::min(first + queries, sequence.q_len)};
}

bool has_idle_warpgroup(const TileRows& rows, std::int32_t warpgroup_queries) {
  bool idle = false, busy = false;
  for (std::int32_t from = rows.first; from < rows.end; from += warpgroup_queries) {
    (rows.sees_keys(from, std::min(from + warpgroup_queries, rows.end)) ? busy : idle) = true;
  }
  return idle && busy;
}

}  // namespace

WorkFacts work_facts(const Plan& plan, const Tensors& tensors) {
  WorkFacts facts;
  if (!is_persistent(*plan.kernel) || plan.num_tiles == 0) return facts;
  std::byte dummy{};  // the addresses in the params are not dereferenced
  const core::AttentionParams params =
      make_params(plan, tensors, {&dummy, plan.workspace_bytes, plan.problem.device});
  const WorkList work = make_work_list(plan, params);
  const std::int32_t ctas = std::min(work.num_scheduled, plan.device.sm_count);
  std::int64_t tiles = 0;
  int keyless = -1;  // tiles since the last one with keys; -1: none yet
  for (std::int32_t scheduled = 0; scheduled < work.num_scheduled; ++scheduled) {
    const TileRows rows = rows_of(params, work, scheduled);
    if (rows.end <= rows.first) continue;
    ++tiles;
    if (has_idle_warpgroup(rows, work.heads.queries())) facts.idle_warpgroup = true;
    const bool has_keys = rows.sees_keys(rows.first, rows.end);
    if (ctas == 1 && has_keys && keyless > 0) facts.keyless_between = true;
    if (has_keys) {
      keyless = 0;
    } else if (keyless >= 0) {
      ++keyless;
    }
    if (ctas == 1 && keyless >= 3) facts.three_keyless = true;
  }
  facts.three_tiles = tiles > 2 * static_cast<std::int64_t>(ctas);
  return facts;
}

}  // namespace flashcore::verify
