// The sizes of random problems.
#pragma once

#include "verify/inputs/case.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {

enum class SizeKind {
  boundary,  ///< at tile edges, around the target work
  tall,      ///< far more queries than keys: a mask leaves query tiles without keys
  large,     ///< 10^4 to 10^5 query rows, few keys
};

/// Persistent kernels get tall and large problems more often: only those give a CTA several tiles.
SizeKind draw_size_kind(Random random, const KernelInfo& kernel);

/// Draws batch, heads and lengths for the given dims.
void draw_sizes(SizeKind kind, Random& random, const KernelInfo& kernel, double target_work,
                CaseSpec& spec);

/// Mask of a tall problem: causal, or a narrow window.
void draw_tall_mask(Random random, CaseSpec& spec);

/// Drops a bias or mask that would dominate the memory.
void drop_large_score_tensors(CaseSpec& spec);

}  // namespace flashcore::verify
