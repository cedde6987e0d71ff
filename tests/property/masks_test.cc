// Masks: all options that hide a key agree, and a hidden key has no effect.
#include <cmath>
#include <limits>

#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Masks : public KernelTest {
 protected:
  Inputs draw() {
    Inputs inputs = draw_inputs(random(), kernel(), draw_sizes(random(), kernel()));
    add_score_options(random(), inputs);
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(1, 3));
    return inputs;
  }
};
FLASHCORE_FOR_EACH_KERNEL(Masks);

TEST_P(Masks, CausalAndWindowsEqualABooleanMask) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs by_rule = draw();
    const std::int64_t q_len = by_rule.q.size(2), kv_len = by_rule.k.size(2);
    const bool causal = random().chance(0.5);
    const std::int64_t left = random().chance(0.6) ? random().between(0, kv_len) : -1;
    const std::int64_t right = random().chance(0.4) ? random().between(0, kv_len) : -1;
    Inputs by_mask = by_rule;
    by_rule.options.causal = causal;
    by_rule.options.window_left = left;
    by_rule.options.window_right = right;
    by_mask.mask = Tensor(DType::boolean, {1, 1, q_len, kv_len});
    for (std::int64_t i = 0; i < q_len; ++i) {
      for (std::int64_t j = 0; j < kv_len; ++j) {
        const std::int64_t position = kv_len - q_len + i;
        const bool visible = (!causal || j <= position) && (left < 0 || j >= position - left) &&
                             (right < 0 || j <= position + right);
        by_mask.mask.set({0, 0, i, j}, visible ? 1 : 0);
      }
    }
    const Output a = attend(by_rule), b = attend(by_mask);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    FLASHCORE_EXPECT_SAME(a, b);
    EXPECT_EQ(verdict(by_rule, a), "");
  }
}

TEST_P(Masks, BooleanMaskEqualsABiasOfMinusInfinity) {
  for (int n = 0; n < rounds(25); ++n) {
    Inputs masked = draw();
    masked.bias = {};
    masked.mask = draw_mask(
        random(),
        {random().chance(0.5) ? masked.q.size(0) : 1, random().chance(0.5) ? masked.q.size(1) : 1,
         random().chance(0.5) ? masked.q.size(2) : 1, masked.k.size(2)},
        0.5);
    Inputs biased = masked;
    biased.mask = {};
    std::vector<double> bias;
    for (const double visible : masked.mask.values()) bias.push_back(visible != 0 ? 0 : -kInfinity);
    biased.bias = tensor_of(random().chance(0.5) ? DType::f32 : dtype(), masked.mask.shape(), bias);
    const Output a = attend(masked), b = attend(biased);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    FLASHCORE_EXPECT_SAME(a, b);
  }
}

TEST_P(Masks, BroadcastMaskAndBiasEqualTheirExpansion) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs inputs = draw();
    inputs.mask = draw_mask(random(), {1, 1, 1, inputs.k.size(2)});
    inputs.bias = draw_normal(random(), DType::f32, {1, 1, 1, inputs.k.size(2)});
    Inputs expanded = inputs;
    for (int axis = 0; axis < 3; ++axis) {
      const std::vector<std::int64_t> zeros(static_cast<std::size_t>(inputs.q.size(axis)), 0);
      expanded.mask = take(expanded.mask, axis, zeros);
      expanded.bias = take(expanded.bias, axis, zeros);
    }
    const Output a = attend(inputs), b = attend(expanded);
    FLASHCORE_EXPECT_SAME(a, b);
  }
}

/// Blocks of all kinds, some of them invalid.
void draw_block_mask(Random& random, Inputs& inputs, std::int64_t block_q, std::int64_t block_k) {
  const std::int64_t q_len = inputs.q.size(2), kv_len = inputs.k.size(2), tiles = 2;
  inputs.mask_blocks =
      Tensor(DType::i32,
             {random.chance(0.5) ? inputs.q.size(0) : 1, random.chance(0.5) ? inputs.q.size(1) : 1,
              (q_len + block_q - 1) / block_q, (kv_len + block_k - 1) / block_k});
  inputs.mask_bits = Tensor(DType::i32, {tiles, block_q, block_k / 32});
  std::vector<std::uint64_t> entries = inputs.mask_blocks.bits();
  for (std::uint64_t& entry : entries) {
    entry = static_cast<std::uint32_t>(static_cast<std::int32_t>(random.between(-1, 2 + tiles)));
  }
  inputs.mask_blocks.set_bits(entries);
  std::vector<std::uint64_t> words = inputs.mask_bits.bits();
  for (std::uint64_t& word : words) word = static_cast<std::uint32_t>(random.bits());
  inputs.mask_bits.set_bits(words);
}

TEST_P(Masks, BlockMaskEqualsTheSameBooleanMask) {
  for (int n = 0; n < rounds(20); ++n) {
    Inputs by_blocks = draw();
    by_blocks.options.causal = random().chance(0.3);
    const std::int64_t block_q = std::int64_t{16} << random().between(0, 3);
    const std::int64_t block_k = std::int64_t{32} << random().between(0, 3);
    draw_block_mask(random(), by_blocks, block_q, block_k);
    Inputs dense = by_blocks;
    dense.mask_blocks = dense.mask_bits = {};
    const Tensor &blocks = by_blocks.mask_blocks, &bits = by_blocks.mask_bits;
    dense.mask = Tensor(DType::boolean,
                        {blocks.size(0), blocks.size(1), by_blocks.q.size(2), by_blocks.k.size(2)});
    for (std::int64_t b = 0; b < blocks.size(0); ++b) {
      for (std::int64_t h = 0; h < blocks.size(1); ++h) {
        for (std::int64_t i = 0; i < by_blocks.q.size(2); ++i) {
          for (std::int64_t j = 0; j < by_blocks.k.size(2); ++j) {
            const double entry = blocks.at({b, h, i / block_q, j / block_k});
            bool visible = entry == 1;
            if (entry == 2 || entry == 3) {
              const double word =
                  bits.at({static_cast<std::int64_t>(entry) - 2, i % block_q, j % block_k / 32});
              visible = (static_cast<std::int64_t>(word) >> (j % 32) & 1) != 0;
            }
            dense.mask.set({b, h, i, j}, visible ? 1 : 0);
          }
        }
      }
    }
    const Output a = attend(by_blocks), want = attend(dense);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    FLASHCORE_EXPECT_SAME(a, want);
    EXPECT_EQ(verdict(by_blocks, a), "");
  }
}

TEST_P(Masks, RowsWithoutVisibleKeysAreZeroAndMinusInfinity) {
  for (int n = 0; n < rounds(15); ++n) {
    Inputs inputs = draw();
    inputs.sinks = {};
    const std::int64_t q_len = inputs.q.size(2), kv_len = inputs.k.size(2);
    inputs.mask = draw_mask(random(), {1, 1, q_len, kv_len});
    const std::int64_t hidden = random().below(q_len);
    for (std::int64_t j = 0; j < kv_len; ++j) inputs.mask.set({0, 0, hidden, j}, 0);
    const Output output = attend(inputs);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    for (std::int64_t h = 0; h < inputs.q.size(1); ++h) {
      ASSERT_EQ(output.lse.at({0, h, hidden}), -kInfinity);
      for (std::int64_t c = 0; c < inputs.v.size(3); ++c) {
        ASSERT_EQ(output.out.at({0, h, hidden, c}), 0.0);
      }
    }
    EXPECT_EQ(verdict(inputs, output), "");
  }
}

TEST_P(Masks, EveryOptionThatHidesAllKeysGivesZero) {
  Inputs base = draw();
  base.sinks = {};
  const auto batch = static_cast<std::size_t>(base.q.size(0));
  std::vector<Inputs> hidden(5, base);
  hidden[0].used_k = ints(std::vector<std::int64_t>(batch, 0));
  hidden[1].options.causal = true;
  hidden[1].q_start = ints(std::vector<std::int64_t>(batch, -1000));
  hidden[2].options.window_left = 5;
  hidden[2].q_start = ints(std::vector<std::int64_t>(batch, 1 << 30));
  hidden[3].bias = Tensor(DType::f32, {1, 1, 1, base.k.size(2)});
  hidden[3].bias.fill(-kInfinity);
  hidden[4].options.window_right = 0;
  hidden[4].k_start = ints(std::vector<std::int64_t>(batch, 1 << 30));
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    SCOPED_TRACE(i);
    const Output output = attend(hidden[i]);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    for (const double x : output.out.values()) ASSERT_EQ(x, 0.0);
    for (const double x : output.lse.values()) ASSERT_EQ(x, -kInfinity);
    // With a sink the LSE equals the sink and the output is still 0.
    hidden[i].sinks = draw_normal(random(), DType::f32, {base.q.size(1)});
    const Output with_sink = attend(hidden[i]);
    for (const double x : with_sink.out.values()) ASSERT_EQ(x, 0.0);
    EXPECT_EQ(verdict(hidden[i], with_sink), "");
    for (std::int64_t h = 0; h < base.q.size(1); ++h) {
      ASSERT_NEAR(with_sink.lse.at({0, h, 0}), hidden[i].sinks.at({h}), 1e-6);
    }
  }
}

TEST_P(Masks, VeryWideWindowsHideNothing) {
  const Inputs inputs = draw();
  const Output want = attend(inputs);
  for (const std::int64_t wide_window : {inputs.q.size(2) + inputs.k.size(2), std::int64_t{1} << 40,
                                         std::numeric_limits<std::int64_t>::max()}) {
    Inputs windowed = inputs;
    windowed.options.window_left = windowed.options.window_right = wide_window;
    const Output output = attend(windowed);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    FLASHCORE_EXPECT_SAME(output, want);
    EXPECT_EQ(verdict(windowed, output), "");
  }
}

TEST_P(Masks, HiddenKeysMayHoldAnything) {
  for (int n = 0; n < rounds(10); ++n) {
    Inputs inputs = draw();
    const std::int64_t kv_len = inputs.k.size(2);
    inputs.mask = draw_mask(random(), {1, 1, 1, kv_len}, 0.6);
    const Output want = attend(inputs);
    // A hidden key may have any K and any finite V.
    for (std::int64_t j = 0; j < kv_len; ++j) {
      if (inputs.mask.at({0, 0, 0, j}) != 0) continue;
      for (std::int64_t d = 0; d < inputs.k.size(3); ++d) {
        inputs.k.set({0, 0, j, d}, std::numeric_limits<double>::quiet_NaN());
      }
      for (std::int64_t c = 0; c < inputs.v.size(3); ++c) inputs.v.set({0, 0, j, c}, 1e4);
    }
    const Output output = attend(inputs);
    FLASHCORE_EXPECT_SAME(output, want);
  }
}

}  // namespace
}  // namespace flashcore::test
