// The frame of every function of the C ABI: turns exceptions into a code and fills *error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>

#include "core/error.h"
#include "flashcore/flashcore.h"

namespace flashcore {

inline std::int32_t finish(const Status& status, flashcore_error* error) noexcept {
  const auto code = static_cast<std::int32_t>(status.code());
  if (error != nullptr) {
    error->code = code;
    std::snprintf(error->message, sizeof error->message, "%s", status.message().c_str());
  }
  return code;
}

/// Runs the body of an entry point. Turns exceptions into a status code and fills *error.
template <typename Body>
std::int32_t entry(flashcore_error* error, Body body) noexcept {
  try {
    return finish(body(), error);
  } catch (const std::bad_alloc&) {
    return finish(out_of_memory(), error);
  } catch (...) {
    return finish(Status(StatusCode::internal, "unexpected"), error);
  }
}

}  // namespace flashcore
