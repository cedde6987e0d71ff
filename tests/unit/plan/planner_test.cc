// The planner: kernel, tiles and splits for named devices. planner_splits_test.cc tests split-KV
// and tail splits on GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "plan/devices.h"
#include "plan/kernel_traits.h"
#include "plan/planner.h"
#include "support/call.h"
#include "verify/inputs/random.h"

namespace flashcore {
namespace {

struct CpuPlan {
  const char* device;
  DType dtype;
  std::int64_t batch, heads, q_len, kv_len, head_dim, v_dim;
  const char* kernel;
  std::int32_t tile_q, tile_k, splits;
};

Result<Plan> plan_for(const char* device, DType dtype, std::int64_t batch, std::int64_t heads,
                      std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim,
                      std::int64_t v_dim, const Options& options = {}) {
  const Result<DeviceInfo> info = named_device(device);
  if (!info.ok()) return info.status();
  const Result<Problem> problem = dense_problem(dtype, batch, heads, heads, q_len, kv_len, head_dim,
                                                v_dim, options, info->device);
  if (!problem.ok()) return problem.status();
  return make_plan(*problem, *info);
}

// CPUs: the widest instruction set, and tile sizes that depend on the dims.
const CpuPlan kCpuPlans[] = {
    {"cpu-neon", DType::f32, 1, 8, 512, 512, 64, 64, "fwd_neon_f32", 64, 128, 1},
    {"cpu-neon", DType::f64, 1, 8, 512, 512, 64, 128, "fwd_neon_f64", 64, 64, 1},
    {"cpu-avx2", DType::bf16, 1, 8, 512, 512, 128, 128, "fwd_avx2_bf16", 64, 48, 1},
    {"cpu-avx512", DType::f16, 1, 8, 512, 512, 256, 64, "fwd_avx512_f16", 64, 24, 1},
    {"cpu-avx512", DType::f16, 1, 8, 512, 512, 576, 576, "fwd_avx512_f16", 64, 12, 1},
    {"cpu-amx", DType::bf16, 1, 8, 512, 512, 64, 128, "fwd_amx_bf16", 256, 256, 1},
    {"cpu-amx", DType::bf16, 1, 8, 512, 512, 576, 1, "fwd_amx_bf16", 256, 64, 1},
    {"cpu-amx", DType::f16, 1, 8, 512, 512, 256, 64, "fwd_amx_f16", 256, 128, 1},
    {"cpu-amx", DType::f32, 1, 8, 512, 512, 128, 64, "fwd_amx_f32", 256, 256, 1},
    {"cpu-amx", DType::f64, 1, 8, 512, 512, 256, 64, "fwd_avx512_f64", 64, 24, 1},
    // Few rows do not pay for the conversion of K and V to bf16 parts.
    {"cpu-amx", DType::f32, 1, 8, 128, 512, 64, 64, "fwd_avx512_f32", 64, 96, 1},
    {"cpu-amx", DType::f32, 1, 8, 129, 512, 64, 64, "fwd_amx_f32", 256, 256, 1},
    {"cpu-amx", DType::f16, 1, 8, 32, 512, 64, 64, "fwd_avx512_f16", 64, 96, 1},
    {"cpu-amx", DType::f16, 1, 8, 33, 512, 64, 64, "fwd_amx_f16", 256, 256, 1},
    // AMX: twice the rows if that leaves four work tiles for each of 32 threads.
    {"cpu-amx", DType::f32, 16, 8, 512, 512, 128, 64, "fwd_amx_f32", 512, 256, 1},
    {"cpu-amx", DType::f32, 15, 8, 512, 512, 128, 64, "fwd_amx_f32", 256, 256, 1},
    {"cpu-amx", DType::f32, 16, 8, 511, 512, 128, 64, "fwd_amx_f32", 256, 256, 1},
    // Up to 16 rows: AVX-512 has kernels for them.
    {"cpu-avx512", DType::f32, 1, 8, 1, 4096, 128, 128, "fwd_avx512_f32_q16", 16, 48, 8},
    {"cpu-avx512", DType::f16, 1, 8, 16, 512, 64, 64, "fwd_avx512_f16_q16", 16, 96, 1},
    {"cpu-avx512", DType::f16, 1, 8, 17, 512, 64, 64, "fwd_avx512_f16", 64, 96, 1},
    {"cpu-avx512", DType::f64, 1, 8, 1, 512, 64, 64, "fwd_avx512_f64", 64, 96, 1},
    {"cpu-amx", DType::bf16, 1, 8, 1, 512, 64, 64, "fwd_avx512_bf16_q16", 16, 96, 1},
    {"cpu-avx2", DType::bf16, 1, 8, 1, 512, 64, 64, "fwd_avx2_bf16", 64, 96, 1},
    {"cpu-generic", DType::f32, 1, 1, 1, 1, 1, 1, "fwd_generic_f32", 64, 128, 1},
    {"cpu-neon", DType::f32, 1, 8, 1, 32768, 64, 64, "fwd_neon_f32", 64, 128, 8},
};

TEST(Planner, ChoosesKernelAndTilesForEveryCpu) {
  for (const CpuPlan& w : kCpuPlans) {
    SCOPED_TRACE(std::string(w.device) + " wants " + w.kernel);
    const Result<Plan> plan =
        plan_for(w.device, w.dtype, w.batch, w.heads, w.q_len, w.kv_len, w.head_dim, w.v_dim);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_STREQ(plan->kernel->id, w.kernel);
    EXPECT_EQ(plan->tile_q, w.tile_q);
    EXPECT_EQ(plan->tile_k, w.tile_k);
    EXPECT_EQ(plan->splits, w.splits);
  }
}

TEST(Planner, BatchInvariantCpuPlansDoNotDependOnTheRows) {
  Options options;
  options.reproducibility = Reproducibility::batch_invariant;
  for (const std::int64_t q_len : {1, 16, 17, 512}) {
    const auto kernel = [&](const char* device, DType dtype) {
      return plan_for(device, dtype, 1, 8, q_len, 512, 64, 64, options)->kernel->id;
    };
    EXPECT_STREQ(kernel("cpu-amx", DType::bf16), "fwd_amx_bf16");
    EXPECT_STREQ(kernel("cpu-amx", DType::f32), "fwd_amx_f32");
    EXPECT_STREQ(kernel("cpu-avx512", DType::f16), "fwd_avx512_f16");
  }
}

/// The kernel for 8-bit keys.
std::string kernel_for_codes(const char* device, DType dtype, std::int64_t q_len, DType k, DType v,
                             const Options& options = {}) {
  const DeviceInfo info = *named_device(device);
  Problem problem = *dense_problem(dtype, 1, 8, 8, q_len, 512, 64, 64, options, info.device);
  problem.k.dtype = k;
  problem.v.dtype = v;
  const Result<Plan> plan = make_plan(problem, info);
  return plan.ok() ? plan->kernel->id : plan.status().message();
}

TEST(Planner, KernelsThatTakeOneInputFormatLeaveOthersToTheRest) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t q_len : {1, 512}) {
      const std::string kernel = std::string("fwd_avx512_") + to_string(dtype);
      EXPECT_EQ(kernel_for_codes("cpu-amx", dtype, q_len, DType::e4m3, DType::e4m3),
                q_len == 1 ? kernel + "_q16" : kernel);
    }
  }
}

TEST(Planner, FewRowsOfIntegerKeysUseDotProducts) {
  for (const DType keys : {DType::int8, DType::u8}) {
    const auto kernel = [&](const char* device, DType dtype, std::int64_t q_len = 1) {
      return kernel_for_codes(device, dtype, q_len, keys, keys);
    };
    EXPECT_EQ(kernel("cpu-amx", DType::f16), "fwd_vnni_f16_q16");
    EXPECT_EQ(kernel("cpu-amx", DType::bf16, 16), "fwd_vnni_bf16_q16");
    EXPECT_EQ(kernel("cpu-amx", DType::bf16, 17), "fwd_avx512_bf16");
    EXPECT_EQ(kernel("cpu-amx", DType::f32), "fwd_avx512_f32_q16");
    EXPECT_EQ(kernel("cpu-avx512", DType::f16), "fwd_avx512_f16_q16");
    EXPECT_EQ(kernel_for_codes("cpu-amx", DType::f16, 1, keys, DType::e4m3), "fwd_avx512_f16_q16");
    Options invariant;
    invariant.reproducibility = Reproducibility::batch_invariant;
    EXPECT_EQ(kernel_for_codes("cpu-amx", DType::f16, 1, keys, keys, invariant), "fwd_avx512_f16");
  }
}

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

// 16-bit kernels reject 8-bit k and v, kv8 kernels reject 16-bit ones. The simt kernels run
// mixtures.
TEST(Planner, Kv8KernelsNeedEightBitKAndV) {
  const DeviceInfo device = *named_device("a100");
  Problem p = *dense_problem(DType::bf16, 2, 8, 4, 64, 4096, 128, 128, {}, device.device);
  const KernelInfo& eight = *find_kernel("fwd_sm80_8bit_bf16_d128_q16");
  const KernelInfo& sixteen = *find_kernel("fwd_sm80_bf16_d128_q16_s1");
  EXPECT_EQ(supports(eight, p, device), Reject::input_format);
  EXPECT_EQ(supports(sixteen, p, device), Reject::none);
  p.k.dtype = DType::e4m3;
  EXPECT_EQ(supports(eight, p, device), Reject::input_format);
  EXPECT_EQ(supports(sixteen, p, device), Reject::input_format);
  EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), "simt");
  p.v.dtype = DType::int8;
  EXPECT_EQ(supports(eight, p, device), Reject::none);
  EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), "sm80_8bit");
}

// fp8 kernels need e4m3 inputs and one scale per KV tile of V.
TEST(Planner, Fp8KernelsNeedE4m3AndScaleBlocksOfWholeTiles) {
  const DeviceInfo device = *named_device("h200");
  Problem p = *dense_problem(DType::bf16, 4, 8, 8, 4096, 4096, 128, 128, {}, device.device);
  const KernelInfo& kernel = *find_kernel("fwd_sm90_e4m3_bf16_d128_q192");
  EXPECT_EQ(supports(kernel, p, device), Reject::input_format);
  p.k.dtype = p.v.dtype = DType::e4m3;
  EXPECT_EQ(supports(kernel, p, device), Reject::input_format);
  EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), "sm80_8bit");
  p.q.dtype = DType::e4m3;
  EXPECT_EQ(make_plan(p, device)->kernel, &kernel);
  p.k_scale.row = 1;  // block scales
  for (const auto& [block, fits] : {std::pair{8, true}, {64, true}, {12, false}, {1, false}}) {
    p.options.kv_scale_block = block;
    EXPECT_EQ(supports(kernel, p, device), fits ? Reject::none : Reject::scales) << block;
  }
  p.v_scale.row = 1;
  for (const auto& [block, fits] : {std::pair{128, true}, {384, true}, {64, false}, {192, false}}) {
    p.options.kv_scale_block = block;
    EXPECT_EQ(supports(kernel, p, device), fits ? Reject::none : Reject::scales) << block;
    EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), fits ? "sm90_e4m3" : "sm80_8bit")
        << block;
  }
  EXPECT_NE(to_message(Reject::scales, kernel, p, device).find("128 rows of v"), std::string::npos);
}

TEST(Planner, LargeSoftcapsGoToTheSimtKernels) {
  const DeviceInfo device = *named_device("h200");
  Options options;
  for (const auto& [cap, family] : {std::pair{256.0, "sm90"}, {257.0, "simt"}, {1e6, "simt"}}) {
    options.softcap = cap;
    const Problem p =
        *dense_problem(DType::bf16, 4, 8, 8, 4096, 4096, 128, 128, options, device.device);
    const Plan plan = *make_plan(p, device);
    EXPECT_STREQ(plan.kernel->family_name(), family) << cap;
  }
  const Problem p =
      *dense_problem(DType::bf16, 4, 8, 8, 4096, 4096, 128, 128, options, device.device);
  const KernelInfo& kernel = *find_kernel("fwd_sm80_bf16_d128_q128");
  EXPECT_EQ(supports(kernel, p, device), Reject::softcap);
  EXPECT_NE(to_message(Reject::softcap, kernel, p, device).find("at most 256"), std::string::npos);
}

// Block scales of V: see features_of_kernel().
TEST(Planner, BatchInvariantBlockScalesOfVGoToTheSimtKernels) {
  const DeviceInfo device = *named_device("a100");
  Options options;
  options.reproducibility = Reproducibility::batch_invariant;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Problem p = *dense_problem(dtype, 2, 8, 4, 64, 4096, 128, 128, options, device.device);
    p.k.dtype = p.v.dtype = DType::e4m3;
    EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), "sm80_8bit");
    p.v_scale.row = 1;  // block scales
    EXPECT_STREQ(make_plan(p, device)->kernel->family_name(), "simt");
  }
}

// sm_75 has neither cp.async nor bf16 MMA.
TEST(Planner, TuringUsesTheSimtKernels) { expect_family_at_every_dim("t4", "simt", 64, 256); }

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

TEST(Planner, ACpuPlanDoesNotDependOnTheNumberOfThreads) {
  DeviceInfo info = *named_device("cpu-neon");
  for (const std::int64_t kv_len : {100, 5000, 100000}) {
    const Problem problem = *dense_problem(DType::f32, 1, 4, 4, 3, kv_len, 64, 64);
    info.threads = 1;
    const Plan one = *make_plan(problem, info);
    for (const int threads : {2, 7, 64, 1000}) {
      info.threads = threads;
      const Plan plan = *make_plan(problem, info);
      EXPECT_EQ(plan.splits, one.splits);
      EXPECT_EQ(plan.keys_per_split, one.keys_per_split);
      EXPECT_EQ(plan.tile_k, one.tile_k);
      EXPECT_EQ(plan.kernel, one.kernel);
    }
  }
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
