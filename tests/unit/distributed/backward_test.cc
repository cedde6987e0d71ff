// distributed_backward() on threads, against the oracle under the bound of docs/numerics.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "flashcore/distributed.h"
#include "flashcore/distributed_c.h"
#include "support/backward.h"
#include "support/to_c.h"
#include "unit/distributed/thread_comm.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

struct Case {
  const char* name;
  std::vector<std::int64_t> rows;  ///< the length; or contiguous shards, repeated for more ranks
  std::int64_t q_heads = 4, kv_heads = 4;
  Options options{};
  std::int64_t more_keys = 0;  ///< than rows
  bool sinks = false, with_dlse = true;
  DType dtype = DType::f32;
  std::vector<std::int64_t> documents{};
};

const Case kCases[] = {
    {"full", {24}},
    {"causal, grouped", {29}, 4, 2, {.causal = true}},
    {"zigzag of few rows", {5}, 4, 1, {.causal = true}, 0, true},
    {"uneven and empty", {7, 0, 16}, 4, 2, {.causal = true, .scale = 0.4, .softcap = 3.0}, 0, true},
    {"one rank has all rows", {0, 19}, 2, 2, {.causal = true}},
    {"window", {40}, 4, 2, {.causal = true, .window_left = 5}, 0, true},
    {"both sides", {9, 20}, 4, 1, {.window_left = 4, .window_right = 3}},
    {"more keys", {11}, 4, 4, {.causal = true}, 12},
    {"rows without keys", {21}, 4, 2, {.causal = true}, -12, true},
    {"no dlse", {17}, 4, 2, {.causal = true}, 0, false, false},
    {"large scores", {30}, 2, 1, {.causal = true, .scale = 30.0}},
    {"documents", {31}, 4, 2, {.causal = true}, 0, true, true, DType::f32, {0, 9, 9, 20, 31}},
    {"bf16", {33}, 4, 2, {.causal = true}, 0, true, true, DType::bf16},
    {"f16 documents",
     {40},
     4,
     4,
     {.window_left = 6, .window_right = 0},
     0,
     false,
     true,
     DType::f16,
     {0, 3, 22, 40}},
};
const Case& case_of(const char* name) {
  return *std::find_if(std::begin(kCases), std::end(kCases),
                       [&](const Case& c) { return std::string(c.name) == name; });
}

/// The rows of each rank, in order.
struct Placement {
  Sharding sharding;
  std::vector<std::vector<std::int64_t>> rows;

  Placement(const Case& c, std::int64_t more, std::int32_t ranks)
      : sharding(c.rows.size() == 1 ? Sharding::zigzag : Sharding::contiguous) {
    std::int64_t begin = 0;
    const std::int64_t length = c.rows[0] + more, parts = 2 * ranks;
    for (std::int64_t r = 0; r < ranks; ++r) {
      if (sharding == Sharding::contiguous) {
        const std::int64_t n = c.rows[static_cast<std::size_t>(r) % c.rows.size()];
        rows.push_back(range(begin, begin + n));
        begin += n;
        continue;
      }
      rows.emplace_back();
      for (const std::int64_t part : {r, parts - 1 - r}) {
        const auto more_rows = range(part * length / parts, (part + 1) * length / parts);
        rows.back().insert(rows.back().end(), more_rows.begin(), more_rows.end());
      }
    }
  }
  std::vector<std::int64_t> counts() const {
    std::vector<std::int64_t> made;
    for (const auto& one : rows) made.push_back(static_cast<std::int64_t>(one.size()));
    return made;
  }
  std::int64_t length() const {
    const auto all = counts();
    return std::accumulate(all.begin(), all.end(), std::int64_t{0});
  }
};

/// A call over the whole sequence, without results. Packed documents are [rows, heads, dim].
Inputs whole_inputs(const Case& c, std::int64_t q_len, std::int64_t k_len) {
  Random random(11);
  const bool packed = !c.documents.empty();
  const auto shape = [&](std::int64_t heads, std::int64_t rows, std::int64_t dim) {
    return packed ? Shape{rows, heads, dim} : Shape{2, heads, rows, dim};
  };
  Inputs inputs;
  inputs.q = draw_normal(random, c.dtype, shape(c.q_heads, q_len, 16));
  inputs.k = draw_normal(random, c.dtype, shape(c.kv_heads, k_len, 16));
  inputs.v = draw_normal(random, c.dtype, shape(c.kv_heads, k_len, 8));
  if (c.sinks) inputs.sinks = draw_normal(random, DType::f32, {c.q_heads});
  if (packed) inputs.cu_seqlens_q = inputs.cu_seqlens_k = ints(c.documents);
  inputs.options = c.options;
  return inputs;
}

/// Packed rows as [1, heads, rows, dim]; an LSE as [1, heads, rows].
TensorView dense(const TensorView& view) {
  if (!view.given() || view.rank == 4) return view;
  TensorView made = view;
  ++made.rank;
  for (int i = view.rank; i > 0; --i) {
    made.shape[i] = view.shape[i - 1];
    made.strides[i] = view.strides[i - 1];
  }
  made.shape[0] = 1, made.strides[0] = 0;
  return view.rank == 3 ? swap_axes(made, 1, 2) : made;
}

/// Writes a rank's rows to their places.
void put(Tensor& whole, int axis, const std::vector<std::int64_t>& rows, const Tensor& part) {
  const auto bits = part.bits();
  std::vector<std::uint64_t> all = whole.bits();
  std::int64_t inner = 1, outer = 1;
  for (int i = axis + 1; i < whole.rank(); ++i) inner *= whole.size(i);
  for (int i = 0; i < axis; ++i) outer *= whole.size(i);
  const auto count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t to = (o * whole.size(axis) + rows[static_cast<std::size_t>(r)]) * inner;
      std::copy_n(bits.begin() + (o * count + r) * inner, inner, all.begin() + to);
    }
  }
  whole.set_bits(all);
}

Status backward_in_cpp(const Comm& comm, const Tensors& tensors, const Gradients& gradients,
                       const Options& options, const DistributedOptions& how,
                       const Workspace& workspace) {
  return distributed_backward(comm, tensors, gradients, options, how, workspace);
}

/// distributed_backward() through the C ABI.
Status backward_in_c(const Comm& comm, const Tensors& tensors, const Gradients& gradients,
                     const Options& options, const DistributedOptions& how,
                     const Workspace& workspace) {
  CCall call(tensors, options);
  call.params.workspace = workspace.data;
  call.params.workspace_bytes = workspace.bytes;
  const CTensor dout(gradients.dout), dlse(gradients.dlse), dq(gradients.dq), dk(gradients.dk),
      dv(gradients.dv);
  const flashcore_backward_params params = {
      sizeof params, &call.params, &dout.tensor, &dlse.tensor, &dq.tensor,
      &dk.tensor,    &dv.tensor,   nullptr,      nullptr,      0};
  const flashcore_comm c_comm = {sizeof c_comm, comm.context,    comm.rank,      comm.size,
                                 comm.sendrecv, comm.all_to_all, comm.all_gather};
  const flashcore_distributed_options c_how = {sizeof c_how,
                                               static_cast<std::int32_t>(how.scheme),
                                               static_cast<std::int32_t>(how.sharding),
                                               0,
                                               how.head_ranks,
                                               how.documents.data(),
                                               how.documents.size()};
  flashcore_error error{};
  const std::int32_t code = flashcore_distributed_backward(&c_comm, &params, &c_how, &error);
  return code == FLASHCORE_OK ? Status() : Status(static_cast<StatusCode>(code), error.message);
}

/// The forward and the backward call of one case on all ranks.
class Ranks {
 public:
  bool in_c = false;

  Ranks(const Case& c, std::int32_t ranks, const DistributedOptions& how)
      : case_(c), how_(how), q_(c, 0, ranks), k_(c, c.more_keys, ranks), engine_(ranks, 2) {
    Random random(5);
    whole_ = draw_gradients(random, whole_inputs(c, q_.length(), k_.length()), c.with_dlse);
    how_.sharding = q_.sharding;
    how_.documents = c.documents;
    problem_.dtype = c.dtype;
    problem_.batch = packed() ? 1 : 2;
    problem_.q_heads = c.q_heads, problem_.kv_heads = c.kv_heads;
    problem_.head_dim = 16, problem_.v_dim = 8;
    problem_.causal = c.options.causal;
    problem_.window_left = c.options.window_left, problem_.window_right = c.options.window_right;
    problem_.q_rows = q_.counts(), problem_.k_rows = k_.counts();
    problem_.documents = c.documents;
    problem_.sharding = q_.sharding, problem_.scheme = how.scheme;
    problem_.ranks_per_node = how.ranks_per_node > 0 ? how.ranks_per_node : ranks;
    problem_.head_ranks = how.head_ranks;
    problem_.separate_backward = true;
  }

  bool possible() const { return choose_scheme(problem_).ok(); }

  void check() {
    forward();
    if (testing::Test::HasFailure()) return;
    backward();
    if (testing::Test::HasFailure()) return;
    EXPECT_EQ(gradient_verdict(whole_), "");
    for (std::int32_t r = 0; r < ranks(); ++r) {
      const auto said = sent_bytes(problem_, r, true);
      ASSERT_TRUE(said.ok()) << said.status().message();
      std::int64_t sum = 0;
      for (const SentBytes& step : *said) sum += step.bytes;
      EXPECT_EQ(engine_.sent(r), sum) << "bytes of rank " << r;
    }
    const Differentiated first = whole_;
    backward();
    EXPECT_EQ(gradient_difference(first, whole_), "") << "of two equal calls";
  }

 private:
  bool packed() const { return !case_.documents.empty(); }
  std::int32_t ranks() const { return static_cast<std::int32_t>(q_.rows.size()); }
  int rows_axis() const { return packed() ? 0 : 2; }
  int lse_axis() const { return packed() ? 1 : 2; }

  /// The call of one rank.
  Differentiated shard(std::int32_t rank) const {
    const auto& q_rows = q_.rows[static_cast<std::size_t>(rank)];
    const auto& k_rows = k_.rows[static_cast<std::size_t>(rank)];
    Differentiated own = whole_;
    const int axis = rows_axis();
    for (auto tensor : {&Differentiated::out, &Differentiated::dout, &Differentiated::dq}) {
      own.*tensor = take(whole_.*tensor, axis, q_rows);
    }
    for (auto tensor : {&Differentiated::dk, &Differentiated::dv}) {
      own.*tensor = take(whole_.*tensor, axis, k_rows);
    }
    own.lse = take(whole_.lse, lse_axis(), q_rows);
    if (whole_.dlse.given()) own.dlse = take(whole_.dlse, lse_axis(), q_rows);
    own.inputs.q = take(whole_.inputs.q, axis, q_rows);
    own.inputs.k = take(whole_.inputs.k, axis, k_rows);
    own.inputs.v = take(whole_.inputs.v, axis, k_rows);
    own.inputs.cu_seqlens_q = own.inputs.cu_seqlens_k = Tensor();
    return own;
  }

  static Tensors tensors_of(const Differentiated& call) {
    Tensors t = call.tensors();
    for (TensorView* one : {&t.q, &t.k, &t.v, &t.out}) *one = dense(*one);
    if (t.lse.rank == 2) t.lse = lse_of(t.lse);
    return t;
  }
  static TensorView lse_of(TensorView lse) {
    if (lse.rank != 2) return lse;
    return {lse.data,
            lse.dtype,
            lse.device,
            3,
            {1, lse.shape[0], lse.shape[1]},
            {0, lse.strides[0], lse.strides[1]}};
  }
  static Gradients gradients_of(const Differentiated& call) {
    Gradients g = call.gradients();
    for (TensorView* one : {&g.dout, &g.dq, &g.dk, &g.dv}) *one = dense(*one);
    g.dlse = lse_of(g.dlse);
    return g;
  }

  void forward() {
    std::vector<Differentiated> own(static_cast<std::size_t>(ranks()));
    const auto results = engine_.run([&](const Comm& comm) {
      Differentiated& mine = own[static_cast<std::size_t>(comm.rank)];
      mine = shard(comm.rank);
      mine.out.fill_bits(verify::poison(mine.out.dtype()));
      mine.lse.fill(7e7);
      return distributed_attention(comm, tensors_of(mine), case_.options, how_);
    });
    const Differentiated expected = whole_;
    for (std::size_t r = 0; r < own.size(); ++r) {
      ASSERT_TRUE(results[r].ok()) << results[r].message();
      put(whole_.out, rows_axis(), q_.rows[r], own[r].out);
      put(whole_.lse, lse_axis(), q_.rows[r], own[r].lse);
    }
    const double scale = case_.options.scale.value_or(0.25);
    const double limit = case_.dtype == DType::f32 ? 4e-6 * std::max(1.0, scale) : 0.02;
    expect_near(whole_.out, expected.out, limit);
    expect_near(whole_.lse, expected.lse, 4e-6 * std::max(1.0, 8 * scale));
  }
  static void expect_near(const Tensor& a, const Tensor& b, double limit) {
    const auto x = a.values(), y = b.values();
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i]) continue;  // also two infinities
      ASSERT_NEAR(x[i], y[i], limit) << i;
    }
  }

  void backward() {
    std::vector<Differentiated> own(static_cast<std::size_t>(ranks()));
    const auto results = engine_.run([&](const Comm& comm) -> Status {
      Differentiated& mine = own[static_cast<std::size_t>(comm.rank)];
      mine = shard(comm.rank);
      const auto bytes = distributed_backward_workspace(problem_, comm.rank);
      if (!bytes.ok()) return bytes.status();
      constexpr std::size_t kGuard = 256;
      const WorkspaceMemory memory(*bytes + kGuard);
      Workspace workspace = memory.get();
      workspace.bytes = *bytes;
      const Status status = (in_c ? backward_in_c : backward_in_cpp)(
          comm, tensors_of(mine), gradients_of(mine), case_.options, how_, workspace);
      const auto* end = static_cast<const std::byte*>(workspace.data) + *bytes;
      EXPECT_TRUE(std::all_of(end, end + kGuard, [](std::byte b) { return b == std::byte{0xff}; }))
          << "wrote past the workspace";
      return status;
    });
    std::vector<double> dsinks(static_cast<std::size_t>(case_.q_heads));
    for (std::size_t r = 0; r < own.size(); ++r) {
      ASSERT_TRUE(results[r].ok()) << results[r].message();
      put(whole_.dq, rows_axis(), q_.rows[r], own[r].dq);
      put(whole_.dk, rows_axis(), k_.rows[r], own[r].dk);
      put(whole_.dv, rows_axis(), k_.rows[r], own[r].dv);
      if (!case_.sinks) continue;
      const auto part = own[r].dsinks.values();
      for (std::size_t h = 0; h < part.size(); ++h) dsinks[h] += part[h];
    }
    if (case_.sinks) whole_.dsinks = tensor_of(DType::f32, {case_.q_heads}, dsinks);
  }

  const Case& case_;
  DistributedOptions how_;
  Placement q_, k_;
  DistributedProblem problem_;
  Differentiated whole_;
  ThreadComm engine_;
};

class DistributedThreadsBackward : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DistributedThreadsBackward, testing::Values(1, 2, 3, 4));

TEST_P(DistributedThreadsBackward, EverySchemeGivesTheGradientsOfOneDevice) {
  for (const Case& c : kCases) {
    for (const Scheme scheme :
         {Scheme::automatic, Scheme::ring, Scheme::gather, Scheme::ulysses, Scheme::halo}) {
      SCOPED_TRACE(std::string(c.name) + ", " + to_string(scheme));
      Ranks ranks(c, GetParam(), {.scheme = scheme});
      if (ranks.possible()) ranks.check();
      if (HasFailure()) return;
    }
  }
}

TEST(DistributedThreadsBackward2d, TwoByTwo) {
  for (const char* name : {"full", "causal, grouped", "documents", "bf16", "rows without keys"}) {
    SCOPED_TRACE(name);
    Ranks(case_of(name), 4, {.scheme = Scheme::two_d, .ranks_per_node = 2, .head_ranks = 2})
        .check();
  }
}

TEST(DistributedThreadsBackward2d, RanksThatShareAKvHead) {
  for (const char* name : {"causal, grouped", "bf16", "documents"}) {
    SCOPED_TRACE(name);
    Ranks(case_of(name), 4, {.scheme = Scheme::ulysses}).check();
  }
}

TEST(DistributedThreadsBackwardC, ThroughTheCAbi) {
  for (const char* name : {"one rank has all rows", "large scores"}) {
    SCOPED_TRACE(name);
    Ranks ranks(case_of(name), 2, {.scheme = Scheme::ring});
    ranks.in_c = true;
    ranks.check();
  }
}

TEST(DistributedThreadsBackwardC, TheWorkspaceIsThatOfCpp) {
  flashcore_distributed_problem p{};
  p.struct_size = sizeof p;
  p.ranks = 4, p.ranks_per_node = 8;
  p.dtype = {FLASHCORE_BFLOAT, 16, 1};
  p.batch = 1, p.q_heads = p.kv_heads = 8, p.head_dim = p.v_dim = 64;
  p.window_left = p.window_right = -1;
  p.length = 100;
  DistributedProblem same;
  same.q_heads = same.kv_heads = 8, same.head_dim = same.v_dim = 64;
  same.q_rows = same.k_rows = distributed_rows(100, 4, Sharding::zigzag);
  std::size_t bytes = 0;
  flashcore_error error{};
  const flashcore_device cpu = {FLASHCORE_CPU, 0};
  ASSERT_EQ(flashcore_distributed_backward_workspace(&p, 1, cpu, &bytes, &error), FLASHCORE_OK)
      << error.message;
  EXPECT_EQ(bytes, *distributed_backward_workspace(same, 1));
  EXPECT_EQ(flashcore_distributed_backward_workspace(&p, 4, cpu, &bytes, &error),
            FLASHCORE_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "rank is 4; wanted 0 to 3");
  same.dtype = DType::f64;
  EXPECT_EQ(distributed_backward_workspace(same, 1).status().message(),
            "dtype is f64; wanted f32, f16 or bf16");
}

}  // namespace
}  // namespace flashcore::test
