// Features: those that a problem needs, and those that a kernel lacks.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plan/kernel_traits.h"
#include "plan/planner.h"

namespace flashcore {
namespace {

Problem dense(const DeviceInfo& device, const Options& options = {}) {
  return *dense_problem(DType::bf16, 2, 8, 4, 512, 512, 128, 128, options, device.device);
}

TEST(Features, OfADefaultProblemAreNone) {
  EXPECT_EQ(features_of(dense(*named_device("h200"))), Features::none);
}

TEST(Features, OfEachOptionAreOneBit) {
  const DeviceInfo device = *named_device("h200");
  const auto expect = [&](Features wanted, auto change) {
    Problem problem = dense(device);
    change(problem);
    EXPECT_EQ(features_of(problem), wanted) << feature_names(wanted).front();
  };
  expect(Features::bias, [](Problem& p) { p.bias = p.q; });
  expect(Features::mask, [](Problem& p) { p.mask = p.q; });
  expect(Features::alibi, [](Problem& p) { p.alibi_slopes.dtype = DType::f32; });
  expect(Features::softcap, [](Problem& p) { p.options.softcap = 5; });
  expect(Features::sinks, [](Problem& p) { p.sinks.dtype = DType::f32; });
  expect(Features::window, [](Problem& p) { p.options.window_right = 0; });
  expect(Features::varlen, [](Problem& p) { p.seqused_k.dtype = DType::i32; });
  expect(Features::paged, [](Problem& p) { p.page_size = 16; });
  expect(Features::any_stride, [](Problem& p) { p.v.column = 2; });
  expect(Features::f32_out, [](Problem& p) { p.out.dtype = DType::f32; });
  expect(Features::partial, [](Problem& p) { p.options.partial = true; });
  expect(Features::num_splits, [](Problem& p) { p.options.num_splits = 2; });
  expect(Features::block_scales, [](Problem& p) { p.k_scale.row = 1; });
  expect(Features::block_scales | Features::batch_invariant_scales, [](Problem& p) {
    p.v_scale.row = 1;
    p.options.reproducibility = Reproducibility::batch_invariant;
  });
}

TEST(Features, ExplainListsExactlyTheMissingOnes) {
  const DeviceInfo device = *named_device("h200");
  Problem problem = dense(device);
  problem.bias = problem.q;
  problem.options.num_splits = 2;
  problem.options.softcap = 5;
  const KernelInfo& kernel = *find_kernel("fwd_sm90_bf16_d128_k160");
  EXPECT_EQ(missing_features(kernel, problem), Features::bias | Features::num_splits);
  EXPECT_EQ(to_message(supports(kernel, problem, device), kernel, problem, device),
            "lacks bias, num_splits");
}

TEST(KernelTraits, LargeNativeTilesOfSm80AloneLackPdl) {
  for (const char* id : {"fwd_sm80_f16_d64_q128", "fwd_sm80_bf16_d256_q64"}) {
    EXPECT_FALSE(uses_pdl(*find_kernel(id))) << id;
  }
  for (const char* id : {"fwd_sm80_f16_d64_q32_k512", "fwd_sm80_bf16_d128_q16_s1",
                         "fwd_sm80_8bit_f16_d64_q128", "fwd_sm90_bf16_d128_k160"}) {
    EXPECT_TRUE(uses_pdl(*find_kernel(id))) << id;
  }
  EXPECT_FALSE(uses_pdl(*find_kernel("fwd_simt_f32_d64_q64")));
}

TEST(Features, HugeBlockMasksAreNotPacked) {
  const DeviceInfo device = *named_device("h200");
  const KernelInfo& kernel = *find_kernel("fwd_sm90_bf16_d128_k128");
  Problem problem =
      *dense_problem(DType::bf16, 967, 8, 4, 20000, 200000, 128, 128, {}, device.device);
  problem.mask_blocks = {
      .dtype = DType::i32, .row = 1563, .column = 1};  // of all heads and batches
  EXPECT_EQ(supports(kernel, problem, device), Reject::none);
  problem.mask_blocks.batch = 157 * 1563;
  EXPECT_GT(packed_mask_bytes(problem), kMaxPackedMaskBytes);
  EXPECT_EQ(to_message(supports(kernel, problem, device), kernel, problem, device),
            "would turn the block mask into more than 8 GiB of bits");
  EXPECT_FALSE(packs_mask(*make_plan(problem, device)->kernel));
}

TEST(Features, EveryKernelBelongsToItsFamily) {
  for (const KernelInfo& kernel : kernels()) {
    const FamilyTraits& traits = traits_of(kernel);
    EXPECT_EQ(traits.family, kernel.family);
    EXPECT_EQ(traits.device, kernel.device) << kernel.id;
    ASSERT_NE(kernel.family_name(), nullptr) << kernel.id;
    EXPECT_EQ(kernel.features & traits.features, kernel.features) << kernel.id;
    if (kernel.device == DeviceType::cuda) {
      EXPECT_NE(std::string(kernel.id).find(kernel.family_name()), std::string::npos) << kernel.id;
    }
  }
}

}  // namespace
}  // namespace flashcore
