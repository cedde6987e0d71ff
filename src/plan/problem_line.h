// A problem in one line: types, sizes and options. A device in one line.
#pragma once

#include <string>

#include "flashcore/plan.h"

namespace flashcore {

std::string problem_line(const Problem& problem);
std::string device_line(const DeviceInfo& device);

}  // namespace flashcore
