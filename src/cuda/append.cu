// Appends keys and values to a cache: core/append.h says what goes where, this copies it.
//
//   grid   one warp per new key and KV head, K and V both; warps loop if the grid is smaller
//   lanes  16-byte pieces of a row, or its elements where a row is no whole number of pieces
#include <cuda_runtime.h>

#include "core/append.h"
#include "cuda/primitives/report.cuh"
#include "cuda/registry.h"

namespace flashcore::cuda {
namespace {

template <typename Piece>
__device__ __forceinline__ void copy_pieces(const core::AppendTensor& t, std::int64_t from,
                                            std::int64_t to, std::int32_t pieces,
                                            std::int64_t from_step, std::int64_t to_step) {
  const Piece* g_from = static_cast<const Piece*>(t.from) + from;
  Piece* g_to = static_cast<Piece*>(t.to) + to;
  for (std::int32_t i = threadIdx.x % 32; i < pieces; i += 32) {
    g_to[i * to_step] = g_from[i * from_step];
  }
}

__device__ __forceinline__ void copy_row(const core::AppendTensor& t, const core::AppendRow& row,
                                         std::int32_t element_bytes) {
  const std::int64_t from = core::row_offset(t.from_strides, row.from, row.head);
  const std::int64_t to = core::row_offset(t.to_strides, row.to, row.head);
  if (t.vectors) {  // offsets and row are multiples of a piece
    const std::int32_t per_piece = 16 / element_bytes;
    copy_pieces<uint4>(t, from / per_piece, to / per_piece, t.columns / per_piece, 1, 1);
  } else if (element_bytes == 2) {
    copy_pieces<std::uint16_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  } else if (element_bytes == 4) {
    copy_pieces<std::uint32_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  } else {
    copy_pieces<std::uint64_t>(t, from, to, t.columns, t.from_strides.column, t.to_strides.column);
  }
}

__global__ void __launch_bounds__(kAppendThreads)
    append(const __grid_constant__ core::AppendParams p) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kAppendRowsPerBlock;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kAppendRowsPerBlock + threadIdx.x / 32;
  const bool reports = threadIdx.x % 32 == 0;
  // A sequence with bad lengths may own no row of work: they are looked at by themselves.
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
    copy_row(p.k, row, p.element_bytes);
    copy_row(p.v, row, p.element_bytes);
  }
}

}  // namespace

const void* append_entry() noexcept { return reinterpret_cast<const void*>(&append); }

}  // namespace flashcore::cuda
