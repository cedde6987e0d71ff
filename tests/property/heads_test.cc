// Other heads, other sequences and the number of threads do not change a row.
#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

class Heads : public KernelTest {};
FLASHCORE_FOR_EACH_KERNEL(Heads);

std::vector<std::int64_t> repeated(std::int64_t heads, std::int64_t times) {
  std::vector<std::int64_t> indices;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t n = 0; n < times; ++n) indices.push_back(h);
  }
  return indices;
}

TEST_P(Heads, GqaEqualsRepeatedKv) {
  for (int n = 0; n < rounds(12); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.q_heads = sizes.kv_heads * random().between(2, 5);
    Inputs grouped = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), grouped);
    add_masks(random(), grouped);
    grouped.options.num_splits = static_cast<std::int32_t>(random().between(1, 3));
    Inputs repeated_kv = grouped;
    const auto indices = repeated(sizes.kv_heads, sizes.q_heads / sizes.kv_heads);
    repeated_kv.k = take(grouped.k, 1, indices);
    repeated_kv.v = take(grouped.v, 1, indices);
    const Output a = attend(grouped), b = attend(repeated_kv);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    FLASHCORE_EXPECT_SAME(a, b);
    EXPECT_EQ(verdict(grouped, a), "");
  }
}

TEST_P(Heads, PermutedHeadsGivePermutedResults) {
  for (int n = 0; n < rounds(20); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.kv_heads = sizes.q_heads = 4;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    const auto order = draw_permutation(random(), 4);
    Inputs permuted = inputs;
    permuted.q = take(inputs.q, 1, order);
    permuted.k = take(inputs.k, 1, order);
    permuted.v = take(inputs.v, 1, order);
    const Output a = attend(inputs), b = attend(permuted);
    FLASHCORE_EXPECT_SAME_BITS(take(a.out, 1, order), b.out);
    FLASHCORE_EXPECT_SAME_BITS(take(a.lse, 1, order), b.lse);
  }
}

TEST_P(Heads, PermutedBatchesGivePermutedResults) {
  for (int n = 0; n < rounds(20); ++n) {
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 4;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    const auto order = draw_permutation(random(), 4);
    const Output a = attend(inputs), b = attend(take_batch(inputs, order));
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    FLASHCORE_EXPECT_SAME_BITS(take(a.out, 0, order), b.out);
    FLASHCORE_EXPECT_SAME_BITS(take(a.lse, 0, order), b.lse);
  }
}

TEST_P(Heads, ThreadsChangeNoBit) {
  for (int n = 0; n < rounds(8); ++n) {
    // Enough work to use several threads, with and without splits.
    Sizes sizes = draw_sizes(random(), kernel());
    sizes.batch = 2;
    sizes.q_len = random().between(30, 80);
    sizes.kv_len = random().between(300, 700);
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(0, 4));
    const Output one = attend(inputs, {.threads = 1});
    ASSERT_TRUE(one.status.ok()) << one.status.message();
    for (int threads = 2; threads <= 8; ++threads) {
      const Output many = attend(inputs, {.threads = threads});
      FLASHCORE_EXPECT_SAME(one, many);
    }
  }
}

TEST_P(Heads, RowsPerWorkTileChangeNoBit) {
  // AMX kernels have more rows per work tile if few threads share many.
  for (const bool causal : {false, true}) {
    Inputs inputs = draw_inputs(random(), kernel(),
                                {.batch = 1,
                                 .q_heads = 4,
                                 .kv_heads = 4,
                                 .q_len = 1030,
                                 .kv_len = 290,
                                 .head_dim = 16,
                                 .v_dim = 24});
    inputs.options.causal = causal;
    if (causal) inputs.options.window_left = 90;
    const Output few = attend(inputs, {.threads = 1}), many = attend(inputs, {.threads = 8});
    if (kernel().isa == Isa::amx) {
      EXPECT_EQ(few.plan.tile_q, 2 * many.plan.tile_q);
    }
    FLASHCORE_EXPECT_SAME(few, many);
  }
}

TEST_P(Heads, SameCallGivesTheSameBits) {
  Inputs inputs = draw_call(random(), kernel());
  const Output first = attend(inputs);
  for (int n = 0; n < rounds(20); ++n) {
    const Output again = attend(inputs);
    FLASHCORE_EXPECT_SAME(first, again);
  }
}

}  // namespace
}  // namespace flashcore::test
