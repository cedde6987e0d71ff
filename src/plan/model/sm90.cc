// Which Hopper kernel, and when it is worth it: the same kind of model as tuning_sm80.cc. Its
// constants were fitted to times on an H200 (docs/performance.md).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/divide.h"
#include "plan/model/model.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

constexpr double kStart = 4700;            // until the first products, and the host's work for them
constexpr double kItem = 500;              // of an item, beside its first products
constexpr double kStep = 1270;             // of a step, whatever its size
constexpr double kProductOverhead = 0.92;  // and for each cycle of its products
constexpr double kFlopsPerCycle = 4096;    // of an SM
// Of 16-bit kernels at head_dim 128 both were measured, an item with its first products: how their
// times at 512 to 16,384 keys compare.
constexpr double kItemOf128 = 2550;
struct StepOf128 {
  int tile_k;
  double cycles;
};
constexpr StepOf128 kStepsOf128[] = {{128, 2857}, {160, 3454}, {176, 3772}};
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
constexpr double kMostlyPadding = 8;
constexpr std::int64_t kCountedTiles = 16;
// Of a step: what lies behind an item's last key, and what masks cost more where tiles of keys do
// not end where tiles of rows do. (At head_dim 128 the first is counted.)
constexpr double kBehindLastKey = 0.25;
constexpr double kUnaligned = 0.75;
constexpr double kUnalignedOf128 = 0.15;
// Of items cut into parts: until the last part knows that it is, and what the others left has come.
constexpr double kJoin = 3000;
constexpr double kPartBytesPerCycle = 25;
constexpr double kLeastGain = 0.01;  // of all the time
constexpr std::int64_t kMostParts = 16;

/// Null where there is none.
const StepOf128* step_of_128(const KernelInfo& kernel) noexcept {
  if (kernel.head_dim != 128 || needs_e4m3(kernel)) return nullptr;
  for (const StepOf128& step : kStepsOf128) {
    if (step.tile_k == kernel.tile_k) return &step;
  }
  return nullptr;
}

/// Steps of an average item, whose tile has so many queries of each head.
double steps_of(const KernelInfo& kernel, const Problem& problem, std::int64_t tile_queries,
                bool masked) noexcept {
  const std::int64_t keys = problem.kv_len, rows = problem.q_len;
  const auto steps_to = [&](std::int64_t end) { return ceil_div(end, kernel.tile_k); };
  if (!masked) return static_cast<double>(steps_to(keys));
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(rows, tile_queries), 1);
  const std::int64_t left = problem.options.window_left;
  if (tiles > kCountedTiles && left < 0) {
    // Ends of items are multiples of the largest number that divides both tiles.
    const auto common = static_cast<double>(std::gcd(tile_queries, kernel.tile_k));
    const double behind =
        step_of_128(kernel) != nullptr ? 0.5 - common / (2.0 * kernel.tile_k) : kBehindLastKey;
    return static_cast<double>(keys + tile_queries) / 2 / kernel.tile_k + behind;
  }
  const std::int64_t counted = std::min(tiles, kCountedTiles);
  std::int64_t steps = 0;
  for (std::int64_t i = 1; i <= counted; ++i) {
    const std::int64_t tile = divide(i * tiles, counted);
    const std::int64_t end = std::min(tile * tile_queries, rows) + keys - rows;
    const std::int64_t begin =
        left < 0
            ? 0
            : std::clamp<std::int64_t>((tile - 1) * tile_queries + keys - rows - left, 0, keys);
    steps += steps_to(std::clamp<std::int64_t>(end, 0, keys)) - divide(begin, kernel.tile_k);
  }
  return static_cast<double>(steps) / static_cast<double>(counted);
}

/// What an item takes.
struct ItemCycles {
  double start;  // what does not depend on its keys
  double step;
  double unaligned;  // in steps, where masks need it
};

ItemCycles item_cycles(const KernelInfo& kernel) noexcept {
  if (const StepOf128* known = step_of_128(kernel); known != nullptr) {
    return {kItemOf128, known->cycles, kUnalignedOf128};
  }
  const int element_bytes = needs_e4m3(kernel) ? 1 : 2;
  const double products =
      4.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / (kFlopsPerCycle * 2 / element_bytes);
  const double scores = static_cast<double>(kernel.tile_q) * kernel.tile_k;
  const double of_score = kernel.tile_q > 128 ? kScoreOfThree : kScoreOfTwo;
  const double step = needs_e4m3(kernel) ? kCodeStep + kCodeScore * scores + kCodeProduct * products
                                         : std::max(kStep + kProductOverhead * products,
                                                    kShortStep + of_score * scores);
  return {kItem + products, step, kUnaligned};
}

/// Of the items at the end, all of them as long, that are fewer than SMs.
double tail_cycles(const KernelInfo& kernel, const ItemCycles& item, std::int64_t items,
                   const Splits& parts, std::int64_t sms) noexcept {
  const double rounds =
      std::ceil(static_cast<double>(items * parts.count) / static_cast<double>(sms));
  const double steps = static_cast<double>(parts.keys_each) / kernel.tile_k;
  const double computed = rounds * (item.start + steps * item.step);
  if (parts.count == 1) return computed;
  const double part_bytes = 4.0 * kernel.tile_q * kernel.head_dim;
  return computed + kJoin + (rounds + parts.count) * part_bytes / kPartBytesPerCycle;
}

}  // namespace

Tail plan_tail_split(const KernelInfo& kernel, const Problem& problem,
                     const DeviceInfo& device) noexcept {
  if (!can_split_tail(kernel, problem)) return {};
  const std::int64_t items = tile_count(kernel, problem), sms = std::max(device.sm_count, 1);
  const std::int64_t last = items % sms;
  if (last == 0) return {};
  const ItemCycles item = item_cycles(kernel);
  const auto cycles = [&](const Splits& parts) {
    return tail_cycles(kernel, item, last, parts, sms);
  };
  Tail best;
  best.cycles = cycles(split_keys(problem.kv_len, 1, kernel.tile_k)) *
                (1 - kLeastGain * static_cast<double>(items / sms + 1));
  for (std::int64_t count = 2; count <= kMostParts; ++count) {
    const Splits parts = split_keys(problem.kv_len, count, kernel.tile_k);
    if (parts.count == count && cycles(parts) < best.cycles) best = {last, count, cycles(parts)};
  }
  return best;
}

double cycles_sm90(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                   bool masked) noexcept {
  const std::int64_t items = tile_count(kernel, problem), sms = std::max(device.sm_count, 1);
  const ItemCycles item = item_cycles(kernel);
  const std::int64_t tile_queries = divide(kernel.tile_q, heads_in_tile(kernel, problem));
  double steps = steps_of(kernel, problem, tile_queries, masked);
  const auto tile = static_cast<std::int32_t>(tile_queries);
  if (masked && kernel.tile_k % tile != 0 && tile % kernel.tile_k != 0) {
    steps += item.unaligned;
  }
  const double each = item.start + steps * item.step;
  // Many items of several lengths leave no SM idle for long. (Of equal ones the constants know.)
  const bool equal = !masked && step_of_128(kernel) != nullptr;
  const double rounds = static_cast<double>(items) / static_cast<double>(sms);
  // Few rows are for kernels that pack heads and split keys.
  const bool mostly_padding = 2 * packed_rows(kernel, problem) <= kernel.tile_q;
  const Tail tail = mostly_padding ? Tail{} : plan_tail_split(kernel, problem, device);
  const double all = tail.items > 0 ? static_cast<double>(items / sms) * each + tail.cycles
                     : items > 4 * sms && !equal ? rounds * each
                                                 : std::ceil(rounds) * each;
  const double cycles = kStart + all;
  return mostly_padding ? kMostlyPadding * cycles : cycles;
}

}  // namespace flashcore
