#include <algorithm>

#include "plan/model/model.h"

namespace flashcore {
namespace {

// K and V tiles should stay in the first-level cache together with one panel of scores; x86 tiles
// are multiples of the 12 and 6 keys its register tiles hold.
constexpr CpuTuningRow kByFour[] = {{64, 128}, {128, 64}, {256, 32}, {576, 16}};
constexpr CpuTuningRow kByTwelve[] = {{64, 96}, {128, 48}, {256, 24}, {576, 12}};

}  // namespace

std::span<const CpuTuningRow> cpu_tuning(Isa isa) noexcept {
  if (isa == Isa::avx2 || isa == Isa::avx512) return kByTwelve;
  return kByFour;
}

std::int32_t cpu_tile_k(Isa isa, std::int64_t head_dim, std::int64_t v_dim) noexcept {
  const std::int64_t dim = std::max(head_dim, v_dim);
  for (const CpuTuningRow& row : cpu_tuning(isa)) {
    if (dim <= row.max_dim) return row.tile_k;
  }
  return cpu_tuning(isa).back().tile_k;
}

}  // namespace flashcore
