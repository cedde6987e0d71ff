// Block masks: every pattern equals its definition, invalid descriptions and tensors are refused.
#include "flashcore/block_mask.h"

#include <gtest/gtest.h>

#include <functional>

#include "flashcore/flashcore.h"
#include "support/call.h"
#include "support/draw.h"

namespace flashcore::test {
namespace {

using Visible = std::function<bool(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j)>;

Tensor expanded(const BlockMask& mask) {
  Tensor dense(DType::boolean, {mask.batch, mask.heads, mask.q_len, mask.kv_len});
  const Status status = expand_block_mask(mask.blocks_view(), mask.bits_view(), dense.view());
  EXPECT_TRUE(status.ok()) << status.message();
  return dense;
}

/// Expects the mask that `visible` defines, and blocks that are mixed only where they must be.
void expect_mask(const Result<BlockMask>& mask, const Visible& visible) {
  ASSERT_TRUE(mask.ok()) << mask.status().message();
  const Tensor dense = expanded(*mask);
  for (std::int64_t b = 0; b < mask->batch; ++b) {
    for (std::int64_t h = 0; h < mask->heads; ++h) {
      std::vector<std::int64_t> shown(
          static_cast<std::size_t>(mask->q_blocks() * mask->k_blocks())),
          all(shown);
      for (std::int64_t i = 0; i < mask->q_len; ++i) {
        for (std::int64_t j = 0; j < mask->kv_len; ++j) {
          ASSERT_EQ(dense.at({b, h, i, j}) != 0, visible(b, h, i, j)) << i << " " << j;
          const auto block =
              static_cast<std::size_t>(i / mask->block_q * mask->k_blocks() + j / mask->block_k);
          ++all[block];
          if (visible(b, h, i, j)) ++shown[block];
        }
      }
      const std::int32_t* entries =
          mask->blocks.data() + (b * mask->heads + h) * mask->q_blocks() * mask->k_blocks();
      for (std::size_t n = 0; n < shown.size(); ++n) {
        const int kind = shown[n] == 0 ? 0 : shown[n] == all[n] ? 1 : 2;
        EXPECT_EQ(std::min(entries[n], 2), kind) << "block " << n;
      }
    }
  }
}

BlockMaskSpec spec_of(MaskPattern pattern, std::int64_t q_len, std::int64_t kv_len) {
  BlockMaskSpec spec;
  spec.pattern = pattern;
  spec.q_len = q_len, spec.kv_len = kv_len;
  spec.block_q = 16, spec.block_k = 32;
  return spec;
}

TEST(BlockMask, DocumentsSeeThemselves) {
  std::vector<std::int64_t> ids;
  for (const int length : {40, 7, 64, 33})
    ids.insert(ids.end(), static_cast<std::size_t>(length), static_cast<std::int64_t>(ids.size()));
  ids[100] = ids[101] = -1;      // padding
  ids[120] = ids[121] = ids[3];  // a document in two places
  const Tensor values = ints(ids);
  for (const std::int64_t q_len : {std::int64_t{144}, std::int64_t{50}, std::int64_t{150}}) {
    BlockMaskSpec spec = spec_of(MaskPattern::documents, q_len, 144);
    spec.values = values.view();
    expect_mask(make_block_mask(spec), [&](auto, auto, std::int64_t i, std::int64_t j) {
      const std::int64_t position = i + 144 - q_len;
      if (position < 0) return false;
      const std::int64_t own = ids[static_cast<std::size_t>(position)];
      return own >= 0 && own == ids[static_cast<std::size_t>(j)];
    });
  }
}

TEST(BlockMask, PrefixesDifferBySequence) {
  const Tensor prefix = ints({0, 45, 500});
  BlockMaskSpec spec = spec_of(MaskPattern::prefix_lm, 70, 100);
  spec.values = prefix.view();
  const std::int64_t lengths[] = {0, 45, 500};
  expect_mask(make_block_mask(spec), [&](std::int64_t b, auto, std::int64_t i, std::int64_t j) {
    return j < lengths[b] || j <= i + 30;
  });
}

TEST(BlockMask, WindowsHaveGlobalTokens) {
  BlockMaskSpec spec = spec_of(MaskPattern::sliding_window, 130, 130);
  spec.window_left = 20, spec.window_right = 3, spec.global_tokens = 5;
  expect_mask(make_block_mask(spec), [](auto, auto, std::int64_t i, std::int64_t j) {
    return (j >= i - 20 && j <= i + 3) || j < 5 || i < 5;
  });
  spec.window_left = -1, spec.window_right = std::int64_t{1} << 62, spec.global_tokens = 0;
  expect_mask(make_block_mask(spec), [](auto, auto, auto, auto) { return true; });
}

TEST(BlockMask, TreeTokensSeeTheirAncestors) {
  const std::vector<std::int64_t> parents = {-1, 0, 0, 1, 2, 2, -1, 6};
  const Tensor values = ints(parents);
  BlockMaskSpec spec = spec_of(MaskPattern::tree, 8, 108);
  spec.values = values.view();
  expect_mask(make_block_mask(spec), [&](auto, auto, std::int64_t i, std::int64_t j) {
    if (j < 100) return true;
    for (std::int64_t t = i; t >= 0; t = parents[static_cast<std::size_t>(t)]) {
      if (t == j - 100) return true;
    }
    return false;
  });
}

TEST(BlockMask, DenseMasksRoundTrip) {
  Random random(7);
  Tensor dense = draw_mask(random, {2, 3, 70, 90}, 0.5);
  for (std::int64_t i = 16; i < 32; ++i) {
    for (std::int64_t j = 0; j < 64; ++j) dense.set({1, 1, i, j}, j < 32 ? 0 : 1);
  }
  BlockMaskSpec spec = spec_of(MaskPattern::dense, 70, 90);
  spec.values = dense.view();
  expect_mask(make_block_mask(spec), [&](auto b, auto h, std::int64_t i, std::int64_t j) {
    return dense.at({b, h, i, j}) != 0;
  });
}

TEST(BlockMask, BlockSparseRowsAreVisibleBlocks) {
  const Tensor offsets = tensor_of(DType::i32, {1, 2, 4}, {0, 1, 1, 3, 3, 4, 4, 4});
  const Tensor columns = ints({2, 0, 1, 1});
  BlockMaskSpec spec = spec_of(MaskPattern::bsr, 40, 90);
  spec.values = offsets.view(), spec.columns = columns.view();
  expect_mask(make_block_mask(spec), [](auto, std::int64_t h, std::int64_t i, std::int64_t j) {
    const std::int64_t q = i / 16, k = j / 32;
    return h == 0 ? (q == 0 && k == 2) || (q == 2 && k < 2) : q == 0 && k == 1;
  });
}

TEST(BlockMask, EqualTilesAreStoredOnce) {
  BlockMaskSpec spec = spec_of(MaskPattern::sliding_window, 4096, 4096);
  spec.window_left = 256, spec.window_right = 0, spec.block_q = spec.block_k = 64;
  const Result<BlockMask> mask = make_block_mask(spec);
  ASSERT_TRUE(mask.ok());
  EXPECT_EQ(mask->tiles(), 2);  // the two edges of the window
}

TEST(BlockMask, InvalidDescriptionsAreRefused) {
  const auto message = [](const BlockMaskSpec& spec) {
    const Result<BlockMask> mask = make_block_mask(spec);
    return mask.ok() ? std::string("accepted") : mask.status().message();
  };
  BlockMaskSpec spec = spec_of(MaskPattern::sliding_window, 10, 10);
  spec.block_q = 24;
  EXPECT_EQ(message(spec), "block_q is 24; wanted a power of two from 16 to 1024");
  spec.block_q = 16, spec.block_k = 16;
  EXPECT_EQ(message(spec), "block_k is 16; wanted a power of two from 32 to 1024");
  spec = spec_of(MaskPattern::documents, 10, 10);
  const Tensor short_ids = ints({1, 2, 3}), parents = ints({-1, 1, 0}), bad = ints({0, 1, 5});
  spec.values = short_ids.view();
  EXPECT_NE(message(spec).find("values: length is 3; wanted 10"), std::string::npos);
  spec = spec_of(MaskPattern::tree, 3, 10);
  spec.values = parents.view();
  EXPECT_NE(message(spec).find("the parent of token 1 is 1"), std::string::npos);
  spec = spec_of(MaskPattern::bsr, 16, 32);
  const Tensor offsets = tensor_of(DType::i32, {1, 1, 2}, {0, 3});
  spec.values = offsets.view(), spec.columns = bad.view();
  EXPECT_NE(message(spec).find("columns: entry 1 is 1; wanted 0 to 0"), std::string::npos);
  spec = spec_of(static_cast<MaskPattern>(9), 16, 32);
  EXPECT_NE(message(spec).find("pattern is 9"), std::string::npos);
}

Inputs small_inputs() {
  Random random(3);
  Inputs inputs;
  inputs.q = draw_normal(random, DType::f32, {2, 4, 40, 16});
  inputs.k = draw_normal(random, DType::f32, {2, 2, 100, 16});
  inputs.v = draw_normal(random, DType::f32, {2, 2, 100, 16});
  inputs.mask_blocks = Tensor(DType::i32, {1, 4, 3, 4});
  inputs.mask_blocks.fill(1);
  inputs.mask_bits = Tensor(DType::i32, {0, 16, 1});
  return inputs;
}

TEST(BlockMask, InvalidTensorsAreRefused) {
  EXPECT_EQ(verdict(small_inputs(), attend(small_inputs())), "");
  const auto message = [](const std::function<void(Inputs&)>& damage) {
    Inputs inputs = small_inputs();
    damage(inputs);
    return attend(inputs).status.message();
  };
  EXPECT_NE(message([](Inputs& in) { in.mask_bits = {}; }).find("without mask_bits"),
            std::string::npos);
  EXPECT_NE(message([](Inputs& in) { in.mask_blocks = {}; }).find("without mask_blocks"),
            std::string::npos);
  EXPECT_NE(message([](Inputs& in) {
              in.mask = Tensor(DType::boolean, {1, 1, 1, 100});
            }).find("given together with mask"),
            std::string::npos);
  EXPECT_EQ(message([](Inputs& in) {
              in.mask_bits = Tensor(DType::i32, {0, 24, 1});
            }),
            "mask_bits: block_q is 24; wanted a power of two from 16 to 1024");
  EXPECT_EQ(message([](Inputs& in) {
              in.mask_blocks = Tensor(DType::i32, {1, 4, 2, 4});
            }),
            "mask_blocks: q_blocks is 2; wanted 3 for 40 queries in blocks of 16");
  EXPECT_EQ(message([](Inputs& in) {
              in.mask_blocks = Tensor(DType::i32, {1, 4, 3, 5});
            }),
            "mask_blocks: k_blocks is 5; wanted 4 for 100 keys in blocks of 32");
  EXPECT_EQ(message([](Inputs& in) {
              in.mask_blocks = Tensor(DType::i32, {3, 4, 3, 4});
            }),
            "mask_blocks: batch is 3; wanted 2 or 1");
  EXPECT_EQ(message([](Inputs& in) {
              in.mask_blocks = Tensor(DType::f32, {1, 4, 3, 4});
            }),
            "mask_blocks: dtype is f32; wanted i32");
}

TEST(BlockMask, ExplainCountsSkippedTiles) {
  Inputs inputs = small_inputs();
  inputs.mask_blocks.fill(0);
  const Output output = attend(inputs);
  ASSERT_TRUE(output.status.ok()) << output.status.message();
  for (const double x : output.out.values()) ASSERT_EQ(x, 0.0);
  const std::string text = explain(output.plan, tensors_of(inputs, output.out, output.lse));
  EXPECT_NE(text.find("blocks of 16 x 32: 100.0 % hidden"), std::string::npos) << text;
  EXPECT_NE(text.find("KV tiles skipped: 100.0 % (by position alone 0.0 %)"), std::string::npos)
      << text;
  inputs.mask_blocks.fill(1);
  EXPECT_NE(explain(output.plan, tensors_of(inputs, output.out, output.lse))
                .find("KV tiles skipped: 0.0 %"),
            std::string::npos);
}

TEST(BlockMask, TheCApiBuildsTheSameMask) {
  flashcore_block_mask_params params{};
  params.struct_size = sizeof params;
  params.q_len = params.kv_len = 300;
  params.window_left = 50, params.window_right = 0;
  params.pattern = FLASHCORE_MASK_SLIDING_WINDOW;
  flashcore_block_mask* mask = nullptr;
  flashcore_error error{};
  ASSERT_EQ(flashcore_block_mask_create(&params, &mask, &error), FLASHCORE_OK) << error.message;
  BlockMaskSpec spec = spec_of(MaskPattern::sliding_window, 300, 300);
  spec.window_left = 50, spec.window_right = 0, spec.block_q = spec.block_k = 128;
  const Result<BlockMask> want = make_block_mask(spec);
  ASSERT_TRUE(want.ok());
  const flashcore_tensor* blocks = flashcore_block_mask_blocks(mask);
  ASSERT_EQ(blocks->ndim, 4);
  EXPECT_EQ(blocks->shape[3], 3);
  const auto* entries = static_cast<const std::int32_t*>(blocks->data);
  EXPECT_EQ(std::vector<std::int32_t>(entries, entries + 9), want->blocks);
  EXPECT_EQ(flashcore_block_mask_bits(mask)->shape[0], want->tiles());
  flashcore_block_mask_free(mask);
  params.struct_size = 8;
  EXPECT_EQ(flashcore_block_mask_create(&params, &mask, &error), FLASHCORE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flashcore::test
