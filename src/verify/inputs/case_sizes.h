// The sizes of random problems.
#pragma once

#include "verify/inputs/case.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {

/// What the lengths of a problem have about them.
enum class SizeKind {
  boundary,  ///< at tile edges, around the work asked for
  tall,      ///< far more queries than keys: a mask leaves tiles of them without a key
  large,     ///< 10^4 to 10^5 query rows in all, as few keys as that takes
};

/// Persistent kernels meet the last two more often: only then have their blocks several items.
SizeKind draw_size_kind(Random random, const KernelInfo& kernel);

/// Draws batch, heads and lengths. The dims are there already.
void draw_sizes(SizeKind kind, Random& random, const KernelInfo& kernel, double target_work,
                CaseSpec& spec);

/// Of a tall problem: causal, a narrow window, or one that queries leave on both sides.
void draw_tall_mask(Random random, CaseSpec& spec);

/// A bias or mask with an element for every score is dropped where that would be most of the work.
void drop_large_score_tensors(CaseSpec& spec);

}  // namespace flashcore::verify
