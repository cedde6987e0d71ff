// Every scheme on threads, forward and backward, against the oracle under the bounds of
// docs/numerics.md. Bytes of each step and rank are those of the model.
#include <gtest/gtest.h>

#include "flashcore/distributed_c.h"
#include "unit/distributed/ranks.h"

namespace flashcore::test {
namespace {

const Case kCases[] = {
    {"full", {24}},
    {"causal, grouped", {29}, 4, 2, {.causal = true}},
    {"twelve heads", {29}, 12, 12, {.causal = true, .scale = 0.4, .softcap = 3.0}, 0, true},
    {"zigzag of few rows", {5}, 4, 1, {.causal = true}, 0, true},
    {"uneven and empty", {7, 0, 16}, 4, 2, {.causal = true, .scale = 0.4, .softcap = 3.0}, 0, true},
    {"one rank has all rows", {0, 19}, 2, 2, {.causal = true}},
    {"fewer rows than ranks", {1, 0, 0}, 12, 12, {.causal = true}, 0, true},
    {"window", {40}, 4, 2, {.causal = true, .window_left = 5}, 0, true},
    {"both sides", {9, 20}, 4, 1, {.window_left = 4, .window_right = 3}},
    {"more keys", {11}, 12, 12, {.causal = true}, 12},
    {"rows without keys", {21}, 4, 2, {.causal = true}, -12, true},
    {"no dlse", {17}, 4, 2, {.causal = true}, 0, false, false},
    {"large scores", {30}, 2, 1, {.causal = true, .scale = 30.0}},
    {"documents", {31}, 4, 2, {.causal = true}, 0, true, true, DType::f32, {0, 9, 9, 20}},
    {"documents, uneven and empty shards",
     {7, 0, 16, 5},
     4,
     4,
     {.causal = true},
     0,
     true,
     true,
     DType::f32,
     {0, 3, 3, 12, 20, 24}},
    {"documents, window, contiguous",
     {9, 12},
     4,
     2,
     {.causal = true, .window_left = 4},
     0,
     false,
     true,
     DType::f32,
     {0, 2, 17}},
    {"bf16", {33}, 12, 12, {.causal = true}, 0, true, true, DType::bf16},
    {"bf16, grouped", {33}, 4, 2, {.causal = true}, 0, true, true, DType::bf16},
    {"f16 documents",
     {40},
     4,
     4,
     {.window_left = 6, .window_right = 0},
     0,
     false,
     true,
     DType::f16,
     {0, 3, 22}},
};
const Case& case_of(const char* name) {
  return *std::find_if(std::begin(kCases), std::end(kCases),
                       [&](const Case& c) { return std::string(c.name) == name; });
}

class DistributedThreads : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DistributedThreads, testing::Values(1, 2, 3, 4));

TEST_P(DistributedThreads, EverySchemeIsWithinTheBounds) {
  for (const Case& c : kCases) {
    for (const Scheme scheme :
         {Scheme::automatic, Scheme::ring, Scheme::gather, Scheme::ulysses, Scheme::halo}) {
      SCOPED_TRACE(std::string(c.name) + ", " + to_string(scheme));
      Ranks ranks(c, GetParam(), {.scheme = scheme});
      if (ranks.possible()) ranks.check();
      if (HasFailure()) return;
    }
  }
}

TEST(DistributedThreads2d, TwoByTwo) {
  for (const char* name : {"full", "causal, grouped", "twelve heads", "more keys", "documents",
                           "documents, uneven and empty shards", "bf16", "rows without keys"}) {
    SCOPED_TRACE(name);
    Ranks(case_of(name), 4, {.scheme = Scheme::two_d, .ranks_per_node = 2, .head_ranks = 2})
        .check();
  }
}

TEST(DistributedThreads2d, RanksThatShareAKvHead) {
  for (const char* name : {"causal, grouped", "bf16, grouped", "documents"}) {
    SCOPED_TRACE(name);
    Ranks(case_of(name), 4, {.scheme = Scheme::ulysses}).check();
  }
}

TEST(DistributedThreadsC, ThroughTheCAbi) {
  for (const char* name : {"one rank has all rows", "large scores", "documents"}) {
    SCOPED_TRACE(name);
    Ranks ranks(case_of(name), 2, {.scheme = Scheme::ring});
    ranks.in_c = true;
    ranks.check();
  }
}

TEST(DistributedThreadsC, TheWorkspaceIsThatOfCpp) {
  flashcore_distributed_problem p{};
  p.struct_size = sizeof p;
  p.ranks = 4, p.ranks_per_node = 8;
  p.dtype = {FLASHCORE_BFLOAT, 16, 1};
  p.batch = 1, p.q_heads = p.kv_heads = 8, p.head_dim = p.v_dim = 64;
  p.window_left = p.window_right = -1;
  p.length = 100;
  DistributedProblem same;
  same.q_heads = same.kv_heads = 8, same.head_dim = same.v_dim = 64;
  same.q_rows = same.k_rows = distributed_rows(100, 4, Sharding::zigzag);
  std::size_t bytes = 0;
  flashcore_error error{};
  const flashcore_device cpu = {FLASHCORE_CPU, 0};
  ASSERT_EQ(flashcore_distributed_backward_workspace(&p, 1, cpu, &bytes, &error), FLASHCORE_OK)
      << error.message;
  EXPECT_EQ(bytes, *distributed_backward_workspace(same, 1));
  EXPECT_EQ(flashcore_distributed_backward_workspace(&p, 4, cpu, &bytes, &error),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "rank is 4; wanted 0 to 3");
  same.dtype = DType::f64;
  EXPECT_EQ(distributed_backward_workspace(same, 1).status().message(),
            "dtype is f64; wanted f32, f16 or bf16");
}

TEST(DistributedThreadsSteps, ADifferenceIsFound) {
  const std::vector<SentBytes> steps = {{"a", 10}, {"b", 0}, {"c", 6}};
  EXPECT_EQ(step_difference(steps, {10, 0, 2, 4}), "");
  EXPECT_EQ(step_difference(steps, {4, 6, 6, 0}), "");
  EXPECT_EQ(step_difference(steps, {6, 10}), "a: 16 bytes were sent; the model says 10");
  EXPECT_EQ(step_difference(steps, {10}), "c: 0 bytes were sent; the model says 6");
  EXPECT_EQ(step_difference(steps, {10, 6, 1}), "1 bytes in no step");
}

}  // namespace
}  // namespace flashcore::test
