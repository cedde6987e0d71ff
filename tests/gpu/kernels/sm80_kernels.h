// The primitives of the tensor-core kernels (sm_80 and up), one launch each, on host data: the .cu
// file knows CUDA, the test does not.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dequant_f16.h"
#include "gpu/half_format.h"

namespace flashcore::gpu_test {

/// cp_async_16() of bytes[i] bytes from source + 16 i into 16 bytes of shared memory that held
/// something else; what is there afterwards. Where bytes[i] is 0 the address lies outside any
/// memory: a copy of nothing must not look.
std::vector<std::uint8_t> run_copy_async(const std::vector<std::uint8_t>& source,
                                         const std::vector<int>& bytes);

/// Copies source in blocks of 512 bytes through a ring of two buffers with one group in the
/// background, and back.
std::vector<std::uint8_t> run_copy_ring(const std::vector<std::uint8_t>& source);

/// ldmatrix_x4() (or its transposed form) from a row-major 16 × 16 tile of 16-bit elements; lane
/// l gives the address offset_bytes[l]. The result is [32 lanes, 4 registers].
std::vector<std::uint32_t> run_load_matrices(const std::vector<std::uint16_t>& tile,
                                             const std::vector<int>& offset_bytes, bool transposed);

/// movmatrix_trans() of a warp's registers.
std::vector<std::uint32_t> run_transpose_matrix(const std::vector<std::uint32_t>& lanes);

/// mma_m16n8k16() of many independent products, one per warp: a is [n, 32, 4] registers, b
/// [n, 32, 2], c and the result [n, 32, 4].
std::vector<float> run_multiply_add(HalfFormat format, const std::vector<std::uint32_t>& a,
                                    const std::vector<std::uint32_t>& b,
                                    const std::vector<float>& c);

/// pack(low[i], high[i]).
std::vector<std::uint32_t> run_pack(HalfFormat format, const std::vector<float>& low,
                                    const std::vector<float>& high);

/// core::Dequantizer of every word: its even pair, then its odd one.
std::vector<std::uint32_t> run_code_pairs(core::Element format,
                                          const std::vector<std::uint32_t>& codes);

/// A matrix of 16-bit elements, copied into a SwizzledTile by cp_async_16() as the kernels do it
/// (zeros past `rows` and `columns`), and read by ldmatrix in blocks of 16 × 16 in all three ways.
/// Results are [tile_rows / 16, tile_columns / 16, 32 lanes, 4 registers].
struct TileCall {
  int tile_rows, tile_columns;
  std::vector<std::uint16_t> matrix;  // [rows, row_stride]
  int rows, columns, row_stride;      // row_stride is a multiple of 8
};
struct TileResult {
  std::vector<std::uint32_t> a, b, b_transposed;
};
TileResult run_tile(const TileCall& call);

/// The shapes run_tile() knows: every combination of the two.
inline constexpr int kTestedRows[] = {16, 32, 48, 64, 128};
inline constexpr int kTestedColumns[] = {64, 96, 128, 192, 256};

}  // namespace flashcore::gpu_test
