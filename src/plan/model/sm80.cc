// Cycle model of the sm80 kernels: chooses the kernel and the number of KV splits. Step costs were
// read off kernel timelines on an H200; the costs of combining and of loads from memory were fitted
// to the times of 848 plans there (docs/performance.md).
#include <algorithm>
#include <cmath>

#include "core/cluster_buffer.h"
#include "core/params.h"
#include "core/sm80_traits.h"
#include "plan/model/model.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

// Cycles unless noted.
constexpr double kClockGhz = 1.8;
constexpr double kPrologue = 2500;       // from a CTA's start to its first loads
constexpr double kEpilogue = 2500;       // from a CTA's last MMA to its last store
constexpr double kEpilogueRow = 25;      // for each row of the tile
constexpr double kStep = 1500;           // exposed latency of a step
constexpr double kMmaOverhead = 1.65;    // factor: time of a step / time of its MMAs
constexpr double kDequantCycles = 8;     // to dequantize the 64 elements of an operand
constexpr double kKv8Alone = 1.85;       // factor: MMA time of a kv8 CTA that has an SM to itself
constexpr double kMemoryShare = 0.93;    // reachable share of the datasheet bandwidth
constexpr double kLatency = 1500;        // from a load's issue to its first bytes
constexpr double kLatencyOther = 2100;   // for head dims other than 64 and 128
constexpr double kSmBytesPerCycle = 43;  // memory to one SM
constexpr double kL2BytesPerCycle = 40;  // L2 cache to one SM
// Combine by the last CTA: large tiles; small tiles, which contain all rows of their keys; small
// kv8 tiles; small tiles with head_dim above 128.
constexpr double kLastCta = 2300, kLastCtaSmall = 4400, kLastCtaKv8 = 6400, kLastCtaWide = 9500;
constexpr double kCluster = 500;         // combine in a cluster
constexpr double kClusterWarps = 300;    // combine in a cluster, by warps (core::ClusterBuffer)
constexpr double kCombineRow = 20;       // small tiles: for each row of each split
constexpr double kWrongTilePenalty = 8;  // factor: another tile size fits better
constexpr double kTie = 1 - 1e-9;        // times closer than this ratio are equal up to rounding

constexpr std::int64_t kMaxCluster = core::ClusterBuffer::kMaxSplits;
constexpr std::int32_t kSmsPerGpc = 16;  // a cluster is within one GPC; most GPCs have 16 SMs
constexpr double kClusterSlots = 0.9;    // share of all CTA slots that clusters can use
// Clusters that share SMs: minimum share of the slots, share without loss, read rate at that share,
// loss below it, and maximum read time in cycles. Outside these limits, splits of equal length save
// more time than a fast combine.
constexpr double kSharedSlots = 0.7, kAmpleSlots = 0.85, kSharedRate = 0.99, kSharedLoss = 0.85;
constexpr double kSharedCycles = 120000;
constexpr std::int64_t kMinKeysLargeTiles = 1024;  // per split
constexpr std::int64_t kRaggedKeys = 1024;  // per split, if lengths are known at run time only

double waves_of(double ctas, double slots) noexcept {
  return ctas <= slots ? 1 : std::ceil(ctas / slots);
}

/// True if another tile size fits the rows of a group better.
bool has_wrong_tile(const KernelInfo& kernel, std::int64_t rows) noexcept {
  if (kernel.tile_q < 16) return rows > kernel.tile_q;
  return kernel.tile_q > 16 && 2 * rows <= kernel.tile_q;
}

/// Cycles of a CTA before its first step and after its last one.
double ends_of(const KernelInfo& kernel) noexcept {
  return kPrologue + kEpilogue + kEpilogueRow * kernel.tile_q;
}

/// Estimates a kernel's time on a problem. Counts are doubles, because they are multiplied by
/// times. The constructor computes all values that do not depend on the splits, and allow_splits()
/// those that more than one split needs.
class Model {
 public:
  Model(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device) noexcept
      : tiles(static_cast<double>(tile_count(kernel, problem))),
        sms(std::max(device.sm_count, 1)),
        ctas_per_sm(std::clamp(
            std::min(device.smem_per_sm_bytes / (kernel.smem_bytes + 1024), kernel.blocks_per_sm),
            1, 8)),
        kv_tiles(std::max<std::int64_t>(ceil_div(problem.kv_len, kernel.tile_k), 1)),
        rows_(packed_rows(kernel, problem)),
        slots_(sms * ctas_per_sm),
        from_memory_(rows_ <= kernel.tile_q) {
    set_loads(kernel, problem, device);
    set_math(kernel, device);
    swap_ab_ = kernel.tile_q < 16;
    wrong_tile_ = has_wrong_tile(kernel, rows_);
  }

  /// Call it before in_cluster() or cycles() of more than one split.
  void allow_splits(const KernelInfo& kernel, const Problem& problem,
                    const DeviceInfo& device) noexcept {
    const bool kv8 = kernel.inputs == Inputs::kv8;
    if (from_memory_ && kernel.tile_q <= 16) {
      last_cta_combine_ = kernel.head_dim > 128 ? kLastCtaWide : kv8 ? kLastCtaKv8 : kLastCtaSmall;
      combine_rows_ = kCombineRow * static_cast<double>(rows_);
    }
    // Only sm_90 SASS combines in clusters. Later GPUs run the sm_80 PTX.
    has_clusters_ = device.compute_capability == 90 && kernel.tile_q <= 16 &&
                    problem.options.reproducibility == Reproducibility::deterministic;
    if (!has_clusters_) return;
    reading_ =
        tiles * static_cast<double>(problem.kv_len) * key_bytes(kernel) / memory_rate(device);
    const int cluster_bytes =
        kernel.smem_bytes +
        core::ClusterBuffer::bytes(kernel.tile_q, kernel.head_dim, kernel.threads);
    cluster_slots_ =
        sms * std::clamp<double>(device.smem_per_sm_bytes / (cluster_bytes + 1024), 1, ctas_per_sm);
    const bool by_warps =
        rows_ <= core::ClusterBuffer::rows_from_warps(kernel.tile_q, kernel.head_dim);
    cluster_combine_ = by_warps ? kClusterWarps : kCluster;
  }

  /// Clusters that read memory must have one CTA per SM, or share SMs and fill most slots. With
  /// fewer CTAs, those of the next call fit next to them: some SMs get two CTAs, others none.
  bool in_cluster(std::int32_t splits) const noexcept {
    if (!has_clusters_ || splits < 2 || splits > kMaxCluster) return false;
    const double ctas = tiles * splits;
    if (ctas > kClusterSlots * cluster_slots_) return false;
    if (!from_memory_) return true;
    const int usable_sms = kSmsPerGpc - kSmsPerGpc % splits;
    return ctas <= kClusterSlots * sms * usable_sms / kSmsPerGpc ||
           (ctas > sms && ctas >= kSharedSlots * cluster_slots_ && reading_ <= kSharedCycles);
  }

  double cycles(std::int32_t splits, std::int64_t steps, bool cluster) const noexcept {
    const double ctas = tiles * splits;
    const double together = std::min(waves_of(ctas, sms), ctas_per_sm);  // CTAs on one SM
    const double waves = ctas > 4 * slots_ ? ctas / slots_ : waves_of(ctas, slots_);
    const bool shares_sms = cluster && from_memory_ && ctas > sms;
    const double fill = splits == 1 ? fill_ : 1;
    const double step =
        std::max(kStep + mma_ * std::max(together, alone_), load_cycles(ctas, together, fill));
    double loop = static_cast<double>(steps) * step;
    if (shares_sms) {
      // Splits of unequal length balance: the CTA that reads longest gets the whole bandwidth.
      const double missing = std::max(kAmpleSlots - ctas / cluster_slots_, 0.0);
      loop = reading_ * (kSharedRate + kSharedLoss * missing);
    }
    const double combine = shares_sms ? kCluster : cluster ? cluster_combine_ : last_cta_combine_;
    const double combines = splits == 1 ? 0 : combine + combine_rows_ * splits;
    const double cycles = waves * (ends_ + loop) + combines;
    // swap_ab tiles shorten the epilogue. Several waves hide the epilogue anyway, and the four
    // warps of swap_ab tiles read more slowly than eight.
    return wrong_tile_ || (swap_ab_ && !cluster) ? kWrongTilePenalty * cycles : cycles;
  }

  double tiles, sms, ctas_per_sm;
  std::int64_t kv_tiles;

 private:
  /// Bytes per cycle.
  static double memory_rate(const DeviceInfo& device) noexcept {
    return kMemoryShare * device.memory_gbs / kClockGhz;
  }
  /// Bytes of one key in K and V.
  static double key_bytes(const KernelInfo& kernel) noexcept {
    return (kernel.inputs == Inputs::kv8 ? 2.0 : 4.0) * kernel.head_dim;
  }

  void set_loads(const KernelInfo& kernel, const Problem& problem,
                 const DeviceInfo& device) noexcept {
    const double tile_bytes = key_bytes(kernel) * kernel.tile_k;
    load_ = tile_bytes / (from_memory_ ? memory_rate(device) : kL2BytesPerCycle);
    const bool tuned_dim = kernel.head_dim == 64 || kernel.head_dim == 128;
    // The steps in flight share the latency equally.
    latency_ = (tuned_dim ? kLatency : kLatencyOther) * tile_bytes / kernel.smem_bytes;
    receive_ = tile_bytes / kSmBytesPerCycle;
    // A single split may end within a tile.
    fill_ = static_cast<double>(problem.kv_len) / static_cast<double>(kv_tiles * kernel.tile_k);
  }

  void set_math(const KernelInfo& kernel, const DeviceInfo& device) noexcept {
    // mma.m16n8k16 on one of the four tensor cores of an SM: 8 cycles; 5.9 measured on Hopper.
    const double mma = device.compute_capability >= 90 ? 5.93 : 8.0;
    // A warp dequantizes K and V once for all of its rows.
    const double dequant =
        kernel.inputs == Inputs::kv8 ? kDequantCycles * 16 / (kernel.tile_q > 64 ? 32 : 16) : 0.0;
    mma_ = kMmaOverhead * 2.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / 2048 / 4 *
           (mma + dequant);
    ends_ = ends_of(kernel);
    if (kernel.inputs == Inputs::kv8 && from_memory_ && kernel.tile_q <= 16) alone_ = kKv8Alone;
  }

  /// Cycles to load K and V of one step for all CTAs of an SM. Keys that only one CTA reads come
  /// from memory, and all CTAs share its bandwidth. Other keys come from the L2 cache. A second CTA
  /// on the SM hides the latency of the first. Without one, latency adds to the bandwidth time,
  /// most of all if the two are similar.
  double load_cycles(double ctas, double together, double fill) const noexcept {
    if (!from_memory_) return load_ * together;
    const double own = latency_ + receive_ * together * fill;
    const double share = load_ * std::min(ctas, sms) * together * fill;
    if (together > 1) return std::max(own, share);
    const double own2 = own * own, share2 = kMemoryShare * kMemoryShare * share * share;
    return std::max(share, std::sqrt(std::sqrt(own2 * own2 + share2 * share2)));
  }

  std::int64_t rows_;
  double slots_;
  bool from_memory_, swap_ab_ = false, wrong_tile_ = false, has_clusters_ = false;
  double reading_ = 0, load_ = 0, latency_ = 0, receive_ = 0, fill_ = 0, mma_ = 0, ends_ = 0;
  double cluster_slots_ = 0;
  double alone_ = 1, last_cta_combine_ = kLastCta, cluster_combine_ = 0, combine_rows_ = 0;
};

/// Estimates the plausible numbers of splits and returns the fastest.
Estimate estimate(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                  Rivals) noexcept {
  Model model(kernel, problem, device);
  Estimate best;
  std::int32_t last = 0;  // splits
  const auto consider = [&](std::int64_t count) {
    const bool split = count > 1 && model.kv_tiles > 1;
    const std::int64_t steps =
        split ? ceil_div(model.kv_tiles, std::min(count, model.kv_tiles)) : model.kv_tiles;
    const auto splits = split ? static_cast<std::int32_t>(ceil_div(model.kv_tiles, steps)) : 1;
    if (splits == last) return;
    last = splits;
    const bool cluster = model.in_cluster(splits);
    const double cycles = model.cycles(splits, steps, cluster);
    if (best.cost != 0 && cycles >= kTie * best.cost) return;
    best = {cycles, {{splits, steps * kernel.tile_k}, cluster}};
  };
  if (problem.options.num_splits > 0) {
    model.allow_splits(kernel, problem, device);
    consider(problem.options.num_splits);
    return best;
  }
  const bool may_split =
      problem.options.reproducibility == Reproducibility::deterministic && model.tiles > 0;
  const std::int64_t min_keys = kernel.tile_q <= 16 ? kernel.tile_k : kMinKeysLargeTiles;
  const std::int64_t most = may_split ? std::clamp<std::int64_t>(divide(problem.kv_len, min_keys),
                                                                 1, core::kMaxCombinedSplits)
                                      : 1;
  if (most > 1) model.allow_splits(kernel, problem, device);
  if (most > 1 && kernel.tile_q <= 16 && (problem.seqused_k.given() || problem.kv_varlen)) {
    // Sequences may differ much in length. Splits of one length balance the SMs.
    const std::int64_t ragged = ceil_div(problem.kv_len, kRaggedKeys);
    if (model.tiles * static_cast<double>(ragged) > model.sms) {
      consider(std::min(ragged, most));
      return best;
    }
  }
  const auto fill = static_cast<std::int64_t>(model.sms / std::max(model.tiles, 1.0));
  const auto ctas_per_sm = static_cast<std::int64_t>(model.ctas_per_sm);
  for (std::int64_t count = 1; count <= std::min(most, kMaxCluster); ++count) {
    consider(count);
    if (count > 2 * fill * ctas_per_sm) break;
  }
  const auto consider_large = [&](std::int64_t count) {
    if (count > kMaxCluster && count <= most) consider(count);
  };
  consider_large(fill);
  consider_large(fill * ctas_per_sm);
  if (fill > most && most > kMaxCluster) consider(most);
  return best;
}

double bound(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (!has_wrong_tile(kernel, packed_rows(kernel, problem))) return 0;
  return kWrongTilePenalty * ends_of(kernel);
}

SplitPlan plan_splits(const KernelInfo& kernel, const Problem& problem,
                      const DeviceInfo& device) noexcept {
  return estimate(kernel, problem, device, Rivals::own_family).splits;
}

}  // namespace

double sm80_options_factor(const Problem& problem, Features needed) noexcept {
  constexpr double kBias = 2.6, kGeneralPath = 1.44, kMask = 1.11, kPaged = 1.18;
  constexpr double kGeneralDecode = 1.05, kMaskDecode = 1.12, kPagedDecode = 1.06;
  constexpr Features kGeneral =
      Features::bias | Features::alibi | Features::softcap | Features::any_stride;
  const bool decode = problem.q_len <= 16;  // memory hides most of the arithmetic
  if (any(needed & Features::bias) && !decode) return kBias;
  if (any(needed & kGeneral)) return decode ? kGeneralDecode : kGeneralPath;
  if (any(needed & Features::mask)) return decode ? kMaskDecode : kMask;
  if (problem.page_size > 0) return decode ? kPagedDecode : kPaged;
  return 1;
}

extern const FamilyModel kSm80Model;
constinit const FamilyModel kSm80Model{estimate, bound, plan_splits, no_tail, EstimateUnit::cycles};

}  // namespace flashcore
