// Integers as text. std::to_string would add a digit table to the exports of the shared library.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace flashcore::distributed {

inline std::string decimal(std::int64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  return text;
}

}  // namespace flashcore::distributed
