#include "cpu/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "core/cancel.h"

namespace flashcore::cpu {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);

struct Job {
  TaskFunction task = nullptr;
  void* context = nullptr;
  std::int64_t count = 0;
  int threads = 0;  // slots 1 … threads - 1 belong to workers
  const std::int32_t* cancel = nullptr;
};

void run_all_tasks(const Job& job) noexcept {
  for (std::int64_t index = 0; index < job.count && !core::is_set(job.cancel); ++index) {
    job.task(job.context, index, 0);
  }
}

class ThreadPool {
 public:
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(const Job& requested) noexcept {
    Job job = requested;
    bool idle = false;
    if (job.threads <= 1 || !busy_.compare_exchange_strong(idle, true)) {
      return run_all_tasks(job);
    }
    {
      const std::lock_guard lock(mutex_);
      grow(job.threads - 1);
      job.threads = std::min(job.threads, static_cast<int>(workers_.size()) + 1);
      job_ = job;
      next_.store(0, std::memory_order_relaxed);
      unfinished_.store(job.threads - 1, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    run_tasks(job, 0);
    wait_until([this] { return unfinished_.load(std::memory_order_acquire) == 0; }, finished_);
    busy_.store(false);
  }

 private:
  void grow(int wanted) noexcept {
    try {
      while (static_cast<int>(workers_.size()) < wanted) {
        const int slot = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, slot, seen = epoch_.load()] { work(slot, seen); });
      }
    } catch (...) {
      // Out of threads or memory: the existing threads do all the work.
    }
  }

  void run_tasks(const Job& job, int slot) noexcept {
    for (;;) {
      const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= job.count || core::is_set(job.cancel)) return;
      job.task(job.context, index, slot);
    }
  }

  /// Spins for a while, then sleeps on `condition` until `done` holds.
  template <typename Done>
  void wait_until(Done done, std::condition_variable& condition) noexcept {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    while (!done()) {
      if (std::chrono::steady_clock::now() < deadline) continue;
      std::unique_lock lock(mutex_);
      condition.wait(lock, done);
    }
  }

  void work(int slot, std::uint64_t seen) noexcept {
    for (;;) {
      wait_until([&] { return epoch_.load(std::memory_order_acquire) != seen; }, wake_);
      Job job;
      {
        const std::lock_guard lock(mutex_);
        seen = epoch_.load(std::memory_order_relaxed);
        if (stopping_) return;
        job = job_;
      }
      if (slot >= job.threads) continue;
      run_tasks(job, slot);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        // With the mutex, the caller is not between its check and its sleep: no lost wake-up.
        const std::lock_guard lock(mutex_);
        finished_.notify_one();
      }
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> unfinished_{0};
  std::atomic<std::uint64_t> epoch_{0};
  std::mutex mutex_;  // guards job_, workers_, stopping_ and the condition variables
  std::condition_variable wake_, finished_;
  Job job_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

// The first call with more than one thread creates the pool; its threads are joined at exit. A
// forked child has no copies of these threads, so it drops the pool without destroying it.
std::atomic<ThreadPool*> g_pool{nullptr};
std::mutex g_pool_mutex;

struct PoolOwner {
  ~PoolOwner() { delete g_pool.exchange(nullptr); }
} g_pool_owner;

ThreadPool* pool() noexcept {
  if (ThreadPool* existing = g_pool.load(std::memory_order_acquire)) return existing;
  const std::lock_guard lock(g_pool_mutex);
  if (ThreadPool* existing = g_pool.load(std::memory_order_acquire)) return existing;
  static const int registered =
      pthread_atfork([] { g_pool_mutex.lock(); }, [] { g_pool_mutex.unlock(); },
                     [] {
                       g_pool.store(nullptr);
                       g_pool_mutex.unlock();
                     });
  static_cast<void>(registered);
  ThreadPool* created = new (std::nothrow) ThreadPool;
  g_pool.store(created, std::memory_order_release);
  return created;
}

}  // namespace

void parallel_for(int threads, std::int64_t count, TaskFunction task, void* context,
                  const std::int32_t* cancel) noexcept {
  const Job job{task, context, count, static_cast<int>(std::min<std::int64_t>(threads, count)),
                cancel};
  ThreadPool* shared = job.threads > 1 ? pool() : nullptr;
  shared != nullptr ? shared->run(job) : run_all_tasks(job);
}

}  // namespace flashcore::cpu
