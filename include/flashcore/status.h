// Errors. FlashCore throws nothing. A call returns a Status, or a Result that holds a value or a
// Status. A message names the argument, its value and the expected value.
#pragma once

#include <optional>
#include <string>
#include <utility>

#if defined(_WIN32)
#define FLASHCORE_API
#else
#define FLASHCORE_API __attribute__((visibility("default")))
#endif

namespace flashcore {

/// The numbers are part of the C ABI (FLASHCORE_OK ... in flashcore.h) and never change.
enum class StatusCode : int {
  ok = 0,
  invalid_argument = 1,  ///< the caller's mistake; the message says what to change
  unsupported = 2,       ///< no kernel supports the call; the message says what is supported
  out_of_memory = 3,
  cuda = 4,  ///< the CUDA runtime failed; the message has its text
  internal = 5,
  cancelled = 6,  ///< the cancellation flag was set
};

/// "ok", "invalid_argument", ...
FLASHCORE_API const char* to_string(StatusCode code) noexcept;

class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) noexcept
      : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == StatusCode::ok; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(const T& value) : value_(value) {}        // NOLINT: implicit on purpose
  Result(T&& value) : value_(std::move(value)) {}  // NOLINT: implicit on purpose
  /// A default value, to be filled in: for values that are large to copy.
  explicit Result(std::in_place_t) : value_(std::in_place) {}
  Result(Status status) noexcept : status_(std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }

  /// Requires ok().
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace flashcore
