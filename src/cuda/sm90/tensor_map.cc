#include "cuda/sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/error.h"
#include "core/wgmma_layout.h"

namespace flashcore::cuda {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// The driver's encoder, or null. libcuda is not linked, so that the library loads without it.
Encode encoder() noexcept {
  static const Encode found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      entry = nullptr;
    }
    return reinterpret_cast<Encode>(entry);
  }();
  return found;
}

}  // namespace

Status make_tensor_map(CUtensorMap& map, void* data, DType dtype, const core::Strides& strides,
                       const MapShape& shape, const MapBox& box, const char* name) noexcept {
  if (encoder() == nullptr) {
    return unsupported("%s needs a tensor map: install a driver of CUDA 12.0 or newer", name);
  }
  const auto element_bytes = static_cast<cuuint64_t>(size_of(dtype));
  constexpr cuuint64_t kAnyStride =
      16;  // of a dimension of extent 1: unused, but checked by the driver
  const std::int64_t extents[4] = {shape.columns, shape.rows, shape.heads, shape.batch};
  // An empty tensor needs a map too: a sequence without keys reads one row of it.
  const bool empty = std::min({shape.rows, shape.heads, shape.batch}) <= 0;
  cuuint64_t sizes[4];
  for (int i = 0; i < 4; ++i) {
    const std::int64_t extent = empty && i > 0 ? 1 : extents[i];
    sizes[i] = static_cast<cuuint64_t>(std::max<std::int64_t>(extent, 1));
  }
  const std::int64_t elements[3] = {strides.row, strides.head, strides.batch};
  cuuint64_t bytes[3];
  for (int i = 0; i < 3; ++i) {
    bytes[i] = sizes[i + 1] > 1 ? static_cast<cuuint64_t>(elements[i]) * element_bytes : kAnyStride;
  }
  const cuuint32_t boxes[4] = {static_cast<cuuint32_t>(core::kPanelRowBytes / element_bytes),
                               static_cast<cuuint32_t>(box.rows),
                               static_cast<cuuint32_t>(box.heads), 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  const CUresult result =
      encoder()(&map,
                dtype == DType::f16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                : dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                4, data, sizes, bytes, boxes, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return error(StatusCode::cuda, "%s: the driver refused a tensor map of it (error %d)", name,
               static_cast<int>(result));
}

}  // namespace flashcore::cuda
