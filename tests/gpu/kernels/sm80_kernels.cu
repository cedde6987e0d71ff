#include "sm80_kernels.h"

#include "core/mma_layout.h"
#include "cuda/primitives/convert.cuh"
#include "cuda/primitives/cp_async.cuh"
#include "cuda/primitives/memory.cuh"
#include "cuda/primitives/mma.cuh"
#include "gpu/device_array.cuh"

namespace flashcore::gpu_test {
namespace {

constexpr int kLanes = 32;

// ---------------------------------------------------------------------------------------------
// Copies

__global__ void copy_async(const std::uint8_t* g_source, const int* g_bytes, uint4* g_out) {
  __shared__ uint4 s_data[128];
  const int i = threadIdx.x;
  s_data[i] = make_uint4(0xabababab, 0xabababab, 0xabababab, 0xabababab);
  __syncthreads();
  const void* nowhere = reinterpret_cast<const void*>(std::uintptr_t{16});
  cuda::cp_async_16(cuda::shared_address(&s_data[i]), g_bytes[i] == 0 ? nowhere : g_source + 16 * i,
                    g_bytes[i]);
  cuda::cp_async_commit();
  cuda::cp_async_wait<0>();
  __syncthreads();
  g_out[i] = s_data[blockDim.x - 1 - i];  // the copy of another thread: finds a missing barrier
}

__global__ void copy_pipeline(const uint4* g_source, uint4* g_out, int chunks) {
  __shared__ uint4 s_stages[2][kLanes];
  const int lane = threadIdx.x;
  const auto start = [&](int chunk) {
    if (chunk < chunks) {
      cuda::cp_async_16(cuda::shared_address(&s_stages[chunk % 2][lane]),
                        g_source + chunk * kLanes + lane, 16);
    }
    cuda::cp_async_commit();  // an empty group counts, too
  };
  start(0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    start(chunk + 1);
    cuda::cp_async_wait<1>();
    __syncwarp();
    g_out[chunk * kLanes + lane] = s_stages[chunk % 2][lane ^ 1];  // the copy of another lane
    __syncwarp();
  }
}

// ---------------------------------------------------------------------------------------------
// ldmatrix, mma.sync, pack

__global__ void ldmatrix_x4(const std::uint16_t* g_tile, const int* g_offset_bytes, bool transposed,
                            std::uint32_t* g_out) {
  __shared__ __align__(16) std::uint16_t s_tile[16 * 16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 16; i += kLanes) s_tile[i] = g_tile[i];
  __syncwarp();
  std::uint32_t r[4];
  const std::uint32_t s_row = cuda::shared_address(s_tile) + g_offset_bytes[lane];
  if (transposed) {
    cuda::ldmatrix_x4_trans(r, s_row);
  } else {
    cuda::ldmatrix_x4(r, s_row);
  }
  for (int reg = 0; reg < 4; ++reg) g_out[4 * lane + reg] = r[reg];
}

__global__ void movmatrix_trans(const std::uint32_t* g_in, std::uint32_t* g_out) {
  g_out[threadIdx.x] = cuda::movmatrix_trans(g_in[threadIdx.x]);
}

template <typename T>
__global__ void mma_m16n8k16(const std::uint32_t* g_a, const std::uint32_t* g_b, const float* g_c,
                             float* g_d) {
  const unsigned i = blockIdx.x * kLanes + threadIdx.x;
  const std::uint32_t a[4] = {g_a[4 * i], g_a[4 * i + 1], g_a[4 * i + 2], g_a[4 * i + 3]};
  float c[4] = {g_c[4 * i], g_c[4 * i + 1], g_c[4 * i + 2], g_c[4 * i + 3]};
  cuda::mma_m16n8k16<T>(c, a, g_b[2 * i], g_b[2 * i + 1]);
  for (int reg = 0; reg < 4; ++reg) g_d[4 * i + reg] = c[reg];
}

template <typename T>
__global__ void pack(const float* g_low, const float* g_high, std::uint32_t* g_out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) g_out[i] = cuda::pack<T>(g_low[i], g_high[i]);
}

template <core::Element kReader>
__global__ void dequantize_words(core::Element format, const std::uint32_t* g_words,
                                 std::uint32_t* g_out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const core::F16x2Pair pairs = core::Dequantizer<kReader>(format)(g_words[i]);
  g_out[2 * i] = pairs.even;
  g_out[2 * i + 1] = pairs.odd;
}

// ---------------------------------------------------------------------------------------------
// A swizzled tile

template <typename Tile, typename Load>
__device__ void read_blocks(std::uint32_t s_first, int block_rows, int block_columns,
                            std::uint32_t* g_out, Load load) {
  for (int i = 0; i < block_rows; ++i) {
    for (int j = 0; j < block_columns; ++j) {
      std::uint32_t r[4];
      load(r, Tile::advance_rows8(Tile::advance_k(s_first, j), 2 * i));
      for (int reg = 0; reg < 4; ++reg) {
        g_out[((i * block_columns + j) * kLanes + threadIdx.x) * 4 + reg] = r[reg];
      }
    }
  }
}

template <int kRows, int kColumns>
__global__ void through_tile(const std::uint16_t* g_matrix, int rows, int columns, int row_stride,
                             std::uint32_t* g_a, std::uint32_t* g_b, std::uint32_t* g_b_trans) {
  using Tile = core::SwizzledTile<kRows, kColumns>;
  extern __shared__ __align__(128) unsigned char s_tile[];
  for (int i = threadIdx.x; i < 2 * Tile::kElements; i += blockDim.x) s_tile[i] = 0xab;
  __syncthreads();
  const std::uint32_t s_base = cuda::shared_address(s_tile);
  for (int i = threadIdx.x; i < kRows * kColumns / 8; i += blockDim.x) {
    const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
    const int left = 2 * (columns - 8 * chunk);
    cuda::cp_async_16(s_base + Tile::offset(row, chunk), g_matrix + row * row_stride + 8 * chunk,
                      row < rows ? max(min(left, 16), 0) : 0);
  }
  cuda::cp_async_commit();
  cuda::cp_async_wait<0>();
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  const auto first = [&](core::Coordinate at) {
    return s_base + static_cast<std::uint32_t>(Tile::offset(at.row, at.column));
  };
  const int lane = threadIdx.x;
  const auto direct = [](std::uint32_t(&r)[4], std::uint32_t s_row) {
    cuda::ldmatrix_x4(r, s_row);
  };
  const auto transposed = [](std::uint32_t(&r)[4], std::uint32_t s_row) {
    cuda::ldmatrix_x4_trans(r, s_row);
  };
  read_blocks<Tile>(first(core::ldmatrix_a(lane)), kRows / 16, kColumns / 16, g_a, direct);
  read_blocks<Tile>(first(core::ldmatrix_b(lane)), kRows / 16, kColumns / 16, g_b, direct);
  read_blocks<Tile>(first(core::ldmatrix_b_trans(lane)), kRows / 16, kColumns / 16, g_b_trans,
                    transposed);
}

template <int kRows, int kColumns>
TileResult tile_of(const TileCall& call) {
  constexpr std::size_t kRegisters = std::size_t{kRows} * kColumns / 2;
  constexpr int kBytes = 2 * kRows * kColumns;
  const auto kernel = through_tile<kRows, kColumns>;
  require_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const Array<std::uint16_t> matrix(call.matrix);
  const Array<std::uint32_t> a(kRegisters), b(kRegisters), b_transposed(kRegisters);
  kernel<<<1, 128, kBytes>>>(matrix.get(), call.rows, call.columns, call.row_stride, a.get(),
                             b.get(), b_transposed.get());
  return {a.host(), b.host(), b_transposed.host()};
}

template <int kRows>
TileResult tile_of(const TileCall& call) {
  switch (call.tile_columns) {
    case 64: return tile_of<kRows, 64>(call);
    case 96: return tile_of<kRows, 96>(call);
    case 128: return tile_of<kRows, 128>(call);
    case 192: return tile_of<kRows, 192>(call);
    case 256: return tile_of<kRows, 256>(call);
    default: throw std::runtime_error("untested tile width");
  }
}

template <typename T>
std::vector<float> mma_all(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b,
                           const std::vector<float>& c) {
  const Array<std::uint32_t> in_a(a), in_b(b);
  const Array<float> in_c(c), d(c.size());
  mma_m16n8k16<T><<<static_cast<unsigned>(c.size() / 4 / kLanes), kLanes>>>(in_a.get(), in_b.get(),
                                                                            in_c.get(), d.get());
  return d.host();
}

template <typename T>
std::vector<std::uint32_t> pack_all(const std::vector<float>& low, const std::vector<float>& high) {
  const Array<float> in_low(low), in_high(high);
  const Array<std::uint32_t> out(low.size());
  const auto n = static_cast<unsigned>(low.size());
  pack<T><<<(n + 255) / 256, 256>>>(in_low.get(), in_high.get(), out.get(), n);
  return out.host();
}

}  // namespace

std::vector<std::uint8_t> run_copy_async(const std::vector<std::uint8_t>& source,
                                         const std::vector<int>& bytes) {
  const Array<std::uint8_t> in(source), out(16 * bytes.size());
  const Array<int> in_bytes(bytes);
  if (bytes.size() > 128) throw std::runtime_error("at most 128 copies");
  copy_async<<<1, static_cast<unsigned>(bytes.size())>>>(in.get(), in_bytes.get(),
                                                         reinterpret_cast<uint4*>(out.get()));
  return out.host();
}

std::vector<std::uint8_t> run_copy_pipeline(const std::vector<std::uint8_t>& source) {
  const Array<std::uint8_t> in(source), out(source.size());
  copy_pipeline<<<1, kLanes>>>(reinterpret_cast<const uint4*>(in.get()),
                               reinterpret_cast<uint4*>(out.get()),
                               static_cast<int>(source.size() / (16 * kLanes)));
  return out.host();
}

std::vector<std::uint32_t> run_ldmatrix(const std::vector<std::uint16_t>& tile,
                                        const std::vector<int>& offset_bytes, bool transposed) {
  const Array<std::uint16_t> in(tile);
  const Array<int> offsets(offset_bytes);
  const Array<std::uint32_t> out(4 * kLanes);
  ldmatrix_x4<<<1, kLanes>>>(in.get(), offsets.get(), transposed, out.get());
  return out.host();
}

std::vector<std::uint32_t> run_movmatrix(const std::vector<std::uint32_t>& lanes) {
  const Array<std::uint32_t> in(lanes), out(kLanes);
  movmatrix_trans<<<1, kLanes>>>(in.get(), out.get());
  return out.host();
}

std::vector<float> run_mma(HalfFormat format, const std::vector<std::uint32_t>& a,
                           const std::vector<std::uint32_t>& b, const std::vector<float>& c) {
  return format == HalfFormat::f16 ? mma_all<__half>(a, b, c) : mma_all<__nv_bfloat16>(a, b, c);
}

std::vector<std::uint32_t> run_pack(HalfFormat format, const std::vector<float>& low,
                                    const std::vector<float>& high) {
  return format == HalfFormat::f16 ? pack_all<__half>(low, high)
                                   : pack_all<__nv_bfloat16>(low, high);
}

std::vector<std::uint32_t> run_dequantize(core::Element format,
                                          const std::vector<std::uint32_t>& words) {
  const Array<std::uint32_t> in(words), out(2 * words.size());
  const auto kernel = format == core::Element::e4m3   ? dequantize_words<core::Element::e4m3>
                      : format == core::Element::e5m2 ? dequantize_words<core::Element::e5m2>
                                                      : dequantize_words<core::Element::int8>;
  const auto n = static_cast<unsigned>(words.size());
  kernel<<<(n + 255) / 256, 256>>>(format, in.get(), out.get(), n);
  return out.host();
}

TileResult run_tile(const TileCall& call) {
  switch (call.tile_rows) {
    case 16: return tile_of<16>(call);
    case 32: return tile_of<32>(call);
    case 48: return tile_of<48>(call);
    case 64: return tile_of<64>(call);
    case 128: return tile_of<128>(call);
    default: throw std::runtime_error("untested tile height");
  }
}

}  // namespace flashcore::gpu_test
