// Every bad input fails with the expected code and a message that names it, and no byte is written,
// through the C++ API and the C ABI.
#include <gtest/gtest.h>

#include <set>

#include "support/to_c.h"
#include "unit/api/bad_call.h"

namespace flashcore::test {
namespace {

/// make_problem(), make_plan(), run().
Status call_cpp(const GoodCall& call, Workspace workspace) {
  const Result<Problem> problem = make_problem(call.tensors, call.options);
  if (!problem.ok()) return problem.status();
  const Result<Plan> plan = make_plan(*problem, *device_info(Device{}));
  if (!plan.ok()) return plan.status();
  return run(*plan, call.tensors, workspace);
}

Status call_c(const GoodCall& call, Workspace workspace) {
  CCall c(call.tensors, call.options);
  c.params.workspace = workspace.data;
  c.params.workspace_bytes = workspace.bytes;
  flashcore_error error{};
  const std::int32_t code = flashcore_attention(&c.params, &error);
  EXPECT_EQ(code, error.code);
  return Status(static_cast<StatusCode>(code), error.message);
}

std::vector<std::vector<std::uint64_t>> all_bits(const GoodCall& call) {
  std::vector<std::vector<std::uint64_t>> bits;
  for (const Tensor* t :
       {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.inputs.bias, &call.inputs.mask,
        &call.inputs.alibi_slopes, &call.inputs.sinks, &call.inputs.cu_seqlens_q,
        &call.inputs.cu_seqlens_k, &call.inputs.used_k, &call.inputs.block_table,
        &call.inputs.q_start, &call.inputs.k_start, &call.output.out, &call.output.lse}) {
    bits.push_back(t->given() ? t->bits() : std::vector<std::uint64_t>{});
  }
  return bits;
}

void expect_refused(const std::vector<BadCall>& rows) {
  WorkspaceMemory workspace(8 << 20);
  std::set<std::string> names;
  for (const BadCall& row : rows) {
    SCOPED_TRACE(row.name);
    EXPECT_TRUE(names.insert(row.name + std::to_string(static_cast<int>(row.layout))).second)
        << "twice";
    for (const bool through_c : {false, true}) {
      SCOPED_TRACE(through_c ? "C" : "C++");
      GoodCall call(row.layout);
      row.corrupt(call);
      const auto before = all_bits(call);
      const Status status =
          through_c ? call_c(call, workspace.get()) : call_cpp(call, workspace.get());
      EXPECT_EQ(status.code(), row.code) << status.message();
      for (const std::string& word : row.words) {
        // Messages of the C ABI say ndim instead of rank.
        if (through_c && word == "rank is") continue;
        EXPECT_NE(status.message().find(word), std::string::npos)
            << "no \"" << word << "\" in: " << status.message();
      }
      EXPECT_TRUE(all_bits(call) == before) << "a failed call wrote memory";
      if (call.options.checked) {
        const Status found = workspace_status(workspace.get());
        EXPECT_EQ(found.message(), status.message());
        EXPECT_TRUE(workspace_status(workspace.get()).ok()) << "the slot was not cleared";
      }
    }
  }
}

TEST(BadInput, TheUnchangedCallsAreValid) {
  WorkspaceMemory workspace(8 << 20);
  for (const CallLayout layout : {CallLayout::dense, CallLayout::varlen, CallLayout::paged}) {
    for (const bool through_c : {false, true}) {
      GoodCall call(layout);
      const Status status =
          through_c ? call_c(call, workspace.get()) : call_cpp(call, workspace.get());
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

TEST(BadInput, Shapes) {
  expect_refused(bad_shapes());
  EXPECT_GE(bad_shapes().size(), 100u);
}
TEST(BadInput, PageTable) { expect_refused(bad_pages()); }
TEST(BadInput, Memory) { expect_refused(bad_memory()); }
TEST(BadInput, Options) { expect_refused(bad_options()); }
TEST(BadInput, Lengths) { expect_refused(bad_lengths()); }

TEST(BadInput, EmptyDimensionsAreValid) {
  WorkspaceMemory workspace(8 << 20);
  struct Row {
    const char* name;
    Shape q, k;
  };
  const Row rows[] = {{"no batch", {0, 4, 5, 16}, {0, 2, 7, 16}},
                      {"no query", {2, 4, 0, 16}, {2, 2, 7, 16}},
                      {"no head", {2, 0, 5, 16}, {2, 0, 7, 16}},
                      {"nothing", {0, 0, 0, 16}, {0, 0, 0, 16}}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    GoodCall call;
    call.inputs = {};
    call.inputs.q = Tensor(DType::f32, row.q);
    call.inputs.k = call.inputs.v = Tensor(DType::f32, row.k);
    call.output = make_output(call.inputs);
    call.tensors = tensors_of(call.inputs, call.output.out, call.output.lse);
    // An empty tensor needs no memory; its compact strides are 0.
    const auto without_memory = [](TensorView& t) {
      TensorView empty = view(nullptr, t.dtype, {});
      empty.rank = t.rank;
      std::int64_t stride = 1;
      for (int i = t.rank - 1; i >= 0; --i) {
        empty.shape[i] = t.shape[i];
        empty.strides[i] = stride;
        stride *= t.shape[i];
      }
      t = empty;
    };
    for (const bool null : {false, true}) {
      if (null) {
        without_memory(call.tensors.q);
        without_memory(call.tensors.out);
        without_memory(call.tensors.lse);
      }
      for (const bool through_c : {false, true}) {
        const Status status =
            through_c ? call_c(call, workspace.get()) : call_cpp(call, workspace.get());
        EXPECT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

TEST(BadInput, NoKeysGiveZeroAndMinusInfinity) {
  GoodCall call;
  call.inputs.k = Tensor(DType::f32, {2, 2, 0, 16});
  call.inputs.v = Tensor(DType::f32, {2, 2, 0, 12});
  call.inputs.bias = call.inputs.mask = call.inputs.used_k = {};
  call.inputs.sinks = {};
  const Output output = attend(call.inputs);
  ASSERT_TRUE(output.status.ok()) << output.status.message();
  for (const double x : output.out.values()) EXPECT_EQ(x, 0.0);
  for (const double x : output.lse.values()) {
    EXPECT_EQ(x, -std::numeric_limits<double>::infinity());
  }
}

}  // namespace
}  // namespace flashcore::test
