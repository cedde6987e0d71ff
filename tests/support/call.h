// Calling the library the way a user does, and judging what comes back.
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

/// f64 for f64, else f32: the type of partial results and of the LSE.
DType wide(DType dtype);

/// Everything a call reads.
struct Inputs {
  Tensor q, k, v, bias, mask, alibi_slopes, sinks;
  Tensor cu_seqlens_q, cu_seqlens_k, used_k, block_table, q_start, k_start;
  Options options;
};

struct Setting {
  int threads = 0;          ///< 0: as many as the machine has
  DType out = DType::none;  ///< none: q's, or what a partial result needs
  MemoryLayout out_layout = MemoryLayout::heads_first;
};

struct Output {
  Status status;
  Problem problem;
  Plan plan;
  Tensor out, lse;
};

/// Poisoned outputs of the right shapes.
Output make_output(const Inputs& inputs, const Setting& setting = {});

/// The views of a call. `lse` may be a tensor that is not given.
Tensors tensors_of(const Inputs& inputs, const Tensor& out, const Tensor& lse);

/// 256-byte aligned, exactly as long as asked for, full of 0xff and then initialised.
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

/// make_problem, make_plan, run. The status is that of the first step that fails.
Output attend(const Inputs& inputs, const Setting& setting = {});

/// How far each element of an output may lie from the truth, in logical order. All rows, no
/// packing.
std::vector<double> out_bounds(const Inputs& inputs, const Output& output);

/// Empty where the output is right: the oracle computes `inputs`, compare() decides.
std::string verdict(const Inputs& inputs, const Output& output);

}  // namespace flashcore::test

#define FLASHCORE_EXPECT_SAME_BITS(a, b) EXPECT_EQ(::flashcore::test::difference(a, b), "")
#define FLASHCORE_EXPECT_SAME(output_a, output_b)               \
  do {                                                          \
    FLASHCORE_EXPECT_SAME_BITS((output_a).out, (output_b).out); \
    FLASHCORE_EXPECT_SAME_BITS((output_a).lse, (output_b).lse); \
  } while (false)
