#include "cuda/sm90/make_params.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "backend/backend.h"
#include "core/error.h"
#include "core/wgmma_layout.h"
#include "cuda/check.h"

namespace flashcore::cuda {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// The driver's encoder, or null: libcuda is not linked, so that the library loads without it.
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
  constexpr cuuint64_t kAnyStride = 16;  // of a dimension with one element: never used, but checked
  const std::int64_t extents[4] = {shape.columns, shape.rows, shape.heads, shape.batch};
  // An empty tensor must have a map too, and is read where a sequence has no key: one row of it.
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

Status make_sm90_params(const Plan& plan, const core::AttentionParams& call,
                        sm90::Params& params) noexcept {
  const DType dtype = plan.problem.q.dtype;  // k's and v's too
  const bool q_varlen = call.cu_seqlens_q != nullptr, kv_varlen = call.cu_seqlens_k != nullptr;
  params.call = call;
  const WorkList work = make_work_list(plan, call);
  const std::int32_t heads = plan.heads_in_tile;
  params.heads = work.heads;
  params.order = work.order;
  params.fast_path = call.softcap == 0 && call.alibi_slopes == nullptr && call.score_scale > 0 &&
                     !call.q_scale.is_per_block() && !call.k_scale.is_per_block() &&
                     !call.v_scale.is_per_block();
  params.v_tail_dirty = kv_varlen || call.used_k != nullptr;
  params.tile_counter =
      reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(call.error) + core::kCountersOffset);
  params.tail = work.tail;
  params.pieces = work.pieces;
  params.parts = call.partial_out;
  params.tail_arrivals = params.tile_counter + 1;
  const std::int64_t q_columns =
      call.fault.is(core::InjectedFault::head_dim_truncated) ? call.head_dim - 1 : call.head_dim;
  const std::int64_t q_rows = q_varlen ? call.total_q : call.q_len;
  const std::int64_t kv_rows = kv_varlen ? call.total_k : call.kv_len;
  const std::int64_t q_batch = q_varlen ? 1 : call.batch, kv_batch = kv_varlen ? 1 : call.batch;
  // Of an empty tensor the kernel reads a row of the workspace's header, and hides what it finds.
  static_assert(kWorkspaceHeaderBytes >= 2 * core::kSm90MaxHeadDim);
  const auto address = [&](const void* data, std::int64_t rows) {
    return rows > 0 ? const_cast<void*>(data) : static_cast<void*>(call.error);
  };
  FLASHCORE_RETURN_IF_ERROR(make_tensor_map(
      params.q, address(call.q, q_rows * q_batch), dtype, call.q_strides,
      {q_columns, q_rows, call.q_heads, q_batch}, {params.heads.queries(), heads}, "q"));
  FLASHCORE_RETURN_IF_ERROR(make_tensor_map(
      params.k, address(call.k, kv_rows * kv_batch), dtype, call.k_strides,
      {call.head_dim, kv_rows, call.kv_heads, kv_batch}, {plan.kernel->tile_k}, "k"));
  return make_tensor_map(params.v, address(call.v, kv_rows * kv_batch), dtype, call.v_strides,
                         {call.v_dim, kv_rows, call.kv_heads, kv_batch}, {plan.kernel->tile_k},
                         "v");
}

}  // namespace flashcore::cuda
