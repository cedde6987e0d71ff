// Error messages of the planner.
#include <gtest/gtest.h>

#include <string>

#include "flashcore/attention.h"
#include "plan/devices.h"

namespace flashcore {
namespace {

/// Plans a (1, 2, 5, 7) problem for `device` with `kernel` forced.
Result<Plan> forced(const char* kernel, const DeviceInfo& device, DType dtype = DType::f32,
                    std::int64_t head_dim = 64) {
  Options options;
  options.kernel = kernel;
  const Result<Problem> problem =
      dense_problem(dtype, 1, 2, 2, 5, 7, head_dim, head_dim, options, device.device);
  if (!problem.ok()) return problem.status();
  return make_plan(*problem, device);
}

void expect_refused(const Result<Plan>& plan, StatusCode code,
                    std::initializer_list<const char*> words) {
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), code);
  for (const char* word : words) {
    EXPECT_NE(plan.status().message().find(word), std::string::npos)
        << word << " is not in: " << plan.status().message();
  }
}

TEST(ForcedKernel, IsUsedIfItSupportsTheProblem) {
  const Result<Plan> plan = forced("fwd_simt_f32_d576_q16", *named_device("h200"));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_STREQ(plan->kernel->id, "fwd_simt_f32_d576_q16");
  EXPECT_EQ(plan->tile_k, 32);
  const Result<Plan> avx2 = forced("fwd_avx2_f32", *named_device("cpu-avx512"));
  ASSERT_TRUE(avx2.ok()) << avx2.status().message();
  EXPECT_STREQ(avx2->kernel->id, "fwd_avx2_f32");
  for (const char* kernel : {"fwd_avx2_f32", "fwd_avx512_f32"}) {
    EXPECT_TRUE(forced(kernel, *named_device("cpu-amx")).ok()) << kernel;
  }
  for (const char* device : {"cpu-neon", "cpu-avx2", "cpu-avx512", "cpu-amx", "cpu-generic"}) {
    EXPECT_TRUE(forced("fwd_generic_f32", *named_device(device)).ok()) << device;
  }
}

TEST(ForcedKernel, ThePlanDoesNotReferToTheCallersString) {
  std::string name = "fwd_generic_f32";
  const Result<Plan> plan = forced(name.c_str(), *named_device("cpu-generic"));
  ASSERT_TRUE(plan.ok());
  name.assign(name.size(), 'x');
  EXPECT_STREQ(plan->problem.options.kernel, "fwd_generic_f32");
}

TEST(ForcedKernel, ErrorsGiveTheReasonWithItsNumbers) {
  const DeviceInfo h200 = *named_device("h200"), neon = *named_device("cpu-neon");
  expect_refused(forced("fwd_unknown_f32", neon), StatusCode::invalid_argument,
                 {"kernel", "fwd_unknown_f32", "info --kernels"});
  expect_refused(forced("", neon), StatusCode::invalid_argument, {"kernel", "\"\""});
  expect_refused(forced("fwd_simt_f32_d64_q64", neon), StatusCode::unsupported,
                 {"fwd_simt_f32_d64_q64", "runs on cuda"});
  expect_refused(forced("fwd_neon_f32", h200), StatusCode::unsupported, {"runs on cpu"});
  expect_refused(forced("fwd_avx2_f32", neon), StatusCode::unsupported, {"avx2", "neon"});
  expect_refused(forced("fwd_avx512_f32", *named_device("cpu-avx2")), StatusCode::unsupported,
                 {"needs avx512", "has avx2"});
  expect_refused(forced("fwd_amx_bf16", *named_device("cpu-avx512"), DType::bf16),
                 StatusCode::unsupported, {"needs amx", "has avx512"});
  expect_refused(forced("fwd_simt_f16_d64_q64", h200), StatusCode::unsupported, {"f16", "f32"});
  expect_refused(forced("fwd_simt_f32_d64_q64", h200, DType::f32, 65), StatusCode::unsupported,
                 {"64", "65"});
  expect_refused(forced("fwd_simt_f32_d128_q64", *named_device("t4"), DType::f32, 128),
                 StatusCode::unsupported, {"68720", "65536"});
  DeviceInfo pascal = h200;
  pascal.compute_capability = 61;
  expect_refused(forced("fwd_simt_f32_d64_q64", pascal), StatusCode::unsupported,
                 {"sm_75", "sm_61"});
  DeviceInfo later = h200;
  later.compute_capability = 100;
  EXPECT_TRUE(forced("fwd_sm80_f16_d64_q16_k128", later, DType::f16).ok());
  expect_refused(forced("fwd_sm80_f16_d64_q8", later, DType::f16), StatusCode::unsupported,
                 {"needs sm_80 to sm_90", "sm_100"});
  expect_refused(forced("fwd_sm90_f16_d64_q64", later, DType::f16), StatusCode::unsupported,
                 {"needs sm_90 exactly", "sm_100"});
}

TEST(Planner, ErrorsListSupportedProblems) {
  DeviceInfo pascal = *named_device("h200");
  pascal.compute_capability = 61;
  const Problem problem = *dense_problem(DType::f16, 1, 2, 2, 5, 7, 64, 64, {}, pascal.device);
  expect_refused(make_plan(problem, pascal), StatusCode::unsupported, {"f16", "64", "sm_75"});
}

TEST(Planner, RejectsTensorsOnAnotherDeviceType) {
  const Problem on_cpu = *dense_problem(DType::f32, 1, 1, 1, 1, 1, 8, 8);
  expect_refused(make_plan(on_cpu, *named_device("h200")), StatusCode::invalid_argument,
                 {"cpu", "cuda"});
}

TEST(NamedDevice, ErrorsListTheKnownNames) {
  for (const char* name : {"h300", "", static_cast<const char*>(nullptr)}) {
    const Result<DeviceInfo> info = named_device(name);
    ASSERT_FALSE(info.ok());
    EXPECT_EQ(info.status().code(), StatusCode::invalid_argument);
    for (const NamedDevice& device : named_devices()) {
      EXPECT_NE(info.status().message().find(device.name), std::string::npos) << device.name;
    }
  }
  const Result<DeviceInfo> here = named_device("cpu");
  ASSERT_TRUE(here.ok());
  EXPECT_GE(here->threads, 1);
  EXPECT_GT(std::string(here->name).size(), 0u);
}

TEST(DeviceInfo, AMissingGpuIsExplained) {
  if (cuda_availability().device_count > 0) GTEST_SKIP() << "this machine has a GPU";
  const Result<DeviceInfo> info = device_info({DeviceType::cuda, 0});
  ASSERT_FALSE(info.ok());
  EXPECT_EQ(info.status().code(), StatusCode::unsupported);
  EXPECT_FALSE(cuda_availability().reason.empty());
  EXPECT_NE(info.status().message().find(cuda_availability().reason), std::string::npos);
}

TEST(DenseProblem, RejectsInvalidSizes) {
  struct Row {
    std::int64_t sizes[7];
    const char* word;
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  const Row rows[] = {
      {{-1, 1, 1, 1, 1, 8, 8}, "q: extent 0 is -1"},
      {{kHuge, 1, 1, 1, 1, 8, 8}, "2147483648"},
      {{kHuge - 1, kHuge - 1, 1, kHuge - 1, 1, 8, 8}, "address space"},
      {{1, 3, 2, 1, 1, 8, 8}, "multiple"},
      {{1, 1, 0, 1, 1, 8, 8}, "0 kv_heads"},
      {{1, 1, 1, 1, 1, 577, 8}, "head_dim is 577"},
      {{1, 1, 1, 1, 1, 8, 577}, "v_dim is 577"},
      {{1, 1, 1, 1, 1, 0, 8}, "head_dim is 0"},
      {{1, 1, 1, kHuge - 1, 1, 8, 8}, "q_len is 2147483647"},
      {{1, 1, 1, 1, kHuge - 1, 8, 8}, "kv_len is 2147483647"},
  };
  for (const Row& row : rows) {
    const auto& s = row.sizes;
    const Result<Problem> problem =
        dense_problem(DType::f32, s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
    ASSERT_FALSE(problem.ok()) << row.word;
    EXPECT_NE(problem.status().message().find(row.word), std::string::npos)
        << problem.status().message();
  }
  EXPECT_FALSE(dense_problem(DType::i32, 1, 1, 1, 1, 1, 8, 8).ok());
  EXPECT_FALSE(dense_problem(DType::none, 1, 1, 1, 1, 1, 8, 8).ok());
  EXPECT_EQ(
      dense_problem(DType::f64, 1, 1, 1, 1, 1, 8, 8, {}, {DeviceType::cuda, 0}).status().code(),
      StatusCode::unsupported);
}

TEST(Plan, RejectsWorkspacesThatOverflow) {
  // 2^45 rows with one split per KV tile need more bytes than an address space has.
  Options options;
  options.num_splits = 1 << 30;
  const Result<Problem> problem =
      dense_problem(DType::f32, 1 << 15, 1 << 15, 1 << 12, 1 << 15, 1 << 30, 1, 1, options);
  ASSERT_TRUE(problem.ok()) << problem.status().message();
  expect_refused(make_plan(*problem, *named_device("cpu-neon")), StatusCode::unsupported,
                 {"workspace", "num_splits"});
}

}  // namespace
}  // namespace flashcore
