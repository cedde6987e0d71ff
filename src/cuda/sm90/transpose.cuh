// The warps that transpose 8-bit values: wgmma reads 8-bit operands only with k along their rows,
// and in P V that is the keys. Their places and the order of rows: key_at(), column_of_row().
#pragma once

#include "core/eight_bit.h"
#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// What stays of a lane's four keys of a group of 16, of which only `keys` are the sequence's.
__device__ __forceinline__ std::uint32_t mask_of_keys(int lane, int keys) {
  std::uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (core::key_at(4 * (lane % 4) + i) < keys) mask |= 0xffu << (8 * i);
  }
  return mask;
}

/// One warp's share of a tile, in pieces of 16 keys and 32 columns. ldmatrix transposes pairs of
/// columns; a lane has two keys of a pair from each of two matrices and makes them four keys of
/// each column. What lies behind the last key becomes zeros: its weights are 0, but 0 * NaN is NaN.
template <typename C>
__device__ __forceinline__ void transpose_tile(std::uint32_t s_from, std::uint32_t s_to, int share,
                                               int lane, int keys, std::uint32_t code_mask) {
  using From = typename C::KeyTile;
  using To = typename C::ValueTile;
  const std::uint32_t from = s_from + From::offset(lane % 16, 16 * (lane / 16));
  const std::uint32_t to = s_to + To::offset(lane, 0);
#pragma unroll 1
  for (int group = share; group < C::kTileK / 16; group += C::kTransposers) {
    std::uint32_t mask = code_mask;
    if (keys < 16 * group + 16) mask &= mask_of_keys(not_hoisted(lane), keys - 16 * group);
    const std::uint32_t at = (to ^ (group % 8 * 16)) + group / 8 * To::kPanelBytes;
#pragma unroll(2)
    for (int pair = 0; pair < C::kHeadDim / 32; ++pair) {
      std::uint32_t x[4], y[4];
      load_matrices_transposed(x, ((from + group * 16 * core::kPanelRowBytes) ^ (pair % 4 * 32)) +
                                      pair / 4 * From::kPanelBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 == 0 ? 0x6420 : 0x7531) & mask;
      }
      store_matrices(at + pair * 32 * core::kPanelRowBytes, y);
    }
  }
}

/// All tiles of the block's items, one after the other. share: which of the warps this is.
template <typename C>
__device__ __forceinline__ void transpose_values(SharedStorage<C>& s, const AttentionParams& p,
                                                 int share, int lane) {
  RingPlace<C::kStages> done;
  for (RingPlace<kItems> place;; place.next()) {
    wait(s.item_full[place.stage()], place.parity());
    const Item& item = s.items[place.stage()];
    if (item.rows < 0) return;
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile, done.next()) {
      const RingPlace<C::kRawStages> raw{done.steps};
      wait(s.raw_full[raw.stage()], raw.parity());
      wait(s.v_empty[done.stage()], done.parity() ^ 1);
      transpose_tile<C>(shared_address(s.raw_v[raw.stage()]), shared_address(s.v[done.stage()]),
                        share, lane, item.sequence.kv_len - (item.first_tile + tile) * C::kTileK,
                        core::code_mask(p));
      fence_async_proxy();
      arrive_once_per_warp(s.raw_empty[raw.stage()], lane);
      if (lane == 0) arrive(s.v_full[done.stage()]);
    }
    arrive_once_per_warp(s.item_empty[place.stage()], lane);
  }
}

}  // namespace flashcore::cuda::sm90
