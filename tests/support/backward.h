// Calls run_backward() as a user does and checks the gradients against the oracle.
#pragma once

#include <string>
#include <vector>

#include "flashcore/backward.h"
#include "support/call.h"
#include "support/draw.h"

namespace flashcore::test {

/// CPU kernels for gradients that this build has and this machine can execute.
std::vector<const KernelInfo*> runnable_backward_kernels();

/// A call, its results and their gradients.
struct Differentiated {
  Inputs inputs;
  Tensor out, lse, dout, dlse;  ///< dlse may be absent
  Tensor dq, dk, dv, dbias, dsinks;

  Tensors tensors() const { return tensors_of(inputs, out, lse); }
  Gradients gradients() const;
};

/// Runs the forward on the kernel of inputs.options, draws dout (and dlse), and poisons the
/// gradients of all inputs that have one. options.kernel is null afterwards.
Differentiated draw_gradients(Random& random, Inputs inputs, bool with_dlse = true);

/// Computes the gradients. `kernel` null: the planner's choice; `threads` 0: all.
Status differentiate(Differentiated& call, const char* kernel = nullptr, int threads = 0);

/// Empty if the gradients are within their bounds, otherwise a report.
std::string gradient_verdict(const Differentiated& call);

/// Empty if all gradients of both calls have equal bits, otherwise names the first that differs.
std::string gradient_difference(const Differentiated& a, const Differentiated& b);

}  // namespace flashcore::test
