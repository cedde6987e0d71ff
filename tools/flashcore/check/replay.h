// The command that does one piece of `bench` or `run` again.
#pragma once

#include <string>

#include "cli/args.h"

namespace flashcore::tool {

/// `command` ("bench", "run") on one case and one kernel, with all that decides its problem.
std::string replay_case(const std::string& program, const char* command, const std::string& label,
                        const std::string& kernel, const DeviceArgs& device,
                        const std::string& cases_file, const RunControlArgs& control);

}  // namespace flashcore::tool
