// Mistakes in calls of distributed_attention(), and ranks that end.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "flashcore/distributed.h"
#include "support/draw.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {
namespace {

/// Arguments of one rank, which has a shard of 8 rows.
struct Arguments {
  Inputs inputs;
  Tensor out, lse;
  Tensors tensors;  ///< views of those above
  Options options{.causal = true};
  DistributedOptions how{.scheme = Scheme::ring, .sharding = Sharding::contiguous};

  explicit Arguments(DType dtype = DType::f32, std::int64_t rows = 8) {
    Random random(1);
    inputs.q = draw_normal(random, dtype, {2, 12, rows, 16});
    inputs.k = draw_normal(random, dtype, {2, 12, rows, 16});
    inputs.v = draw_normal(random, dtype, {2, 12, rows, 8});
    inputs.sinks = draw_normal(random, DType::f32, {12});
    out = Tensor(dtype, {2, 12, rows, 8});
    lse = Tensor(DType::f32, {2, 12, rows});
    tensors = tensors_of(inputs, out, lse);
  }
  Status call(const Comm& comm) const { return distributed_attention(comm, tensors, options, how); }
};

/// The results of 3 ranks, of which rank 1 changes its arguments.
std::vector<Status> with_wrong_rank(const std::function<void(Arguments&)>& change) {
  ThreadComm engine(3);
  return engine.run([&](const Comm& comm) {
    Arguments mine;
    if (comm.rank == 1) change(mine);
    const Status status = mine.call(comm);
    EXPECT_EQ(engine.sent(comm.rank), 0) << "data moved before the error";
    return status;
  });
}

void expect(const char* wanted, const std::function<void(Arguments&)>& change) {
  const std::vector<Status> results = with_wrong_rank(change);
  for (const Status& one : results) {
    EXPECT_EQ(one.code(), StatusCode::invalid_argument);
    EXPECT_EQ(one.message().rfind(wanted, 0), 0u) << one.message() << "\nwanted " << wanted;
    EXPECT_EQ(one.message(), results[0].message());
  }
}

void set_heads(Arguments& a, std::int64_t heads) {
  for (TensorView* one : {&a.tensors.k, &a.tensors.v}) one->shape[1] = heads;
}

TEST(DistributedThreadsErrors, RanksThatDisagree) {
  expect("rank 1: k has 6 heads, rank 0 has 12; all ranks must pass the same",
         [](Arguments& a) { set_heads(a, 6); });
  expect("rank 1: q has 6 heads, rank 0 has 12", [](Arguments& a) {
    set_heads(a, 6);
    for (TensorView* one : {&a.tensors.q, &a.tensors.out, &a.tensors.lse}) one->shape[1] = 6;
    a.tensors.sinks.shape[0] = 6;
  });
  expect("rank 1: q has batch 1, rank 0 has 2", [](Arguments& a) {
    for (auto one : {&Tensors::q, &Tensors::k, &Tensors::v, &Tensors::out, &Tensors::lse}) {
      (a.tensors.*one).shape[0] = 1;
    }
  });
  expect("rank 1: q has head_dim 8, rank 0 has 16",
         [](Arguments& a) { a.tensors.q.shape[3] = a.tensors.k.shape[3] = 8; });
  expect("rank 1: v has v_dim 4, rank 0 has 8",
         [](Arguments& a) { a.tensors.v.shape[3] = a.tensors.out.shape[3] = 4; });
  expect("rank 1: scheme is gather, rank 0 has ring",
         [](Arguments& a) { a.how.scheme = Scheme::gather; });
  expect("rank 1: sharding is zigzag, rank 0 has contiguous",
         [](Arguments& a) { a.how.sharding = Sharding::zigzag; });
  expect("rank 1: ranks_per_node is 2, rank 0 has 0",
         [](Arguments& a) { a.how.ranks_per_node = 2; });
  expect("rank 1: head_ranks is 3, rank 0 has 0", [](Arguments& a) { a.how.head_ranks = 3; });
  expect("rank 1: causal is 0, rank 0 has 1", [](Arguments& a) { a.options.causal = false; });
  expect("rank 1: window_left is 3, rank 0 has -1",
         [](Arguments& a) { a.options.window_left = 3; });
  expect("rank 1: window_right is 3, rank 0 has -1",
         [](Arguments& a) { a.options.window_right = 3; });
  expect("rank 1: scale is 0.5, rank 0 has 0.25; all ranks must pass the same",
         [](Arguments& a) { a.options.scale = 0.5; });
  expect("rank 1: softcap is 1.5, rank 0 has 0", [](Arguments& a) { a.options.softcap = 1.5; });
  expect("rank 1: sinks are not given, rank 0 has given",
         [](Arguments& a) { a.tensors.sinks = {}; });
  expect("rank 1: reproducibility is 1, rank 0 has 0",
         [](Arguments& a) { a.options.reproducibility = Reproducibility::batch_invariant; });
  static constexpr std::int64_t kDocuments[] = {0, 4, 24};
  expect("rank 1: documents have hash ", [](Arguments& a) { a.how.documents = kDocuments; });
  const Arguments narrow(DType::bf16);
  expect("rank 1: q has dtype bf16, rank 0 has f32",
         [&](Arguments& a) { a.tensors = narrow.tensors; });
}

TEST(DistributedThreadsErrors, ARankIsWrongByItself) {
  expect("rank 1: v: rows is 7; wanted 8", [](Arguments& a) { a.tensors.v.shape[2] = 7; });
  expect("rank 1: k: dtype is bf16; wanted f32",
         [](Arguments& a) { a.tensors.k.dtype = DType::bf16; });
  expect("rank 1: sinks: wanted f32 [12]", [](Arguments& a) { a.tensors.sinks.shape[0] = 11; });
  expect("rank 1: out: shares memory with the input q",
         [](Arguments& a) { a.tensors.out.data = a.tensors.q.data; });
  expect("rank 1: scale is nan", [](Arguments& a) { a.options.scale = std::nan(""); });
  expect("rank 1: scheme is decode, rank 0 has ring",
         [](Arguments& a) { a.how.scheme = Scheme::decode; });
}

TEST(DistributedThreadsErrors, ARankThatEndsIsReported) {
  ThreadComm engine(3);
  const auto results = engine.run([&](const Comm& comm) -> Status {
    if (comm.rank == 2) return {};  // never calls
    return Arguments().call(comm);
  });
  for (const std::size_t r : {0u, 1u}) {
    EXPECT_EQ(results[r].code(), StatusCode::internal);
    EXPECT_EQ(results[r].message(),
              "distributed_attention, header: all_gather failed with code 7; a rank ended, or the "
              "engine's timeout passed");
  }
}

TEST(DistributedThreadsErrors, ZigzagLengthsAndComm) {
  ThreadComm engine(2);
  const auto results = engine.run([&](const Comm& comm) {
    Arguments mine(DType::f32, comm.rank == 0 ? 6 : 4);
    mine.how.sharding = Sharding::zigzag;
    return mine.call(comm);
  });
  for (const Status& one : results) {
    EXPECT_EQ(one.message().rfind("q: rank 0: has 6 rows; zigzag placement of 10 rows on 2 ranks "
                                  "gives it 5.",
                                  0),
              0u)
        << one.message();
  }
  EXPECT_EQ(Arguments().call({}).message(), "comm.sendrecv: is NULL");
}

}  // namespace
}  // namespace flashcore::test
