// What the Hopper kernels (sm_90a) are made of, one launch each, on host data: the .cu file knows
// CUDA, the test does not.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/plan.h"
#include "gpu/half_format.h"

namespace flashcore::gpu_test {

/// A tile of a 4-D tensor of 16-bit elements, copied by TMA as the kernels do it.
struct TileCopy {
  int tile_rows, tile_columns;  // any of the two lists below
  std::vector<std::uint16_t> tensor;
  int columns, rows, heads, batch;            // extents of the tensor
  int row_stride, head_stride, batch_stride;  // in elements, multiples of 8
  int row, head, b;                           // where the tile begins
};
inline constexpr int kCopiedRows[] = {64, 96, 112, 128, 160, 176, 192, 208};
inline constexpr int kCopiedColumns[] = {64, 96, 128, 192, 256};

/// What is then at PanelTile::offset() of every row and column, whole panels of them; shared memory
/// held something else before.
std::vector<std::uint16_t> run_copy_tile(const TileCopy& call);

/// A barrier of three arrivals and the bytes of a copy, through `rounds` phases. The result is
/// [rounds, kBarrierEvents]: at the start, when some have come, when all but one have, and after
/// wait(). Each is kOwnPhaseEnded, kPhaseBeforeEnded or their sum.
inline constexpr int kBarrierEvents = 4;
inline constexpr int kOwnPhaseEnded = 1;
inline constexpr int kPhaseBeforeEnded = 2;
std::vector<int> run_barrier_phases(int rounds);

/// Each block of a cluster sends every block of it four floats and two, a thread 6 values; the
/// result is what they then have, [blocks, from block, kClusterThreads, 6]: values count up in the
/// order [from block, to block, thread, 6].
inline constexpr int kClusterThreads = 64;
std::vector<float> run_cluster_stores(int blocks);

/// Copies a matrix of rows of 64 elements through a ring of `stages` (2 or 4) tiles of
/// kRingRows rows, from a thread that loads to warps that read, each being late at times.
inline constexpr int kRingRows = 64;
std::vector<std::uint16_t> run_ring(int stages, const std::vector<std::uint16_t>& matrix);

/// Operands of a warpgroup's product, 64 rows of a. c and results are accumulators: [128 threads,
/// columns / 2].
struct WarpgroupProduct {
  HalfFormat format;
  int columns;  // of the result
  int depth;    // columns of a
  std::vector<std::uint16_t> a;
  std::vector<std::uint16_t> b;
  std::vector<float> c;
};

/// Wgmma::ss(): a is [64, depth] and b [columns, depth], both in shared memory.
inline constexpr int kScoreColumns[] = {64,  96,  112, 128,
                                        160, 176, 208};  // tile_k in cuda/kernels.def
inline constexpr int kScoreDepths[] = {64, 96, 128, 192, 256};
struct SsResult {
  std::vector<float> added;  // c + a b
  std::vector<float> alone;  // a b, into the registers that held `added`
};
SsResult run_wgmma_ss(const WarpgroupProduct& call);

/// Wgmma::rs_b_mn_major(): a is [64, depth], in registers, and b [depth, columns], in shared
/// memory. c + a b, or, unless it `adds`, a b.
inline constexpr int kOutputColumns[] = {64, 96, 128, 192, 256};
inline constexpr int kOutputDepths[] = {64, 128, 208};
std::vector<float> run_wgmma_rs(const WarpgroupProduct& call, bool accumulate);

/// The products of one step of a kernel, with the kernel's own functions: (Q K^T) V without
/// softmax. q is [tile_q, head_dim], k and v are [tile_k, head_dim], the result is [tile_q,
/// head_dim].
std::vector<float> run_two_products(const KernelInfo& kernel, const std::vector<std::uint16_t>& q,
                                    const std::vector<std::uint16_t>& k,
                                    const std::vector<std::uint16_t>& v);

/// What a kernel on e4m3 codes is made of, with its own functions. q is [tile_q, head_dim], k and v
/// are [tile_k, head_dim], in codes; p is [tile_q, tile_k], of values that e4m3 has.
struct CodeProducts {
  std::vector<float> scores;             // Q K^T, [tile_q, tile_k]
  std::vector<std::uint8_t> transposed;  // V: [head_dim, tile_k], rows as they lie in the tile
  std::vector<float> output;             // P V of the `keys` first keys, [tile_q, head_dim]
};
CodeProducts run_code_products(const KernelInfo& kernel, const std::vector<std::uint8_t>& q,
                               const std::vector<std::uint8_t>& k,
                               const std::vector<std::uint8_t>& v, const std::vector<float>& p,
                               int keys);

}  // namespace flashcore::gpu_test
