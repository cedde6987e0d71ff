// What the CUDA runtime tells of a device.
#pragma once

#include "flashcore/plan.h"

namespace flashcore::cuda {

Result<DeviceInfo> query_device(int index) noexcept;

}  // namespace flashcore::cuda
