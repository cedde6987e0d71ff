// The models of all families.
#include "plan/model/model.h"

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

double no_bound(const KernelInfo&, const Problem&) noexcept { return 0; }

TailPlan no_tail(const KernelInfo&, const Problem&, const DeviceInfo&) noexcept { return {}; }

std::int32_t key_tile(const KernelInfo& kernel, const Problem& problem) noexcept {
  return kernel.tile_k != 0 ? kernel.tile_k
                            : cpu_tile_k(kernel.isa, problem.head_dim, problem.v_dim);
}

}  // namespace flashcore
