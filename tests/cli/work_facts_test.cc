// The tile sequences of the CTAs of a persistent kernel, derived from a plan without a GPU.
#include "check/work_facts.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "check/check_suites.h"
#include "check/coverage.h"
#include "data/problem.h"
#include "plan/planner.h"
#include "verify/inputs/case_lengths.h"

namespace flashcore::verify {
namespace {

constexpr const char* kKernel = "fwd_sm90_f16_d64_q128";  // two warpgroups of 64 rows

Plan plan_of(const CaseSpec& spec, int blocks) {
  const DeviceInfo h200 = *named_device("h200");
  const Result<Problem> problem = tool::problem_of(spec, h200.device);
  EXPECT_TRUE(problem.ok()) << problem.status().message();
  const Result<Plan> plan = make_plan(*problem, tool::with_blocks(h200, blocks));
  EXPECT_TRUE(plan.ok()) << plan.status().message() << "\n" << to_string(spec);
  return *plan;
}

TensorView ints(const std::vector<std::int32_t>& values, bool given) {
  auto* data = const_cast<std::int32_t*>(values.data());
  return given ? view(data, DType::i32, {static_cast<std::int64_t>(values.size())}) : TensorView{};
}

WorkFacts facts_of(const CaseSpec& spec, int blocks, const CaseLengths& lengths) {
  Tensors t;
  t.cu_seqlens_q = ints(lengths.q_ends, spec.q_varlen);
  t.cu_seqlens_k = ints(lengths.k_ends, spec.kv_varlen);
  t.seqused_k = ints(lengths.used_k, spec.used_k);
  t.q_start = ints(lengths.q_start, spec.q_start);
  t.k_start = ints(lengths.k_start, spec.k_start);
  return work_facts(plan_of(spec, blocks), t);
}

WorkFacts facts_of(const CaseSpec& spec, int blocks) {
  return facts_of(spec, blocks, draw_lengths(spec));
}

CaseSpec spec_of(std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                 std::int64_t q_len, std::int64_t kv_len, const char* kernel = kKernel) {
  CaseSpec spec;
  spec.dtype = DType::f16;
  spec.batch = batch;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.q_len = q_len;
  spec.kv_len = kv_len;
  spec.options.causal = true;
  spec.options.kernel = kernel;
  return spec;
}

/// One query tile per sequence, with the given numbers of keys in use.
WorkFacts facts_of_used(std::vector<std::int64_t> used) {
  CaseSpec spec = spec_of(static_cast<std::int64_t>(used.size()), 1, 1, 128, 64);
  spec.used_k = true;
  spec.used_lengths = std::move(used);
  return facts_of(spec, 1);
}

TEST(WorkFacts, FarMoreQueriesThanKeys) {
  const WorkFacts one = facts_of(spec_of(7, 7, 1, 1025, 63), 1);
  EXPECT_TRUE(one.three_tiles && one.keyless_between && one.three_keyless && one.idle_warpgroup);
  CaseSpec visible = spec_of(7, 7, 1, 1025, 63);
  visible.options.causal = false;
  const WorkFacts all_see = facts_of(visible, 1);
  EXPECT_TRUE(all_see.three_tiles);
  EXPECT_FALSE(all_see.keyless_between || all_see.three_keyless || all_see.idle_warpgroup);
  // A single head has its tiles with keys first, so no tile with keys follows.
  const WorkFacts head = facts_of(spec_of(1, 1, 1, 1025, 63), 1);
  EXPECT_TRUE(head.three_keyless);
  EXPECT_FALSE(head.keyless_between);
}

TEST(WorkFacts, SequencesAreKnownForOneCtaOnly) {
  const WorkFacts two = facts_of(spec_of(7, 7, 1, 1025, 63), 2);
  EXPECT_TRUE(two.three_tiles && two.idle_warpgroup);
  EXPECT_FALSE(two.keyless_between || two.three_keyless);
}

TEST(WorkFacts, ThreeTilesNeedMoreThanTwoPerCta) {
  EXPECT_FALSE(facts_of(spec_of(1, 1, 1, 2 * 128, 64), 1).three_tiles);
  EXPECT_TRUE(facts_of(spec_of(1, 1, 1, 2 * 128 + 1, 64), 1).three_tiles);
  EXPECT_FALSE(facts_of(spec_of(1, 1, 1, 4 * 128, 64), 2).three_tiles);
  EXPECT_TRUE(facts_of(spec_of(1, 1, 1, 4 * 128 + 1, 64), 2).three_tiles);
  EXPECT_FALSE(facts_of(spec_of(1, 1, 1, 4 * 128 + 1, 64), 0).three_tiles);  // all SMs
}

TEST(WorkFacts, TilesWithoutQueriesDoNotCount) {
  CaseSpec spec = spec_of(3, 1, 1, 256, 64);
  spec.q_varlen = true;
  CaseLengths lengths = draw_lengths(spec);
  lengths.q_ends = {0, 256, 256, 256};
  EXPECT_FALSE(facts_of(spec, 1, lengths).three_tiles);
  lengths.q_ends = {0, 256, 256, 257};
  EXPECT_TRUE(facts_of(spec, 1, lengths).three_tiles);
}

TEST(WorkFacts, OrderOfKeylessTilesMatters) {
  const WorkFacts between = facts_of_used({64, 0, 64});
  EXPECT_TRUE(between.keyless_between);
  EXPECT_FALSE(between.three_keyless);
  const WorkFacts after = facts_of_used({64, 0, 0, 0});
  EXPECT_TRUE(after.three_keyless);
  EXPECT_FALSE(after.keyless_between);
  const WorkFacts before = facts_of_used({0, 0, 0, 64});
  EXPECT_FALSE(before.three_keyless || before.keyless_between);
  EXPECT_FALSE(facts_of_used({64, 0, 0, 64, 0}).three_keyless);
}

TEST(WorkFacts, WarpgroupWithoutKeys) {
  EXPECT_TRUE(facts_of(spec_of(1, 1, 1, 128, 64), 1).idle_warpgroup);   // rows 0 to 63 see none
  EXPECT_FALSE(facts_of(spec_of(1, 1, 1, 128, 65), 1).idle_warpgroup);  // row 63 sees one
  EXPECT_FALSE(facts_of(spec_of(1, 1, 1, 64, 32), 1).idle_warpgroup);   // one warpgroup has rows
  // PackGQA, four heads in a tile: a warpgroup has 16 queries of each.
  constexpr const char* kPacksGqa = "fwd_sm90_f16_d128_k160";
  EXPECT_TRUE(facts_of(spec_of(1, 4, 1, 32, 16, kPacksGqa), 1).idle_warpgroup);
  EXPECT_FALSE(facts_of(spec_of(1, 4, 1, 32, 17, kPacksGqa), 1).idle_warpgroup);
}

TEST(WorkFacts, EmptyForOtherKernels) {
  const WorkFacts facts = facts_of(spec_of(7, 7, 1, 1025, 63, "fwd_sm80_f16_d64_q128"), 1);
  EXPECT_FALSE(facts.three_tiles || facts.keyless_between || facts.three_keyless ||
               facts.idle_warpgroup);
}

TEST(WorkFacts, CoverageRequiresThemForPersistentKernelsOnly) {
  EXPECT_EQ(Coverage({find_kernel("fwd_generic_f32"), find_kernel("fwd_sm80_f16_d64_q128")})
                .work_lists()
                .possible,
            0u);
  EXPECT_EQ(Coverage({find_kernel("fwd_sm90_f16_d64_q64")}).work_lists().possible, 3u);
  Coverage coverage({find_kernel(kKernel)});
  EXPECT_EQ(coverage.work_lists().possible, 4u);
  const CaseSpec spec = spec_of(1, 1, 1, 1025, 63);
  coverage.add(spec, plan_of(spec, 1), facts_of(spec, 1));
  ASSERT_EQ(coverage.work_lists().missing.size(), 1u);
  EXPECT_EQ(coverage.work_lists().missing.front(),
            std::string(kKernel).append(" tiles without keys between tiles with keys"));
}

TEST(WorkFacts, RandomProblemsCoverAll) {
  const tool::CheckArgs args;
  std::vector<const KernelInfo*> persistent;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == Operation::fwd && is_persistent(kernel)) persistent.push_back(&kernel);
  }
  Coverage coverage(persistent);
  for (const KernelInfo* kernel : persistent) {
    for (std::uint64_t i = 0; i < 200; ++i) {
      const CaseSpec spec = random_case(*kernel, 1, i);
      if (spec.kv_len == 0) continue;  // no strides without keys
      const int blocks = tool::blocks_of(args, i, true);
      coverage.add(spec, plan_of(spec, blocks), facts_of(spec, blocks));
    }
  }
  EXPECT_GT(coverage.work_lists().possible, 100u);
  EXPECT_EQ(coverage.work_lists().missing, std::vector<std::string>{});
}

}  // namespace
}  // namespace flashcore::verify
