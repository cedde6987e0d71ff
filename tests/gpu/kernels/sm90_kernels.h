// Primitives of the Hopper kernels (sm_90a), one launch each, on host data. Only the .cu files
// include CUDA headers.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/plan.h"
#include "gpu/half_format.h"

namespace flashcore::gpu_test {

/// A tile of a 4-D tensor of 16-bit elements, loaded by TMA as in the kernels.
struct TileCopy {
  int tile_rows, tile_columns;  // from the two lists below
  std::vector<std::uint16_t> tensor;
  int columns, rows, heads, batch;            // extents of the tensor
  int row_stride, head_stride, batch_stride;  // in elements, multiples of 8
  int row, head, b;                           // first element of the tile
};
inline constexpr int kCopiedRows[] = {64, 96, 112, 128, 160, 176, 192, 208};
inline constexpr int kCopiedColumns[] = {64, 96, 128, 192, 256};

/// Returns the elements at PanelTile::offset() of every row and column, in whole panels. Shared
/// memory is poisoned before the load.
std::vector<std::uint16_t> run_copy_tile(const TileCopy& call);

/// Runs an mbarrier with three arrivals and the bytes of a copy through `phases` phases. The result
/// is [phases, kBarrierEvents]: at the start, after some arrivals, after all arrivals and bytes but
/// one, and after wait(). Each is kOwnPhaseEnded, kPhaseBeforeEnded or their sum.
inline constexpr int kBarrierEvents = 4;
inline constexpr int kOwnPhaseEnded = 1;
inline constexpr int kPhaseBeforeEnded = 2;
std::vector<int> run_barrier_phases(int phases);

/// Each thread of a cluster stores four floats and two floats to every CTA of the cluster. The
/// result is [CTA, from CTA, kClusterThreads, 6]; values count up in the order [from CTA, to CTA,
/// thread, 6].
inline constexpr int kClusterThreads = 64;
std::vector<float> run_cluster_stores(int ctas);

/// Copies a matrix with rows of 64 elements through a pipeline of `stages` (2 or 4) tiles of
/// kPipelineRows rows, from a producer thread to consumer warps. Delays make each side late at
/// times.
inline constexpr int kPipelineRows = 64;
std::vector<std::uint16_t> run_pipeline(int stages, const std::vector<std::uint16_t>& matrix);

/// Operands of a warpgroup's GEMM: a has 64 rows, c and the results are accumulators, [128 threads,
/// columns / 2].
struct WarpgroupGemm {
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
  std::vector<float> alone;  // a b, in the registers that held `added`
};
SsResult run_wgmma_ss(const WarpgroupGemm& call);

/// Wgmma::rs_b_mn_major(): a is [64, depth], in registers, and b [depth, columns], in shared
/// memory. c + a b or, without `accumulate`, a b.
inline constexpr int kOutputColumns[] = {64, 96, 128, 192, 256};
inline constexpr int kOutputDepths[] = {64, 128, 208};
std::vector<float> run_wgmma_rs(const WarpgroupGemm& call, bool accumulate);

/// Wgmma::ss_mn_major(): a is the transpose of a [64, depth] matrix, b [depth, columns], both in
/// shared memory.
inline constexpr int kMnMajorColumns[] = {64, 96, 128};  // head dims of fused kernels
inline constexpr int kMnMajorDepth = 128;                // their keys
SsResult run_wgmma_ss_mn_major(const WarpgroupGemm& call);

/// Both GEMMs of one mainloop step with the kernel's own functions: (Q K^T) V without softmax. q
/// is [tile_q, head_dim], k and v are [tile_k, head_dim], the result is [tile_q, head_dim].
std::vector<float> run_two_gemms(const KernelInfo& kernel, const std::vector<std::uint16_t>& q,
                                 const std::vector<std::uint16_t>& k,
                                 const std::vector<std::uint16_t>& v);

/// The GEMMs and the V transpose of an fp8 kernel, with the kernel's own functions. q is [tile_q,
/// head_dim], k and v are [tile_k, head_dim], in e4m3; p is [tile_q, tile_k], values that e4m3 can
/// hold.
struct Fp8Gemms {
  std::vector<float> scores;             // Q K^T, [tile_q, tile_k]
  std::vector<std::uint8_t> transposed;  // V^T: [head_dim, tile_k], in the tile's row order
  std::vector<float> output;             // P V of the `keys` first keys, [tile_q, head_dim]
};
Fp8Gemms run_fp8_gemms(const KernelInfo& kernel, const std::vector<std::uint8_t>& q,
                       const std::vector<std::uint8_t>& k, const std::vector<std::uint8_t>& v,
                       const std::vector<float>& p, int keys);

}  // namespace flashcore::gpu_test
