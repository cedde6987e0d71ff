// distributed_attention() and distributed_decode() on threads, against one call on one device.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "flashcore/distributed.h"
#include "flashcore/distributed_c.h"
#include "unit/distributed/thread_comm.h"

namespace flashcore::test {
namespace {

/// A [batch, heads, rows, dim] tensor of f32 or of bf16 (as raw bits).
struct Array {
  DType dtype = DType::f32;
  std::int64_t batch = 1, heads = 1, rows = 0, dim = 1;
  std::vector<std::byte> data;

  Array() = default;
  Array(DType type, std::int64_t b, std::int64_t h, std::int64_t r, std::int64_t d)
      : dtype(type),
        batch(b),
        heads(h),
        rows(r),
        dim(d),
        data(static_cast<std::size_t>(b * h * r * d * size_of(type))) {}

  TensorView tensor() { return view(data.data(), dtype, {batch, heads, rows, dim}); }
  TensorView lse() { return view(data.data(), dtype, {batch, heads, rows}); }
  float at(std::int64_t index) const {
    if (dtype == DType::f32) return reinterpret_cast<const float*>(data.data())[index];
    const std::uint32_t bits =
        std::uint32_t{reinterpret_cast<const std::uint16_t*>(data.data())[index]} << 16;
    return std::bit_cast<float>(bits);
  }
  void set(std::int64_t index, float value) {
    if (dtype == DType::f32) {
      reinterpret_cast<float*>(data.data())[index] = value;
    } else {
      reinterpret_cast<std::uint16_t*>(data.data())[index] =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    }
  }
  void draw(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < batch * heads * rows * dim; ++i) set(i, normal(random));
  }
  /// These rows, in order.
  Array rows_of(const std::vector<std::int64_t>& wanted) const {
    Array made(dtype, batch, heads, static_cast<std::int64_t>(wanted.size()), dim);
    const std::int64_t bytes = dim * size_of(dtype);
    for (std::int64_t bh = 0; bh < batch * heads; ++bh) {
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        std::copy_n(data.begin() + (bh * rows + wanted[i]) * bytes, bytes,
                    made.data.begin() + (bh * made.rows + static_cast<std::int64_t>(i)) * bytes);
      }
    }
    return made;
  }
};

struct Case {
  const char* name;
  std::int64_t q_len, k_len;
  std::int64_t q_heads, kv_heads;
  Options options;
  bool sinks = false;
  Sharding sharding = Sharding::zigzag;
  DType dtype = DType::f32;
};

/// The rows of a rank, from the documented placement and not from the library.
std::vector<std::int64_t> rows_of_rank(std::int64_t length, std::int64_t ranks, std::int64_t rank,
                                       Sharding sharding) {
  std::vector<std::int64_t> rows;
  const std::int64_t parts = sharding == Sharding::zigzag ? 2 * ranks : ranks;
  const auto add = [&](std::int64_t part) {
    for (std::int64_t i = part * length / parts; i < (part + 1) * length / parts; ++i) {
      rows.push_back(i);
    }
  };
  add(rank);
  if (sharding == Sharding::zigzag) add(parts - 1 - rank);
  return rows;
}

struct Problem1 {
  Array q, k, v, out, lse, sinks;

  Problem1(const Case& c, std::uint32_t seed) {
    std::mt19937 random(seed);
    q = Array(c.dtype, 2, c.q_heads, c.q_len, 16);
    k = Array(c.dtype, 2, c.kv_heads, c.k_len, 16);
    v = Array(c.dtype, 2, c.kv_heads, c.k_len, 8);
    out = Array(c.dtype, 2, c.q_heads, c.q_len, 8);
    lse = Array(DType::f32, 2, c.q_heads, c.q_len, 1);
    for (Array* one : {&q, &k, &v}) one->draw(random);
    if (c.sinks) {
      sinks = Array(DType::f32, 1, 1, c.q_heads, 1);
      sinks.draw(random);
    }
  }
  TensorView sinks_view() {
    return sinks.data.empty() ? TensorView() : view(sinks.data.data(), DType::f32, {sinks.rows});
  }
  Tensors tensors() {
    Tensors t;
    t.q = q.tensor(), t.k = k.tensor(), t.v = v.tensor(), t.out = out.tensor();
    t.lse = lse.lse();
    t.sinks = sinks_view();
    return t;
  }
};

Status attend_once(const Tensors& tensors, const Options& options) {
  const auto problem = make_problem(tensors, options);
  if (!problem.ok()) return problem.status();
  const auto plan = make_plan(*problem, *device_info({}));
  if (!plan.ok()) return plan.status();
  std::vector<std::byte> memory(workspace_bytes(*plan) + 256);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(256, workspace_bytes(*plan), aligned, space);
  const Workspace workspace{aligned, workspace_bytes(*plan), {}, nullptr};
  if (const Status status = workspace_init(workspace); !status.ok()) return status;
  return run(*plan, tensors, workspace);
}

/// The largest difference of a rank's rows from the whole result.
double difference(const Array& got, const Array& whole, const std::vector<std::int64_t>& rows) {
  const Array want = whole.rows_of(rows);
  double worst = 0;
  for (std::int64_t i = 0; i < want.batch * want.heads * want.rows * want.dim; ++i) {
    const double a = got.at(i), b = want.at(i);
    if (a == b) continue;  // also two infinities
    worst = std::max(worst, std::fabs(a - b));
    if (!(std::fabs(a - b) < 1e30)) return 1e30;
  }
  return worst;
}

const Case kCases[] = {
    {"full", 24, 24, 4, 4, {}},
    {"causal", 24, 24, 12, 12, {.causal = true}},
    {"uneven", 29, 29, 12, 12, {.causal = true, .scale = 0.4, .softcap = 3.0}, true},
    {"window", 40, 40, 4, 2, {.causal = true, .window_left = 5}, true},
    {"more keys", 11, 23, 12, 12, {.causal = true}},
    {"rows without keys", 21, 9, 4, 2, {.causal = true}, true},
    {"fewer rows than ranks", 2, 2, 12, 12, {.causal = true}, true, Sharding::contiguous},
    {"both sides",
     31,
     31,
     4,
     1,
     {.window_left = 4, .window_right = 3},
     false,
     Sharding::contiguous},
    {"bf16", 33, 33, 12, 12, {.causal = true}, false, Sharding::zigzag, DType::bf16},
};

/// Runs a case on all ranks. Checks values and bytes.
void check_case(const Case& c, std::int32_t ranks, const DistributedOptions& how, bool same_bits) {
  Problem1 whole(c, 7);
  ASSERT_TRUE(attend_once(whole.tensors(), c.options).ok());
  ThreadComm engine(ranks);
  std::vector<Array> outs(static_cast<std::size_t>(ranks)), lses(outs);
  DistributedProblem problem;
  problem.dtype = c.dtype;
  problem.batch = 2, problem.q_heads = c.q_heads, problem.kv_heads = c.kv_heads;
  problem.head_dim = 16, problem.v_dim = 8;
  problem.causal = c.options.causal;
  problem.window_left = c.options.window_left, problem.window_right = c.options.window_right;
  problem.reproducibility = c.options.reproducibility;
  problem.sharding = c.sharding, problem.scheme = how.scheme;
  problem.ranks_per_node = how.ranks_per_node > 0 ? how.ranks_per_node : ranks;
  problem.head_ranks = how.head_ranks;
  problem.q_rows = distributed_rows(c.q_len, ranks, c.sharding);
  problem.k_rows = distributed_rows(c.k_len, ranks, c.sharding);
  const std::vector<Status> results = engine.run([&](const Comm& comm) {
    const auto r = static_cast<std::size_t>(comm.rank);
    Problem1 all(c, 7);
    Problem1 own(c, 7);
    const auto q_rows = rows_of_rank(c.q_len, ranks, comm.rank, c.sharding);
    const auto k_rows = rows_of_rank(c.k_len, ranks, comm.rank, c.sharding);
    own.q = all.q.rows_of(q_rows), own.out = all.out.rows_of(q_rows);
    own.lse = all.lse.rows_of(q_rows);
    own.k = all.k.rows_of(k_rows), own.v = all.v.rows_of(k_rows);
    DistributedOptions options = how;
    options.sharding = c.sharding;
    const Status status = distributed_attention(comm, own.tensors(), c.options, options);
    outs[r] = own.out, lses[r] = own.lse;
    return status;
  });
  for (std::int32_t r = 0; r < ranks; ++r) {
    const auto n = static_cast<std::size_t>(r);
    ASSERT_TRUE(results[n].ok()) << results[n].message();
    const auto rows = rows_of_rank(c.q_len, ranks, r, c.sharding);
    const double limit = same_bits ? 0 : c.dtype == DType::bf16 ? 0.02 : 4e-6;
    EXPECT_LE(difference(outs[n], whole.out, rows), limit) << "out of rank " << r;
    EXPECT_LE(difference(lses[n], whole.lse, rows), same_bits ? 0 : 4e-6) << "lse of rank " << r;
    const auto said = sent_bytes(problem, r, false);
    ASSERT_TRUE(said.ok()) << said.status().message();
    std::int64_t sum = 0;
    for (const SentBytes& step : *said) sum += step.bytes;
    EXPECT_EQ(engine.sent(r), sum) << "bytes of rank " << r;
  }
}

class DistributedThreads : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DistributedThreads, testing::Values(1, 2, 3, 4));

TEST_P(DistributedThreads, EverySchemeGivesTheResultOfOneDevice) {
  for (const Case& c : kCases) {
    for (const Scheme scheme : {Scheme::automatic, Scheme::ring, Scheme::gather, Scheme::ulysses,
                                Scheme::two_d, Scheme::halo}) {
      SCOPED_TRACE(std::string(c.name) + ", " + to_string(scheme));
      DistributedProblem heads;
      heads.q_heads = c.q_heads, heads.kv_heads = c.kv_heads, heads.scheme = scheme;
      heads.q_rows.resize(static_cast<std::size_t>(GetParam()));
      heads.causal = c.options.causal;
      heads.window_left = c.options.window_left, heads.window_right = c.options.window_right;
      if (!choose_scheme(heads).ok()) continue;
      check_case(c, GetParam(), {.scheme = scheme}, false);
    }
  }
}

TEST_P(DistributedThreads, GatherAndUlyssesGiveTheBitsOfOneDevice) {
  Case c = kCases[2];
  c.options.reproducibility = Reproducibility::batch_invariant;
  for (const Scheme scheme : {Scheme::gather, Scheme::ulysses}) {
    SCOPED_TRACE(to_string(scheme));
    check_case(c, GetParam(), {.scheme = scheme}, true);
  }
  check_case(c, GetParam(), {.scheme = Scheme::ring}, false);
}

TEST(DistributedThreads2d, TwoByTwo) {
  for (const Case& c : {kCases[1], kCases[2], kCases[4], kCases[8]}) {
    SCOPED_TRACE(c.name);
    check_case(c, 4, {.scheme = Scheme::two_d, .ranks_per_node = 2, .head_ranks = 2}, false);
  }
  Case shared = kCases[1];
  shared.q_heads = 8, shared.kv_heads = 2;  // two ranks share a KV head
  check_case(shared, 4, {.scheme = Scheme::ulysses}, false);
}

TEST(DistributedThreadsErrors, EveryRankGetsTheSameError) {
  const Case c = kCases[1];
  const auto errors = [&](auto change) {
    ThreadComm engine(3);
    return engine.run([&](const Comm& comm) {
      Case own = c;
      own.q_len = own.k_len = 8;
      Options options = c.options;
      DistributedOptions how{.scheme = Scheme::ring, .sharding = Sharding::contiguous};
      if (comm.rank == 1) change(own, options, how);
      Problem1 problem(own, 1);
      return distributed_attention(comm, problem.tensors(), options, how);
    });
  };
  const auto expect = [&](const std::vector<Status>& results, const char* wanted) {
    for (const Status& one : results) {
      EXPECT_EQ(one.code(), StatusCode::invalid_argument);
      EXPECT_EQ(one.message(), wanted);
    }
  };
  expect(errors([](Case& own, Options&, DistributedOptions&) { own.kv_heads = 6; }),
         "rank 1: k has 6 heads, rank 0 has 12; all ranks must pass the same");
  expect(errors([](Case& own, Options&, DistributedOptions&) { own.dtype = DType::bf16; }),
         "rank 1: q has dtype bf16, rank 0 has f32; all ranks must pass the same");
  expect(errors([](Case&, Options& o, DistributedOptions&) { o.softcap = 1.5; }),
         "rank 1: softcap is 1.5, rank 0 has 0; all ranks must pass the same");
  expect(errors([](Case&, Options&, DistributedOptions& d) { d.scheme = Scheme::gather; }),
         "rank 1: scheme is gather, rank 0 has ring; all ranks must pass the same");
  expect(errors([](Case&, Options&, DistributedOptions& d) { d.sharding = Sharding::zigzag; }),
         "rank 1: sharding is zigzag, rank 0 has contiguous; all ranks must pass the same");
}

TEST(DistributedThreadsErrors, AWrongRankTellsTheOthers) {
  ThreadComm engine(2);
  const auto results = engine.run([&](const Comm& comm) {
    Problem1 problem(kCases[0], 1);
    Tensors tensors = problem.tensors();
    if (comm.rank == 1) tensors.v.shape[2] = 23;
    return distributed_attention(comm, tensors, {}, {.sharding = Sharding::contiguous});
  });
  for (const Status& one : results) {
    EXPECT_EQ(one.message(), "rank 1: v: rows is 23; wanted 24");
  }
}

TEST(DistributedThreadsErrors, AnOutputInTheInputIsFoundBeforeDataMoves) {
  for (const Scheme scheme : {Scheme::ring, Scheme::gather}) {
    ThreadComm engine(2);
    const auto results = engine.run([&](const Comm& comm) {
      Problem1 problem(kCases[0], 1);
      Tensors tensors = problem.tensors();
      if (comm.rank == 1) tensors.out.data = tensors.q.data;
      const DistributedOptions how{.scheme = scheme, .sharding = Sharding::contiguous};
      const Status status = distributed_attention(comm, tensors, {}, how);
      EXPECT_EQ(engine.sent(comm.rank), 0);
      return status;
    });
    for (const Status& one : results) {
      EXPECT_EQ(one.message().rfind("rank 1: out: shares memory with the input q", 0), 0u)
          << one.message();
    }
  }
}

TEST(DistributedThreadsErrors, ARankThatEndsIsReported) {
  ThreadComm engine(3);
  const auto results = engine.run([&](const Comm& comm) -> Status {
    if (comm.rank == 2) return {};  // never calls
    Problem1 problem(kCases[0], 1);
    return distributed_attention(comm, problem.tensors(), {}, {.sharding = Sharding::contiguous});
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
    Case c = kCases[0];
    c.q_len = c.k_len = comm.rank == 0 ? 6 : 4;
    Problem1 problem(c, 1);
    return distributed_attention(comm, problem.tensors(), {}, {.scheme = Scheme::ring});
  });
  for (const Status& one : results) {
    EXPECT_EQ(one.message().rfind("q: rank 0: has 6 rows; zigzag placement of 10 rows on 2 ranks "
                                  "gives it 5.",
                                  0),
              0u)
        << one.message();
  }
  Problem1 problem(kCases[0], 1);
  EXPECT_EQ(distributed_attention({}, problem.tensors(), {}).message(), "comm.sendrecv: is NULL");
}

TEST(DistributedThreadsC, AttentionThroughTheCAbi) {
  const Case c = kCases[1];
  Problem1 whole(c, 7);
  ASSERT_TRUE(attend_once(whole.tensors(), c.options).ok());
  ThreadComm engine(2);
  const auto results = engine.run([&](const Comm& comm) -> Status {
    Problem1 own(c, 7);
    const auto rows = rows_of_rank(c.q_len, 2, comm.rank, Sharding::zigzag);
    for (Array* one : {&own.q, &own.k, &own.v, &own.out}) *one = one->rows_of(rows);
    flashcore_tensor tensors[4];
    std::int64_t shapes[4][4];
    Array* arrays[] = {&own.q, &own.k, &own.v, &own.out};
    for (int i = 0; i < 4; ++i) {
      const Array& a = *arrays[i];
      const std::int64_t shape[] = {a.batch, a.heads, a.rows, a.dim};
      std::copy_n(shape, 4, shapes[i]);
      tensors[i] = {arrays[i]->data.data(),
                    {FLASHCORE_CPU, 0},
                    4,
                    {FLASHCORE_FLOAT, 32, 1},
                    shapes[i],
                    nullptr,
                    0};
    }
    flashcore_params params;
    flashcore_params_init(&params, sizeof params);
    params.q = &tensors[0], params.k = &tensors[1], params.v = &tensors[2];
    params.out = &tensors[3];
    params.causal = 1;
    const flashcore_comm c_comm = {sizeof c_comm, comm.context,    comm.rank,      comm.size,
                                   comm.sendrecv, comm.all_to_all, comm.all_gather};
    const flashcore_distributed_options options = {
        sizeof options, FLASHCORE_SCHEME_RING, FLASHCORE_SHARDING_ZIGZAG, 0, 0, nullptr, 0};
    flashcore_error error{};
    const std::int32_t code = flashcore_distributed_attention(&c_comm, &params, &options, &error);
    if (code != FLASHCORE_OK) return Status(static_cast<StatusCode>(code), error.message);
    EXPECT_LE(difference(own.out, whole.out, rows), 4e-6);
    return {};
  });
  for (const Status& one : results) EXPECT_TRUE(one.ok()) << one.message();
}

}  // namespace
}  // namespace flashcore::test
