// reproducibility = batch_invariant: the bits of a row depend on the data of that row only.
#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class BatchInvariant : public KernelTest {
 protected:
  Inputs draw(std::int64_t batch, std::int64_t kv_len = 0) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = batch;
    if (kv_len > 0) sizes.kv_len = kv_len;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    inputs.options.reproducibility = Reproducibility::batch_invariant;
    return inputs;
  }
};
FLASHCORE_FOR_EACH_KERNEL(BatchInvariant);

TEST_P(BatchInvariant, OtherBatchesGiveTheSameBits) {
  for (int n = 0; n < rounds(5); ++n) {
    const Inputs inputs = draw(4, random().chance(0.3) ? 2100 : 0);
    const Output together = attend(inputs);
    ASSERT_TRUE(together.status.ok()) << together.status.message();
    ASSERT_EQ(together.plan.splits, 1);
    for (const std::vector<std::int64_t>& chosen :
         {std::vector<std::int64_t>{2}, {3, 1}, {1, 1, 0, 2, 3, 3, 0}}) {
      const Output output = attend(take_batch(inputs, chosen));
      FLASHCORE_EXPECT_SAME_BITS(take(together.out, 0, chosen), output.out);
      FLASHCORE_EXPECT_SAME_BITS(take(together.lse, 0, chosen), output.lse);
    }
  }
}

TEST_P(BatchInvariant, PaddingGivesTheSameBits) {
  for (int n = 0; n < rounds(10); ++n) {
    Inputs inputs = draw(2);
    inputs.bias = inputs.mask = {};
    const std::int64_t q_len = inputs.q.size(2), kv_len = inputs.k.size(2);
    const Output want = attend(inputs);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    // The same sequences in longer buffers: extra queries and extra capacity after the keys.
    Inputs padded = inputs;
    const auto longer = [](std::int64_t length, std::int64_t extra) {
      std::vector<std::int64_t> indices = range(0, length);
      for (std::int64_t i = 0; i < extra; ++i) indices.push_back(i % length);
      return indices;
    };
    padded.q = take(inputs.q, 2, longer(q_len, random().between(1, 90)));
    padded.k = take(inputs.k, 2, longer(kv_len, random().between(1, 300)));
    padded.v = take(inputs.v, 2, longer(kv_len, padded.k.size(2) - kv_len));
    padded.used_k = ints({kv_len, kv_len});
    padded.q_start = ints({kv_len - q_len, kv_len - q_len});
    const Output output = attend(padded);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    FLASHCORE_EXPECT_SAME_BITS(take(output.out, 2, range(0, q_len)), want.out);
    FLASHCORE_EXPECT_SAME_BITS(take(output.lse, 2, range(0, q_len)), want.lse);
  }
}

TEST_P(BatchInvariant, ChunkedPrefillGivesTheSameBits) {
  for (int n = 0; n < rounds(10); ++n) {
    Inputs inputs = draw(2);
    inputs.options.causal = true;
    inputs.options.window_right = -1;
    // The whole prompt in one call: as many queries as keys.
    const std::int64_t length = std::min<std::int64_t>(inputs.k.size(2), 150);
    inputs.k = take(inputs.k, 2, range(0, length));
    inputs.v = take(inputs.v, 2, range(0, length));
    inputs.q = draw_normal(random(), dtype(), {2, inputs.q.size(1), length, inputs.q.size(3)});
    inputs.bias = inputs.mask = {};
    const Output whole = attend(inputs);
    ASSERT_TRUE(whole.status.ok()) << whole.status.message();
    for (std::int64_t begin = 0; begin < length;) {
      const std::int64_t end = std::min(length, begin + random().between(1, 70));
      // A chunk gets the keys up to its end, like a cache, or all keys. q_start gives its position.
      Inputs chunk = inputs;
      chunk.q = take(inputs.q, 2, range(begin, end));
      chunk.q_start = ints({begin, begin});
      if (random().chance(0.5)) {
        chunk.k = take(inputs.k, 2, range(0, end));
        chunk.v = take(inputs.v, 2, range(0, end));
      }
      const Output output = attend(chunk);
      ASSERT_TRUE(output.status.ok()) << output.status.message();
      FLASHCORE_EXPECT_SAME_BITS(take(whole.out, 2, range(begin, end)), output.out);
      FLASHCORE_EXPECT_SAME_BITS(take(whole.lse, 2, range(begin, end)), output.lse);
      begin = end;
    }
  }
}

TEST_P(BatchInvariant, VarlenGivesTheSameBits) {
  for (int n = 0; n < rounds(10); ++n) {
    Inputs inputs = draw(1, random().chance(0.5) ? 1500 : 0);
    inputs.bias = inputs.mask = {};
    if (inputs.alibi_slopes.rank() == 2) inputs.alibi_slopes = {};
    const std::int64_t q_len = inputs.q.size(2), kv_len = inputs.k.size(2);
    const Output want = attend(inputs);
    // The same sequence as the second of two varlen sequences.
    const auto to_varlen = [&](const Tensor& t, std::int64_t before) {
      Tensor rows(t.dtype(), {before + t.size(2), t.size(1), t.size(3)});
      rows.fill(0.25);
      for (std::int64_t h = 0; h < t.size(1); ++h) {
        for (std::int64_t i = 0; i < t.size(2); ++i) {
          for (std::int64_t d = 0; d < t.size(3); ++d) {
            rows.set({before + i, h, d}, t.at({0, h, i, d}));
          }
        }
      }
      return rows;
    };
    Inputs both = inputs;
    both.q = to_varlen(inputs.q, 3);
    both.k = to_varlen(inputs.k, 11);
    both.v = to_varlen(inputs.v, 11);
    both.cu_seqlens_q = ints({0, 3, 3 + q_len});
    both.cu_seqlens_k = ints({0, 11, 11 + kv_len});
    const Output output = attend(both);
    ASSERT_TRUE(output.status.ok()) << output.status.message();
    for (std::int64_t h = 0; h < inputs.q.size(1); ++h) {
      for (std::int64_t i = 0; i < q_len; ++i) {
        ASSERT_EQ(output.lse.at({h, 3 + i}), want.lse.at({0, h, i}));
        for (std::int64_t d = 0; d < inputs.v.size(3); ++d) {
          ASSERT_EQ(output.out.at({3 + i, h, d}), want.out.at({0, h, i, d}));
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::test
