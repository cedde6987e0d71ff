// How a failed assertion of a kernel (core/assert.h) ends: the only place in src that prints, and
// only in a build that asks for it.
#include "core/assert.h"

#if defined(FLASHCORE_ASSERTS)

#include <cstdio>
#include <cstdlib>

namespace flashcore::core {

void assertion_failed(const char* kernel, std::int32_t b, std::int32_t h, std::int64_t row,
                      const char* what) noexcept {
  std::fprintf(stderr, "flashcore: kernel %s, batch %d, head %d, row %lld: %s\n", kernel, b, h,
               static_cast<long long>(row), what);
  std::abort();
}

}  // namespace flashcore::core

#endif
