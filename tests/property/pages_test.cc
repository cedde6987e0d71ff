// Paged KV gives the bits of dense KV for all page sizes and page orders, also in a cache that
// append() fills step by step.
#include "support/pages.h"
#include "support/kernel_test.h"

namespace flashcore::test {
namespace {

constexpr std::int64_t kPageSizes[] = {1, 2, 3, 5, 8, 16, 33, 64, 100, 256};

class PagedKv : public KernelTest {
 protected:
  Inputs draw(std::int64_t kv_len = 0) {
    Sizes sizes = draw_sizes(random(), kernel());
    if (kv_len > 0) sizes.kv_len = kv_len;
    Inputs inputs = draw_inputs(random(), kernel(), sizes);
    add_score_options(random(), inputs);
    add_masks(random(), inputs);
    return inputs;
  }
  void draw_used_lengths(Inputs& inputs) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < inputs.k.size(0); ++b) {
      lengths.push_back(random().between(0, inputs.k.size(2)));
    }
    inputs.used_k = ints(lengths);
  }
};
FLASHCORE_FOR_EACH_KERNEL(PagedKv);

// With the same capacity per sequence the plan and its splits are the same, so the bits are equal.
TEST_P(PagedKv, SameBitsAsDenseKv) {
  for (int n = 0; n < rounds(12); ++n) {
    const std::int64_t page_size = random().pick(kPageSizes);
    Inputs inputs = draw(page_size * random().between(1, 200 / page_size + 2));
    draw_used_lengths(inputs);
    inputs.options.num_splits = static_cast<std::int32_t>(random().between(0, 3));
    const Output want = attend(inputs);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    const Inputs in_pages = paged(random(), inputs, page_size);
    const Output got = attend(in_pages);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_EQ(got.plan.splits, want.plan.splits);
    FLASHCORE_EXPECT_SAME(got, want);
    EXPECT_EQ(verdict(in_pages, got), "");
  }
}

TEST_P(PagedKv, WithoutUsedLengthsAllPagesAreFull) {
  for (int n = 0; n < rounds(6); ++n) {
    const std::int64_t page_size = random().pick(kPageSizes);
    const Inputs inputs = draw(page_size * random().between(1, 100 / page_size + 2));
    const Output want = attend(inputs);
    Inputs in_pages = paged(random(), inputs, page_size);
    in_pages.used_k = {};
    const Output got = attend(in_pages);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    FLASHCORE_EXPECT_SAME(got, want);
  }
}

TEST_P(PagedKv, BatchInvariantForAllPageSizes) {
  for (int n = 0; n < rounds(6); ++n) {
    Inputs inputs = draw(random().between(1, 300));
    inputs.options.reproducibility = Reproducibility::batch_invariant;
    if (random().chance(0.5)) draw_used_lengths(inputs);
    const Output want = attend(inputs);
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    for (int pages = 0; pages < 3; ++pages) {
      const Output got = attend(paged(random(), inputs, random().pick(kPageSizes)));
      ASSERT_TRUE(got.status.ok()) << got.status.message();
      FLASHCORE_EXPECT_SAME(got, want);
    }
  }
}

TEST_P(PagedKv, SequencesMaySharePages) {
  for (int n = 0; n < rounds(6); ++n) {
    const std::int64_t page_size = random().pick(kPageSizes);
    const std::int64_t pages = random().between(1, 5);
    Inputs inputs = draw(page_size * pages);
    // All sequences share the keys of the first one. Each has its own length.
    const std::int64_t batch = inputs.q.size(0);
    inputs.k = take(inputs.k, 0, std::vector<std::int64_t>(static_cast<std::size_t>(batch), 0));
    inputs.v = take(inputs.v, 0, std::vector<std::int64_t>(static_cast<std::size_t>(batch), 0));
    draw_used_lengths(inputs);
    const Output want = attend(inputs);
    Inputs first = take_batch(inputs, {0});
    first.used_k = {};
    const Inputs in_pages = paged(random(), first, page_size);
    Inputs shared = inputs;
    shared.k = in_pages.k;
    shared.v = in_pages.v;
    shared.block_table = take(in_pages.block_table, 0,
                              std::vector<std::int64_t>(static_cast<std::size_t>(batch), 0));
    const Output got = attend(shared);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    FLASHCORE_EXPECT_SAME(got, want);
  }
}

// A decode loop: each step appends a few keys and runs attention with the last queries. All rows
// together equal one causal call over all keys.
TEST_P(PagedKv, AppendInStepsEqualsOneCall) {
  for (const bool in_pages : {false, true}) {
    for (int n = 0; n < rounds(3); ++n) {
      Sizes sizes = draw_sizes(random(), kernel());
      sizes.batch = 2;
      sizes.q_len = sizes.kv_len = random().between(8, 40);
      Inputs inputs = draw_inputs(random(), kernel(), sizes);
      inputs.options.causal = true;
      inputs.options.reproducibility = Reproducibility::batch_invariant;
      if (random().chance(0.5)) inputs.sinks = draw_normal(random(), DType::f32, {sizes.q_heads});
      const Output want = attend(inputs);
      ASSERT_TRUE(want.status.ok()) << want.status.message();

      // An empty cache: all pages are assigned, but hold no keys.
      const std::int64_t page_size = random().pick(kPageSizes);
      Inputs cache = in_pages ? paged(random(), inputs, page_size) : inputs;
      cache.k = Tensor(cache.k.dtype(), cache.k.shape());
      cache.v = Tensor(cache.v.dtype(), cache.v.shape());
      for (std::int64_t used = 0; used < sizes.kv_len;) {
        const std::int64_t now = std::min(sizes.kv_len, used + random().between(1, 5));
        const Tensor k_new = take(inputs.k, 2, range(used, now));
        const Tensor v_new = take(inputs.v, 2, range(used, now));
        const Tensor before = ints({used, used});
        const Status status = append({.k_new = k_new.view(),
                                      .v_new = v_new.view(),
                                      .k = cache.k.view(),
                                      .v = cache.v.view(),
                                      .seqused_k = before.view(),
                                      .block_table = cache.block_table.view()});
        ASSERT_TRUE(status.ok()) << status.message();
        cache.q = take(inputs.q, 2, range(used, now));
        cache.used_k = ints({now, now});
        const Output got = attend(cache);
        ASSERT_TRUE(got.status.ok()) << got.status.message();
        FLASHCORE_EXPECT_SAME_BITS(got.out, take(want.out, 2, range(used, now)));
        FLASHCORE_EXPECT_SAME_BITS(got.lse, take(want.lse, 2, range(used, now)));
        used = now;
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::test
