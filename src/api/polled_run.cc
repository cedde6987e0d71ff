#include "api/polled_run.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "api/guarded.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(10);

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};

/// A call on a thread of its own. (std::async would add its own symbols to the library's.)
class RunningCall {
 public:
  /// Throws std::system_error where no thread can be had.
  explicit RunningCall(const CancellableCall& call)
      : thread_([this, &call] {
          Status status = call(&cancel_);
          const std::lock_guard lock(mutex_);
          status_ = std::move(status);
          is_done_ = true;
          done_.notify_one();
        }) {}
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;
  /// Returns when the call has ended.
  ~RunningCall() { thread_.join(); }

  bool ends_within(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return done_.wait_for(lock, time, [this] { return is_done_; });
  }
  void cancel() { __atomic_store_n(&cancel_, 1, __ATOMIC_RELAXED); }
  /// Once the call has ended.
  const Status& status() const { return status_; }

 private:
  std::int32_t cancel_ = 0;
  std::mutex mutex_;  // guards is_done_ and status_
  std::condition_variable done_;
  bool is_done_ = false;
  Status status_;
  std::thread thread_;  // last: it uses the others
};

Status run_on_a_thread(const CancellableCall& call, const std::function<bool()>& stop) {
  RunningCall running(call);
  while (!running.ends_within(kPollInterval)) {
    if (!stop()) continue;
    running.cancel();
    return cancelled();  // also if the call was complete by then: stop() has been obeyed
  }
  return running.status();
}

}  // namespace

Status run_polled(const CancellableCall& call, const std::function<bool()>& stop) {
  try {
    return run_on_a_thread(call, stop);
  } catch (const std::system_error&) {  // there is no thread
    return call(nullptr);
  }
}

Status run_polled(const Plan& plan, const Tensors& tensors, const std::function<bool()>& stop) {
  const std::size_t blocks = (plan.workspace_bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment;
  const std::unique_ptr<void, Free> memory(
      std::aligned_alloc(kWorkspaceAlignment, blocks * kWorkspaceAlignment));
  if (memory == nullptr) return out_of_memory();
  const Workspace workspace{memory.get(), plan.workspace_bytes, plan.problem.device};
  FLASHCORE_RETURN_IF_ERROR(workspace_init(workspace));
  return run_polled(
      [&](const std::int32_t* cancel) { return run(plan, tensors, workspace, nullptr, cancel); },
      stop);
}

}  // namespace flashcore
