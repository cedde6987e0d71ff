// A parallel loop on the host.
#pragma once

#include <cstdint>
#include <functional>

namespace flashcore::tool {

/// Calls body(i) for i = 0 … count - 1 in any order on `threads` threads (0: one per CPU). body
/// must not throw.
void in_parallel(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body);

}  // namespace flashcore::tool
