// Exit codes, and the error that stops a command. docs/cli.md lists the codes for users.
#pragma once

#include <stdexcept>

#include "flashcore/status.h"

namespace flashcore::tool {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,         ///< a check failed, the binary is stale, or a row got slower
  kCouldNotRun = 2,    ///< wrong usage, unreadable file, missing device
  kInterrupted = 130,  ///< SIGINT, after printing the results so far
};

/// The command cannot run. The message is one line that says what to do; the exit code is 2.
class CommandError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  explicit CommandError(const Status& status) : std::runtime_error(status.message()) {}
};

/// Returns the value, or throws its error as a CommandError.
template <typename T>
T value_or_throw(Result<T> result) {
  if (!result.ok()) throw CommandError(result.status());
  return std::move(result).value();
}

}  // namespace flashcore::tool
