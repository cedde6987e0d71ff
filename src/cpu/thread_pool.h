// A pool of worker threads, shared by all CPU calls of the process.
//
// A job is a number of independent tasks. The assignment of tasks to threads never changes a
// result. The pool runs one job at a time: a call that finds it busy, from another thread or nested
// in a task, runs its tasks on its own thread. Workers spin briefly before they sleep, so
// back-to-back calls avoid the cost of waking them. A forked child starts its own workers.
#pragma once

#include <cstdint>

namespace flashcore::cpu {

/// Runs task `index` on the thread with number `slot` < threads.
using TaskFunction = void (*)(void* context, std::int64_t index, int slot);

/// Runs tasks 0 … count - 1 on up to `threads` threads, including the caller's, and returns when
/// all are done. Uses fewer threads if some cannot be started. No task starts while `cancel` is
/// set; `cancel` may be null.
void parallel_for(int threads, std::int64_t count, TaskFunction task, void* context,
                  const std::int32_t* cancel = nullptr) noexcept;

}  // namespace flashcore::cpu
