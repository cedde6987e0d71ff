// Appends keys and values to a cache: copies or quantises rows. core/append.h maps rows to the
// cache.
//
//   grid   one warp per new key and KV head, for both K and V; warps loop if the grid is smaller
//   lanes  16-byte vectors of a row, or four elements if the row is quantised; single elements if
//          the row is not whole vectors
#include <cuda_runtime.h>

#include "core/append.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/report.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

template <typename Piece>
__device__ __forceinline__ void copy_vecs(const core::AppendTensor& t, std::int64_t from,
                                          std::int64_t to, std::int32_t vecs,
                                          std::int64_t from_step, std::int64_t to_step) {
  const Piece* g_from = static_cast<const Piece*>(t.from) + from;
  Piece* g_to = static_cast<Piece*>(t.to) + to;
  for (std::int32_t i = threadIdx.x % 32; i < vecs; i += 32) {
    g_to[i * to_step] = g_from[i * from_step];
  }
}

/// Loads four adjacent elements of a row.
__device__ __forceinline__ float4 load_wide(const core::AppendTensor& t, std::int64_t at) {
  switch (t.wide) {
    case core::Element::f16: return load_four(static_cast<const __half*>(t.from) + at);
    case core::Element::bf16: return load_four(static_cast<const __nv_bfloat16*>(t.from) + at);
    default: return load_four(static_cast<const float*>(t.from) + at);
  }
}

/// Quantises a row. Returns true if this lane has seen a NaN.
__device__ __forceinline__ bool quantize_row(const core::AppendTensor& t,
                                             const core::AppendRow& row) {
  const float factor = core::append_factor(t, row);
  const std::int64_t from = core::row_offset(t.from_strides, row.from, row.head);
  std::uint8_t* g_to =
      static_cast<std::uint8_t*>(t.to) + core::row_offset(t.to_strides, row.to, row.head);
  const int lane = threadIdx.x % 32;
  bool nan = false;
  const auto encode = [&](float x) -> std::uint32_t {
    nan = nan || x != x;
    return core::encode(t.code, x * factor).bits;
  };
  if (t.vectors) {
    for (std::int32_t c = 4 * lane; c < t.columns; c += 4 * 32) {
      const float4 x = load_wide(t, from + c);
      *reinterpret_cast<std::uint32_t*>(g_to + c) =
          encode(x.x) | encode(x.y) << 8 | encode(x.z) << 16 | encode(x.w) << 24;
    }
  } else {
    for (std::int32_t c = lane; c < t.columns; c += 32) {
      g_to[c * t.to_strides.column] = static_cast<std::uint8_t>(
          encode(core::load_element<float>(t.from, t.wide, from + c * t.from_strides.column)));
    }
  }
  return nan;
}

__device__ __forceinline__ void copy_row(const core::AppendTensor& t, const core::AppendRow& row) {
  const std::int32_t element_bytes = t.bytes;
  const std::int64_t from = core::row_offset(t.from_strides, row.from, row.head);
  const std::int64_t to = core::row_offset(t.to_strides, row.to, row.head);
  if (t.vectors) {  // offsets and the row's length are multiples of 16 bytes
    const std::int32_t per_vec = 16 / element_bytes;
    copy_vecs<uint4>(t, from / per_vec, to / per_vec, t.columns / per_vec, 1, 1);
  } else if (element_bytes == 1) {
    copy_vecs<std::uint8_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  } else if (element_bytes == 2) {
    copy_vecs<std::uint16_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  } else if (element_bytes == 4) {
    copy_vecs<std::uint32_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  } else {
    copy_vecs<std::uint64_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  }
}

/// Writes a row of K or V. All lanes of the warp call this function.
__device__ __forceinline__ void write_row(const core::AppendParams& p, const core::AppendTensor& t,
                                          const core::AppendRow& row, bool of_v) {
  if (!t.quantizes) {
    copy_row(t, row);
    return;
  }
  const bool nan = __any_sync(0xffffffffu, quantize_row(t, row)) && !core::has_nan(t.code);
  if (threadIdx.x % 32 != 0) return;
  report(p.error, core::append_scale_error(t, row, of_v));
  if (nan) report(p.error, core::append_nan_error(row, of_v));
}

__global__ void __launch_bounds__(kAppendThreads)
    append(const __grid_constant__ core::AppendParams p) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kAppendRowsPerCta;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kAppendRowsPerCta + threadIdx.x / 32;
  const bool reports = threadIdx.x % 32 == 0;
  // A sequence with invalid lengths may have no rows: check the lengths separately.
  if (reports && p.error != nullptr) {
    for (std::int64_t b = first; b < p.batch; b += step) {
      report(p.error, core::append_range(p, static_cast<std::int32_t>(b)).error);
    }
  }
  const std::int64_t rows = core::append_rows(p);
  for (std::int64_t index = first; index < rows; index += step) {
    const core::AppendRow row = core::append_row(p, index);
    if (reports) report(p.error, row.error);
    if (row.skipped) continue;
    write_row(p, p.k, row, false);
    write_row(p, p.v, row, true);
  }
}

}  // namespace

const void* append_entry() noexcept { return reinterpret_cast<const void*>(&append); }

}  // namespace flashcore::cuda
