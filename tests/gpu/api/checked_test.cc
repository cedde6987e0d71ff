// Checked mode: kernels clamp a bad length or start and report its index and value. gpu_check also
// runs these tests under compute-sanitizer: memcheck finds an access that a clamp misses.
#include <cstring>
#include <functional>

#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

constexpr std::int64_t kBatch = 3, kQ = 8, kK = 24;

/// A tensor with bad values and the expected report.
struct BadInput {
  const char* name;
  verify::CaseSpec spec;
  std::function<const TensorView&(const Tensors&)> tensor;
  std::vector<std::int32_t> values;  // the whole tensor
  const char* wanted;                // substring of the message
};

void PrintTo(const BadInput& input, std::ostream* out) { *out << input.name; }

verify::CaseSpec base() {
  verify::CaseSpec spec = dense(DType::f16, kBatch, 2, 1, kQ, kK, 64);
  spec.options.checked = true;
  spec.lse = true;
  return spec;
}

verify::CaseSpec varlen_q() {
  verify::CaseSpec spec = base();
  spec.q_varlen = true;
  return spec;
}

verify::CaseSpec varlen_k() {
  verify::CaseSpec spec = base();
  spec.kv_varlen = true;
  return spec;
}

std::vector<BadInput> bad_inputs() {
  const auto cu_q = [](const Tensors& t) -> const TensorView& { return t.cu_seqlens_q; };
  const auto cu_k = [](const Tensors& t) -> const TensorView& { return t.cu_seqlens_k; };
  const auto used_k = [](const Tensors& t) -> const TensorView& { return t.seqused_k; };
  const auto q_start = [](const Tensors& t) -> const TensorView& { return t.q_start; };
  const auto k_start = [](const Tensors& t) -> const TensorView& { return t.k_start; };
  verify::CaseSpec with_used = base(), with_q_start = base(), with_k_start = base();
  with_used.used_k = with_q_start.q_start = with_k_start.k_start = true;
  with_q_start.options.causal = with_k_start.options.causal = true;
  verify::CaseSpec split_used = with_used;
  split_used.options.num_splits = 3;
  split_used.kv_len = 200;
  // The last entry of cu_seqlens bounds one sequence only, so the report is deterministic.
  return {
      {"cu_q_past_the_end",
       varlen_q(),
       cu_q,
       {0, 1, 2, 100000},
       "cu_seqlens_q[3] is 100000 (sequence 2)"},
      {"cu_q_decreasing", varlen_q(), cu_q, {0, 1, 2, 1}, "cu_seqlens_q[3] is 1 (sequence 2)"},
      {"cu_q_negative", varlen_q(), cu_q, {-5, 1, 2, 3}, "cu_seqlens_q[0] is -5 (sequence 0)"},
      {"cu_k_past_the_end",
       varlen_k(),
       cu_k,
       {0, 1, 2, 2000000000},
       "cu_seqlens_k[3] is 2000000000 (sequence 2)"},
      {"cu_k_decreasing", varlen_k(), cu_k, {0, 2, 3, -7}, "cu_seqlens_k[3] is -7 (sequence 2)"},
      {"used_k_too_long", with_used, used_k, {3, 24, 25}, "seqused_k[2] is 25 (sequence 2)"},
      {"used_k_negative", with_used, used_k, {3, -1, 4}, "seqused_k[1] is -1 (sequence 1)"},
      {"used_k_in_a_split_plan",
       split_used,
       used_k,
       {3, 1 << 30, 4},
       "seqused_k[1] is 1073741824 (sequence 1)"},
      {"q_start_too_far",
       with_q_start,
       q_start,
       {0, 0, 2000000000},
       "q_start[2] is 2000000000 (sequence 2)"},
      {"q_start_too_low",
       with_q_start,
       q_start,
       {-2000000000, 0, 0},
       "q_start[0] is -2000000000 (sequence 0)"},
      {"k_start_too_far",
       with_k_start,
       k_start,
       {0, 1073741825, 0},
       "k_start[1] is 1073741825 (sequence 1)"},
  };
}

class Checked : public GpuTest, public ::testing::WithParamInterface<BadInput> {};

TEST_P(Checked, ReportsAndClamps) {
  const BadInput& input = GetParam();
  const verify::CaseMemory memory(input.spec);
  GpuCase gpu(memory);
  const TensorView& damaged = input.tensor(gpu.tensors());
  ASSERT_EQ(static_cast<std::size_t>(damaged.shape[0]), input.values.size());
  require(cudaMemcpy(damaged.data, input.values.data(), input.values.size() * sizeof(std::int32_t),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  const TestStream stream;
  require(gpu.run(stream));
  const Workspace workspace = gpu.workspace().get();
  const Status status = workspace_status(workspace, stream);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find(input.wanted), std::string::npos) << status.message();

  // The error is reported once, and reading it resets the workspace.
  EXPECT_TRUE(workspace_status(workspace, stream).ok());
  EXPECT_TRUE(gpu.workspace().header_is_zero());

  // Only outputs changed.
  std::vector<std::byte> block = gpu.block();
  const TensorView& original = input.tensor(memory.tensors());
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(original.data) -
                                               memory.bytes().data());
  std::memcpy(block.data() + offset, original.data, input.values.size() * sizeof(std::int32_t));
  EXPECT_TRUE(memory.only_outputs_changed(block));

  // The next call with valid data is correct.
  expect_right(memory, gpu.direct(memory, stream), gpu.plan());
  EXPECT_TRUE(workspace_status(workspace, stream).ok());
}

INSTANTIATE_TEST_SUITE_P(BadInputs, Checked, ::testing::ValuesIn(bad_inputs()),
                         [](const auto& test) { return std::string(test.param.name); });

class CheckedMode : public GpuTest {};

// An inner entry bounds two sequences; either may report it first.
TEST_F(CheckedMode, NamesAnInnerEntry) {
  const verify::CaseMemory memory(varlen_q());
  GpuCase gpu(memory);
  const std::int32_t values[] = {0, 1, 70000, 3};
  require(
      cudaMemcpy(gpu.tensors().cu_seqlens_q.data, values, sizeof values, cudaMemcpyHostToDevice),
      "cudaMemcpy");
  require(gpu.run(nullptr));
  const Status status = workspace_status(gpu.workspace().get());
  EXPECT_NE(status.message().find("cu_seqlens_q[2] is 70000"), std::string::npos)
      << status.message();
}

// Unchecked calls clamp too, but do not write the error slot.
TEST_F(CheckedMode, UncheckedCallsReportNothing) {
  verify::CaseSpec spec = base();
  spec.options.checked = false;
  spec.used_k = true;
  const verify::CaseMemory memory(spec);
  GpuCase gpu(memory);
  const std::int32_t values[kBatch] = {1 << 30, -1, 3};
  require(cudaMemcpy(gpu.tensors().seqused_k.data, values, sizeof values, cudaMemcpyHostToDevice),
          "cudaMemcpy");
  require(gpu.run(nullptr));
  EXPECT_TRUE(workspace_status(gpu.workspace().get()).ok());
  EXPECT_TRUE(gpu.workspace().header_is_zero());
}

}  // namespace
}  // namespace flashcore::gpu_test
