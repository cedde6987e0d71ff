// What a Hopper kernel is launched with beyond what every kernel is.
#pragma once

#include <cuda.h>

#include "core/params.h"
#include "core/sm90_shape.h"

namespace flashcore::cuda::sm90 {

struct Params {
  core::AttentionParams call;
  core::WorkOrder order;
  bool plain;             // scores are only scaled and masked by position
  bool garbage_tail;      // behind a sequence's last key lies something, not the end of the tensor
  std::uint32_t* ticket;  // 0 between calls: which item is next, where there are more than blocks
  // 4-D: columns, rows, heads, batch; boxes of 64 columns and a tile's rows.
  CUtensorMap q, k, v;
};

}  // namespace flashcore::cuda::sm90
