// Which Hopper kernel, and when it is worth it: the same kind of model as tuning_sm80.cc.
#include <algorithm>
#include <cmath>

#include "plan/tuning.h"

namespace flashcore {
namespace {

constexpr double kStart = 3000;            // until the first products
constexpr double kItem = 2500;             // of an item: what its products do not hide,
                                           // and the first of them
constexpr double kStep = 450;              // of a step, whatever its size
constexpr double kProductOverhead = 1.25;  // a step's time over that of its products alone
constexpr double kFlopsPerCycle = 4096;    // of an SM
constexpr double kMostlyPadding = 8;  // few rows are for the kernels that pack heads and split keys

/// Steps of an average item.
double steps_of(const KernelInfo& kernel, const Problem& problem, bool masked) noexcept {
  const auto keys = static_cast<double>(problem.kv_len);
  if (!masked) return std::ceil(keys / kernel.tile_k);
  // A causal item of the middle sees half of the keys and, as all do, half a tile too many.
  return (keys / 2 + kernel.tile_q / 2) / kernel.tile_k + 0.5;
}

}  // namespace

double cycles_sm90(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                   bool masked) noexcept {
  const double items = static_cast<double>(items_of(kernel, problem));
  const double sms = std::max(device.sm_count, 1);
  const double rounds = items > 4 * sms ? items / sms : std::ceil(items / sms);
  const double products = 4.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / kFlopsPerCycle;
  const double step = kStep + kProductOverhead * products;
  const double cycles =
      kStart + rounds * (kItem + products + steps_of(kernel, problem, masked) * step);
  return 2 * problem.q_len <= kernel.tile_q ? kMostlyPadding * cycles : cycles;
}

}  // namespace flashcore
