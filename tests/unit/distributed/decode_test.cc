// distributed_decode() on threads, against the oracle, and its mistakes.
#include <gtest/gtest.h>

#include <functional>

#include "flashcore/distributed.h"
#include "support/draw.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {
namespace {

constexpr std::int64_t kQHeads = 12, kKvHeads = 4, kCapacity = 30;
const std::vector<std::int32_t> kLengths = {30, 17};

/// The whole cache of two sequences. Row i sees the keys up to its own.
Inputs whole_inputs(DType dtype, std::int64_t rows) {
  Random random(3);
  Inputs inputs;
  inputs.q = draw_normal(random, dtype, {2, kQHeads, rows, 16});
  inputs.k = draw_normal(random, dtype, {2, kKvHeads, kCapacity, 16});
  inputs.v = draw_normal(random, dtype, {2, kKvHeads, kCapacity, 8});
  inputs.sinks = draw_normal(random, DType::f32, {kQHeads});
  inputs.used_k = ints({kLengths[0], kLengths[1]});
  inputs.options.softcap = 2.0;
  inputs.options.causal = true;
  return inputs;
}

/// The keys of a rank: key p is on rank (p / interleave) % ranks.
std::vector<std::int64_t> keys_of(std::int64_t rank, std::int64_t ranks, std::int64_t interleave) {
  std::vector<std::int64_t> keys;
  for (std::int64_t p = 0; p < kCapacity; ++p) {
    if (p / interleave % ranks == rank) keys.push_back(p);
  }
  return keys;
}

/// The arguments of one rank.
struct Arguments {
  Inputs inputs;
  Tensor out, lse;
  Tensors tensors;  ///< views of those above
  std::vector<std::int32_t> lengths = kLengths;
  Options options;
  DecodeOptions how;

  Arguments(const Inputs& whole, const DecodeOptions& decode, std::int32_t rank, std::int32_t ranks)
      : inputs(whole), how(decode) {
    const auto keys = keys_of(rank, ranks, how.interleave);
    inputs.k = take(whole.k, 2, keys);
    inputs.v = take(whole.v, 2, keys);
    inputs.used_k = Tensor();
    const std::int64_t rows = whole.q.size(2), heads = kQHeads / (how.by_heads ? ranks : 1);
    out = Tensor(whole.q.dtype(), {2, heads, rows, 8});
    lse = Tensor(DType::f32, {2, heads, rows});
    options.softcap = whole.options.softcap;
    tensors = tensors_of(inputs, out, lse);
  }
  Status call(const Comm& comm) const {
    return distributed_decode(comm, tensors, lengths, options, how);
  }
};

void put_heads(Tensor& whole, const Tensor& part, std::int64_t first) {
  for (std::int64_t b = 0; b < part.size(0); ++b) {
    for (std::int64_t h = 0; h < part.size(1); ++h) {
      for (std::int64_t i = 0; i < part.size(2); ++i) {
        if (part.rank() == 3) {
          whole.set({b, first + h, i}, part.at({b, h, i}));
          continue;
        }
        for (std::int64_t d = 0; d < part.size(3); ++d) {
          whole.set({b, first + h, i, d}, part.at({b, h, i, d}));
        }
      }
    }
  }
}

class DistributedThreadsDecode : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DistributedThreadsDecode, testing::Values(1, 2, 3, 4));

TEST_P(DistributedThreadsDecode, GivesTheResultOfOneDevice) {
  const std::int32_t ranks = GetParam();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const DecodeOptions how : {DecodeOptions{1, false}, {4, false}, {1, true}, {2, true}}) {
      const Inputs whole = whole_inputs(dtype, 3);
      const Output one = attend(whole);
      ASSERT_TRUE(one.status.ok()) << one.status.message();
      ThreadComm engine(ranks);
      std::vector<Output> results(static_cast<std::size_t>(ranks), one);
      const auto statuses = engine.run([&](const Comm& comm) {
        const Arguments mine(whole, how, comm.rank, ranks);
        const Status status = mine.call(comm);
        Output& to = results[static_cast<std::size_t>(comm.rank)];
        put_heads(to.out, mine.out, how.by_heads ? comm.rank * (kQHeads / ranks) : 0);
        put_heads(to.lse, mine.lse, how.by_heads ? comm.rank * (kQHeads / ranks) : 0);
        return status;
      });
      DistributedProblem problem;
      problem.dtype = dtype, problem.batch = 2;
      problem.q_heads = kQHeads, problem.kv_heads = kKvHeads;
      problem.head_dim = 16, problem.v_dim = 8;
      problem.scheme = Scheme::decode, problem.by_heads = how.by_heads;
      problem.q_rows.assign(static_cast<std::size_t>(ranks), 3);
      for (std::int32_t r = 0; r < ranks; ++r) {
        problem.k_rows.push_back(decode_length(kCapacity, r, ranks, how.interleave));
      }
      for (std::int32_t r = 0; r < ranks; ++r) {
        const auto n = static_cast<std::size_t>(r);
        ASSERT_TRUE(statuses[n].ok()) << statuses[n].message();
        EXPECT_EQ(verdict(whole, results[n]), "") << "rank " << r;
        const auto said = sent_bytes(problem, r, false);
        ASSERT_TRUE(said.ok()) << said.status().message();
        EXPECT_EQ((*said)[0].bytes, engine.sent(r)) << "rank " << r;
      }
    }
  }
}

TEST(DistributedThreadsDecodeErrors, EveryRankGetsTheSameError) {
  const auto expect = [&](const char* wanted, const std::function<void(Arguments&)>& change) {
    const Inputs whole = whole_inputs(DType::f32, 2);
    ThreadComm engine(3);
    const auto results = engine.run([&](const Comm& comm) {
      Arguments mine(whole, {}, comm.rank, 3);
      if (comm.rank == 1) change(mine);
      const Status status = mine.call(comm);
      EXPECT_EQ(engine.sent(comm.rank), 0) << "data moved before the error";
      return status;
    });
    for (const Status& one : results) {
      EXPECT_EQ(one.message().rfind(wanted, 0), 0u) << one.message() << "\nwanted " << wanted;
      EXPECT_EQ(one.message(), results[0].message());
    }
  };
  expect("rank 1: k: dtype is bf16", [](Arguments& a) { a.tensors.k.dtype = DType::bf16; });
  expect("rank 1: k: head_dim is 8", [](Arguments& a) { a.tensors.k.shape[3] = 8; });
  expect("rank 1: k: batch is 1", [](Arguments& a) { a.tensors.k.shape[0] = 1; });
  expect("rank 1: k: rank is 3; wanted 4", [](Arguments& a) { a.tensors.k.rank = 3; });
  expect("rank 1: k: holds 9 keys of a sequence; this rank's part of a length of 30 has 10",
         [](Arguments& a) { a.tensors.k.shape[2] = a.tensors.v.shape[2] = 9; });
  expect("rank 1: k has 2 heads, rank 0 has 4; all ranks must pass the same",
         [](Arguments& a) { a.tensors.k.shape[1] = a.tensors.v.shape[1] = 2; });
  expect("rank 1: sinks: wanted f32 [12]", [](Arguments& a) { a.tensors.sinks.shape[0] = 11; });
  expect("rank 1: sinks: ", [](Arguments& a) { a.tensors.sinks.dtype = DType::f16; });
  expect("rank 1: sinks are not given", [](Arguments& a) { a.tensors.sinks = {}; });
  expect("rank 1: lse: ", [](Arguments& a) { a.tensors.lse.shape[2] = 1; });
  expect("rank 1: out: dtype is ", [](Arguments& a) { a.tensors.out.dtype = DType::f16; });
  expect("rank 1: out: ", [](Arguments& a) { a.tensors.out.data = a.tensors.q.data; });
  expect("rank 1: scale is 0.5, rank 0 has 0.25", [](Arguments& a) { a.options.scale = 0.5; });
  expect("rank 1: softcap is 3, rank 0 has 2", [](Arguments& a) { a.options.softcap = 3; });
  expect("rank 1: interleave is 2, rank 0 has 1", [](Arguments& a) {
    a.how.interleave = 2;
    a.lengths = {6, 6};
  });
  expect("rank 1: lengths have hash ", [](Arguments& a) { a.lengths = {29, 17}; });
  expect("rank 1: lengths: has 1 entries; wanted 2", [](Arguments& a) { a.lengths = {29}; });
}

TEST(DistributedThreadsDecodeErrors, OneRankHasAPageThatDoesNotExist) {
  ThreadComm engine(2);
  const Inputs whole = whole_inputs(DType::f32, 1);
  const auto results = engine.run([&](const Comm& comm) {
    Arguments mine(whole, {}, comm.rank, 2);
    const Tensor pages(DType::f32, {8, 4, kKvHeads, 16}), values(DType::f32, {8, 4, kKvHeads, 8});
    Tensor table(DType::i32, {2, 4});
    for (std::int64_t i = 0; i < 8; ++i) table.set({i / 4, i % 4}, static_cast<double>(i));
    if (comm.rank == 1) table.set({0, 2}, 8);
    mine.tensors.k = pages.view();
    mine.tensors.v = values.view();
    mine.tensors.block_table = table.view();
    return mine.call(comm);
  });
  for (const Status& one : results) {
    EXPECT_EQ(one.message().rfind("rank 1: block_table[0, 2] is 8", 0), 0u) << one.message();
  }
}

}  // namespace
}  // namespace flashcore::test
