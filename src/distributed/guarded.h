// Turns exceptions into a Status.
#pragma once

#include <exception>
#include <new>

#include "core/error.h"

namespace flashcore::distributed {

/// Runs the body of a public call, which returns a Result or a Status.
template <typename Returned, typename Body>
Returned guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::exception& e) {
    return error(StatusCode::internal, "unexpected: %s", e.what());
  }
}

}  // namespace flashcore::distributed
