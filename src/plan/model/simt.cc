#include "plan/model/model.h"
#include "plan/tile_counts.h"

namespace flashcore {
namespace {

constexpr std::int64_t kWantedTilesPerSm = 2;
constexpr std::int64_t kMinKeysPerSplit = 256;

/// True if the kernel's tiles keep the device busy.
bool fills_device(const KernelInfo& kernel, const Problem& problem,
                  const DeviceInfo& device) noexcept {
  // More than half of the tile would be padding.
  if (2 * packed_rows(kernel, problem) <= kernel.tile_q) return false;
  // A large tile does about four times the work of a small one in little more time. It pays as soon
  // as every second SM has one.
  return 2 * tile_count(kernel, problem) >= device.sm_count;
}

/// Ranks the first kernel that fills the device, else the one with the smallest tiles. The list has
/// large tiles first.
Estimate estimate(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                  Rivals) noexcept {
  return {fills_device(kernel, problem, device) ? 0.0 : kernel.tile_q};
}

SplitPlan plan_splits(const KernelInfo& kernel, const Problem& problem,
                      const DeviceInfo& device) noexcept {
  return {choose_splits(problem, tile_count(kernel, problem), kWantedTilesPerSm * device.sm_count,
                        kMinKeysPerSplit, kernel.tile_k)};
}

}  // namespace

extern const FamilyModel kSimtModel;
constinit const FamilyModel kSimtModel{estimate, no_bound, plan_splits, no_tail,
                                       EstimateUnit::rank};

}  // namespace flashcore
