// Which Hopper kernel, and when it is worth it: the same kind of model as tuning_sm80.cc. Its
// constants were fitted to times on an H200 (docs/performance.md).
#include <algorithm>
#include <cmath>

#include "plan/planner.h"
#include "plan/tuning.h"

namespace flashcore {
namespace {

constexpr double kStart = 4700;            // until the first products, and the host's work for them
constexpr double kItem = 500;              // of an item, beside its first products
constexpr double kStep = 1270;             // of a step, whatever its size
constexpr double kProductOverhead = 0.92;  // and for each cycle of its products
constexpr double kFlopsPerCycle = 4096;    // of an SM
// Or, where that is more, of a step whose softmax takes longer than its products, as at head_dim
// 64: for each of its scores, where two warpgroups overlap, or three.
constexpr double kShortStep = 400;
constexpr double kScoreOfTwo = 0.108;
constexpr double kScoreOfThree = 0.09;
// Of e4m3 kernels, whose warpgroups do not overlap their own products with their softmax: a step,
// each of its scores, and each cycle of its products.
constexpr double kCodeStep = 950;
constexpr double kCodeScore = 0.043;
constexpr double kCodeProduct = 0.97;
constexpr double kMostlyPadding = 8;  // few rows are for kernels that pack heads and split keys
constexpr std::int64_t kCountedTiles = 16;
// Of a step: what masks cost more where tiles of keys do not end where tiles of rows do.
constexpr double kUnaligned = 0.75;

/// Steps of an average item.
double steps_of(const KernelInfo& kernel, const Problem& problem, bool masked) noexcept {
  const std::int64_t keys = problem.kv_len, rows = problem.q_len;
  const auto steps_to = [&](std::int64_t end) { return (end + kernel.tile_k - 1) / kernel.tile_k; };
  if (!masked) return static_cast<double>(steps_to(keys));
  const std::int64_t tiles = std::max<std::int64_t>((rows + kernel.tile_q - 1) / kernel.tile_q, 1);
  const std::int64_t left = problem.options.window_left;
  if (tiles > kCountedTiles && left < 0) {
    return (static_cast<double>(keys) + kernel.tile_q) / 2 / kernel.tile_k + 0.25;
  }
  const std::int64_t counted = std::min(tiles, kCountedTiles);
  std::int64_t steps = 0;
  for (std::int64_t i = 1; i <= counted; ++i) {
    const std::int64_t tile = i * tiles / counted;
    const std::int64_t end = std::min(tile * kernel.tile_q, rows) + keys - rows;
    const std::int64_t begin =
        left < 0
            ? 0
            : std::clamp<std::int64_t>((tile - 1) * kernel.tile_q + keys - rows - left, 0, keys);
    steps += steps_to(std::clamp<std::int64_t>(end, 0, keys)) - begin / kernel.tile_k;
  }
  return static_cast<double>(steps) / static_cast<double>(counted);
}

}  // namespace

double cycles_sm90(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                   bool masked) noexcept {
  const double items = static_cast<double>(items_of(kernel, problem));
  const double sms = std::max(device.sm_count, 1);
  const double rounds = items > 4 * sms ? items / sms : std::ceil(items / sms);
  const int element_bytes = needs_e4m3(kernel) ? 1 : 2;
  const double products =
      4.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / (kFlopsPerCycle * 2 / element_bytes);
  const double scores = static_cast<double>(kernel.tile_q) * kernel.tile_k;
  const double of_score = kernel.tile_q > 128 ? kScoreOfThree : kScoreOfTwo;
  const double step = needs_e4m3(kernel) ? kCodeStep + kCodeScore * scores + kCodeProduct * products
                                         : std::max(kStep + kProductOverhead * products,
                                                    kShortStep + of_score * scores);
  double steps = steps_of(kernel, problem, masked);
  if (masked && kernel.tile_k % kernel.tile_q != 0 && kernel.tile_q % kernel.tile_k != 0) {
    steps += kUnaligned;
  }
  const double cycles = kStart + rounds * (kItem + products + steps * step);
  return 2 * problem.q_len <= kernel.tile_q ? kMostlyPadding * cycles : cycles;
}

}  // namespace flashcore
