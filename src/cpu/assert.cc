// Prints the message of a failed kernel assertion (core/assert.h) and aborts. No other file in src
// prints.
#include "core/assert.h"

#if defined(FLASHCORE_ASSERTS)

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashcore::core {

bool assertions_enabled() noexcept {
  static const bool enabled = [] {
    const char* text = std::getenv("FLASHCORE_ASSERT");
    return text != nullptr && std::strcmp(text, "") != 0 && std::strcmp(text, "0") != 0;
  }();
  return enabled;
}

void assertion_failed(const char* kernel, std::int32_t b, std::int32_t h, std::int64_t row,
                      const char* what) noexcept {
  std::fprintf(stderr, "flashcore: kernel %s, batch %d, head %d, row %lld: %s\n", kernel, b, h,
               static_cast<long long>(row), what);
  std::abort();
}

}  // namespace flashcore::core

#endif
