// Devices described by name, for planning without them.
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
