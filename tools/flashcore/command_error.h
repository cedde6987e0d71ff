// How a command ends. docs/cli.md lists the same codes for users.
#pragma once

#include <stdexcept>

#include "flashcore/status.h"

namespace flashcore::tool {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,         ///< a check failed, the binary is stale, or something got slower
  kCouldNotRun = 2,    ///< wrong usage, unreadable file, missing device
  kInterrupted = 130,  ///< SIGINT; what was done so far has been printed
};

/// What makes the command impossible: one line that says what to do, exit code 2.
class CommandError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  explicit CommandError(const Status& status) : std::runtime_error(status.message()) {}
};

/// The value, or its error as a CommandError.
template <typename T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw CommandError(result.status());
  return std::move(result).value();
}

}  // namespace flashcore::tool
