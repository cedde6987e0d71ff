// cpu/thread_pool.h: parallel_for() runs every item exactly once, for any caller and thread count.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "support/call.h"

// One test starts threads in a forked child; die_after_fork=0 allows that.
// NOLINTNEXTLINE(bugprone-reserved-identifier): ThreadSanitizer looks for this name.
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

namespace flashcore::cpu {
namespace {

/// Counts the runs of each item, and records the largest slot.
struct Counts {
  explicit Counts(std::int64_t count_of_items) : items(static_cast<std::size_t>(count_of_items)) {}
  std::vector<std::atomic<int>> items;
  std::atomic<int> largest_slot{-1};

  static void count(void* context, std::int64_t item, int slot) {
    auto& self = *static_cast<Counts*>(context);
    ++self.items[static_cast<std::size_t>(item)];
    int seen = self.largest_slot.load();
    while (slot > seen && !self.largest_slot.compare_exchange_weak(seen, slot)) {
    }
  }
  bool each_once() const {
    for (const auto& n : items) {
      if (n.load() != 1) return false;
    }
    return true;
  }
};

TEST(ThreadPool, RunsEveryItemOnce) {
  for (int round = 0; round < test::rounds(200); ++round) {
    for (const int threads : {1, 2, 3, 8}) {
      for (const std::int64_t items : {0, 1, 2, 7, 64, 1000}) {
        Counts counts(items);
        parallel_for(threads, items, Counts::count, &counts);
        ASSERT_TRUE(counts.each_once()) << threads << " threads, " << items << " items";
        ASSERT_LT(counts.largest_slot.load(), threads);
      }
    }
  }
}

TEST(ThreadPool, ThreadsAreLimitedToItems) {
  Counts counts(3);
  parallel_for(50, 3, Counts::count, &counts);
  EXPECT_TRUE(counts.each_once());
  EXPECT_LT(counts.largest_slot.load(), 3);
}

TEST(ThreadPool, ZeroThreadsUseTheCaller) {
  for (const int threads : {0, -5}) {
    Counts counts(10);
    parallel_for(threads, 10, Counts::count, &counts);
    EXPECT_TRUE(counts.each_once());
    EXPECT_EQ(counts.largest_slot.load(), 0);
  }
}

TEST(ThreadPool, SlotBelongsToOneThreadAtATime) {
  struct Slots {
    std::atomic<int> users[8] = {};
    std::atomic<int> clashes{0};
  } slots;
  for (int round = 0; round < test::rounds(100); ++round) {
    parallel_for(
        8, 200,
        [](void* context, std::int64_t, int slot) {
          auto& s = *static_cast<Slots*>(context);
          if (s.users[slot].fetch_add(1) != 0) ++s.clashes;
          std::this_thread::yield();
          s.users[slot].fetch_sub(1);
        },
        &slots);
  }
  EXPECT_EQ(slots.clashes.load(), 0);
}

/// Runs two items that wait for each other, so they can end only on two threads. Returns the number
/// of items that ran.
int meet_on_two_threads() {
  std::atomic<int> arrived{0};
  parallel_for(
      2, 2,
      [](void* context, std::int64_t, int) {
        auto& count = *static_cast<std::atomic<int>*>(context);
        ++count;
        while (count.load() < 2) std::this_thread::yield();
      },
      &arrived);
  return arrived.load();
}

TEST(ThreadPool, SeveralThreadsRunItems) { EXPECT_EQ(meet_on_two_threads(), 2); }

TEST(ThreadPool, NestedCallsRunEveryItemOnce) {
  Counts inner(4 * 100);
  parallel_for(
      4, 4,
      [](void* context, std::int64_t outer_item, int) {
        struct Part {
          Counts* counts;
          std::int64_t first;
        } part{static_cast<Counts*>(context), outer_item * 100};
        parallel_for(
            4, 100,
            [](void* nested, std::int64_t item, int slot) {
              const Part& p = *static_cast<Part*>(nested);
              Counts::count(p.counts, p.first + item, slot);
            },
            &part);
      },
      &inner);
  EXPECT_TRUE(inner.each_once());
}

TEST(ThreadPool, ConcurrentCallersRunEveryItemOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> failures{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&failures] {
      for (int round = 0; round < test::rounds(300); ++round) {
        Counts counts(100);
        parallel_for(3, 100, Counts::count, &counts);
        if (!counts.each_once()) ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failures.load(), 0);
}

TEST(ThreadPool, WorksBackToBackAndAfterSleep) {
  for (int round = 0; round < test::rounds(2000); ++round) {
    Counts counts(5);
    parallel_for(4, 5, Counts::count, &counts);
    ASSERT_TRUE(counts.each_once());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the workers have gone to sleep
  Counts counts(50);
  parallel_for(4, 50, Counts::count, &counts);
  EXPECT_TRUE(counts.each_once());
}

TEST(ThreadPool, ForkedChildStartsItsOwnWorkers) {
  Counts before(10);
  parallel_for(4, 10, Counts::count, &before);  // the parent's pool exists
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends a child that waits for workers of its parent
    bool good = true;
    for (int round = 0; round < 20; ++round) {
      Counts counts(100);
      parallel_for(4, 100, Counts::count, &counts);
      good = good && counts.each_once();
    }
    meet_on_two_threads();
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  Counts after(100);
  parallel_for(4, 100, Counts::count, &after);
  EXPECT_TRUE(after.each_once());
}

}  // namespace
}  // namespace flashcore::cpu
