// Device primitives, one launch each, on host data. Only the .cu file includes CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

namespace flashcore::gpu_test {

/// Per lane: half_warp_max() of max_ignore_nan(-inf, lane), half_warp_sum() and fast_exp2().
struct LaneResults {
  std::vector<float> max, sum, exp2;
};
LaneResults run_lanes(const std::vector<float>& lanes);

/// Per lane: quad_max(), cross_quad_max(), cross_octet_max() and warp_max() of
/// max_ignore_nan(-inf, lane), the corresponding sums, and cross_octet_sum_each() of the lane's
/// value times 1, 2, 3 and 4.
struct LaneGroupResults {
  std::vector<float> quad_max, quad_sum, cross_quad_max, cross_quad_sum, cross_octet_max,
      cross_octet_sum, warp_max, warp_sum, cross_octet_sum_each;
};
LaneGroupResults run_lane_groups(const std::vector<float>& lanes);

/// largest() of the first 1, 2, … kMaxValuesPerThread values of a thread.
inline constexpr int kMaxValuesPerThread = 9;
std::vector<float> run_largest(const std::vector<float>& values);

/// max_ignore_nan(a[i], b[i]).
std::vector<float> run_max_ignore_nan(const std::vector<float>& a, const std::vector<float>& b);

enum class Format { f32, f16, bf16 };

/// to_float() of every 16-bit pattern, through load_four().
std::vector<float> run_load_all(Format format);

/// Bits of the values as store_four() rounds them. The count is a multiple of 4.
std::vector<std::uint16_t> run_store(Format format, const std::vector<float>& values);

/// One load_chunk() of `tile_rows` x 64 elements by a CTA of 256 threads. `matrix` holds the bits
/// of a [matrix_rows, row_stride] array of the format. The result is the tile, [tile_rows, 64 + 4].
/// Elements that the call must not write keep kUntouched.
inline constexpr float kUntouched = -12345.f;
struct ChunkCall {
  Format format;
  int tile_rows;  // 16, 32 or 64
  std::vector<std::uint32_t> matrix;
  std::int64_t row_stride, column_stride;
  int columns;  // of the matrix
  std::int64_t first_row;
  int rows;
  int first_column;
  float factor;
  bool vector_rows;
};
std::vector<float> run_load_chunk(const ChunkCall& call);

}  // namespace flashcore::gpu_test
