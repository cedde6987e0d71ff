// The planner: what holds for every plan. planner_<topic>_test.cc test its choices.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/devices.h"
#include "plan/kernel_traits.h"
#include "plan/planner.h"
#include "support/call.h"
#include "unit/plan/plan_for.h"
#include "verify/inputs/random.h"

namespace flashcore {
namespace {

/// Checks the invariants of every plan.
void expect_consistent(const Plan& plan) {
  const Problem& p = plan.problem;
  ASSERT_NE(plan.kernel, nullptr);
  EXPECT_EQ(supports(*plan.kernel, p, plan.device), Reject::none);
  ASSERT_GE(plan.splits, 1);
  EXPECT_EQ(plan.keys_per_split % plan.tile_k, 0);
  EXPECT_GE(plan.splits * plan.keys_per_split, p.kv_len);
  if (plan.splits > 1) {
    EXPECT_LT((plan.splits - 1) * plan.keys_per_split, p.kv_len) << "a split has no key";
  }
  const bool cpu = plan.kernel->device == DeviceType::cpu;
  const bool packs = traits_of(*plan.kernel).gqa_packing == GqaPacking::group;
  const std::int64_t rows = packs ? p.q_len * (p.q_heads / p.kv_heads) : p.q_len;
  const std::int64_t heads = packs ? p.kv_heads : p.q_heads;
  EXPECT_EQ(plan.num_tiles,
            p.batch * heads * ((rows + plan.tile_q - 1) / plan.tile_q) * plan.splits);

  // Workspace: header, scratch (CPU), partial out and partial lse (splits), without overlap.
  const std::size_t element = p.dtype == DType::f64 ? 8 : 4;
  std::size_t end = kWorkspaceHeaderBytes;
  if (cpu) {
    EXPECT_EQ(plan.scratch_offset % 256, 0u);
    EXPECT_EQ(plan.scratch_bytes_per_thread % 256, 0u);
    EXPECT_GE(plan.scratch_offset, end);
    end = plan.scratch_offset + plan.scratch_bytes_per_thread *
                                    static_cast<std::size_t>(std::max(plan.device.threads, 1));
  }
  if (plan.splits > 1) {
    const auto partial_rows = static_cast<std::size_t>(p.batch * p.q_heads * p.q_len * plan.splits);
    EXPECT_EQ(plan.partial_out_offset % 256, 0u);
    EXPECT_GE(plan.partial_out_offset, end);
    end = plan.partial_out_offset + partial_rows * static_cast<std::size_t>(p.v_dim) * element;
    EXPECT_EQ(plan.partial_lse_offset % 256, 0u);
    EXPECT_GE(plan.partial_lse_offset, end);
    end = plan.partial_lse_offset + partial_rows * element;
  }
  EXPECT_GE(plan.workspace_bytes, end);
  EXPECT_LT(plan.workspace_bytes, end + 256);
  EXPECT_EQ(plan.workspace_bytes % 256, 0u);
  EXPECT_EQ(workspace_bytes(plan), plan.workspace_bytes);
}

TEST(Planner, AnyPlanIsConsistent) {
  verify::Random random(4);
  for (const NamedDevice& device : named_devices()) {
    for (int n = 0; n < test::rounds(2000); ++n) {
      static constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};
      DType dtype = random.pick(kTypes);
      if (dtype == DType::f64 && device.info.device.type == DeviceType::cuda) dtype = DType::f32;
      const std::int64_t kv_heads = random.between(1, 8);
      Options options;
      options.num_splits =
          static_cast<std::int32_t>(random.chance(0.3) ? random.between(1, 40) : 0);
      options.causal = random.chance(0.5);
      if (options.num_splits <= 1 && random.chance(0.3)) {
        options.reproducibility = Reproducibility::batch_invariant;
      }
      const Result<Problem> problem =
          dense_problem(dtype, random.between(1, 70), kv_heads * random.between(1, 8), kv_heads,
                        random.between(1, 3000), random.between(0, 70000), random.between(1, 576),
                        random.between(1, 576), options, device.info.device);
      ASSERT_TRUE(problem.ok()) << problem.status().message();
      const Result<Plan> plan = make_plan(*problem, device.info);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      expect_consistent(*plan);
      if (HasFailure()) return;
    }
  }
}

TEST(Planner, NumSplitsIsRespectedIfThereAreEnoughTiles) {
  for (const char* device : {"h200", "cpu-neon", "cpu-avx512"}) {
    for (std::int32_t splits = 1; splits <= 12; ++splits) {
      Options options;
      options.num_splits = splits;
      const Result<Plan> plan = plan_for(device, DType::f16, 1, 2, 1, 12 * 1024, 64, 64, options);
      ASSERT_TRUE(plan.ok());
      EXPECT_LE(plan->splits, splits);
      if (splits == 1 || splits == 2 || splits == 4) {
        EXPECT_EQ(plan->splits, splits);
      }
    }
    Options many;
    many.num_splits = 1000;  // more than tiles: one tile per split
    const Result<Plan> plan = plan_for(device, DType::f16, 1, 2, 1, 1000, 64, 64, many);
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->splits, (1000 + plan->tile_k - 1) / plan->tile_k);
  }
}

TEST(Planner, ABatchInvariantPlanDependsOnTypesDimsAndOptionsOnly) {
  Options options;
  options.reproducibility = Reproducibility::batch_invariant;
  for (const NamedDevice& device : named_devices()) {
    for (const std::int64_t dim : {64, 100, 256, 576}) {
      const Result<Plan> first = plan_for(device.name, DType::f16, 1, 1, 1, 1, dim, dim, options);
      ASSERT_TRUE(first.ok());
      for (const std::int64_t batch : {1, 3, 256}) {
        for (const std::int64_t heads : {1, 32}) {
          for (const std::int64_t q_len : {1, 16, 17, 4096}) {
            for (const std::int64_t kv_len : {1, 500, 100000}) {
              const Result<Plan> plan =
                  plan_for(device.name, DType::f16, batch, heads, q_len, kv_len, dim, dim, options);
              ASSERT_TRUE(plan.ok());
              ASSERT_TRUE(round_alike(*plan->kernel, *first->kernel)) << device.name;
              ASSERT_EQ(plan->tile_k, first->tile_k);
              ASSERT_EQ(plan->splits, 1);
            }
          }
        }
      }
    }
  }
}

// A thread remembers its last plan.
TEST(Planner, APlanIsAlwaysOfTheGivenProblemAndDevice) {
  const DeviceInfo h200 = *named_device("h200");
  const Problem first = *dense_problem(DType::bf16, 2, 8, 4, 70, 4096, 128, 128, {}, h200.device);
  const auto expect_plan_of = [](const Problem& problem, const DeviceInfo& device) {
    const Plan plan = *make_plan(problem, device);
    EXPECT_TRUE(plan.problem == problem);
    EXPECT_EQ(plan.device.sm_count, device.sm_count);
    EXPECT_EQ(plan.device.compute_capability, device.compute_capability);
    EXPECT_EQ(plan.device.smem_per_block_bytes, device.smem_per_block_bytes);
    EXPECT_STREQ(plan.device.name, device.name);
    return plan.kernel;
  };
  std::vector<Problem> problems(6, first);
  problems[1].q_len = 4096;
  problems[2].options.causal = true;
  problems[3].k.row *= 2;
  problems[4].mask = {.dtype = DType::u8, .column = 1};
  problems[5].scale = 3;
  for (const Problem& problem : problems) {
    for (const char* name : {"h200", "a100", "h100", "l4"}) {
      const DeviceInfo device = *named_device(name);
      const KernelInfo* kernel = expect_plan_of(problem, device);
      EXPECT_EQ(expect_plan_of(problem, device), kernel);
      expect_plan_of(first, h200);
      EXPECT_EQ(expect_plan_of(problem, device), kernel);
    }
  }
  Problem forced = first;
  forced.options.kernel = "fwd_simt_bf16_d128_q64";
  ASSERT_NE(find_kernel(forced.options.kernel), nullptr);
  EXPECT_STREQ(make_plan(forced, h200)->kernel->id, forced.options.kernel);
  EXPECT_STREQ(make_plan(first, h200)->kernel->id, make_plan(problems[0], h200)->kernel->id);
}

TEST(Planner, EmptyProblemsHavePlans) {
  for (const char* device : {"h200", "cpu-neon"}) {
    for (int axis = 0; axis < 3; ++axis) {
      const Result<Plan> plan = plan_for(device, DType::f32, axis == 0 ? 0 : 2, 2,
                                         axis == 1 ? 0 : 5, axis == 2 ? 0 : 7, 16, 16);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      if (axis < 2) {
        EXPECT_EQ(plan->num_tiles, 0);
      }
      EXPECT_FALSE(explain(*plan).empty());
    }
  }
}

}  // namespace
}  // namespace flashcore
