// Named devices: planning for a device needs its description only.
#pragma once

#include <span>

#include "flashcore/plan.h"

namespace flashcore {

struct NamedDevice {
  const char* name;
  DeviceInfo info;
};

std::span<const NamedDevice> named_devices() noexcept;

}  // namespace flashcore
