// Number of repetitions of a test.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace flashcore::test {

/// `count` times FLASHCORE_TEST_SCALE from the environment, a tenth of that in a build with a
/// sanitizer, and at least 1.
inline int rounds(int count) {
  static const int scale = [] {
    const char* text = std::getenv("FLASHCORE_TEST_SCALE");
    return std::clamp(text == nullptr ? 1 : std::atoi(text), 1, 1000);
  }();
  return std::max(count * scale / FLASHCORE_TEST_DIVISOR, 1);
}

}  // namespace flashcore::test
