// The inspector warp of gradients: looks for elements of A that are not finite, and marks their
// head for simt/repair.cu. core::inspect_bwd has its order.
#pragma once

#include <type_traits>

#include "cuda/sm90/bwd_config.cuh"

namespace flashcore::cuda::sm90 {

/// Adds to `bad` the sign bits of two 16-bit elements that are not finite. Without the sign, their
/// exponents overflow into it.
template <typename T>
__device__ __forceinline__ void add_nonfinite(std::uint32_t& bad, std::uint32_t two) {
  constexpr std::uint32_t kLowest = std::is_same_v<T, __half> ? 0x0400u : 0x0080u;
  bad |= (two & 0x7fff7fffu) + (kLowest << 16 | kLowest);
}
inline constexpr std::uint32_t kNonfiniteSigns = 0x80008000u;

template <typename C>
struct BwdInspector : BwdRoleLanes<C> {
  __device__ __forceinline__ void inspect_a1(BwdQueueState queue) const {
    inspect<typename C::TileA1>(this->s.a1(), queue);
  }
  __device__ __forceinline__ void inspect_a2(BwdQueueState queue) const {
    inspect<typename C::TileA2>(this->s.a2(), queue);
  }

 private:
  template <typename Tile>
  __device__ __forceinline__ void inspect(const unsigned char* s_tile, BwdQueueState queue) const {
    const BwdWorkTile& work = this->work(queue);
    const int bytes =
        work.rows * core::kPanelRowBytes;  // of a panel; later rows are not the head's
    std::uint32_t bad = 0;
#pragma unroll 1
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
#pragma unroll 4
      for (int i = 16 * this->lane; i < bytes; i += 16 * 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(s_tile + panel * Tile::kPanelBytes + i);
        add_nonfinite<typename C::Element>(bad, x.x);
        add_nonfinite<typename C::Element>(bad, x.y);
        add_nonfinite<typename C::Element>(bad, x.z);
        add_nonfinite<typename C::Element>(bad, x.w);
      }
    }
    if ((bad & kNonfiniteSigns) == 0) return;
    const core::BackwardParams& p = this->params.call;
    const bool keys = work.output != BackwardOutput::dq;
    p.nonfinite_heads[work.b * p.fwd.kv_heads + (keys ? work.head : work.first_head)] = 1;
  }
};

}  // namespace flashcore::cuda::sm90
