// Host only: creates a Status with a printf-style message. Never throws. If memory for the message
// is lacking, the code is out_of_memory.
#pragma once

#include <cstdint>

#include "flashcore/status.h"

namespace flashcore {

[[gnu::format(printf, 2, 3)]] Status error(StatusCode code, const char* format, ...) noexcept;

[[gnu::format(printf, 1, 2)]] Status invalid_argument(const char* format, ...) noexcept;

[[gnu::format(printf, 1, 2)]] Status unsupported(const char* format, ...) noexcept;

Status out_of_memory() noexcept;

Status cancelled() noexcept;

/// cancelled() if the cancellation flag of a call is set. The flag may be null.
Status check_cancel(const std::int32_t* cancel) noexcept;

}  // namespace flashcore

/// Returns from the enclosing function with the expression's Status unless it is ok.
#define FLASHCORE_RETURN_IF_ERROR(expression)                                      \
  do {                                                                             \
    if (::flashcore::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)
