// Coverage counts the problems that ran, and names the missing ones.
#include "check/coverage.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "data/problem.h"

namespace flashcore::verify {
namespace {

const KernelInfo& kernel_named(const char* id) { return *find_kernel(id); }

Plan plan_of(CaseSpec spec, const char* kernel, const char* device) {
  spec.options.kernel = kernel;
  const Result<DeviceInfo> info = named_device(device);
  const Result<Problem> problem = tool::problem_of(spec, info->device);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  const Result<Plan> plan = make_plan(*problem, *info);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return *plan;
}

bool misses(const Covered& covered, const std::string& name) {
  return std::find(covered.missing.begin(), covered.missing.end(), name) != covered.missing.end();
}

TEST(Coverage, StartsWithNothing) {
  const Coverage coverage({&kernel_named("fwd_generic_f32"), &kernel_named("fwd_generic_f16")});
  EXPECT_EQ(coverage.fewest_per_kernel(), 0);
  for (const Covered& c : {coverage.options(), coverage.option_pairs(), coverage.tile_edges()}) {
    EXPECT_EQ(c.covered, 0u);
    EXPECT_GT(c.possible, 0u);
    EXPECT_EQ(c.missing.size(), c.possible);
  }
}

TEST(Coverage, CountsOptionsAndPairs) {
  Coverage coverage({&kernel_named("fwd_generic_f16")});
  CaseSpec spec;
  spec.dtype = DType::f16;
  spec.options.causal = true;
  spec.sinks = true;
  coverage.add(spec, plan_of(spec, "fwd_generic_f16", "cpu-generic"));
  EXPECT_EQ(coverage.fewest_per_kernel(), 1);
  EXPECT_EQ(coverage.options().covered, 2u);
  EXPECT_EQ(coverage.option_pairs().covered, 1u);
  EXPECT_FALSE(misses(coverage.option_pairs(), "causal+sinks"));
  EXPECT_TRUE(misses(coverage.option_pairs(), "causal+softcap"));
}

TEST(Coverage, ExcludesIncompatiblePairs) {
  const Coverage narrow({&kernel_named("fwd_generic_f16")}),
      f32({&kernel_named("fwd_generic_f32")});
  EXPECT_FALSE(misses(narrow.option_pairs(), "alibi+alibi_per_batch"));
  EXPECT_FALSE(misses(narrow.option_pairs(), "batch_invariant+splits"));
  EXPECT_FALSE(misses(narrow.option_pairs(), "out_f32+partial"));
  EXPECT_TRUE(misses(narrow.options(), "out_f32"));
  EXPECT_FALSE(misses(f32.options(), "out_f32"));
}

TEST(Coverage, CountsSplitsOfThePlan) {
  Coverage coverage({&kernel_named("fwd_generic_f32")});
  CaseSpec spec;
  spec.options.num_splits = 2;
  spec.kv_len = 8;  // one tile: nothing to split
  coverage.add(spec, plan_of(spec, "fwd_generic_f32", "cpu-generic"));
  EXPECT_TRUE(misses(coverage.options(), "splits"));
  spec.kv_len = 1000;
  coverage.add(spec, plan_of(spec, "fwd_generic_f32", "cpu-generic"));
  EXPECT_FALSE(misses(coverage.options(), "splits"));
}

TEST(Coverage, TileEdges) {
  Coverage coverage({&kernel_named("fwd_simt_f16_d64_q64")});
  EXPECT_EQ(coverage.tile_edges().possible, 6u);
  const auto add = [&](std::int64_t q_len, std::int64_t kv_len, bool used_k) {
    CaseSpec spec;
    spec.dtype = DType::f16;
    spec.q_len = q_len;
    spec.kv_len = kv_len;
    spec.used_k = used_k;
    coverage.add(spec, plan_of(spec, "fwd_simt_f16_d64_q64", "h200"));
  };
  add(1, 2, false);  // one row is not "one more than a tile"
  EXPECT_EQ(coverage.tile_edges().covered, 0u);
  add(63, 65, false);
  EXPECT_FALSE(misses(coverage.tile_edges(), "fwd_simt_f16_d64_q64 rows 64n-1"));
  EXPECT_FALSE(misses(coverage.tile_edges(), "fwd_simt_f16_d64_q64 keys 64n+1"));
  add(128, 128, true);  // fewer keys are in use, and their number is unknown
  EXPECT_FALSE(misses(coverage.tile_edges(), "fwd_simt_f16_d64_q64 rows 64n"));
  EXPECT_TRUE(misses(coverage.tile_edges(), "fwd_simt_f16_d64_q64 keys 64n"));
  EXPECT_EQ(coverage.tile_edges().covered, 3u);
}

TEST(Coverage, CpuTilesPackTheHeadsOfAGroup) {
  Coverage coverage({&kernel_named("fwd_generic_f32")});
  CaseSpec spec;
  spec.q_heads = 4;  // on one KV head: 4 rows per query
  spec.q_len = 16;
  coverage.add(spec, plan_of(spec, "fwd_generic_f32", "cpu-generic"));
  EXPECT_FALSE(misses(coverage.tile_edges(), "fwd_generic_f32 rows 64n"));
}

}  // namespace
}  // namespace flashcore::verify
