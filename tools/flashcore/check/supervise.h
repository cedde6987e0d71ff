// Commands under a deadline. A kernel that never ends cannot be cancelled, and its process may not
// even be able to exit. So the command runs in a worker process; this one watches the clock, ends a
// worker that is overdue and starts another, which goes on after the task that did not end.
#pragma once

#include "cli/command_line.h"

namespace flashcore::tool {

/// Whether the command runs kernels that might not end: on a GPU, or where --deadline says so.
/// Looks at the command line alone: the supervisor must never touch CUDA.
bool needs_supervisor(const Command& command);

/// Runs the command line in worker processes; its exit code.
int supervise(int argc, char** argv);

}  // namespace flashcore::tool
