// The warps that transpose 8-bit values: wgmma reads 8-bit operands only with k along their rows,
// and in P V that is the keys. Their places and the order of rows: key_at(), column_of_row().
#pragma once

#include "core/quant_formats.h"
#include "cuda/primitives/hopper.cuh"
#include "cuda/primitives/ptx.cuh"
#include "cuda/sm90/config.cuh"

namespace flashcore::cuda::sm90 {

/// What stays of a lane's four keys of a group of 16, of which only `keys` are the sequence's.
__device__ __forceinline__ std::uint32_t mask_of_keys(int lane, int keys) {
  static_assert(core::key_at(5) == 3 && core::key_at(6) == 10);  // two pairs, 8 keys apart
  const auto of_pair = [](int count) { return count <= 0 ? 0u : count == 1 ? 0xffu : 0xffffu; };
  const int first = keys - core::key_at(4 * (lane % 4));
  return of_pair(first) | of_pair(first - 8) << 16;
}

/// One warp's share of a tile, in pieces of 16 keys and 32 columns. ldmatrix transposes pairs of
/// columns; a lane has two keys of a pair from each of two matrices and makes them four keys of
/// each column. What lies behind the last key becomes zeros: its weights are 0, but 0 * NaN is NaN.
template <typename C>
__device__ __forceinline__ void transpose_tile(std::uint32_t s_from, std::uint32_t s_to, int share,
                                               int lane, int keys, std::uint32_t code_mask) {
  using From = typename C::KeyTile;
  using To = typename C::ValueTile;
  constexpr int kTogether = C::kHeadDim == 64 ? 2 : 4;  // pieces under way
  const std::uint32_t from = s_from + From::offset(lane % 16, 16 * (lane / 16));
  const std::uint32_t to = s_to + To::offset(lane, 0);
#pragma unroll 1
  for (int group = share; group < C::kTileK / 16; group += C::kTransposers) {
#pragma unroll 1
    for (int first = 0; first < C::kHeadDim / 32; first += kTogether) {  // a panel's
      std::uint32_t x[kTogether][4];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        ldmatrix_x4_trans(x[i], ((from + group * 16 * core::kPanelRowBytes) ^ (i * 32)) +
                                    first / 4 * From::kPanelBytes);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const std::uint32_t low = x[i][j], high = x[i][j + 1];
          x[i][j] = __byte_perm(low, high, 0x6420);
          x[i][j + 1] = __byte_perm(low, high, 0x7531);
        }
      }
      if (keys < 16 * group + 16 || code_mask != ~0u) {
        const std::uint32_t mask = mask_of_keys(opaque(lane), keys - 16 * group) & code_mask;
#pragma unroll
        for (int i = 0; i < 4 * kTogether; ++i) x[i / 4][i % 4] &= mask;
      }
      const std::uint32_t at = (to ^ (group % 8 * 16)) + group / 8 * To::kPanelBytes;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        stmatrix_x4(at + (first + i) * 32 * core::kPanelRowBytes, x[i]);
      }
    }
  }
}

/// One of the warps that transpose (core/sm90_roles.h). share: which of them it is.
template <typename C>
struct TransposerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  int share, lane;

  template <Sm90Barrier kBarrier, typename Place>
  __device__ __forceinline__ void arrive(const Place& place) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(place.stage()), lane);
  }

  __device__ __forceinline__ void transpose(typename Pipeline::LoadedVState raw,
                                            typename Pipeline::KvState done, TileQueueState place,
                                            std::int32_t tile) const {
    transpose_tile<C>(shared_address(this->s.v_staging[raw.stage()]),
                      shared_address(this->s.v[done.stage()]), share, lane,
                      this->item(place).seq.kv_len - tile * C::kTileK,
                      core::code_mask(this->params.call));
    fence_async_proxy();
  }
};

}  // namespace flashcore::cuda::sm90
