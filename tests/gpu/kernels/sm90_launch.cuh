// Helpers of the sm_90a test kernels: launch with a shared memory struct, fill tiles without TMA.
#pragma once

#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/primitives/tma.cuh"
#include "cuda/sm90/fwd_kernel.cuh"
#include "gpu/device_array.cuh"
#include "gpu/half_format.h"

namespace flashcore::gpu_test {

inline constexpr int kGroupThreads = 128;  // threads of a warpgroup
inline constexpr int kPanelColumns = core::PanelTile<64, 64>::kPanelColumns;

/// A kernel's shared memory as one struct, whose alignment places the tiles.
template <typename Storage>
__device__ Storage& shared_storage() {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  return *reinterpret_cast<Storage*>(s_bytes);
}

template <typename Storage, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int threads, const Arguments&... arguments) {
  constexpr int kBytes = sizeof(Storage);
  require_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<1, static_cast<unsigned>(threads), kBytes>>>(arguments...);
}

/// Calls f with `value` as a std::integral_constant; `value` must be in kChoices.
template <const auto& kChoices, std::size_t kIndex = 0, typename F>
auto with_constant(int value, F f) {
  if constexpr (kIndex + 1 < std::size(kChoices)) {
    if (value != kChoices[kIndex]) return with_constant<kChoices, kIndex + 1>(value, f);
  } else {
    if (value != kChoices[kIndex]) throw std::runtime_error("size not in the list of tested sizes");
  }
  return f(std::integral_constant<int, kChoices[kIndex]>{});
}

template <typename F>
auto with_element(HalfFormat format, F f) {
  return format == HalfFormat::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

/// Writes a row-major matrix into a tile; the rest of the tile is NaN. Call publish_tiles() after
/// it.
template <typename Tile, typename Bits>
__device__ void fill_tile(unsigned char* s_tile, const Bits* g_matrix, int rows, int columns) {
  for (int i = threadIdx.x; i < Tile::kBytes; i += blockDim.x) s_tile[i] = 0xff;
  __syncthreads();
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const std::uint32_t offset = Tile::offset(i / columns, i % columns);
    *reinterpret_cast<Bits*>(s_tile + offset) = g_matrix[i];
  }
}

inline __device__ void publish_tiles() {
  cuda::fence_async_proxy();
  __syncthreads();
}

}  // namespace flashcore::gpu_test
