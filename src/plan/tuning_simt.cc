#include "plan/tuning.h"

namespace flashcore {

bool simt_prefers_few_rows(const Problem& problem, const DeviceInfo& device, std::int32_t many_rows,
                           std::int32_t few_rows) noexcept {
  // A batch-invariant plan may not look at q_len or batch: it always takes many rows.
  if (problem.options.reproducibility == Reproducibility::batch_invariant) return false;
  if (problem.q_len <= few_rows) return true;  // more rows would be padding
  const std::int64_t tiles = (problem.q_len + many_rows - 1) / many_rows;
  // A block of many rows does about four times the work of one of few in little more time, so it
  // pays as soon as every second SM has one.
  return 2 * problem.batch * problem.q_heads * tiles < device.sm_count;
}

}  // namespace flashcore
