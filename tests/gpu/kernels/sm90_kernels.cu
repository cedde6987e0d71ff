#include "sm90_kernels.h"

#include "cuda/primitives/cluster.cuh"
#include "cuda/sm90/tensor_map.h"
#include "sm90_launch.cuh"

namespace flashcore::gpu_test {
namespace {

// ---------------------------------------------------------------------------------------------
// Clusters

constexpr int kMaxCtas = 8;

/// No cluster barrier at the end: a CTA exits as soon as its mbarrier has counted all bytes.
__global__ void store_to_all(float* g_out, int ctas) {
  __shared__ __align__(16) float s_fours[kMaxCtas][kClusterThreads][4];
  __shared__ __align__(8) float s_twos[kMaxCtas][kClusterThreads][2];
  __shared__ std::uint64_t s_full;
  const auto rank = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    cuda::init_barrier(s_full, 1);
    cuda::fence_barrier_init();
    cuda::arrive_expect_tx(s_full, ctas * kClusterThreads * 6 * 4);
  }
  cuda::arrive_at_cluster();
  cuda::wait_for_cluster();
  for (int to = 0; to < ctas; ++to) {
    const auto value = [&](int i) {
      return static_cast<float>(((rank * ctas + to) * kClusterThreads + thread) * 6 + i);
    };
    const std::uint32_t barrier = cuda::cluster_address(&s_full, to);
    cuda::store_cluster(cuda::cluster_address(s_fours[rank][thread], to),
                        {value(0), value(1), value(2), value(3)}, barrier);
    cuda::store_cluster(cuda::cluster_address(s_twos[rank][thread], to), {value(4), value(5)},
                        barrier);
  }
  cuda::wait(s_full, 0);
  for (int from = 0; from < ctas; ++from) {
    float* g_to = g_out + ((rank * ctas + from) * kClusterThreads + thread) * 6;
    for (int i = 0; i < 4; ++i) g_to[i] = s_fours[from][thread][i];
    for (int i = 0; i < 2; ++i) g_to[4 + i] = s_twos[from][thread][i];
  }
}

// ---------------------------------------------------------------------------------------------
// TMA

/// Tensor map of an f16 tensor from the library's encoder, with boxes of a tile's rows.
CUtensorMap map_of(const Array<std::uint16_t>& tensor, const core::Strides& strides,
                   const cuda::MapShape& shape, int box_rows) {
  CUtensorMap map{};
  const Status status = cuda::make_tensor_map(map, tensor.get(), DType::f16, strides, shape,
                                              {box_rows}, "the tested tensor");
  if (!status.ok()) throw std::runtime_error(status.message());
  return map;
}

template <typename Tile>
struct alignas(core::kSwizzleBytes) CopiedTile {
  unsigned char tile[Tile::kBytes];
  std::uint64_t full;
};

template <typename Tile>
__global__ void copy_tile(const __grid_constant__ CUtensorMap map, int row, int head, int batch,
                          std::uint16_t* g_out) {
  auto& s = shared_storage<CopiedTile<Tile>>();
  auto* s_elements = reinterpret_cast<std::uint16_t*>(s.tile);
  for (int i = threadIdx.x; i < Tile::kBytes / 2; i += blockDim.x) s_elements[i] = 0xabab;
  if (threadIdx.x == 0) {
    cuda::init_barrier(s.full, 1);
    cuda::fence_barrier_init();
  }
  publish_tiles();
  if (threadIdx.x == 0) cuda::sm90::load_tile<Tile>(s.tile, map, row, head, batch, s.full);
  cuda::wait(s.full, 0);
  constexpr int kColumns = Tile::kPanels * Tile::kPanelColumns;
  for (int i = threadIdx.x; i < Tile::kBytes / 2; i += blockDim.x) {
    g_out[i] = s_elements[Tile::offset(i / kColumns, i % kColumns) / 2];
  }
}

template <typename Tile>
std::vector<std::uint16_t> copied(const TileCopy& call) {
  const Array<std::uint16_t> tensor(call.tensor), out(Tile::kBytes / 2);
  const core::Strides strides{call.batch_stride, call.head_stride, call.row_stride, 1};
  const CUtensorMap map =
      map_of(tensor, strides, {call.columns, call.rows, call.heads, call.batch}, call.tile_rows);
  launch<CopiedTile<Tile>>(copy_tile<Tile>, kGroupThreads, map, call.row, call.head, call.b,
                           out.get());
  return out.host();
}

// ---------------------------------------------------------------------------------------------
// Barriers

using PipelineTile = core::PanelTile<kPipelineRows, kPanelColumns>;

CUtensorMap pipeline_map(const Array<std::uint16_t>& matrix, std::size_t elements) {
  const auto rows = static_cast<std::int64_t>(elements) / kPanelColumns;
  return map_of(matrix, {0, 0, kPanelColumns, 1}, {kPanelColumns, rows, 1, 1}, kPipelineRows);
}

/// Tests without blocking whether the phase of this parity is complete.
__device__ bool has_ended(std::uint64_t& s_barrier, std::uint32_t parity) {
  std::uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}\n"
      : "=r"(ended)
      : "r"(cuda::shared_address(&s_barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

/// A single thread. Its copy follows the arrivals in even phases and precedes them in odd ones.
__global__ void barrier_phases(const __grid_constant__ CUtensorMap map, int phases, int* g_out) {
  auto& s = shared_storage<CopiedTile<PipelineTile>>();
  cuda::init_barrier(s.full, 3);
  cuda::fence_barrier_init();
  const auto copy = [&] {
    cuda::tma_load_4d(cuda::shared_address(s.tile), map, 0, 0, 0, 0, s.full);
  };
  for (int phase = 0; phase < phases; ++phase) {
    const std::uint32_t parity = phase % 2;
    const auto note = [&] {
      *g_out++ = (has_ended(s.full, parity) ? kOwnPhaseEnded : 0) +
                 (has_ended(s.full, parity ^ 1) ? kPhaseBeforeEnded : 0);
    };
    note();
    if (phase % 2 == 0) {
      cuda::arrive(s.full);
      cuda::arrive(s.full);
      note();
      cuda::arrive_expect_tx(s.full, PipelineTile::kBytes);
      note();
      copy();
    } else {
      cuda::arrive_expect_tx(s.full, PipelineTile::kBytes);
      copy();
      note();
      cuda::arrive(s.full);
      note();
      cuda::arrive(s.full);
    }
    cuda::wait(s.full, parity);
    note();
  }
}

template <int kStages>
struct alignas(core::kSwizzleBytes) TilePipeline {
  unsigned char tile[kStages][PipelineTile::kBytes];
  std::uint64_t full[kStages], empty[kStages];
};

/// Delays long enough for the other side to arrive first.
__device__ void delay() { __nanosleep(20000); }

/// Four consumer warps read, the fifth warp is the producer.
template <int kStages>
__global__ void through_pipeline(const __grid_constant__ CUtensorMap map, int tiles,
                                 std::uint16_t* g_out) {
  constexpr int kReaders = 4;
  auto& s = shared_storage<TilePipeline<kStages>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      cuda::init_barrier(s.full[i], 1);
      cuda::init_barrier(s.empty[i], kReaders);
    }
    cuda::fence_barrier_init();
  }
  __syncthreads();
  core::PipelineState<kStages> state;
  const auto parity = [&](bool empty) {
    return core::parity_of_last(core::phases_before(empty, state.round()));
  };
  if (warp == kReaders) {
    if (lane != 0) return;
    for (int tile = 0; tile < tiles; ++tile, state.advance()) {
      cuda::wait(s.empty[state.stage()], parity(true));
      if (tile % 5 == 3) delay();
      cuda::sm90::load_tile<PipelineTile>(s.tile[state.stage()], map, tile * kPipelineRows, 0, 0,
                                          s.full[state.stage()]);
    }
    return;
  }
  constexpr int kElements = PipelineTile::kBytes / 2;
  for (int tile = 0; tile < tiles; ++tile, state.advance()) {
    cuda::wait(s.full[state.stage()], parity(false));
    if ((tile + warp) % 7 == 2) delay();
    for (int i = threadIdx.x; i < kElements; i += 32 * kReaders) {
      const int row = i / kPanelColumns, column = i % kPanelColumns;
      g_out[tile * kElements + i] = *reinterpret_cast<const std::uint16_t*>(
          s.tile[state.stage()] + PipelineTile::offset(row, column));
    }
    cuda::arrive_once_per_warp(s.empty[state.stage()], lane);
  }
}

template <int kStages>
std::vector<std::uint16_t> pipeline_of(const std::vector<std::uint16_t>& matrix) {
  const Array<std::uint16_t> in(matrix), out(matrix.size());
  const int tiles = static_cast<int>(matrix.size()) / (PipelineTile::kBytes / 2);
  launch<TilePipeline<kStages>>(through_pipeline<kStages>, 5 * 32, pipeline_map(in, matrix.size()),
                                tiles, out.get());
  return out.host();
}

// ---------------------------------------------------------------------------------------------
// wgmma

template <int kCount>
__device__ void load_accumulators(float (&c)[kCount], const float* g_c) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) c[i] = g_c[threadIdx.x * kCount + i];
}

template <int kCount>
__device__ void store_accumulators(const float (&c)[kCount], float* g_c) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) g_c[threadIdx.x * kCount + i] = c[i];
}

template <int kColumns, int kDepth>
struct alignas(core::kSwizzleBytes) BothOperands {
  using A = core::PanelTile<64, kDepth>;
  using B = core::PanelTile<kColumns, kDepth>;
  unsigned char a[A::kBytes];
  unsigned char b[B::kBytes];
};

/// c = c + a b or, without kAccumulate, c = a b.
template <typename T, bool kAccumulate, int kColumns, int kDepth>
__device__ void gemm_ss(float (&c)[kColumns / 2], const BothOperands<kColumns, kDepth>& s) {
  using Operands = BothOperands<kColumns, kDepth>;
  using Product = cuda::Wgmma<kColumns>;
  const std::uint64_t a = core::matrix_descriptor(cuda::shared_address(s.a), 0);
  const std::uint64_t b = core::matrix_descriptor(cuda::shared_address(s.b), 0);
  cuda::wgmma_fence();
  Product::template ss<T, kAccumulate>(c, a, b);
#pragma unroll
  for (int step = 1; step < kDepth / 16; ++step) {
    Product::template ss<T, true>(c, core::advance(a, Operands::A::k_offset(step)),
                                  core::advance(b, Operands::B::k_offset(step)));
  }
  cuda::wgmma_commit();
  cuda::wgmma_wait<0>();
  cuda::fence_registers(c);
}

template <typename T, int kColumns, int kDepth>
__global__ void __launch_bounds__(kGroupThreads)
    wgmma_ss(const std::uint16_t* g_a, const std::uint16_t* g_b, const float* g_c, float* g_added,
             float* g_alone) {
  using Operands = BothOperands<kColumns, kDepth>;
  auto& s = shared_storage<Operands>();
  fill_tile<typename Operands::A>(s.a, g_a, 64, kDepth);
  fill_tile<typename Operands::B>(s.b, g_b, kColumns, kDepth);
  publish_tiles();
  float c[kColumns / 2];
  load_accumulators(c, g_c);
  gemm_ss<T, true, kColumns, kDepth>(c, s);
  store_accumulators(c, g_added);
  gemm_ss<T, false, kColumns, kDepth>(c, s);
  store_accumulators(c, g_alone);
}

template <int kColumns>
struct alignas(core::kSwizzleBytes) MnMajorOperands {
  using A = core::PanelTile<kMnMajorDepth, 64>;  // transposed
  using B = core::PanelTile<kMnMajorDepth, kColumns>;
  unsigned char a[A::kBytes];
  unsigned char b[B::kBytes];
};

/// c = c + a b or, without kAccumulate, c = a b.
template <typename T, bool kAccumulate, int kColumns>
__device__ void gemm_ss_mn_major(float (&c)[kColumns / 2], const MnMajorOperands<kColumns>& s) {
  using Operands = MnMajorOperands<kColumns>;
  using Product = cuda::Wgmma<kColumns>;
  const std::uint64_t a =
      core::matrix_descriptor(cuda::shared_address(s.a), Operands::A::kPanelBytes);
  const std::uint64_t b =
      core::matrix_descriptor(cuda::shared_address(s.b), Operands::B::kPanelBytes);
  cuda::wgmma_fence();
  Product::template ss_mn_major<T, kAccumulate>(c, a, b);
#pragma unroll
  for (int step = 1; step < kMnMajorDepth / 16; ++step) {
    Product::template ss_mn_major<T, true>(c, core::advance(a, Operands::A::mn_offset(step)),
                                           core::advance(b, Operands::B::mn_offset(step)));
  }
  cuda::wgmma_commit();
  cuda::wgmma_wait<0>();
  cuda::fence_registers(c);
}

/// g_a is [depth, 64].
template <typename T, int kColumns>
__global__ void __launch_bounds__(kGroupThreads)
    wgmma_ss_mn_major(const std::uint16_t* g_a, const std::uint16_t* g_b, const float* g_c,
                      float* g_added, float* g_alone) {
  using Operands = MnMajorOperands<kColumns>;
  auto& s = shared_storage<Operands>();
  fill_tile<typename Operands::A>(s.a, g_a, kMnMajorDepth, 64);
  fill_tile<typename Operands::B>(s.b, g_b, kMnMajorDepth, kColumns);
  publish_tiles();
  float c[kColumns / 2];
  load_accumulators(c, g_c);
  gemm_ss_mn_major<T, true, kColumns>(c, s);
  store_accumulators(c, g_added);
  gemm_ss_mn_major<T, false, kColumns>(c, s);
  store_accumulators(c, g_alone);
}

template <typename Tile>
struct alignas(core::kSwizzleBytes) OneOperand {
  unsigned char b[Tile::kBytes];
};

template <typename T, int kColumns, int kDepth>
__global__ void __launch_bounds__(kGroupThreads)
    wgmma_rs(const std::uint16_t* g_a, const std::uint16_t* g_b, const float* g_c, bool accumulate,
             float* g_out) {
  using B = core::PanelTile<kDepth, kColumns>;
  auto& s = shared_storage<OneOperand<B>>();
  fill_tile<B>(s.b, g_b, kDepth, kColumns);
  publish_tiles();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::uint32_t a[kDepth / 16][4];
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) {
    a[i / 4][i % 4] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::Coordinate at = core::mma_a(lane, i % 4, half);
      const std::uint32_t bits = g_a[(16 * warp + at.row) * kDepth + i / 4 * 16 + at.column];
      a[i / 4][i % 4] |= bits << (16 * half);
    }
  }
  float c[kColumns / 2];
  load_accumulators(c, g_c);
  const std::uint64_t b = core::matrix_descriptor(cuda::shared_address(s.b), B::kPanelBytes);
  cuda::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    cuda::Wgmma<kColumns>::template rs_b_mn_major<T>(
        c, a[step], core::advance(b, B::mn_offset(step)), accumulate || step > 0);
  }
  cuda::wgmma_commit();
  cuda::wgmma_wait<0>();
  cuda::fence_registers(c);
  store_accumulators(c, g_out);
}

}  // namespace

std::vector<float> run_cluster_stores(int ctas) {
  const Array<float> out(static_cast<std::size_t>(ctas * ctas * kClusterThreads * 6));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kClusterThreads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  require_cuda(cudaLaunchKernelEx(&config, store_to_all, out.get(), ctas));
  return out.host();
}

std::vector<std::uint16_t> run_copy_tile(const TileCopy& call) {
  return with_constant<kCopiedRows>(call.tile_rows, [&](auto rows) {
    return with_constant<kCopiedColumns>(call.tile_columns, [&](auto columns) {
      return copied<core::PanelTile<decltype(rows)::value, decltype(columns)::value>>(call);
    });
  });
}

std::vector<int> run_barrier_phases(int phases) {
  const std::vector<std::uint16_t> matrix(PipelineTile::kBytes / 2);
  const Array<std::uint16_t> in(matrix);
  const Array<int> out(static_cast<std::size_t>(phases * kBarrierEvents));
  launch<CopiedTile<PipelineTile>>(barrier_phases, 1, pipeline_map(in, matrix.size()), phases,
                                   out.get());
  return out.host();
}

std::vector<std::uint16_t> run_pipeline(int stages, const std::vector<std::uint16_t>& matrix) {
  return stages == 2 ? pipeline_of<2>(matrix) : pipeline_of<4>(matrix);
}

SsResult run_wgmma_ss(const WarpgroupGemm& call) {
  const Array<std::uint16_t> a(call.a), b(call.b);
  const Array<float> c(call.c), added(call.c.size()), alone(call.c.size());
  with_element(call.format, [&](auto element) {
    using T = decltype(element);
    with_constant<kScoreColumns>(call.columns, [&](auto columns) {
      with_constant<kScoreDepths>(call.depth, [&](auto depth) {
        constexpr int kColumns = decltype(columns)::value, kDepth = decltype(depth)::value;
        launch<BothOperands<kColumns, kDepth>>(wgmma_ss<T, kColumns, kDepth>, kGroupThreads,
                                               a.get(), b.get(), c.get(), added.get(), alone.get());
      });
    });
  });
  return {added.host(), alone.host()};
}

SsResult run_wgmma_ss_mn_major(const WarpgroupGemm& call) {
  const Array<std::uint16_t> a(call.a), b(call.b);
  const Array<float> c(call.c), added(call.c.size()), alone(call.c.size());
  with_element(call.format, [&](auto element) {
    using T = decltype(element);
    with_constant<kMnMajorColumns>(call.columns, [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      launch<MnMajorOperands<kColumns>>(wgmma_ss_mn_major<T, kColumns>, kGroupThreads, a.get(),
                                        b.get(), c.get(), added.get(), alone.get());
    });
  });
  return {added.host(), alone.host()};
}

std::vector<float> run_wgmma_rs(const WarpgroupGemm& call, bool accumulate) {
  const Array<std::uint16_t> a(call.a), b(call.b);
  const Array<float> c(call.c), out(call.c.size());
  with_element(call.format, [&](auto element) {
    using T = decltype(element);
    with_constant<kOutputColumns>(call.columns, [&](auto columns) {
      with_constant<kOutputDepths>(call.depth, [&](auto depth) {
        constexpr int kColumns = decltype(columns)::value, kDepth = decltype(depth)::value;
        launch<OneOperand<core::PanelTile<kDepth, kColumns>>>(wgmma_rs<T, kColumns, kDepth>,
                                                              kGroupThreads, a.get(), b.get(),
                                                              c.get(), accumulate, out.get());
      });
    });
  });
  return out.host();
}

}  // namespace flashcore::gpu_test
