// A pool of worker threads shared by all CPU calls of the process.
//
// Work is a count of independent items; which thread does which item never changes a result. One
// job runs at a time: a call that finds the pool busy (another thread's call, or a nested one) does
// its items on its own thread. Workers spin briefly before they sleep, so back-to-back calls do not
// pay for waking. A forked child starts its own workers.
#pragma once

#include <cstdint>

namespace flashcore::cpu {

/// Does item `item`; `slot` < threads is the number of the thread doing it.
using ItemTask = void (*)(void* context, std::int64_t item, int slot);

/// Runs task for items 0 … count - 1 on up to `threads` threads, the caller's among them, and
/// returns when all are done. If threads cannot be started, fewer do the work. `cancel` may be
/// null; no item begins while it is set.
void parallel_for(int threads, std::int64_t count, ItemTask task, void* context,
                  const std::int32_t* cancel = nullptr) noexcept;

}  // namespace flashcore::cpu
