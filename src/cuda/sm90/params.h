// Launch parameters of a Hopper kernel.
#pragma once

#include <cuda.h>

#include "core/packed_mask.h"
#include "core/params.h"
#include "core/sm90_traits.h"
#include "core/softcap.h"

namespace flashcore::cuda::sm90 {

struct Params {
  core::AttentionParams call;
  core::TileScheduler order;
  core::PackGqa heads;           // one head in a tile unless the kernel packs GQA
  bool v_tail_dirty;             // memory past a sequence's last key is not the end of the tensor
  std::int32_t page_box_log2;    // paged KV: log2 of the rows of a TMA box
  std::uint32_t* tile_counter;   // next tile of the dynamic scheduler; 0 between calls
  core::TailSplit tail;          // or the key ranges of every tile, if they are apart
  std::int32_t num_scheduled;    // tiles and tail splits
  void* tail_partials;           // partial results of the tail splits or key ranges
  std::uint32_t* tail_arrivals;  // per warp of a tail tile: finished splits; 0 between calls
  std::int32_t keys_per_range;   // of key ranges (core/key_ranges.h)
  bool ranges_apart;             // on several CTAs
  core::PackedMask mask;
  float score_scale, softcap;  // AttentionParams::score_scale and softcap
  // Softcap of small raw scores, in units of log2.
  core::CapPolynomial<2> shortest_cap_polynomial;
  core::CapPolynomial<3> short_cap_polynomial;
  core::CapPolynomial<5> cap_polynomial;
  bool caps_exponents;  // softcap.cuh may cap small scores in their exponents
  bool adds_alibi;      // alibi.cuh may add ALiBi, which is the only score modification
  bool batch_invariant;
  bool tiles_from_window;  // KV tiles start at the first key of the query tile's window
  bool stages_bias;    // the bias is the only score modification, and cp.async can copy its rows
  bool gathers_pages;  // paged KV without TMA boxes
  // 4-D maps: columns, rows, heads, batch. A box has 128 bytes of columns and the rows of a tile;
  // a box of q has a 64-row Q tile, from as many heads as it packs.
  CUtensorMap q, k, v;
};

}  // namespace flashcore::cuda::sm90
