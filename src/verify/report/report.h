// Shared by the writers of reports: text, JSON, HTML.
#pragma once

#include <string>

#include "flashcore/verify.h"

namespace flashcore::verify {

/// The text quoted and escaped for JSON.
std::string json_text(const std::string& text);

/// "passed", "failed" or "not probed".
const char* status_name(ProbeResult::Status status);

}  // namespace flashcore::verify
