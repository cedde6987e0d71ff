// Primitives of the tensor-core kernels (sm_80 and later), one launch each, on host data. Only the
// .cu file includes CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dequant_f16.h"
#include "gpu/half_format.h"

namespace flashcore::gpu_test {

/// cp_async_16() of bytes[i] bytes from source + 16 i to 16 bytes of shared memory with other
/// content. Returns these 16 bytes for each i. If bytes[i] is 0, the source address is unmapped: an
/// empty copy must not access it.
std::vector<std::uint8_t> run_copy_async(const std::vector<std::uint8_t>& source,
                                         const std::vector<int>& bytes);

/// Copies source in chunks of 512 bytes through a two-stage cp.async pipeline with one group in
/// flight, and back to global memory.
std::vector<std::uint8_t> run_copy_pipeline(const std::vector<std::uint8_t>& source);

/// ldmatrix_x4() (or its transposed form) from a row-major 16 × 16 tile of 16-bit elements; lane
/// l gives the address offset_bytes[l]. The result is [32 lanes, 4 registers].
std::vector<std::uint32_t> run_ldmatrix(const std::vector<std::uint16_t>& tile,
                                        const std::vector<int>& offset_bytes, bool transposed);

/// movmatrix_trans() of a warp's registers.
std::vector<std::uint32_t> run_movmatrix(const std::vector<std::uint32_t>& lanes);

/// mma_m16n8k16() of n independent products, one per warp: a is [n, 32, 4] registers, b
/// [n, 32, 2], c and the result [n, 32, 4].
std::vector<float> run_mma(HalfFormat format, const std::vector<std::uint32_t>& a,
                           const std::vector<std::uint32_t>& b, const std::vector<float>& c);

/// pack(low[i], high[i]).
std::vector<std::uint32_t> run_pack(HalfFormat format, const std::vector<float>& low,
                                    const std::vector<float>& high);

/// core::Dequantizer of every word of four 8-bit values: the even pair, then the odd pair.
std::vector<std::uint32_t> run_dequantize(core::Element format,
                                          const std::vector<std::uint32_t>& words);

/// Copies a matrix of 16-bit elements into a SwizzledTile by cp_async_16() as the kernels do (zeros
/// past `rows` and `columns`) and reads 16 × 16 blocks with ldmatrix as A, B and transposed B.
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

/// Tile shapes of run_tile(): every combination of rows and columns.
inline constexpr int kTestedRows[] = {16, 32, 48, 64, 128};
inline constexpr int kTestedColumns[] = {64, 96, 128, 192, 256};

}  // namespace flashcore::gpu_test
