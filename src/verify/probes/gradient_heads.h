// Explains gradients that are wrong only with several heads: some tensor of another head was read.
#pragma once

#include <string>

#include "verify/gradient_call.h"

namespace flashcore::verify {

struct HeadDiagnosis {
  FaultStage stage = FaultStage::none;
  std::string text;
};

/// Computes dq of every wrong head again with one tensor of another head, for every tensor and
/// head. Finds nothing if no single tensor explains all wrong heads. For calls without a mask or
/// softcap.
HeadDiagnosis tensor_of_another_head(const GradientCall& call, const RanGradients& ran);

/// dv alone, or dk alone, is that with dout or P, or with Q or dS, of other heads.
HeadDiagnosis operand_of_another_head(const GradientCall& call, const RanGradients& ran);

/// A gradient is a sum of parts of query heads, but not of its own ones, each once.
HeadDiagnosis mixed_heads(const GradientCall& call, const RanGradients& ran);

/// A tensor is read or written as if its axes were in another order. `native` is the layout of the
/// call.
HeadDiagnosis exchanged_axes(const GradientCall& call, const RanGradients& ran,
                             MemoryLayout native);

/// A gradient that holds another gradient, or the same one of other heads.
HeadDiagnosis exchanged_gradients(const GradientCall& call, const RanGradients& ran);

}  // namespace flashcore::verify
