// The transposer warps (fp8): V from the staging buffer to the V pipeline. wgmma reads 8-bit
// operands K-major only, and k of P V is the keys. core::key_at and core::column_of_row give the
// order.
#pragma once

#include "core/quant_formats.h"
#include "cuda/primitives/compiler.cuh"
#include "cuda/primitives/mma.cuh"
#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/barriers.cuh"

namespace flashcore::cuda::sm90 {

/// Byte mask of a lane's four keys in a group of 16: those below `keys`.
__device__ __forceinline__ std::uint32_t mask_of_keys(int lane, int keys) {
  static_assert(core::key_at(5) == 3 && core::key_at(6) == 10);  // two pairs, 8 keys apart
  const auto of_pair = [](int count) { return count <= 0 ? 0u : count == 1 ? 0xffu : 0xffffu; };
  const int first = keys - core::key_at(4 * (lane % 4));
  return of_pair(first) | of_pair(first - 8) << 16;
}

/// Transposes one warp's share of a tile, 16 keys and 32 columns at a time. ldmatrix.trans
/// transposes pairs of columns: a lane gets two keys of a pair from each of two matrices and
/// permutes them to four keys of each column. Rows past the last key become 0: P is 0 there, but 0
/// * NaN is NaN.
template <typename C>
__device__ __forceinline__ void transpose_tile(std::uint32_t s_from, std::uint32_t s_to, int share,
                                               int lane, int keys, std::uint32_t byte_mask) {
  using From = typename C::KeyTile;
  using To = typename C::ValueTile;
  constexpr int kInFlight = C::kHeadDim == 64 ? 2 : 4;
  const std::uint32_t from = s_from + From::offset(lane % 16, 16 * (lane / 16));
  const std::uint32_t to = s_to + To::offset(lane, 0);
#pragma unroll 1
  for (int group = share; group < C::kTileK / 16; group += C::kTransposers) {
#pragma unroll 1
    for (int first = 0; first < C::kHeadDim / 32; first += kInFlight) {  // a panel's
      std::uint32_t x[kInFlight][4];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        ldmatrix_x4_trans(x[i], ((from + group * 16 * core::kPanelRowBytes) ^ (i * 32)) +
                                    first / 4 * From::kPanelBytes);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const std::uint32_t low = x[i][j], high = x[i][j + 1];
          x[i][j] = __byte_perm(low, high, 0x6420);
          x[i][j + 1] = __byte_perm(low, high, 0x7531);
        }
      }
      if (keys < 16 * group + 16 || byte_mask != ~0u) {
        const std::uint32_t mask = mask_of_keys(opaque(lane), keys - 16 * group) & byte_mask;
#pragma unroll
        for (int i = 0; i < 4 * kInFlight; ++i) x[i / 4][i % 4] &= mask;
      }
      const std::uint32_t it = (to ^ (group % 8 * 16)) + group / 8 * To::kPanelBytes;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        stmatrix_x4(it + (first + i) * 32 * core::kPanelRowBytes, x[i]);
      }
    }
  }
}

/// share: index of the transposer warp.
template <typename C>
struct TransposerWarp : RoleWarp<C> {
  using Pipeline = typename C::Pipeline;
  int share, lane;

  template <Sm90Barrier kBarrier, typename State>
  __device__ __forceinline__ void arrive(const State& state) const {
    arrive_once_per_warp(this->s.template barrier<kBarrier>(state.stage()), lane);
  }

  __device__ __forceinline__ void transpose(typename Pipeline::LoadedVState staging,
                                            typename Pipeline::KvState v_state,
                                            TileQueueState queue, std::int32_t tile) const {
    transpose_tile<C>(shared_address(this->s.v_staging[staging.stage()]),
                      shared_address(this->s.v[v_state.stage()]), share, lane,
                      this->work(queue).seq.kv_len - tile * C::kTileK,
                      core::code_mask(this->params.call));
    fence_async_proxy();
  }
};

}  // namespace flashcore::cuda::sm90
