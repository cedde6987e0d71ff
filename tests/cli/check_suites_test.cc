// The problems of `flashcore check`: their contents, CTA limits and replay commands.
#include "check/check_suites.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "check/work_facts.h"
#include "data/problem.h"
#include "plan/planner.h"

namespace flashcore::tool {
namespace {

constexpr const char* kHopper = "fwd_sm90_bf16_d128_k160";

std::vector<RunnableKernel> kernels_named(const std::vector<const char*>& ids) {
  std::vector<RunnableKernel> list;
  for (const char* id : ids) list.push_back({find_kernel(id), 0});
  return list;
}

CheckArgs args_with(std::vector<int> blocks) {
  CheckArgs args;
  args.program = "flashcore";
  args.blocks = std::move(blocks);
  return args;
}

TEST(CheckBlocks, EveryKernelDrawsEveryEntry) {
  const CheckArgs args = args_with({1, 2, 3, 7});
  const auto kernels = kernels_named({kHopper, "fwd_sm90_f16_d64_q64", "fwd_sm80_f16_d64_q128",
                                      "fwd_sm90_f16_d256_k64"});  // as many kernels as entries
  const CheckSuite suite = random_suite(args, kernels);
  std::map<std::string, std::set<int>> drawn;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const CheckProblem problem = suite.problem(i);
    drawn[problem.spec.options.kernel].insert(problem.blocks);
  }
  EXPECT_EQ(drawn.size(), 4u);
  for (const auto& [kernel, blocks] : drawn)
    EXPECT_EQ(blocks, (std::set<int>{1, 2, 3, 7})) << kernel;
}

TEST(CheckBlocks, DefaultLimitsPersistentKernelsOnly) {
  const CheckArgs args = args_with({});
  const CheckSuite suite = random_suite(args, kernels_named({kHopper, "fwd_sm80_f16_d64_q128"}));
  std::set<int> persistent, other;
  for (std::uint64_t i = 0; i < 200; ++i) {
    (i % 2 == 0 ? persistent : other).insert(suite.problem(i).blocks);
  }
  EXPECT_EQ(persistent, (std::set<int>{0, 1, 2, 3, 7}));
  EXPECT_EQ(other, std::set<int>{0});
}

TEST(CheckBlocks, ReplayRepeatsTheProblem) {
  const CheckArgs args = args_with({1, 2, 3, 7});
  const CheckSuite all = random_suite(args, kernels_named({"fwd_sm90_f16_d64_q64", kHopper}));
  const CheckSuite alone = random_suite(args, kernels_named({kHopper}));
  std::set<int> drawn;
  for (std::uint64_t i = 1; i < 41; i += 2) {
    const CheckProblem first = all.problem(i), again = alone.problem(i);
    EXPECT_EQ(verify::to_string(first.spec), verify::to_string(again.spec));
    EXPECT_EQ(first.spec.seed, again.spec.seed);
    EXPECT_EQ(first.blocks, again.blocks);
    drawn.insert(first.blocks);
    EXPECT_EQ(all.replay(i, first), "flashcore check --kernel '^" + std::string(kHopper) +
                                        "$' --seed 1 --blocks 1,2,3,7 --index " +
                                        std::to_string(i));
  }
  EXPECT_EQ(drawn.size(), 4u);
  CheckArgs other = args;
  other.control.seed = 2;
  int different = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    different += blocks_of(args, i, true) != blocks_of(other, i, true);
  }
  EXPECT_GT(different, 0);
}

TEST(CheckBlocks, ApplyToListSuites) {
  const CheckArgs args = args_with({2}), unlimited = args_with({});
  EXPECT_EQ(tuning_suite(args, kernels_named({kHopper})).problem(0).blocks, 2);
  EXPECT_EQ(tuning_suite(unlimited, kernels_named({kHopper})).problem(0).blocks, 0);
}

TEST(CheckBlocks, NeverRaiseTheSmCount) {
  const DeviceInfo h200 = *named_device("h200");
  EXPECT_EQ(with_blocks(h200, 3).sm_count, 3);
  EXPECT_EQ(with_blocks(h200, 0).sm_count, h200.sm_count);
  EXPECT_EQ(with_blocks(h200, 1000).sm_count, h200.sm_count);
}

/// On one CTA of a Hopper kernel, three tiles without keys follow one with keys: the sequence that
/// can deadlock the tile queue.
TEST(KeylessTiles, HaveThreeKeylessTilesInARow) {
  const CheckArgs args = args_with({});
  DeviceArgs cpu;
  cpu.device = "cpu";
  const CheckSuite suite = keyless_tiles_suite(args, {find_target(cpu)});
  int problems = 0, keyless = 0;
  for (std::uint64_t i = 0; i < suite.count; ++i) {
    verify::CaseSpec spec = suite.problem(i).spec;
    if (spec.dtype != DType::bf16 || spec.k_storage != DType::none) continue;
    ++problems;
    const DeviceInfo h200 = *named_device("h200");
    spec.options.kernel = spec.head_dim > 128 ? "fwd_sm90_bf16_d256_k64" : kHopper;
    const Plan plan = *make_plan(*problem_of(spec, h200.device), with_blocks(h200, 1));
    EXPECT_GT(plan.num_tiles, 2 * h200.sm_count) << verify::to_string(spec);
    std::vector<std::int32_t> used(spec.used_lengths.begin(), spec.used_lengths.end());
    Tensors tensors;
    if (spec.used_k) tensors.seqused_k = view(used.data(), DType::i32, {spec.batch});
    keyless += verify::work_facts(plan, tensors).three_keyless;
  }
  EXPECT_EQ(problems, 11);
  EXPECT_EQ(keyless, 10);  // in one problem every query sees keys
}

}  // namespace
}  // namespace flashcore::tool
