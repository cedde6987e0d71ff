// The planner on CPUs: kernels, tiles and splits.
#include <gtest/gtest.h>

#include <string>

#include "plan/devices.h"
#include "plan/planner.h"
#include "support/call.h"
#include "unit/plan/plan_for.h"

namespace flashcore {
namespace {

struct CpuPlan {
  const char* device;
  DType dtype;
  std::int64_t batch, heads, q_len, kv_len, head_dim, v_dim;
  const char* kernel;
  std::int32_t tile_q, tile_k, splits;
};

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

}  // namespace
}  // namespace flashcore
