// What programs read: the tool's own values as JSON.
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

/// NaN and infinities, which JSON has no numbers for, become strings.
Json to_json(double value);

/// Versions of this program, its compilers and the GPU's driver.
Json versions();

/// One object, two spaces deep, on standard output.
void print_json(const Json& json);

}  // namespace flashcore::tool
