#include <algorithm>

#include "plan/tuning.h"

namespace flashcore {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

Splits choose_splits(const Problem& problem, std::int64_t items, std::int64_t wanted_items,
                     std::int64_t min_keys, std::int32_t tile_k) noexcept {
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(problem.kv_len, tile_k), 1);
  std::int64_t count = 1;
  if (problem.options.num_splits > 0) {
    count = problem.options.num_splits;
  } else if (problem.options.reproducibility == Reproducibility::deterministic && items > 0) {
    // Chosen from shapes alone. Batch-invariant plans keep one range that starts at key 0.
    count = std::min(wanted_items / items, problem.kv_len / min_keys);
  }
  count = std::clamp<std::int64_t>(count, 1, tiles);
  const std::int64_t tiles_each = ceil_div(tiles, count);
  return {static_cast<std::int32_t>(ceil_div(tiles, tiles_each)), tiles_each * tile_k};
}

}  // namespace flashcore
