// Integers as text. std::to_string would add a digit table to the exports of the shared library.
#pragma once

#include <concepts>
#include <cstdio>
#include <string>

namespace flashcore::verify {

template <std::integral T>
std::string decimal(T value) {
  char text[24];
  if constexpr (std::is_signed_v<T>) {
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  } else {
    std::snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(value));
  }
  return text;
}

}  // namespace flashcore::verify
