// The thread pool on a machine without free threads: the existing threads do the work. This program
// replaces pthread_create with one that fails on demand, as at a process limit.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <vector>

#include "cpu/thread_pool.h"
#include "support/draw.h"

namespace {

std::atomic<int> g_threads_left{1 << 20};
std::atomic<int> g_refused{0};

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (g_threads_left.fetch_sub(1) <= 0) {
    ++g_refused;
    return EAGAIN;
  }
  return real(thread, attributes, start, argument);
}

namespace flashcore {
namespace {

void expect_each_once(int threads) {
  std::vector<std::atomic<int>> counts(500);
  cpu::parallel_for(
      threads, 500,
      [](void* context, std::int64_t item, int) {
        ++(*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<std::size_t>(item)];
      },
      &counts);
  for (const auto& count : counts) ASSERT_EQ(count.load(), 1);
}

// One test, because the process has one pool and its number of workers grows from step to step.
TEST(ThreadStart, WorksWithRefusedThreads) {
  g_threads_left = 0;
  expect_each_once(6);
  EXPECT_GT(g_refused.load(), 0) << "the replacement of pthread_create was never called";

  // A call of the library gives the same bits with no worker, some workers and all workers.
  verify::Random random(1);
  test::Inputs inputs = test::draw_inputs(random, *test::runnable_kernels().front(),
                                          {.batch = 2,
                                           .q_heads = 4,
                                           .kv_heads = 2,
                                           .q_len = 100,
                                           .kv_len = 300,
                                           .head_dim = 32,
                                           .v_dim = 32});
  g_threads_left = 0;
  const test::Output alone = test::attend(inputs, {.threads = 6});
  ASSERT_TRUE(alone.status.ok()) << alone.status.message();
  EXPECT_EQ(test::verdict(inputs, alone), "");

  g_threads_left = 2;
  g_refused = 0;
  expect_each_once(6);
  EXPECT_GT(g_refused.load(), 0);
  const test::Output some = test::attend(inputs, {.threads = 6});
  FLASHCORE_EXPECT_SAME(some, alone);

  g_threads_left = 1 << 20;
  expect_each_once(6);
  const test::Output all = test::attend(inputs, {.threads = 6});
  FLASHCORE_EXPECT_SAME(all, alone);
}

}  // namespace
}  // namespace flashcore
