// The models of all families, and the counts they share.
#include "plan/model/model.h"

#include <algorithm>

#include "plan/divide.h"
#include "plan/kernel_traits.h"

namespace flashcore {

// Each is defined in the file of its family.
extern const FamilyModel kCpuModel, kSimtModel, kSm80Model, kSm90Model;

const FamilyModel& model_of(Family family) noexcept {
  static constexpr const FamilyModel* kModels[] = {&kCpuModel, &kSimtModel, &kSm80Model,
                                                   &kSm90Model};
  static_assert(std::size(kModels) == std::size(kFamilies));
  return *kModels[static_cast<std::size_t>(family)];
}

TailPlan no_tail(const KernelInfo&, const Problem&, const DeviceInfo&) noexcept { return {}; }

std::int32_t key_tile(const KernelInfo& kernel, const Problem& problem) noexcept {
  return kernel.tile_k != 0 ? kernel.tile_k
                            : cpu_tile_k(kernel.isa, problem.head_dim, problem.v_dim);
}

std::int64_t heads_in_tile(const KernelInfo& kernel, const Problem& problem) noexcept {
  if (problem.q_heads <= problem.kv_heads || problem.kv_heads == 0) return 1;
  const std::int64_t group = divide(problem.q_heads, problem.kv_heads);
  switch (traits_of(kernel).gqa_packing) {
    case GqaPacking::none: return 1;
    case GqaPacking::group: return group;
    case GqaPacking::power_of_two: break;
  }
  if (!sm90_shape(kernel).packs_gqa()) return 1;
  return std::min<std::int64_t>(group & -group, core::kMaxHeadsInTile);
}

std::int64_t packed_rows(const KernelInfo& kernel, const Problem& problem) noexcept {
  return problem.q_len * heads_in_tile(kernel, problem);
}

std::int64_t tile_count(const KernelInfo& kernel, const Problem& problem) noexcept {
  const std::int64_t heads = heads_in_tile(kernel, problem);
  return problem.batch * divide(problem.q_heads, heads) *
         ceil_div(problem.q_len * heads, kernel.tile_q);
}

}  // namespace flashcore
