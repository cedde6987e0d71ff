#include "plan/model/model.h"

namespace flashcore {

bool fills_device(const KernelInfo& kernel, std::int64_t rows, std::int64_t items,
                  const DeviceInfo& device) noexcept {
  if (kernel.device == DeviceType::cpu) return true;
  if (2 * rows <= kernel.tile_q) return false;  // more than half of the tile would be padding
  // A block of many rows does about four times the work of one of few in little more time, so it
  // pays as soon as every second SM has one.
  return 2 * items >= device.sm_count;
}

}  // namespace flashcore
