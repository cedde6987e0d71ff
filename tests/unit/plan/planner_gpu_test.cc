// The planner on GPUs: the family and the size of kernels, and rows per tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "plan/devices.h"
#include "plan/planner.h"
#include "support/call.h"
#include "unit/plan/plan_for.h"

namespace flashcore {
namespace {

/// The part of a GPU plan that does not depend on measured constants, unlike rows per tile and
/// splits.
struct GpuPlan {
  const char* device;
  DType dtype;
  std::int64_t batch, heads, q_len, kv_len, head_dim, v_dim;
  const char* family;
  std::int32_t size;  // head_dim of the kernel
};

const GpuPlan kGpuPlans[] = {
    {"h200", DType::f16, 4, 8, 2048, 2048, 64, 64, "sm90", 64},
    {"h100", DType::bf16, 4, 8, 2048, 2048, 192, 128, "sm90", 192},
    {"h100", DType::bf16, 1, 8, 1, 32768, 128, 128, "sm80", 128},
    {"a100", DType::bf16, 1, 8, 1, 32768, 128, 128, "sm80", 128},
    {"l4", DType::f16, 1, 8, 512, 512, 64, 64, "sm80", 64},
    // The larger of the two dims decides the size class.
    {"a100", DType::f16, 8, 16, 1024, 1024, 64, 65, "sm80", 96},
    {"a100", DType::f16, 8, 16, 1024, 1024, 192, 128, "sm80", 192},
    {"a100", DType::f32, 8, 16, 1024, 1024, 64, 65, "simt", 128},
    // No tensor-core kernels exist for f32, dims above 256 and GPUs before sm_80.
    {"h200", DType::f32, 4, 8, 2048, 2048, 64, 64, "simt", 64},
    {"a100", DType::f32, 1, 8, 512, 512, 64, 64, "simt", 64},
    {"a100", DType::f16, 8, 16, 1024, 1024, 576, 512, "simt", 576},
    {"h200", DType::bf16, 1, 8, 1, 4096, 257, 16, "simt", 576},
    {"t4", DType::f16, 1, 8, 512, 512, 64, 64, "simt", 64},
    {"t4", DType::f32, 8, 16, 1024, 1024, 128, 128, "simt", 128},
    {"t4", DType::f32, 8, 16, 1024, 1024, 200, 200, "simt", 256},
    // Kernels for 8-bit inputs have three sizes: 64, 128 and 256.
    {"h200", DType::e4m3, 16, 8, 1, 8192, 128, 128, "sm80_8bit", 128},
    {"h200", DType::e4m3, 4, 8, 4096, 4096, 128, 128, "sm90_e4m3", 128},
    {"h200", DType::e4m3, 4, 8, 4096, 4096, 192, 128, "sm90_e4m3", 256},
    {"h200", DType::int8, 4, 8, 4096, 4096, 128, 128, "sm80_8bit", 128},
    {"a100", DType::int8, 4, 8, 2048, 2048, 64, 64, "sm80_8bit", 64},
    {"l4", DType::u8, 1, 8, 512, 512, 72, 64, "sm80_8bit", 128},
    {"a100", DType::e5m2, 4, 8, 2048, 2048, 129, 192, "sm80_8bit", 256},
    {"a100", DType::e4m3, 1, 8, 512, 512, 257, 64, "simt", 576},
    {"t4", DType::e4m3, 1, 8, 512, 512, 64, 64, "simt", 64},
};

TEST(Planner, ChoosesFamilyAndSizeForEveryGpu) {
  for (const GpuPlan& w : kGpuPlans) {
    const Result<Plan> plan =
        plan_for(w.device, w.dtype, w.batch, w.heads, w.q_len, w.kv_len, w.head_dim, w.v_dim);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    SCOPED_TRACE(std::string(w.device) + " got " + plan->kernel->id);
    EXPECT_STREQ(plan->kernel->family_name(), w.family);
    EXPECT_EQ(plan->kernel->head_dim, w.size);
    EXPECT_EQ(plan->tile_q, plan->kernel->tile_q);
    EXPECT_EQ(plan->tile_k, plan->kernel->tile_k);
  }
}

/// tile_q of all kernels that support the plan's problem and have the head_dim of its kernel.
std::set<std::int32_t> available_tile_q(const Plan& plan) {
  std::set<std::int32_t> tiles;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.family == plan.kernel->family && kernel.inputs == plan.kernel->inputs &&
        kernel.head_dim == plan.kernel->head_dim &&
        supports(kernel, plan.problem, plan.device) == Reject::none) {
      tiles.insert(kernel.tile_q);
    }
  }
  return tiles;
}

// Prefill of large batches uses the largest tiles. Decode of one sequence uses tiles of at most 16
// rows and enough splits to keep the SMs busy. Decode of many sequences needs no splits.
TEST(Planner, RowsPerTileAndSplitsFollowTheWork) {
  for (const char* device : {"h200", "h100", "a100", "l4", "t4"}) {
    const std::int64_t sm_count = named_device(device)->sm_count;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t dim : {64, 128, 256}) {
        const Result<Plan> prefill = plan_for(device, dtype, 16, 16, 4096, 4096, dim, dim);
        const Result<Plan> decode = plan_for(device, dtype, 1, 8, 1, 65536, dim, dim);
        const Result<Plan> large_batch = plan_for(device, dtype, 128, 32, 1, 4096, dim, dim);
        ASSERT_TRUE(prefill.ok() && decode.ok() && large_batch.ok());
        SCOPED_TRACE(std::string(device) + ' ' + prefill->kernel->id + ' ' + decode->kernel->id);
        EXPECT_EQ(prefill->tile_q, *available_tile_q(*prefill).rbegin());
        EXPECT_EQ(prefill->splits, 1);
        EXPECT_LE(decode->tile_q, 16);
        if (sm_count >= 100) {  // on a small GPU, a few CTAs saturate the memory bandwidth
          EXPECT_GT(decode->splits, 1);
          EXPECT_GE(4 * decode->num_tiles, sm_count) << "most SMs are idle";
        }
        EXPECT_EQ(large_batch->tile_q, 16);
        EXPECT_EQ(large_batch->splits, 1);
      }
    }
  }
}

// The sm90 kernel of head_dim 128 with 160-key tiles packs a power of two of heads: the largest one
// that divides the GQA group, at most four. Other kernels do not pack heads here.
TEST(Planner, HopperPacksGqaHeads) {
  const Result<DeviceInfo> info = named_device("h200");
  const auto planned = [&](DType dtype, std::int64_t kv_heads, std::int64_t group,
                           std::int64_t dim) {
    Problem problem = *dense_problem(dtype, 4, kv_heads * group, kv_heads, 2048, 2048, dim, dim, {},
                                     info->device);
    return make_plan(problem, *info);
  };
  const std::pair<std::int64_t, std::int32_t> kHeads[] = {{1, 1}, {2, 2}, {3, 1}, {4, 4},
                                                          {6, 2}, {7, 1}, {8, 4}, {12, 4}};
  for (const auto& [group, heads] : kHeads) {
    for (const std::int64_t dim : {64, 128, 256}) {
      const Result<Plan> plan = planned(DType::bf16, 8, group, dim);
      ASSERT_TRUE(plan.ok());
      SCOPED_TRACE(testing::Message() << plan->kernel->id << ", group " << group);
      EXPECT_EQ(plan->kernel->family, Family::sm90);
      EXPECT_EQ(plan->heads_in_tile, dim == 128 ? heads : 1);
      const std::int64_t rows = 2048 * plan->heads_in_tile;
      EXPECT_EQ(plan->num_tiles,
                4 * 8 * group / plan->heads_in_tile * ((rows + plan->tile_q - 1) / plan->tile_q));
    }
    EXPECT_EQ(planned(DType::f32, 8, group, 128)->heads_in_tile, 1) << "simt";
  }
}

void expect_family_at_every_dim(const char* device, const char* family, std::int64_t first_dim,
                                std::int64_t last_dim) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (std::int64_t dim = first_dim; dim <= last_dim; ++dim) {
      for (const std::int64_t q_len : {1, 64, 4096}) {
        for (const bool batch_invariant : {false, true}) {
          Options options;
          if (batch_invariant) options.reproducibility = Reproducibility::batch_invariant;
          const Result<Plan> plan = plan_for(device, dtype, 2, 8, q_len, 4096, dim, dim, options);
          ASSERT_TRUE(plan.ok()) << plan.status().message();
          ASSERT_STREQ(plan->kernel->family_name(), family)
              << device << ' ' << to_string(dtype) << " dim " << dim << " q_len " << q_len
              << " got " << plan->kernel->id;
          ASSERT_GE(plan->kernel->head_dim, dim);
          ASSERT_LE(plan->kernel->smem_bytes, plan->device.smem_per_block_bytes);
        }
      }
    }
  }
}

// 163 KiB of shared memory per CTA.
TEST(Planner, AmpereHasTensorCoreKernelsForEveryDim) {
  expect_family_at_every_dim("a100", "sm80", 64, 256);
}

// 99 KiB of shared memory per CTA.
TEST(Planner, AdaHasTensorCoreKernelsForEveryDim) {
  expect_family_at_every_dim("l4", "sm80", 64, 256);
}

// They run PTX, which some of the kernels have.
TEST(Planner, LaterGpusHaveTensorCoreKernelsForEveryDim) {
  DeviceInfo later = *named_device("h200");
  later.compute_capability = 100;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t dim : {40, 64, 96, 128, 192, 256}) {
      for (const std::int64_t q_len : {1, 4, 2048}) {
        const Problem problem =
            *dense_problem(dtype, 4, 32, 8, q_len, 4096, dim, dim, {}, later.device);
        const Result<Plan> plan = make_plan(problem, later);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        const KernelInfo& kernel = *plan->kernel;
        EXPECT_EQ(kernel.family, Family::sm80);
        EXPECT_GE(kernel.max_compute_capability, later.compute_capability) << kernel.id;
        EXPECT_EQ(kernel.tile_q < 64, q_len < 2048) << kernel.id;
      }
    }
  }
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.device != DeviceType::cuda || kernel.family == Family::sm90) continue;
    const auto alike = kernels_of(kernel.op, kernel.family, kernel.inputs, kernel.dtype);
    EXPECT_TRUE(std::any_of(alike.begin(), alike.end(), [&](const KernelInfo& other) {
      return other.head_dim == kernel.head_dim && (other.tile_q < 64) == (kernel.tile_q < 64) &&
             other.max_compute_capability >= later.compute_capability;
    })) << kernel.id;
  }
}

// sm_75 has neither cp.async nor bf16 MMA.
TEST(Planner, TuringUsesTheSimtKernels) { expect_family_at_every_dim("t4", "simt", 64, 256); }

// kernels_of() relies on this order.
TEST(Planner, KernelsOfAGroupAreAdjacentAndInOrder) {
  std::set<std::tuple<Operation, Family, Inputs, DType>> groups;
  std::size_t found = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (!groups.insert({kernel.op, kernel.family, kernel.inputs, kernel.dtype}).second) continue;
    std::int32_t head_dim = 0;
    for (const KernelInfo& one :
         kernels_of(kernel.op, kernel.family, kernel.inputs, kernel.dtype)) {
      EXPECT_STREQ(one.family_name(), kernel.family_name());
      EXPECT_EQ(one.dtype, kernel.dtype);
      EXPECT_GE(one.head_dim, head_dim) << one.id;
      head_dim = one.head_dim;
      ++found;
    }
  }
  EXPECT_EQ(found, kernels().size());
  EXPECT_TRUE(kernels_of(Operation::fwd, Family::sm90, Inputs::native, DType::f32).empty());
}

}  // namespace
}  // namespace flashcore
