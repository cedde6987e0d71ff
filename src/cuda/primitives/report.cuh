// Checked mode: the first bad length or start that any block finds goes to the error slot.
#pragma once

#include "core/params.h"

namespace flashcore::cuda {

__device__ __forceinline__ void report(const core::AttentionParams& p,
                                       const core::ErrorSlot& found) {
  if (!p.checked || found.code == 0) return;
  if (atomicCAS(&p.error->code, 0, found.code) != 0) return;  // the first report stays
  p.error->batch = found.batch;
  p.error->index = found.index;
  p.error->value = found.value;
}

}  // namespace flashcore::cuda
