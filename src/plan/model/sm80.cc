// Which tensor-core kernel, and how many key ranges: a small model of time, in SM cycles. Its
// constants were read off timelines of the kernels on an H200, those of joins and of copies from
// memory fitted to the times of 848 plans there (docs/performance.md).
#include <algorithm>
#include <cmath>

#include "core/cluster_buffer.h"
#include "core/params.h"
#include "core/sm80_traits.h"
#include "plan/divide.h"
#include "plan/model/model.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

constexpr double kClockGhz = 1.8;
constexpr double kStart = 2500;            // until a block's first copies are under way
constexpr double kFinish = 2500;           // from its last product to its last store
constexpr double kFinishRow = 25;          // more for each row of its tile
constexpr double kStep = 1500;             // latencies of a step that nothing hides
constexpr double kProductOverhead = 1.65;  // a step's time over that of its products alone
constexpr double kCodeCycles = 8;          // more for an instruction's 64 codes to become operands
constexpr double kCodesAlone = 1.85;       // a block that has an SM for itself, in blocks' products
constexpr double kMemoryShare = 0.93;      // of the datasheet's bandwidth
constexpr double kLatency = 1500;          // from a copy's begin until its first bytes are there
constexpr double kLatencyOther = 2100;     // the same, of head dims other than 64 and 128
constexpr double kSmBytesPerCycle = 43;    // that then come to one SM from memory
constexpr double kL2BytesPerCycle = 40;    // from the L2 cache
// Splits joined by the last block to arrive: where rows are many, where a tile has all rows that
// read its keys, and there of 8-bit keys or of a head_dim above 128.
constexpr double kJoinLast = 2300, kJoinLastFew = 4400, kJoinLastCodes = 6400, kJoinLastWide = 9500;
constexpr double kJoinCluster = 500;     // in a cluster
constexpr double kJoinWarps = 300;       // there, by warps (core::ClusterBuffer)
constexpr double kJoinRow = 20;          // of few rows, more for each row of each split
constexpr double kWrongTilePenalty = 8;  // other tiles are there, and take less
constexpr double kAsGood = 1 - 1e-9;     // of two equal times, which rounding may tell apart

constexpr std::int64_t kMaxCluster = core::ClusterBuffer::kMaxSplits;
constexpr std::int32_t kSmsPerGpc = 16;  // SMs of which clusters are made, in most GPUs' groups
constexpr double kClusterPlaces = 0.9;   // of all places for blocks, those that clusters can take
// Clusters that share SMs: the places they must take at least, how many they take without loss,
// what they lose below that, and what they may read.
constexpr double kSharedPlaces = 0.7, kAmplePlaces = 0.85, kSharedRate = 0.99, kSharedLoss = 0.85;
constexpr double kSharedCycles = 120000;  // then ranges of one length matter more than the join
constexpr std::int64_t kMinKeysManyRows = 1024;  // that are worth splitting tiles of many rows
constexpr std::int64_t kRaggedKeys = 1024;       // of a range, where lengths are not known

/// Counts, as most of what follows, are doubles: they are multiplied with times.
double rounds(double count, double places) noexcept {
  return count <= places ? 1 : std::ceil(count / places);
}

/// A kernel's time on a problem. What does not depend on the splits is worked out once.
class Model {
 public:
  Model(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device) noexcept
      : items(static_cast<double>(tile_count(kernel, problem))),
        sms(std::max(device.sm_count, 1)),
        blocks_per_sm(std::clamp(
            std::min(device.smem_per_sm_bytes / (kernel.smem_bytes + 1024), kernel.blocks_per_sm),
            1, 8)),
        tiles(std::max<std::int64_t>(ceil_div(problem.kv_len, kernel.tile_k), 1)),
        slots_(sms * blocks_per_sm) {
    const double memory_rate = kMemoryShare * device.memory_gbs / kClockGhz;
    const bool codes = needs_8_bits(kernel);
    const double key_bytes = (codes ? 2.0 : 4.0) * kernel.head_dim;  // of K and V
    const std::int64_t rows = packed_rows(kernel, problem);
    from_memory_ = rows <= kernel.tile_q;
    reading_ = items * static_cast<double>(problem.kv_len) * key_bytes / memory_rate;
    const double tile_bytes = key_bytes * kernel.tile_k;
    copy_ = tile_bytes / (from_memory_ ? memory_rate : kL2BytesPerCycle);
    const bool usual = kernel.head_dim == 64 || kernel.head_dim == 128;
    // Steps that are under way share it.
    latency_ = (usual ? kLatency : kLatencyOther) * tile_bytes / kernel.smem_bytes;
    receive_ = tile_bytes / kSmBytesPerCycle;
    // An only range may end within a tile.
    fill_ = static_cast<double>(problem.kv_len) / static_cast<double>(tiles * kernel.tile_k);
    // mma.m16n8k16 on one of an SM's four tensor cores: 8 cycles, on Hopper measured 5.9.
    const double one = device.compute_capability >= 90 ? 5.93 : 8.0;
    // A warp's codes become operands once for all of its rows.
    const double more = codes ? kCodeCycles * 16 / (kernel.tile_q > 64 ? 32 : 16) : 0.0;
    products_ = kProductOverhead * 2.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / 2048 /
                4 * (one + more);
    ends_ = kStart + kFinish + kFinishRow * kernel.tile_q;
    if (from_memory_ && kernel.tile_q <= 16) {
      join_last_ = kernel.head_dim > 128 ? kJoinLastWide : codes ? kJoinLastCodes : kJoinLastFew;
      join_rows_ = kJoinRow * static_cast<double>(rows);
      if (codes) alone_ = kCodesAlone;
    }
    few_rows_ = kernel.tile_q < 16;
    misplaced_ = few_rows_ ? rows > kernel.tile_q : kernel.tile_q > 16 && 2 * rows <= kernel.tile_q;
    // Only machine code for sm_90 joins in clusters: later GPUs run sm_80's PTX.
    has_clusters_ = device.compute_capability == 90 && kernel.tile_q <= 16 &&
                    problem.options.reproducibility == Reproducibility::deterministic;
    if (!has_clusters_) return;
    const int cluster_bytes =
        kernel.smem_bytes +
        core::ClusterBuffer::bytes(kernel.tile_q, kernel.head_dim, kernel.threads);
    cluster_places_ = sms * std::clamp<double>(device.smem_per_sm_bytes / (cluster_bytes + 1024), 1,
                                               blocks_per_sm);
    const bool by_warps =
        rows <= core::ClusterBuffer::rows_from_warps(kernel.tile_q, kernel.head_dim);
    join_cluster_ = by_warps ? kJoinWarps : kJoinCluster;
  }

  /// Clusters that wait for memory have SMs of their own, or share nearly all of them: where the
  /// next call's blocks find room beside these, some SMs come to have two and others none.
  bool in_cluster(std::int32_t splits) const noexcept {
    if (!has_clusters_ || splits < 2 || splits > kMaxCluster) return false;
    const double blocks = items * splits;
    if (blocks > kClusterPlaces * cluster_places_) return false;
    if (!from_memory_) return true;
    const int neighbours = kSmsPerGpc - kSmsPerGpc % splits;
    return blocks <= kClusterPlaces * sms * neighbours / kSmsPerGpc ||
           (blocks > sms && blocks >= kSharedPlaces * cluster_places_ && reading_ <= kSharedCycles);
  }

  /// clusters: whether the splits are joined in clusters.
  double cycles(std::int32_t splits, std::int64_t steps, bool clusters) const noexcept {
    const double blocks = items * splits;
    const double together = std::min(rounds(blocks, sms), blocks_per_sm);  // on one SM
    const double waves = blocks > 4 * slots_ ? blocks / slots_ : rounds(blocks, slots_);
    const bool shares_sms = clusters && from_memory_ && blocks > sms;
    const double fill = splits == 1 ? fill_ : 1;
    const double step =
        std::max(kStep + products_ * std::max(together, alone_), copies(blocks, together, fill));
    double loop = static_cast<double>(steps) * step;
    if (shares_sms) {
      // Ranges need not be of one length: whoever reads longest has the memory to itself.
      const double missing = std::max(kAmplePlaces - blocks / cluster_places_, 0.0);
      loop = reading_ * (kSharedRate + kSharedLoss * missing);
    }
    const double join = shares_sms ? kJoinCluster : clusters ? join_cluster_ : join_last_;
    const double joins = splits == 1 ? 0 : join + join_rows_ * splits;
    const double cycles = waves * (ends_ + loop) + joins;
    // Tiles of few rows shorten what is behind the last keys. Where blocks come in rounds that does
    // not show, and four warps a block read more slowly than eight.
    return misplaced_ || (few_rows_ && !clusters) ? kWrongTilePenalty * cycles : cycles;
  }

  double items, sms, blocks_per_sm;
  std::int64_t tiles;  // of keys

 private:
  /// Until a step's keys and values are there, for all blocks of an SM. Where one block alone reads
  /// them they come from memory, which all blocks share; else from the L2 cache. A second block on
  /// the SM hides what one waits for. Without one, a block's own time adds to what it takes at the
  /// datasheet's bandwidth, the more the closer they are.
  double copies(double blocks, double together, double fill) const noexcept {
    if (!from_memory_) return copy_ * together;
    const double own = latency_ + receive_ * together * fill;
    const double share = copy_ * std::min(blocks, sms) * together * fill;
    if (together > 1) return std::max(own, share);
    const double own2 = own * own, share2 = kMemoryShare * kMemoryShare * share * share;
    return std::max(share, std::sqrt(std::sqrt(own2 * own2 + share2 * share2)));
  }

  double slots_, reading_, copy_, latency_, receive_, fill_, products_, ends_;
  double cluster_places_ = 0;
  double alone_ = 1, join_last_ = kJoinLast, join_cluster_ = 0, join_rows_ = 0;
  bool from_memory_, few_rows_, misplaced_, has_clusters_;
};

}  // namespace

Sm80Schedule schedule_sm80(const KernelInfo& kernel, const Problem& problem,
                           const DeviceInfo& device) noexcept {
  const Model model(kernel, problem, device);
  Sm80Schedule best;
  const auto consider = [&](std::int64_t count) {
    const std::int64_t steps =
        ceil_div(model.tiles, std::clamp<std::int64_t>(count, 1, model.tiles));
    const auto splits = static_cast<std::int32_t>(ceil_div(model.tiles, steps));
    if (splits == best.splits.count && best.cycles != 0) return;
    const bool clusters = model.in_cluster(splits);
    const double cycles = model.cycles(splits, steps, clusters);
    if (best.cycles != 0 && cycles >= kAsGood * best.cycles) return;
    best = {{splits, steps * kernel.tile_k}, clusters, cycles};
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
  if (most > 1 && kernel.tile_q <= 16 && (problem.seqused_k.given() || problem.kv_varlen)) {
    // Some sequences may be far shorter than others: ranges of one length keep the SMs even.
    const std::int64_t ragged = ceil_div(problem.kv_len, kRaggedKeys);
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
