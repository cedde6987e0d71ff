// Mistakes in calls of distributed_backward(), and ranks that end.
#include <gtest/gtest.h>

#include <functional>

#include "flashcore/distributed.h"
#include "support/backward.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {
namespace {

/// The tensors of one rank.
Inputs draw_shard(Random& random) {
  Inputs inputs;
  inputs.q = draw_normal(random, DType::f32, {2, 4, 8, 16});
  inputs.k = draw_normal(random, DType::f32, {2, 2, 8, 16});
  inputs.v = draw_normal(random, DType::f32, {2, 2, 8, 8});
  inputs.options.causal = true;
  return inputs;
}

/// Arguments of one rank.
struct Arguments {
  Tensors tensors;
  Gradients gradients;
  Options options{.causal = true};
  DistributedOptions how{.scheme = Scheme::ring, .sharding = Sharding::contiguous};
  Workspace workspace;
};

/// The results of 3 ranks, of which rank 1 changes its arguments or, for null, does not call.
std::vector<Status> with_wrong_rank(const std::function<void(Arguments&)>& change) {
  Random random(3);
  const Differentiated call = draw_gradients(random, draw_shard(random), false);
  ThreadComm engine(3);
  return engine.run([&](const Comm& comm) -> Status {
    Differentiated mine = call;
    Arguments a;
    a.tensors = mine.tensors();
    a.gradients = mine.gradients();
    if (comm.rank == 1 && !change) return {};
    if (comm.rank == 1) change(a);
    const Status status =
        distributed_backward(comm, a.tensors, a.gradients, a.options, a.how, a.workspace);
    EXPECT_EQ(engine.sent(comm.rank) > 512 * 2, status.ok()) << "data moved before the error";
    return status;
  });
}

TEST(DistributedThreadsBackwardErrors, EveryRankGetsTheSameError) {
  const auto expect = [](auto change, const char* wanted) {
    for (const Status& one : with_wrong_rank(change)) {
      EXPECT_NE(one.message().find(wanted), std::string::npos) << one.message();
    }
  };
  expect([](Arguments& a) { a.options.softcap = 2; },
         "rank 1: softcap is 2, rank 0 has 0; all ranks must pass the same");
  expect([](Arguments& a) { a.tensors.lse = {}; },
         "rank 1: lse: not given; gradients need the forward's LSE");
  expect([](Arguments& a) { a.gradients.dq = {}; }, "rank 1: dq: is not given");
  expect([](Arguments& a) { a.gradients.dk.dtype = DType::bf16; },
         "rank 1: dk: dtype is bf16; wanted f32");
  expect([](Arguments& a) { a.gradients.dout.shape[2] = 7; },
         "rank 1: dout: extent 2 is 7, out has 8");
  expect([](Arguments& a) { a.gradients.dv.data = a.tensors.v.data; },
         "rank 1: dv: shares memory with the input v");
  expect([](Arguments& a) { a.gradients.dbias = a.gradients.dq; }, "rank 1: dbias: distributed");
  static constexpr std::int64_t kDocuments[] = {0, 4, 24};
  expect([](Arguments& a) { a.how.documents = kDocuments; }, "rank 1: documents have hash ");
  const WorkspaceMemory memory(1024);
  expect([&](Arguments& a) { a.workspace = memory.get(); },
         "rank 1: workspace: has 1024 bytes; wanted ");
  expect(
      [&](Arguments& a) {
        a.workspace = memory.get();
        a.workspace.data = static_cast<std::byte*>(a.workspace.data) + 8;
      },
      "rank 1: workspace: the pointer is not a multiple of 256");
}

TEST(DistributedThreadsBackwardErrors, DocumentsHaveAllRows) {
  const auto error_of = [](std::vector<std::int64_t> documents) {
    DistributedProblem problem;
    problem.q_rows = problem.k_rows = {8, 8};
    problem.documents = std::move(documents);
    return distributed_backward_workspace(problem, 0).status().message();
  };
  EXPECT_EQ(error_of({0, 9, 16}), "");
  EXPECT_EQ(error_of({0, 9, 17}), "documents: ends with 17; the ranks have 16 rows of q together");
  EXPECT_EQ(error_of({1, 16}), "documents: wanted ascending numbers that start with 0");
}

TEST(DistributedThreadsBackwardErrors, OtherCallsAndRanksThatEnd) {
  ThreadComm engine(2);
  Random random(3);
  const Differentiated call = draw_gradients(random, draw_shard(random));
  const DistributedOptions how{.scheme = Scheme::ring, .sharding = Sharding::contiguous};
  const auto mixed = engine.run([&](const Comm& comm) {
    Differentiated mine = call;
    return comm.rank == 1 ? distributed_attention(comm, mine.tensors(), {}, how)
                          : distributed_backward(comm, mine.tensors(), mine.gradients(), {}, how);
  });
  for (const Status& one : mixed) {
    EXPECT_EQ(
        one.message(),
        "rank 1: calls distributed_attention, rank 0 has distributed_backward; all ranks must "
        "pass the same");
  }
  const auto ended = with_wrong_rank(nullptr);
  for (const std::size_t r : {0u, 2u}) {
    EXPECT_EQ(ended[r].code(), StatusCode::internal);
    EXPECT_NE(
        ended[r].message().find("distributed_backward, header: all_gather failed with code 7"),
        std::string::npos)
        << ended[r].message();
  }
  // A rank that ends between its headers and its messages.
  const auto late = engine.run([&](const Comm& comm) {
    Differentiated mine = call;
    Comm dies = comm;
    if (comm.rank == 1) {
      dies.sendrecv = [](void*, const void*, std::size_t, std::int32_t, void*, std::size_t,
                         std::int32_t, void*) { return std::int32_t{9}; };
    }
    return distributed_backward(dies, mine.tensors(), mine.gradients(), {}, how);
  });
  EXPECT_EQ(
      late[0].message(),
      "ring, ring step 1: sendrecv to rank 1 and from rank 1 failed with code 7; a rank ended, "
      "or the engine's timeout passed");
}

}  // namespace
}  // namespace flashcore::test
