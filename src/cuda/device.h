// Device properties from the CUDA runtime.
#pragma once

#include "flashcore/plan.h"

namespace flashcore::cuda {

/// Device indices are below this number.
inline constexpr int kMaxDevices = 64;

Result<DeviceInfo> query_device(int index) noexcept;

}  // namespace flashcore::cuda
