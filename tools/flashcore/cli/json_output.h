// JSON output of the command.
#pragma once

#include <nlohmann/json.hpp>

#include "backend/backend.h"
#include "verify/inputs/case.h"
#include "verify/inputs/compare.h"

namespace flashcore::tool {

using Json = nlohmann::ordered_json;

Json to_json(const DeviceInfo& info);
Json to_json(const KernelInfo& kernel);
Json to_json(const Plan& plan);
Json to_json(const verify::Comparison& comparison);

/// NaN and infinities become strings, because JSON has no such numbers.
Json to_json(double value);

/// Versions of this program, its compilers and the GPU driver.
Json versions();

/// Prints one object to standard output, indented by two spaces.
void print_json(const Json& json);

}  // namespace flashcore::tool
