#include "emulator/runtime/tensor_map.h"

#include <cstring>

namespace flashcore::emulator {
namespace {

int bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
  }
}

int bytes_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE: return 0;
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return -1;
  }
}

}  // namespace

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                           const cuuint32_t* boxes, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap made{};
  made.magic = kTensorMapMagic;
  made.address = reinterpret_cast<std::uint64_t>(address);
  made.rank = static_cast<std::uint8_t>(rank);
  made.type = static_cast<std::uint8_t>(type);
  made.nan_fill = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  const int element = bytes_of(type), swizzled = bytes_of(swizzle);
  made.element_bytes = static_cast<std::uint8_t>(element);
  made.swizzle_bytes = static_cast<std::uint8_t>(swizzled);
  if (rank < 1 || rank > 5 || element == 0 || swizzled < 0 || made.address % 16 != 0 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (cuuint32_t k = 0; k < rank; ++k) {
    if (sizes[k] == 0 || sizes[k] > std::uint64_t{1} << 32 || boxes[k] == 0 || boxes[k] > 256 ||
        element_strides[k] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    made.sizes[k] = static_cast<std::uint32_t>(sizes[k]);
    made.boxes[k] = static_cast<std::uint16_t>(boxes[k]);
    if (k + 1 == rank) break;
    if (strides[k] % 16 != 0 || strides[k] >= std::uint64_t{1} << 40)
      return CUDA_ERROR_INVALID_VALUE;
    made.strides[k] = strides[k];
  }
  const cuuint32_t row_bytes = boxes[0] * static_cast<cuuint32_t>(element);
  if (row_bytes % 16 != 0 || (swizzled != 0 && row_bytes > static_cast<cuuint32_t>(swizzled))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *map = {};
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace flashcore::emulator
