// What a Hopper kernel is launched with beyond what every kernel is.
#pragma once

#include <cuda.h>

#include "core/params.h"
#include "core/sm90_traits.h"

namespace flashcore::cuda::sm90 {

struct Params {
  core::AttentionParams call;
  core::TileScheduler order;  // of tiles that have rows of several heads, where `heads` says so
  core::PackGqa heads;        // one, but where the kernel spreads
  bool fast_path;             // scores are only scaled and masked by position
  bool v_tail_dirty;  // behind a sequence's last key lies something, not the end of the tensor
  std::uint32_t*
      tile_counter;  // 0 between calls: which piece is next, where there are more than blocks
  core::Tail tail;
  std::int32_t pieces;           // of work, in all
  void* parts;                   // what those of cut items leave behind
  std::uint32_t* tail_arrivals;  // 0 between calls: how many have, for each warp of a cut item
  // 4-D: columns, rows, heads, batch; boxes of 64 columns and a tile's rows, of q a piece's, from
  // as many heads as have rows in it.
  CUtensorMap q, k, v;
};

}  // namespace flashcore::cuda::sm90
