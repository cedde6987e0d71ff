#include "unit/distributed/ranks.h"

#include <gtest/gtest.h>

#include "flashcore/distributed_c.h"
#include "support/to_c.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::test {
namespace {

Gradients dense(const Gradients& gradients) {
  Gradients g = gradients;
  for (TensorView* one : {&g.dout, &g.dq, &g.dk, &g.dv}) *one = test::dense(*one);
  g.dlse = dense_lse(g.dlse);
  return g;
}

flashcore_comm c_comm(const Comm& comm) {
  return {sizeof(flashcore_comm), comm.context,    comm.rank,      comm.size,
          comm.sendrecv,          comm.all_to_all, comm.all_gather};
}

flashcore_distributed_options c_options(const DistributedOptions& how) {
  return {sizeof(flashcore_distributed_options),
          static_cast<std::int32_t>(how.scheme),
          static_cast<std::int32_t>(how.sharding),
          how.ranks_per_node,
          how.head_ranks,
          how.documents.data(),
          how.documents.size()};
}

Status status_of(std::int32_t code, const flashcore_error& error) {
  return code == FLASHCORE_OK ? Status() : Status(static_cast<StatusCode>(code), error.message);
}

Status forward_in_c(const Comm& comm, const Tensors& tensors, const Options& options,
                    const DistributedOptions& how) {
  const CCall call(tensors, options);
  const flashcore_comm engine = c_comm(comm);
  const flashcore_distributed_options c_how = c_options(how);
  flashcore_error error{};
  return status_of(flashcore_distributed_attention(&engine, &call.params, &c_how, &error), error);
}

Status backward_in_c(const Comm& comm, const Tensors& tensors, const Gradients& gradients,
                     const Options& options, const DistributedOptions& how,
                     const Workspace& workspace) {
  CCall call(tensors, options);
  call.params.workspace = workspace.data;
  call.params.workspace_bytes = workspace.bytes;
  const CTensor dout(gradients.dout), dlse(gradients.dlse), dq(gradients.dq), dk(gradients.dk),
      dv(gradients.dv), dsinks(gradients.dsinks);
  const flashcore_backward_params params = {sizeof params,
                                            &call.params,
                                            &dout.tensor,
                                            &dlse.tensor,
                                            &dq.tensor,
                                            &dk.tensor,
                                            &dv.tensor,
                                            nullptr,
                                            gradients.dsinks.given() ? &dsinks.tensor : nullptr,
                                            0};
  const flashcore_comm engine = c_comm(comm);
  const flashcore_distributed_options c_how = c_options(how);
  flashcore_error error{};
  return status_of(flashcore_distributed_backward(&engine, &params, &c_how, &error), error);
}

}  // namespace

Ranks::Ranks(const Case& c, std::int32_t ranks, const DistributedOptions& how)
    : case_(c),
      how_(how),
      q_(c, 0, ranks),
      k_(c, c.more_keys, ranks),
      documents_(documents_of(c, q_.length())) {
  const Inputs inputs = whole_inputs(c, q_.length(), k_.length());
  output_ = attend(inputs);
  Random random(5);
  whole_ = draw_gradients(random, inputs, c.with_dlse);
  how_.sharding = q_.sharding;
  how_.documents = documents_;
  problem_.dtype = c.dtype;
  problem_.batch = packed() ? 1 : 2;
  problem_.q_heads = c.q_heads, problem_.kv_heads = c.kv_heads;
  problem_.head_dim = 16, problem_.v_dim = 8;
  problem_.causal = c.options.causal;
  problem_.window_left = c.options.window_left, problem_.window_right = c.options.window_right;
  problem_.reproducibility = c.options.reproducibility;
  problem_.q_rows = q_.counts(), problem_.k_rows = k_.counts();
  problem_.documents = documents_;
  problem_.sharding = q_.sharding, problem_.scheme = how.scheme;
  problem_.ranks_per_node = how.ranks_per_node > 0 ? how.ranks_per_node : ranks;
  problem_.head_ranks = how.head_ranks;
  problem_.separate_backward = true;
}

void Ranks::check() {
  forward();
  if (testing::Test::HasFailure()) return;
  backward();
  if (testing::Test::HasFailure()) return;
  EXPECT_EQ(gradient_verdict(whole_), "");
  const Differentiated first = whole_;
  backward();
  EXPECT_EQ(gradient_difference(first, whole_), "") << "of two equal calls";
}

Differentiated Ranks::shard(std::int32_t rank) const {
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

void Ranks::check_bytes(const ThreadComm& engine, bool backward) const {
  for (std::int32_t r = 0; r < ranks(); ++r) {
    const auto said = sent_bytes(problem_, r, backward);
    ASSERT_TRUE(said.ok()) << said.status().message();
    EXPECT_EQ(step_difference(*said, engine.messages(r)), "") << "rank " << r;
  }
}

const Output& Ranks::forward() {
  std::vector<Differentiated> own(static_cast<std::size_t>(ranks()));
  ThreadComm engine(ranks());
  const auto results = engine.run([&](const Comm& comm) {
    Differentiated& mine = own[static_cast<std::size_t>(comm.rank)];
    mine = shard(comm.rank);
    mine.out.fill_bits(verify::poison(mine.out.dtype()));
    mine.lse.fill(7e7);
    const Tensors tensors = dense(mine.tensors());
    return in_c ? forward_in_c(comm, tensors, case_.options, how_)
                : distributed_attention(comm, tensors, case_.options, how_);
  });
  for (std::size_t r = 0; r < own.size(); ++r) {
    EXPECT_TRUE(results[r].ok()) << results[r].message();
    put(whole_.out, rows_axis(), q_.rows[r], own[r].out);
    put(whole_.lse, lse_axis(), q_.rows[r], own[r].lse);
  }
  output_.out = whole_.out;
  output_.lse = whole_.lse;
  EXPECT_EQ(verdict(whole_.inputs, output_), "");
  check_bytes(engine, false);
  return output_;
}

void Ranks::backward() {
  std::vector<Differentiated> own(static_cast<std::size_t>(ranks()));
  ThreadComm engine(ranks(), 2);
  const auto results = engine.run([&](const Comm& comm) -> Status {
    Differentiated& mine = own[static_cast<std::size_t>(comm.rank)];
    mine = shard(comm.rank);
    const auto bytes = distributed_backward_workspace(problem_, comm.rank);
    if (!bytes.ok()) return bytes.status();
    constexpr std::size_t kGuard = 256;
    const WorkspaceMemory memory(*bytes + kGuard);
    Workspace workspace = memory.get();
    workspace.bytes = *bytes;
    const Tensors tensors = dense(mine.tensors());
    const Gradients gradients = dense(mine.gradients());
    const Status status =
        in_c ? backward_in_c(comm, tensors, gradients, case_.options, how_, workspace)
             : distributed_backward(comm, tensors, gradients, case_.options, how_, workspace);
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
  check_bytes(engine, true);
}

}  // namespace flashcore::test
