// Launch parameters of a Hopper kernel for gradients.
#pragma once

#include <cuda.h>

#include "core/backward_params.h"
#include "core/sm90_bwd_traits.h"
#include "core/tile_scheduler.h"

namespace flashcore::cuda::sm90 {

struct BwdParams {
  core::BackwardParams call;
  // No tiles: not wanted. Kernels that split dkdv have dk tiles in place of dkdv tiles.
  core::TileScheduler dkdv_order, dq_order;
  std::int32_t num_scheduled;   // in the order of core::BwdPhasesOf
  std::uint32_t* tile_counter;  // next tile of the dynamic scheduler; 0 before a call
  // Memory past a sequence's last row is not the end of the tensor.
  bool q_tail_dirty, k_tail_dirty;
  float score_scale, softcap;  // AttentionParams::score_scale and softcap
  // 4-D maps: columns, rows, heads, batch. A box has 128 bytes of columns and
  // Sm90BwdTraits::box_rows() rows.
  CUtensorMap q, k, v, dout;
  core::TileScheduler dv_order;  // of kernels that split dkdv
};

}  // namespace flashcore::cuda::sm90
