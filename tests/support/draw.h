// Random calls for property tests. Sizes are small and often next to a tile edge of the kernel.
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

/// Compact q, k and v, and options that force `kernel`.
Inputs draw_inputs(Random& random, const KernelInfo& kernel, const Sizes& sizes,
                   double sigma = 1.0);

/// Adds options that change scores but hide no key: scale, softcap, ALiBi, bias, sinks.
void add_score_options(Random& random, Inputs& inputs);

/// Adds options that hide keys: causal, windows, a boolean mask.
void add_masks(Random& random, Inputs& inputs);

/// Draws sizes, data and any of the options.
Inputs draw_call(Random& random, const KernelInfo& kernel);

std::vector<std::int64_t> draw_permutation(Random& random, std::int64_t count);

/// The call for sequences `indices` of the batch. Selects, permutes or repeats every operand along
/// its batch axis.
Inputs take_batch(const Inputs& inputs, const std::vector<std::int64_t>& indices);

}  // namespace flashcore::test
