// Cycle model of the sm90 kernels: chooses the kernel and plans tail splits. The constants were
// fitted to times on an H200 (docs/performance.md).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/paged_kv.h"
#include "core/wgmma_layout.h"
#include "plan/model/model.h"
#include "plan/planner.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

constexpr double kStart = 4700;          // launch to first GEMMs, including the host's work
constexpr double kTile = 500;            // per tile, without its first GEMMs
constexpr double kStep = 1270;           // constant part of a step
constexpr double kGemmOverhead = 0.92;   // per cycle of a step's GEMMs
constexpr double kFlopsPerCycle = 4096;  // per SM
// 16-bit kernels of head_dim 128: a tile with its first GEMMs, and a step, measured at 512 to
// 16,384 keys.
constexpr double kTileOf128 = 2550;
struct StepOf128 {
  int tile_q, tile_k;
  double cycles;
};
constexpr StepOf128 kStepsOf128[] = {
    {128, 128, 2857},
    {128, 160, 3454},
    {128, 176, 3772},
    {64, 160, 1950},  // estimated: one warpgroup, K and V from memory
};
// A step whose softmax takes longer than its GEMMs, as at head_dim 64: a constant, and a time per
// score with two or three overlapping warpgroups.
constexpr double kSoftmaxStep = 400;
constexpr double kScoreOfTwo = 0.108;
constexpr double kScoreOfThree = 0.09;
// fp8 kernels: time per step, per score and per GEMM cycle. A warpgroup does not overlap its own
// GEMMs with its softmax.
constexpr double kFp8Step = 950;
constexpr double kFp8Score = 0.043;
constexpr double kFp8Gemm = 0.97;
constexpr double kPageBox = 50;  // per TMA box of a page; a warp issues them one by one
constexpr double kPageRow = 2;   // per 128 bytes of a row that is gathered; counted, not measured
// Softcap: a step with polynomials in the exponents, and one with the formula.
constexpr double kPolynomialCap = 1.35;
constexpr double kFormulaCap = 1.8;
// ALiBi: in units of the slope, and score by score.
constexpr double kAlibiInSlopes = 1.15;
constexpr double kAlibiByScore = 1.44;
// A bias in a step: counted instructions, not times.
constexpr double kStagedBias = 1.2;
constexpr double kDirectBias = 2;
constexpr double kMostlyPadding = 8;  // penalty factor: another family packs heads and splits keys
constexpr std::int64_t kCountedTiles = 16;
// In steps: the padding past a tile's last key, and the cost of masks if the edges of KV tiles and
// query tiles differ. At head_dim 128 the padding is computed instead.
constexpr double kPadding = 0.25;
constexpr double kUnaligned = 0.75;
constexpr double kUnalignedOf128 = 0.15;
// Tail splits: time until the last split of a tile knows that it is the last, and its rate of
// reading the other splits.
constexpr double kReduce = 3000;
constexpr double kPartialBytesPerCycle = 25;
constexpr double kLeastGain = 0.01;  // as a share of the total time
constexpr std::int64_t kMaxTailSplits = 16;

/// The measured step of a 16-bit kernel of head_dim 128; null for others.
const StepOf128* step_of_128(const KernelInfo& kernel) noexcept {
  if (kernel.head_dim != 128 || kernel.inputs == Inputs::fp8) return nullptr;
  for (const StepOf128& step : kStepsOf128) {
    if (step.tile_q == kernel.tile_q && step.tile_k == kernel.tile_k) return &step;
  }
  return nullptr;
}

/// Steps of an average tile with `tile_queries` queries of each head.
double steps_of(const KernelInfo& kernel, const Problem& problem, std::int64_t tile_queries,
                bool masked) noexcept {
  const std::int64_t keys = problem.kv_len, rows = problem.q_len;
  const auto steps_to = [&](std::int64_t end) { return ceil_div(end, kernel.tile_k); };
  if (!masked) return static_cast<double>(steps_to(keys));
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div(rows, tile_queries), 1);
  const std::int64_t left = problem.options.window_left;
  if (tiles > kCountedTiles && left < 0) {
    // Tiles end at multiples of the greatest common divisor of both tile sizes.
    const auto common = static_cast<double>(std::gcd(tile_queries, kernel.tile_k));
    const double padding =
        step_of_128(kernel) != nullptr ? 0.5 - common / (2.0 * kernel.tile_k) : kPadding;
    return static_cast<double>(keys + tile_queries) / 2 / kernel.tile_k + padding;
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
    const std::int64_t first =
        tiles_from_window(kernel, problem) ? begin : divide(begin, kernel.tile_k) * kernel.tile_k;
    steps += steps_to(std::clamp<std::int64_t>(end, 0, keys) - first);
  }
  return static_cast<double>(steps) / static_cast<double>(counted);
}

struct TileCycles {
  double start;  // independent of the number of keys
  double step;
  double unaligned;  // in steps; added for masks with unaligned tile edges
};

TileCycles tile_cycles(const KernelInfo& kernel) noexcept {
  if (const StepOf128* known = step_of_128(kernel); known != nullptr) {
    return {kTileOf128, known->cycles, kUnalignedOf128};
  }
  const bool fp8 = kernel.inputs == Inputs::fp8;
  const int element_bytes = fp8 ? 1 : 2;
  const double gemms =
      4.0 * kernel.tile_q * kernel.tile_k * kernel.head_dim / (kFlopsPerCycle * 2 / element_bytes);
  const double scores = static_cast<double>(kernel.tile_q) * kernel.tile_k;
  const double score = kernel.tile_q > 128 ? kScoreOfThree : kScoreOfTwo;
  const double step = fp8 ? kFp8Step + kFp8Score * scores + kFp8Gemm * gemms
                          : std::max(kStep + kGemmOverhead * gemms, kSoftmaxStep + score * scores);
  return {kTile + gemms, step, kUnaligned};
}

/// Cycles in which the producers issue the loads of a step's paged K and V.
double page_cycles(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (problem.page_size == 0) return 0;
  const int rows_log2 =
      core::page_box_log2(static_cast<std::int32_t>(problem.page_size), kernel.tile_k);
  const core::Sm90Traits shape = sm90_shape(kernel);
  const int panels = shape.tile_bytes(1) / core::kPanelRowBytes;
  if (shape.gathers_pages(1 << rows_log2, problem.head_dim, problem.v_dim)) {
    return kPageRow * 2 * panels * kernel.tile_k;
  }
  const std::int64_t boxes = ceil_div(kernel.tile_k >> rows_log2, shape.page_producers());
  return kPageBox * 2 * panels * static_cast<double>(boxes);
}

/// The factor of a step with a bias (cuda/sm90/bias.cuh).
double bias_factor(const KernelInfo& kernel, const Problem& problem) noexcept {
  const Layout& bias = problem.bias;
  if (!bias.given()) return 1;
  const bool aligned =
      bias.dtype == problem.dtype && bias.column == 1 && bias.alignment_bytes >= 16;
  const bool fits = sm90_shape(kernel).staged_bias_bytes(kernel.smem_bytes) > 0;
  const bool modified = problem.options.softcap > 0 || problem.alibi_slopes.given() ||
                        problem.mask.given() || problem.mask_blocks.given();
  return aligned && fits && !modified ? kStagedBias : kDirectBias;
}

/// Cycles of the `tiles` tiles of a last partial wave, all of one length.
double tail_cycles(const KernelInfo& kernel, const TileCycles& tile, std::int64_t tiles,
                   const Splits& splits, std::int64_t sms) noexcept {
  const double waves =
      std::ceil(static_cast<double>(tiles * splits.count) / static_cast<double>(sms));
  const double steps = static_cast<double>(splits.keys_each) / kernel.tile_k;
  const double computed = waves * (tile.start + steps * tile.step);
  if (splits.count == 1) return computed;
  const double partial_bytes = 4.0 * kernel.tile_q * kernel.head_dim;
  return computed + kReduce + (waves + splits.count) * partial_bytes / kPartialBytesPerCycle;
}

TailPlan plan_tail(const KernelInfo& kernel, const Problem& problem,
                   const DeviceInfo& device) noexcept {
  if (!can_split_tail(kernel, problem)) return {};
  const std::int64_t tiles = tile_count(kernel, problem), sms = std::max(device.sm_count, 1);
  const std::int64_t whole_waves = divide(tiles, sms), last = tiles - whole_waves * sms;
  if (last == 0) return {};
  const TileCycles tile = tile_cycles(kernel);
  const auto cycles = [&](const Splits& splits) {
    return tail_cycles(kernel, tile, last, splits, sms);
  };
  TailPlan best;
  best.cycles = cycles(split_keys(problem.kv_len, 1, kernel.tile_k)) *
                (1 - kLeastGain * static_cast<double>(whole_waves + 1));
  const std::int64_t most = std::min(kMaxTailSplits, ceil_div(problem.kv_len, kernel.tile_k));
  for (std::int64_t count = 2; count <= most; ++count) {
    const Splits splits = split_keys(problem.kv_len, count, kernel.tile_k);
    if (splits.count != count) continue;
    const double split_cycles = cycles(splits);
    if (split_cycles < best.cycles) best = {last, count, split_cycles};
  }
  return best;
}

/// Includes a causal mask only for comparisons within the family: the models of other families
/// ignore masks.
Estimate estimate(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                  Rivals rivals) noexcept {
  const bool masked = rivals == Rivals::own_family && problem.options.causal;
  const std::int64_t tiles = tile_count(kernel, problem), sms = std::max(device.sm_count, 1);
  TileCycles tile = tile_cycles(kernel);
  if (problem.options.softcap > 0) {
    tile.step *= sm90_shape(kernel).caps_exponents() ? kPolynomialCap : kFormulaCap;
  }
  if (problem.alibi_slopes.given()) {
    tile.step *= sm90_shape(kernel).adds_alibi() ? kAlibiInSlopes : kAlibiByScore;
  }
  tile.step *= bias_factor(kernel, problem);
  tile.step = std::max(tile.step, page_cycles(kernel, problem));
  const std::int64_t tile_queries = divide(kernel.tile_q, heads_in_tile(kernel, problem));
  double steps = steps_of(kernel, problem, tile_queries, masked);
  const auto queries = static_cast<std::int32_t>(tile_queries);
  if (masked && kernel.tile_k % queries != 0 && queries % kernel.tile_k != 0) {
    steps += tile.unaligned;
  }
  const double each = tile.start + steps * tile.step;
  // Many tiles of different lengths balance the SMs, so waves are not rounded up. The constants of
  // head_dim 128 were fitted to tiles of one length in whole waves.
  const bool equal = !masked && step_of_128(kernel) != nullptr;
  const double waves = static_cast<double>(tiles) / static_cast<double>(sms);
  // Kernels of head_dim 128 with few rows are for batch-invariant calls. Other calls split keys.
  const bool few_rows_of_128 = kernel.tile_q == core::kQTileRows &&
                               step_of_128(kernel) != nullptr &&
                               problem.options.reproducibility == Reproducibility::deterministic;
  const bool mostly_padding = few_rows_of_128 || 2 * packed_rows(kernel, problem) <= kernel.tile_q;
  const TailPlan tail = mostly_padding ? TailPlan{} : plan_tail(kernel, problem, device);
  const double all = tail.tiles > 0 ? static_cast<double>(divide(tiles, sms)) * each + tail.cycles
                     : tiles > 4 * sms && !equal ? waves * each
                     : tiles <= sms && tiles > 0 ? each
                                                 : std::ceil(waves) * each;
  const double cycles = kStart + all;
  return {mostly_padding ? kMostlyPadding * cycles : cycles};
}

SplitPlan plan_splits(const KernelInfo& kernel, const Problem& problem,
                      const DeviceInfo&) noexcept {
  return {split_keys(problem.kv_len, 1, kernel.tile_k)};
}

}  // namespace

bool can_split_tail(const KernelInfo& kernel, const Problem& problem) noexcept {
  const Options& options = problem.options;
  if (options.causal || options.window_left >= 0 || options.window_right >= 0) return false;
  const bool is_varlen = problem.q_varlen || problem.kv_varlen || problem.seqused_k.given() ||
                         problem.q_start.given() || problem.k_start.given();
  return traits_of(kernel).gqa_packing == GqaPacking::power_of_two &&
         sm90_shape(kernel).packs_gqa() && !is_varlen && problem.kv_len > 0 &&
         options.reproducibility == Reproducibility::deterministic;
}

bool has_key_ranges(const KernelInfo& kernel, const Problem& problem) noexcept {
  return traits_of(kernel).gqa_packing == GqaPacking::power_of_two &&
         sm90_shape(kernel).packs_gqa() &&
         problem.options.reproducibility == Reproducibility::batch_invariant;
}

extern const FamilyModel kSm90Model;
constinit const FamilyModel kSm90Model{estimate, no_bound, plan_splits, plan_tail,
                                       EstimateUnit::cycles_by_rivals};

}  // namespace flashcore
