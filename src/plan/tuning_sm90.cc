// When a Hopper kernel is worth it: the same kind of model as tuning_sm80.cc.
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

}  // namespace

double cycles_sm90(const KernelInfo& kernel, const Problem& problem,
                   const DeviceInfo& device) noexcept {
  const double items = static_cast<double>(items_of(kernel, problem));
  const double rounds = std::ceil(items / std::max(device.sm_count, 1));
  const double steps = std::ceil(static_cast<double>(problem.kv_len) / kernel.tile_k);
  const double products = 4.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / kFlopsPerCycle;
  return kStart + rounds * (kItem + products + steps * (kStep + kProductOverhead * products));
}

}  // namespace flashcore
