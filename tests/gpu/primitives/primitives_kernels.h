// The device primitives, one launch each, on host data: the .cu file knows CUDA, the test does not.
#pragma once

#include <cstdint>
#include <vector>

namespace flashcore::gpu_test {

/// Per lane: row_max() of what max_ignore_nan() leaves of it, row_sum() and fast_exp2().
struct LaneResults {
  std::vector<float> max, sum, exp2;
};
LaneResults run_lanes(const std::vector<float>& lanes);

/// Per lane: quad_max(), cross_quad_max(), cross_octet_max() and warp_max() of what
/// max_ignore_nan() leaves of it, and the sums; cross_octet_sum_each() of the lane once, twice, three
/// and four times.
struct LaneGroupResults {
  std::vector<float> quad_max, quad_sum, cross_quad_max, cross_quad_sum, cross_octet_max,
      cross_octet_sum, warp_max, warp_sum, cross_octet_sum_each;
};
LaneGroupResults run_lane_groups(const std::vector<float>& lanes);

/// largest() of the first 1, 2, … kMostOfThread of a thread's values.
inline constexpr int kMostOfThread = 9;
std::vector<float> run_largest(const std::vector<float>& values);

/// max_ignore_nan(a[i], b[i]).
std::vector<float> run_max_passing_nan(const std::vector<float>& a, const std::vector<float>& b);

enum class Format { f32, f16, bf16 };

/// to_float() of every 16-bit pattern, through load_four().
std::vector<float> run_load_all(Format format);

/// The bits of the values rounded by store_four(); the count is a multiple of 4.
std::vector<std::uint16_t> run_store(Format format, const std::vector<float>& values);

/// One load_chunk() of `tile_rows` x 64 elements by a block of 256 threads. `matrix` holds the bits
/// of a [matrix_rows, row_stride] array of the format; the result is the tile as the block left it,
/// [tile_rows, 64 + 4], and every element the call must not touch keeps kUntouched.
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
