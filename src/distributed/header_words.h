// Values of header fields in words, for errors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "flashcore/distributed.h"

namespace flashcore::distributed {

inline std::string dtype_words(std::int64_t dtype) { return to_string(static_cast<DType>(dtype)); }
inline std::string scheme_words(std::int64_t scheme) {
  return to_string(static_cast<Scheme>(scheme));
}
inline std::string sharding_words(std::int64_t sharding) {
  return sharding == static_cast<std::int64_t>(Sharding::zigzag) ? "zigzag" : "contiguous";
}
inline std::string yes_words(std::int64_t flag) { return flag != 0 ? "given" : "not given"; }
inline std::string call_words(std::int64_t backward) {
  return backward != 0 ? "distributed_backward" : "distributed_attention";
}

/// A header has integers: the bits of a number stand for it.
inline std::int64_t bits_of(double number) { return std::bit_cast<std::int64_t>(number); }
inline std::string number_words(std::int64_t bits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", std::bit_cast<double>(bits));
  return text;
}

inline double scale_of(const Options& options, std::int64_t head_dim) {
  const auto dim = static_cast<double>(head_dim > 1 ? head_dim : 1);
  return options.scale.value_or(1 / std::sqrt(dim));
}

}  // namespace flashcore::distributed
