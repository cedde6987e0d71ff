// Which tensor-core kernel, and how many key ranges: a small model of time, in SM cycles, whose
// constants were read off timelines of the kernels on an H200 (docs/performance.md).
#include <algorithm>
#include <cmath>

#include "core/params.h"
#include "core/sm80_shape.h"
#include "plan/planner.h"
#include "plan/tuning.h"

namespace flashcore {
namespace {

constexpr double kClockGhz = 1.8;
constexpr double kStart = 2500;            // until a block's first copies are under way
constexpr double kFinish = 2500;           // from its last product to its last store
constexpr double kFinishRow = 25;          // more for each row of its tile
constexpr double kStep = 1500;             // latencies of a step that nothing hides
constexpr double kProductOverhead = 1.65;  // a step's time over that of its products alone
constexpr double kCodeCycles = 8;          // more for an instruction's 64 codes to become operands
constexpr double kJoinLast = 2300;         // splits joined by the last block to arrive
constexpr double kJoinCluster = 500;       // in a cluster
constexpr double kJoinWarps = 300;         // there, by warps (core::Inbox)
constexpr double kMemoryCycles = 4800;     // from a copy's begin to its end, when all SMs read
constexpr double kL2BytesPerCycle = 40;    // of one SM
constexpr double kMisplaced = 8;           // other tiles are there, and take less
constexpr double kMemoryShare = 0.93;      // of the datasheet's bandwidth

constexpr std::int64_t kMaxCluster = core::Inbox::kMaxSplits;
constexpr std::int64_t kNeighbours = 16;  // SMs of which clusters are made, in most GPUs' groups
constexpr double kClusterPlaces = 0.9;    // of all places for blocks, those that clusters can take
// Clusters that share SMs: the places they must take at least, how many they take without loss,
// what they lose below that, and what they may read.
constexpr double kSharedPlaces = 0.7, kAmplePlaces = 0.85, kSharedRate = 0.99, kSharedLoss = 0.7;
constexpr double kSharedCycles = 120000;  // then ranges of one length matter more than the join
constexpr std::int64_t kMinKeysManyRows = 1024;  // that are worth splitting tiles of many rows
constexpr std::int64_t kRaggedKeys = 1024;       // of a range, where lengths are not known

double ceil_div(double a, double b) { return std::ceil(a / b); }

struct Model {
  const KernelInfo& kernel;
  const Problem& problem;
  const DeviceInfo& device;
  double items, sms, blocks_per_sm, mma_cycles;

  Model(const KernelInfo& k, const Problem& p, const DeviceInfo& d) noexcept
      : kernel(k),
        problem(p),
        device(d),
        items(static_cast<double>(items_of(k, p))),
        sms(std::max(d.sm_count, 1)) {
    const int by_memory = d.smem_per_sm_bytes / (k.smem_bytes + 1024);
    blocks_per_sm = std::clamp(std::min(by_memory, k.blocks_per_sm), 1, 8);
    // mma.m16n8k16 on one of an SM's four tensor cores: 8 cycles, on Hopper measured 5.9.
    const double one = d.compute_capability >= 90 ? 5.93 : 8.0;
    // A warp's codes become operands once for all of its rows.
    const double codes = needs_8_bits(k) ? kCodeCycles * 16 / (k.tile_q > 64 ? 32 : 16) : 0.0;
    mma_cycles = 2.0 * k.tile_q * k.tile_k * k.head_dim / 2048 / 4 * (one + codes);
  }

  /// K and V are read by one block each: they come from memory, which the SMs share. Else they come
  /// from the L2 cache.
  bool from_memory() const noexcept { return rows_of(kernel, problem) <= kernel.tile_q; }

  double blocks_of(std::int64_t splits) const noexcept {
    return items * static_cast<double>(splits);
  }

  /// Places for blocks that are a cluster's: they keep more in shared memory.
  double cluster_places() const noexcept {
    const int bytes = kernel.smem_bytes +
                      core::Inbox::bytes(kernel.tile_q, kernel.head_dim, kernel.threads) + 1024;
    return sms * std::clamp<double>(device.smem_per_sm_bytes / bytes, 1, blocks_per_sm);
  }

  /// Cycles in which memory gives all of K and V.
  double reading() const noexcept {
    const double bytes = (needs_8_bits(kernel) ? 2.0 : 4.0) * kernel.head_dim;
    return items * static_cast<double>(problem.kv_len) * bytes * kClockGhz /
           (kMemoryShare * device.memory_gbs);
  }

  /// Only machine code for sm_90 joins in clusters: later GPUs run sm_80's PTX. Clusters that wait
  /// for memory have SMs of their own, or share nearly all of them: where the next call's blocks
  /// find room beside these, some SMs come to have two and others none.
  bool in_cluster(std::int64_t splits) const noexcept {
    if (device.compute_capability != 90 || kernel.tile_q > 16 || splits < 2 ||
        splits > kMaxCluster || problem.options.reproducibility != Reproducibility::deterministic) {
      return false;
    }
    const double blocks = blocks_of(splits), places = cluster_places();
    if (blocks > kClusterPlaces * places) return false;
    if (!from_memory()) return true;
    const auto neighbours = static_cast<double>(kNeighbours / splits * splits);
    return blocks <= kClusterPlaces * sms * neighbours / kNeighbours ||
           (blocks > sms && blocks >= kSharedPlaces * places && reading() <= kSharedCycles);
  }

  /// clusters: whether the splits are joined in clusters.
  double cycles(const Splits& splits, bool clusters) const noexcept {
    const double blocks = blocks_of(splits.count);
    const double together = std::clamp(ceil_div(blocks, sms), 1.0, blocks_per_sm);  // on one SM
    const double slots = sms * blocks_per_sm;
    const double waves = blocks > 4 * slots ? blocks / slots : ceil_div(blocks, slots);
    const double bytes =
        (needs_8_bits(kernel) ? 2.0 : 4.0) * kernel.tile_k * kernel.head_dim * together;
    const double of_memory = kMemoryShare * device.memory_gbs / kClockGhz / std::min(blocks, sms);
    const double under_way = together * kernel.smem_bytes / kMemoryCycles;
    const double rate = from_memory() ? std::min(of_memory, under_way) : kL2BytesPerCycle;
    const double step = std::max(kStep + kProductOverhead * mma_cycles * together, bytes / rate);
    const double steps = static_cast<double>(splits.keys_each) / kernel.tile_k;
    double loop = steps * step;
    const bool shares_sms = clusters && from_memory() && blocks > sms;
    if (shares_sms) {
      // Ranges need not be of one length: whoever reads longest has the memory to itself.
      const double missing = std::max(kAmplePlaces - blocks / cluster_places(), 0.0);
      loop = reading() * (kSharedRate + kSharedLoss * missing);
    }
    const std::int64_t rows = rows_of(kernel, problem);
    // What clusters that share SMs lose was timed as a whole, with the join of many rows.
    const bool by_warps =
        rows <= core::Inbox::rows_from_warps(kernel.tile_q, kernel.head_dim) && !shares_sms;
    const double in_cluster = by_warps ? kJoinWarps : kJoinCluster;
    const double join = splits.count == 1 ? 0 : clusters ? in_cluster : kJoinLast;
    const double cycles = waves * (kStart + kFinish + kFinishRow * kernel.tile_q + loop) + join;
    // Tiles of few rows shorten what is behind the last keys. Where blocks come in rounds that does
    // not show, and four warps a block read more slowly than eight.
    const bool misplaced = kernel.tile_q < 16 ? rows > kernel.tile_q || !clusters
                                              : kernel.tile_q > 16 && 2 * rows <= kernel.tile_q;
    return misplaced ? kMisplaced * cycles : cycles;
  }
};

}  // namespace

Sm80Schedule schedule_sm80(const KernelInfo& kernel, const Problem& problem,
                           const DeviceInfo& device) noexcept {
  const Model model(kernel, problem, device);
  Sm80Schedule best;
  const auto consider = [&](std::int64_t count) {
    const Splits splits = split_keys(problem.kv_len, count, kernel.tile_k);
    const bool clusters = model.in_cluster(splits.count);
    const double cycles = model.cycles(splits, clusters);
    if (best.cycles == 0 || cycles < best.cycles) best = {splits, clusters, cycles};
  };
  if (problem.options.num_splits > 0) {
    consider(problem.options.num_splits);
    return best;
  }
  const bool may_split =
      problem.options.reproducibility == Reproducibility::deterministic && model.items > 0;
  const std::int64_t min_keys = kernel.tile_q <= 16 ? kernel.tile_k : kMinKeysManyRows;
  const std::int64_t most =
      may_split ? std::clamp<std::int64_t>(problem.kv_len / min_keys, 1, core::kMaxJoinedSplits)
                : 1;
  if (most > 1 && kernel.tile_q <= 16 && (problem.used_k.given() || problem.kv_packed)) {
    // Some sequences may be far shorter than others: ranges of one length keep the SMs even.
    const std::int64_t ragged = (problem.kv_len + kRaggedKeys - 1) / kRaggedKeys;
    if (model.items * static_cast<double>(ragged) > model.sms) {
      consider(std::min(ragged, most));
      return best;
    }
  }
  const auto fill = static_cast<std::int64_t>(model.sms / std::max(model.items, 1.0));
  for (std::int64_t count = 1; count <= std::min(most, kMaxCluster); ++count) {
    consider(count);
    if (count > 2 * fill * static_cast<std::int64_t>(model.blocks_per_sm)) break;
  }
  for (const std::int64_t count : {fill, fill * static_cast<std::int64_t>(model.blocks_per_sm)}) {
    if (count > kMaxCluster && count <= most) consider(count);
  }
  if (fill > most) consider(most);
  return best;
}

}  // namespace flashcore
