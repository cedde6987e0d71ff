// Random calls for property tests. Sizes are small and lean to the kernels' tile edges.
#pragma once

#include "support/call.h"
#include "verify/inputs/random.h"

namespace flashcore::test {

using verify::Random;

struct Sizes {
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1;
  std::int64_t q_len = 1, kv_len = 1, head_dim = 16, v_dim = 16;
};
Sizes draw_sizes(Random& random, const KernelInfo& kernel);

Tensor draw_normal(Random& random, DType dtype, const Shape& shape, double sigma = 1.0);
Tensor draw_mask(Random& random, const Shape& shape, double visible = 0.7);

/// q, k and v on compact tensors, and options that force `kernel`.
Inputs draw_inputs(Random& random, const KernelInfo& kernel, const Sizes& sizes,
                   double sigma = 1.0);

/// Options that change scores but not which keys are seen: scale, softcap, ALiBi, bias, sinks.
void add_score_options(Random& random, Inputs& inputs);

/// Options that hide keys: causal, windows, a boolean mask.
void add_masks(Random& random, Inputs& inputs);

/// Sizes, any of the options, and data.
Inputs draw_call(Random& random, const KernelInfo& kernel);

std::vector<std::int64_t> draw_permutation(Random& random, std::int64_t count);

/// The sequences of a batch in another order (or some of them, or some twice): every operand that
/// has a batch axis is taken along it.
Inputs take_batch(const Inputs& inputs, const std::vector<std::int64_t>& indices);

}  // namespace flashcore::test
