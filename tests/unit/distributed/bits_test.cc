// Bits of batch-invariant calls. Gather and Ulysses have those of one call on one device. A ring
// has those of one device that attends to the same ranges of keys and merges them in ascending
// order.
#include <gtest/gtest.h>

#include <algorithm>

#include "flashcore/distributed.h"
#include "support/draw.h"
#include "unit/distributed/ranks.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {
namespace {

constexpr std::int64_t kLength = 45;

/// Chunk i of 2 * ranks - 1: what zigzag placement divides the rows into. The last rank has two
/// parts that follow each other: one chunk.
std::vector<std::int64_t> chunk(std::int64_t i, std::int64_t ranks) {
  const auto part = [&](std::int64_t n) { return n * kLength / (2 * ranks); };
  return range(part(i < ranks ? i : i + 1), part(i < ranks - 1 ? i + 1 : i + 2));
}

/// Causal attention of one chunk over each chunk of keys that it sees, merged.
Output merged_chunk(const Inputs& whole, std::int64_t i, std::int64_t ranks) {
  Inputs part = whole;
  part.sinks = Tensor();
  part.options.partial = true;
  part.q = take(whole.q, 2, chunk(i, ranks));
  part.q_start = ints({chunk(i, ranks).front(), chunk(i, ranks).front()});
  std::vector<Output> outputs;
  std::vector<PartialResult> results;
  for (std::int64_t j = 0; j <= i; ++j) {
    part.k = take(whole.k, 2, chunk(j, ranks));
    part.v = take(whole.v, 2, chunk(j, ranks));
    part.k_start = ints({chunk(j, ranks).front(), chunk(j, ranks).front()});
    outputs.push_back(attend(part));
    EXPECT_TRUE(outputs.back().status.ok()) << outputs.back().status.message();
  }
  for (const Output& one : outputs) results.push_back({one.out.view(), one.lse.view()});
  part.options.partial = false;
  Output merged = make_output(part);
  const Status status =
      merge(results, merged.out.view(), merged.lse.view(), whole.sinks.view(), nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return merged;
}

class DistributedThreadsBits : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DistributedThreadsBits, testing::Values(2, 3, 4));

TEST_P(DistributedThreadsBits, GatherAndUlyssesGiveTheBitsOfOneDevice) {
  Case c{"bits", {29}, 12, 12, {.causal = true, .scale = 0.4, .softcap = 3.0}, 0, true};
  c.options.reproducibility = Reproducibility::batch_invariant;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::vector<std::int64_t>& documents : {std::vector<std::int64_t>{}, {0, 7, 20}}) {
      c.dtype = dtype, c.documents = documents;
      const Output one = attend(whole_inputs(c, 29, 29));
      for (const Scheme scheme : {Scheme::gather, Scheme::ulysses}) {
        SCOPED_TRACE(to_string(scheme));
        const Output all = Ranks(c, GetParam(), {.scheme = scheme}).forward();
        FLASHCORE_EXPECT_SAME(one, all);
      }
    }
  }
}

TEST_P(DistributedThreadsBits, RingMergesTheSameRangesOfKeys) {
  const std::int32_t ranks = GetParam();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Random random(2);
    Inputs whole;
    whole.q = draw_normal(random, dtype, {2, 4, kLength, 16});
    whole.k = draw_normal(random, dtype, {2, 2, kLength, 16});
    whole.v = draw_normal(random, dtype, {2, 2, kLength, 8});
    whole.sinks = draw_normal(random, DType::f32, {4});
    whole.options.causal = true;
    whole.options.reproducibility = Reproducibility::batch_invariant;
    std::vector<Output> own(static_cast<std::size_t>(ranks));
    ThreadComm engine(ranks);
    const auto results = engine.run([&](const Comm& comm) {
      Inputs mine = whole;
      auto rows = chunk(comm.rank, ranks);
      if (comm.rank < ranks - 1) {
        const auto last = chunk(2 * ranks - 2 - comm.rank, ranks);
        rows.insert(rows.end(), last.begin(), last.end());
      }
      for (auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v}) {
        mine.*tensor = take(whole.*tensor, 2, rows);
      }
      Output& output = own[static_cast<std::size_t>(comm.rank)];
      output = make_output(mine);
      return distributed_attention(comm, tensors_of(mine, output.out, output.lse), whole.options,
                                   {.scheme = Scheme::ring});
    });
    for (std::int32_t r = 0; r < ranks; ++r) {
      const auto n = static_cast<std::size_t>(r);
      ASSERT_TRUE(results[n].ok()) << results[n].message();
      std::int64_t begin = 0;
      for (std::int64_t i = r; begin < own[n].out.size(2); i = 2 * ranks - 2 - r) {
        const Output merged = merged_chunk(whole, i, ranks);
        const std::int64_t end = begin + merged.out.size(2);
        FLASHCORE_EXPECT_SAME_BITS(take(own[n].out, 2, range(begin, end)), merged.out);
        FLASHCORE_EXPECT_SAME_BITS(take(own[n].lse, 2, range(begin, end)), merged.lse);
        begin = end;
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::test
