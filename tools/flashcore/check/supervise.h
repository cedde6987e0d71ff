// Commands with a deadline. A kernel that never ends cannot be cancelled, and its process may not
// be able to exit. So the command runs in a worker process. The supervisor watches the clock, kills
// a worker that is overdue, and starts another one that continues after the task that did not end.
#pragma once

#include "cli/command_line.h"

namespace flashcore::tool {

/// True if the command needs a deadline: on a GPU, or with --deadline. Uses the command line only,
/// because the supervisor must never touch CUDA.
bool needs_supervisor(const Command& command);

/// Runs the command line in worker processes. Returns its exit code.
int supervise(int argc, char** argv);

}  // namespace flashcore::tool
