// The planner on Hopper: what its own kernels run, and their keys per tile.
#include <gtest/gtest.h>

#include <string>

#include "plan/devices.h"
#include "plan/kernel_traits.h"
#include "plan/planner.h"
#include "support/call.h"
#include "unit/plan/plan_for.h"

namespace flashcore {
namespace {

// sm80 kernels run the problems that sm90 kernels reject, and explain() gives the reason.
TEST(Planner, Sm80RunsProblemsThatSm90Rejects) {
  const DeviceInfo device = *named_device("h200");
  const Problem supported =
      *dense_problem(DType::bf16, 2, 8, 4, 4096, 4096, 128, 128, {}, device.device);
  EXPECT_STREQ(make_plan(supported, device)->kernel->family_name(), "sm90");
  const auto expect_reject = [&](const char* what, Reject why, auto change) {
    SCOPED_TRACE(what);
    Problem problem = supported;
    change(problem);
    const Result<Plan> plan = make_plan(problem, device);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_STREQ(plan->kernel->family_name(), "sm80");
    for (const KernelInfo& kernel : kernels()) {
      if (kernel.op != Operation::fwd || kernel.family != Family::sm90 ||
          kernel.inputs != Inputs::native || kernel.dtype != DType::bf16 || kernel.head_dim < 128) {
        continue;
      }
      EXPECT_EQ(supports(kernel, problem, device), why) << kernel.id;
      EXPECT_NE(explain(*plan).find(to_message(why, kernel, problem, device)), std::string::npos);
    }
  };
  expect_reject("splits", Reject::missing_feature, [](Problem& p) { p.options.num_splits = 2; });
  expect_reject("strided columns", Reject::strides, [](Problem& p) { p.q.column = 2; });
  expect_reject("misaligned", Reject::strides, [](Problem& p) { p.k.alignment_bytes = 8; });
  expect_reject("broadcast", Reject::strides, [](Problem& p) { p.v.batch = 0; });
  expect_reject("huge stride", Reject::strides,
                [](Problem& p) { p.v.head = std::int64_t{1} << 40; });
  expect_reject("v_dim", Reject::strides, [](Problem& p) { p.v_dim = 126; });
}

TEST(Planner, HopperRunsPagedKvAndF32Output) {
  const DeviceInfo device = *named_device("h200");
  for (const std::int64_t page_size : {1, 2, 3, 4, 8, 12, 16, 64, 256}) {
    Problem problem = *dense_problem(DType::bf16, 2, 8, 4, 4096, 4096, 128, 128, {}, device.device);
    problem.page_size = page_size;
    problem.pages = 1024;
    problem.out.dtype = DType::f32;
    const Result<Plan> plan = make_plan(problem, device);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_STREQ(plan->kernel->family_name(), "sm90") << page_size;
  }
}

// 32 queries of four heads see 1,056 keys: 7 tiles of 160 from the window's first key, 9 of 128.
TEST(Planner, HopperCountsTheKvTilesOfAWindowFromItsFirstKey) {
  const DeviceInfo device = *named_device("h200");
  Options options;
  options.causal = true;
  options.window_left = 1024;
  Problem problem =
      *dense_problem(DType::bf16, 4, 32, 8, 4096, 4096, 128, 128, options, device.device);
  const auto plan = [&] { return make_plan(problem, device); };
  EXPECT_STREQ(plan()->kernel->id, "fwd_sm90_bf16_d128_k160");
  EXPECT_TRUE(tiles_from_window(*plan()->kernel, problem));
  problem.page_size = 64;
  problem.pages = 256;
  EXPECT_FALSE(tiles_from_window(*plan()->kernel, problem));
  problem.page_size = problem.pages = 0;
  problem.options.reproducibility = Reproducibility::batch_invariant;
  EXPECT_FALSE(tiles_from_window(*plan()->kernel, problem));
}

TEST(Planner, HopperTakesABooleanMaskWithSmallKvTiles) {
  const DeviceInfo device = *named_device("h200");
  for (const std::int64_t dim : {64, 96, 128, 192, 256}) {
    Problem problem = *dense_problem(DType::bf16, 2, 8, 4, 4096, 4096, dim, dim, {}, device.device);
    const std::size_t without = make_plan(problem, device)->workspace_bytes;
    problem.mask = {.dtype = DType::u8, .row = 4096, .column = 1};  // of all heads and batches
    const Result<Plan> plan = make_plan(problem, device);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_STREQ(plan->kernel->family_name(), "sm90") << dim;
    EXPECT_LE(plan->tile_k, 128);
    const std::size_t bits = (4096 + 192) * 4096 / 8, ranges = 4096 / 16 * 8;
    EXPECT_EQ(plan->workspace_bytes, plan->packed_mask_offset + bits + ranges);
    EXPECT_GT(plan->packed_mask_offset, 0u);
    problem.mask.row = 0;  // of all rows
    EXPECT_LE(make_plan(problem, device)->workspace_bytes, without + 1024);
  }
}

TEST(Planner, AWindowSelectsASmallerTileKOnHopper) {
  Options options;
  options.causal = true;
  const Result<Plan> whole = plan_for("h200", DType::bf16, 1, 16, 16384, 16384, 128, 128, options);
  options.window_left = 1024;
  const Result<Plan> window = plan_for("h200", DType::bf16, 1, 16, 16384, 16384, 128, 128, options);
  ASSERT_TRUE(whole.ok() && window.ok());
  EXPECT_EQ(whole->tile_k, 176);
  EXPECT_EQ(window->tile_k, 128) << "1,152 keys are exactly nine tiles of 128";
}

// The fastest tile_k measured on an H200 (docs/performance.md).
TEST(Planner, TileKOfHopperAtHeadDim128DependsOnTheKeys) {
  const auto tile_k = [](std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                         std::int64_t keys, bool causal) {
    const DeviceInfo device = *named_device("h200");
    const Problem problem = *dense_problem(DType::bf16, batch, q_heads, kv_heads, keys, keys, 128,
                                           128, {.causal = causal}, device.device);
    return make_plan(problem, device)->tile_k;
  };
  EXPECT_EQ(tile_k(4, 32, 8, 4096, false), 160);
  EXPECT_EQ(tile_k(4, 32, 8, 4096, true), 160);
  EXPECT_EQ(tile_k(4, 16, 16, 4096, false), 160);
  EXPECT_EQ(tile_k(1, 16, 16, 16384, false), 160);
  EXPECT_EQ(tile_k(1, 16, 16, 16384, true), 176);
  EXPECT_EQ(tile_k(16, 16, 16, 1024, false), 176);
  EXPECT_EQ(tile_k(16, 16, 16, 1024, true), 128);
  EXPECT_EQ(tile_k(32, 16, 16, 512, true), 128);
}

TEST(Planner, BatchInvariantPlansTakeTheFirstFamilyThatSupportsThem) {
  const DeviceInfo device = *named_device("h200");
  for (const std::int64_t q_len : {1, 100, 8192}) {
    const Problem problem =
        *dense_problem(DType::bf16, 2, 8, 4, q_len, 8192, 128, 128,
                       {.reproducibility = Reproducibility::batch_invariant}, device.device);
    EXPECT_STREQ(make_plan(problem, device)->kernel->family_name(), "sm90") << q_len;
    Problem biased = problem;
    biased.bias = problem.q;
    EXPECT_STREQ(make_plan(biased, device)->kernel->family_name(), "sm90") << q_len;
  }
}

TEST(Planner, BiasesTakeHopperKernelsWithSpareRegisters) {
  const DeviceInfo device = *named_device("h200");
  const auto kernel_for = [&](DType dtype, std::int64_t head_dim) {
    Problem problem = *dense_problem(dtype, 4, 32, 8, 4096, 4096, head_dim, head_dim,
                                     {.causal = true}, device.device);
    problem.bias = problem.q;
    return std::string(make_plan(problem, device)->kernel->id);
  };
  EXPECT_EQ(kernel_for(DType::bf16, 64), "fwd_sm90_bf16_d64_q128");
  EXPECT_EQ(kernel_for(DType::f16, 96), "fwd_sm90_f16_d128_k128");
  EXPECT_EQ(kernel_for(DType::bf16, 128), "fwd_sm90_bf16_d128_k128");
  EXPECT_EQ(kernel_for(DType::bf16, 192), "fwd_sm90_bf16_d192_q128");
  EXPECT_EQ(kernel_for(DType::f16, 256), "fwd_sm90_f16_d256_k64");
}

}  // namespace
}  // namespace flashcore
