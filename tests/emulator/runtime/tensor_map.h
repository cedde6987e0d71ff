// Tensor maps of TMA: what the driver's opaque 128 bytes hold here.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashcore::emulator {

struct TensorMap {
  std::uint64_t magic;
  std::uint64_t address;
  std::uint64_t strides[4];  // bytes, of dimensions 1 to 4
  std::uint32_t sizes[5];
  std::uint16_t boxes[5];
  std::uint8_t rank, element_bytes, swizzle_bytes, nan_fill;
  std::uint8_t type;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
inline constexpr std::uint64_t kTensorMapMagic = 0x70616d726f736e65;

/// cuTensorMapEncodeTiled, with the driver's checks of its arguments.
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                           const cuuint32_t* boxes, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

}  // namespace flashcore::emulator
