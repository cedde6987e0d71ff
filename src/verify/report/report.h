// Shared by the two writers of reports.
#pragma once

#include <string>

#include "flashcore/verify.h"

namespace flashcore::verify {

/// Quoted and escaped for JSON.
std::string json_text(const std::string& text);

}  // namespace flashcore::verify
