#include <algorithm>

#include "plan/divide.h"
#include "plan/model/model.h"

namespace flashcore {

Splits split_keys(std::int64_t kv_len, std::int64_t count, std::int32_t tile_k) noexcept {
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(kv_len, tile_k), 1);
  const std::int64_t tiles_each = ceil_div(tiles, std::clamp<std::int64_t>(count, 1, tiles));
  return {static_cast<std::int32_t>(ceil_div(tiles, tiles_each)), tiles_each * tile_k};
}

Splits choose_splits(const Problem& problem, std::int64_t tiles, std::int64_t wanted_tiles,
                     std::int64_t min_keys, std::int32_t tile_k) noexcept {
  std::int64_t count = 1;
  if (problem.options.num_splits > 0) {
    count = problem.options.num_splits;
  } else if (problem.options.reproducibility == Reproducibility::deterministic && tiles > 0) {
    // Depends on shapes only. A batch-invariant plan has one split, which starts at key 0.
    count = std::min(wanted_tiles / tiles, problem.kv_len / min_keys);
  }
  return split_keys(problem.kv_len, count, tile_k);
}

}  // namespace flashcore
