#include <algorithm>

#include "plan/model/model.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

// A K tile, a V tile and one panel of scores stay in the L1 cache together. x86 tiles are multiples
// of the 12 and 6 keys of its register tiles.
constexpr CpuTuningRow kMultiplesOf4[] = {{64, 128}, {128, 64}, {256, 32}, {576, 16}};
constexpr CpuTuningRow kMultiplesOf12[] = {{64, 96}, {128, 48}, {256, 24}, {576, 12}};
// VNNI multiplies 16 keys at a time, which stay in 8 bits.
constexpr CpuTuningRow kVnni[] = {{64, 96}, {128, 64}, {256, 32}, {576, 16}};
// AMX multiplies 32 keys at a time. The scores and P of a panel of 32 rows stay in the L1 cache, K
// and V in the L2 cache.
constexpr CpuTuningRow kAmx[] = {{128, 256}, {256, 128}, {576, 64}};

// The number of work tiles that split-KV aims at. It does not depend on the number of threads, so
// neither do the bits of the result.
constexpr std::int64_t kWantedTiles = 64;
constexpr std::int64_t kMinKeysPerSplit = 512;

/// True if splitting K and V into bf16 parts costs more than the products save. Batch-invariant
/// plans do not depend on the rows.
bool has_too_few_rows_for_parts(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (kernel.isa != Isa::amx || kernel.dtype == DType::bf16) return false;
  if (problem.options.reproducibility == Reproducibility::batch_invariant) return false;
  return packed_rows(kernel, problem) <= (kernel.dtype == DType::f32 ? 128 : 32);
}

/// VNNI kernels multiply Q by integers. Other keys are widened by all kernels for few rows.
bool has_integer_keys(const Problem& problem) noexcept {
  const DType k = problem.k.dtype;
  return k == problem.v.dtype && (k == DType::int8 || k == DType::u8);
}

/// A kernel for few rows is the best one for them and the worst for others. All others tie but for
/// AMX kernels that split their operands, and the first one wins: the list begins with the widest
/// instruction set.
Estimate estimate(const KernelInfo& kernel, const Problem& problem, const DeviceInfo&,
                  Rivals) noexcept {
  if (kernel.tile_q > core::kGemvRows) {
    return {has_too_few_rows_for_parts(kernel, problem) ? 1.5 : 1.0};
  }
  if (packed_rows(kernel, problem) > core::kGemvRows) return {2.0};
  if (kernel.isa != Isa::vnni) return {0.5};
  return {has_integer_keys(problem) ? 0.0 : 0.75};
}

// AMX kernels pack K and V once per work tile. Twice the rows halve that, if every thread still has
// some work tiles.
constexpr std::int64_t kTilesPerThread = 4;

SplitPlan plan_splits(const KernelInfo& kernel, const Problem& problem,
                      const DeviceInfo&) noexcept {
  return {choose_splits(problem, tile_count(kernel, problem), kWantedTiles, kMinKeysPerSplit,
                        key_tile(kernel, problem))};
}

}  // namespace

std::span<const CpuTuningRow> cpu_tuning(Isa isa) noexcept {
  if (isa == Isa::amx) return kAmx;
  if (isa == Isa::vnni) return kVnni;
  if (isa == Isa::avx2 || isa == Isa::avx512) return kMultiplesOf12;
  return kMultiplesOf4;
}

std::int32_t cpu_tile_q(const KernelInfo& kernel, const Problem& problem,
                        const DeviceInfo& device) noexcept {
  const std::int32_t twice = 2 * kernel.tile_q;
  const bool doubles = kernel.isa == Isa::amx && packed_rows(kernel, problem) >= twice &&
                       tile_count(kernel, problem, twice) >= kTilesPerThread * device.threads;
  return doubles ? twice : kernel.tile_q;
}

core::CpuOperands cpu_operands(Isa isa, DType dtype) noexcept {
  if (isa != Isa::amx) return core::CpuOperands::compute;
  return dtype == DType::bf16  ? core::CpuOperands::bf16_tiles
         : dtype == DType::f16 ? core::CpuOperands::two_bf16_tiles
                               : core::CpuOperands::three_bf16_tiles;
}

std::int32_t cpu_tile_k(Isa isa, std::int64_t head_dim, std::int64_t v_dim) noexcept {
  const std::int64_t dim = std::max(head_dim, v_dim);
  for (const CpuTuningRow& row : cpu_tuning(isa)) {
    if (dim <= row.max_dim) return row.tile_k;
  }
  return cpu_tuning(isa).back().tile_k;
}

extern const FamilyModel kCpuModel;
constinit const FamilyModel kCpuModel{estimate, no_bound, plan_splits, no_tail, EstimateUnit::rank};

}  // namespace flashcore
