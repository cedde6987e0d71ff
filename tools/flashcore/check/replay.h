// The command that repeats one case of `bench` or `run`.
#pragma once

#include <string>

#include "cli/args.h"

namespace flashcore::tool {

/// `command` ("bench" or "run") on one case and one kernel, with all options that define its
/// problem.
std::string replay_case(const std::string& program, const char* command, const std::string& label,
                        const std::string& kernel, const DeviceArgs& device,
                        const std::string& cases_file, const RunControlArgs& control);

}  // namespace flashcore::tool
