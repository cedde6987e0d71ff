// The planner on GPUs: input formats, scales and softcaps that a family does not serve.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "plan/devices.h"
#include "plan/planner.h"
#include "support/call.h"

namespace flashcore {
namespace {

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

}  // namespace
}  // namespace flashcore
