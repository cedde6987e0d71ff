// Strides of a tensor.
#pragma once

#include <cstdint>

namespace flashcore::core {

/// Element strides; 0 repeats.
struct Strides {
  std::int64_t batch;
  std::int64_t head;
  std::int64_t row;
  std::int64_t column;
};

}  // namespace flashcore::core
