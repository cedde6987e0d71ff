// Calls the library as a user does and checks the results against the oracle.
#pragma once

#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "support/rounds.h"
#include "support/tensor.h"
#include "verify/inputs/compare.h"

namespace flashcore::test {

/// CPU kernels that this build has and this machine can execute.
std::vector<const KernelInfo*> runnable_kernels();

/// Type of partial results and of the LSE: f64 for f64, otherwise f32.
DType wide(DType dtype);

/// All inputs of a call.
struct Inputs {
  Tensor q, k, v, bias, mask, mask_blocks, mask_bits, alibi_slopes, sinks;
  Tensor cu_seqlens_q, cu_seqlens_k, used_k, block_table, q_start, k_start;
  Options options;
};

struct Setting {
  int threads = 0;          ///< 0: all threads of the machine
  DType out = DType::none;  ///< none: the type of q, or wide(q) for a partial result
  MemoryLayout out_layout = MemoryLayout::heads_first;
};

struct Output {
  Status status;
  Problem problem;
  Plan plan;
  Tensor out, lse;
};

/// Outputs of the right shapes, filled with a poison value.
Output make_output(const Inputs& inputs, const Setting& setting = {});

/// The views of a call. `lse` may be an absent tensor.
Tensors tensors_of(const Inputs& inputs, const Tensor& out, const Tensor& lse);

/// Workspace of exactly `bytes` bytes, aligned to 256, filled with 0xff and then initialized.
class WorkspaceMemory {
 public:
  explicit WorkspaceMemory(std::size_t bytes);
  ~WorkspaceMemory();
  WorkspaceMemory(const WorkspaceMemory&) = delete;
  WorkspaceMemory& operator=(const WorkspaceMemory&) = delete;

  Workspace get() const { return workspace_; }

 private:
  Workspace workspace_;
};

/// Calls make_problem, make_plan and run. Returns the status of the first step that fails.
Output attend(const Inputs& inputs, const Setting& setting = {});

/// Error bound of each output element, in logical order. Requires a call without varlen Q.
std::vector<double> out_bounds(const Inputs& inputs, const Output& output);

/// Compares the output with the oracle. Returns an empty text if it is right, else a report.
std::string verdict(const Inputs& inputs, const Output& output);

}  // namespace flashcore::test

#define FLASHCORE_EXPECT_SAME_BITS(a, b) EXPECT_EQ(::flashcore::test::difference(a, b), "")
#define FLASHCORE_EXPECT_SAME(output_a, output_b)               \
  do {                                                          \
    FLASHCORE_EXPECT_SAME_BITS((output_a).out, (output_b).out); \
    FLASHCORE_EXPECT_SAME_BITS((output_a).lse, (output_b).lse); \
  } while (false)
