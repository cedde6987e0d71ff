#include "primitives_kernels.h"

#include <cstring>
#include <stdexcept>

#include "cuda/simt/fwd.cuh"
#include "gpu/device_array.cuh"

namespace flashcore::gpu_test {
namespace {

struct LaneGroupPointers {
  float *quad_max, *quad_sum, *cross_quad_max, *cross_quad_sum, *cross_octet_max, *cross_octet_sum,
      *warp_max, *warp_sum;
  float* cross_octet_sum_each;
};

__global__ void lanes(const float* g_in, float* g_max, float* g_sum, float* g_exp2) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  // As in the kernels: a lane's maximum starts from the running row max, which is never NaN.
  const float own = cuda::max_ignore_nan(-__builtin_inff(), g_in[i]);
  g_max[i] = cuda::half_warp_max(own);
  g_sum[i] = cuda::half_warp_sum(g_in[i]);
  g_exp2[i] = cuda::fast_exp2(g_in[i]);
}

__global__ void lane_groups(const float* g_in, LaneGroupPointers g_out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  const float own = cuda::max_ignore_nan(-__builtin_inff(), g_in[i]);
  g_out.quad_max[i] = cuda::quad_max(own);
  g_out.quad_sum[i] = cuda::quad_sum(g_in[i]);
  g_out.cross_quad_max[i] = cuda::cross_quad_max(own);
  g_out.cross_quad_sum[i] = cuda::cross_quad_sum(g_in[i]);
  g_out.cross_octet_max[i] = cuda::cross_octet_max(own);
  g_out.cross_octet_sum[i] = cuda::cross_octet_sum(g_in[i]);
  g_out.cross_octet_sum_each[i] =
      cuda::cross_octet_sum_each({g_in[i], 2 * g_in[i], 3 * g_in[i], 4 * g_in[i]});
  g_out.warp_max[i] = cuda::warp_max(own);
  g_out.warp_sum[i] = cuda::warp_sum(g_in[i]);
}

template <int kCount>
__device__ void largest_of_first(const float* g_in, float* g_out) {
  float x[kCount];
  for (int i = 0; i < kCount; ++i) x[i] = g_in[i];
  g_out[kCount - 1] = cuda::largest(x);
  if constexpr (kCount > 1) largest_of_first<kCount - 1>(g_in, g_out);
}

__global__ void largest(const float* g_in, float* g_out) {
  const unsigned first = threadIdx.x * kMaxValuesPerThread;
  largest_of_first<kMaxValuesPerThread>(g_in + first, g_out + first);
}

__global__ void max_ignore_nan(const float* g_a, const float* g_b, float* g_out) {
  const unsigned i = threadIdx.x;
  g_out[i] = cuda::max_ignore_nan(g_a[i], g_b[i]);
}

template <typename T>
__global__ void load_all(const T* g_in, float4* g_out, unsigned fours) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < fours) g_out[i] = cuda::load_four(g_in + 4 * i);
}

template <typename T>
__global__ void store_all(const float4* g_in, T* g_out, unsigned fours) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < fours) cuda::store_four(g_out + 4 * i, g_in[i]);
}

constexpr int kChunk = 64, kPad = 4;

template <typename T>
constexpr core::Element kElementOf = core::Element::f32;
template <>
constexpr core::Element kElementOf<__half> = core::Element::f16;
template <>
constexpr core::Element kElementOf<__nv_bfloat16> = core::Element::bf16;

template <int kRows, typename T>
__global__ void load_chunk(float* g_tile, const T* g_matrix, core::Strides strides,
                           std::int32_t columns, std::int32_t first_row, int rows, int first_column,
                           float factor, bool vector_rows) {
  const core::AttentionParams params{};  // used by 8-bit matrices only
  const core::Scales scales{};
  const cuda::simt::WorkTile tile{};
  const cuda::simt::Matrix matrix{
      g_matrix, core::kv_row_map({}, 0, 0), strides, columns, kElementOf<T>, scales, params, tile,
      false};
  __shared__ __align__(16) float s_tile[kRows][kChunk + kPad];
  for (int i = threadIdx.x; i < kRows * (kChunk + kPad); i += blockDim.x) {
    (&s_tile[0][0])[i] = kUntouched;
  }
  __syncthreads();
  cuda::simt::load_chunk<kRows>(s_tile, 0, matrix, first_row, rows, first_column, factor,
                                vector_rows);
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * (kChunk + kPad); i += blockDim.x) {
    g_tile[i] = (&s_tile[0][0])[i];
  }
}

template <int kRows, typename T>
std::vector<float> chunk_of(const ChunkCall& call) {
  std::vector<T> host(call.matrix.size());
  for (std::size_t i = 0; i < host.size(); ++i) {
    std::memcpy(static_cast<void*>(&host[i]), &call.matrix[i], sizeof(T));
  }
  const Array<T> matrix(host);
  const Array<float> tile(std::vector<float>(kRows * (kChunk + kPad)));
  load_chunk<kRows, T><<<1, 256>>>(tile.get(), matrix.get(),
                                   core::Strides{0, 0, call.row_stride, call.column_stride},
                                   call.columns, static_cast<std::int32_t>(call.first_row),
                                   call.rows, call.first_column, call.factor, call.vector_rows);
  return tile.host();
}

template <typename T>
std::vector<float> chunk_of(const ChunkCall& call) {
  switch (call.tile_rows) {
    case 16: return chunk_of<16, T>(call);
    case 32: return chunk_of<32, T>(call);
    default: return chunk_of<64, T>(call);
  }
}

template <typename T>
std::vector<float> load_every_pattern() {
  std::vector<std::uint16_t> bits(65536);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  const Array<std::uint16_t> in(bits);
  const Array<float> out(bits.size());
  load_all<<<64, 256>>>(reinterpret_cast<const T*>(in.get()), reinterpret_cast<float4*>(out.get()),
                        65536 / 4);
  return out.host();
}

template <typename T>
std::vector<std::uint16_t> store_values(const std::vector<float>& values) {
  const Array<float> in(values);
  const Array<std::uint16_t> out(values.size());
  const auto fours = static_cast<unsigned>(values.size() / 4);
  store_all<<<(fours + 255) / 256, 256>>>(reinterpret_cast<const float4*>(in.get()),
                                          reinterpret_cast<T*>(out.get()), fours);
  return out.host();
}

}  // namespace

LaneResults run_lanes(const std::vector<float>& values) {
  const Array<float> in(values), max(values.size()), sum(values.size()), exp2(values.size());
  constexpr unsigned kThreads = 256;
  if (values.size() % kThreads != 0) throw std::runtime_error("not whole blocks");
  lanes<<<static_cast<unsigned>(values.size()) / kThreads, kThreads>>>(in.get(), max.get(),
                                                                       sum.get(), exp2.get());
  return {max.host(), sum.host(), exp2.host()};
}

LaneGroupResults run_lane_groups(const std::vector<float>& values) {
  const Array<float> in(values);
  const Array<float> quad_max(values.size()), quad_sum(values.size());
  const Array<float> cross_quad_max(values.size()), cross_quad_sum(values.size());
  const Array<float> cross_octet_max(values.size()), cross_octet_sum(values.size());
  const Array<float> cross_octet_sum_each(values.size());
  const Array<float> warp_max(values.size()), warp_sum(values.size());
  constexpr unsigned kThreads = 128;
  if (values.size() % kThreads != 0) throw std::runtime_error("not whole blocks");
  lane_groups<<<static_cast<unsigned>(values.size()) / kThreads, kThreads>>>(
      in.get(), {quad_max.get(), quad_sum.get(), cross_quad_max.get(), cross_quad_sum.get(),
                 cross_octet_max.get(), cross_octet_sum.get(), warp_max.get(), warp_sum.get(),
                 cross_octet_sum_each.get()});
  return {quad_max.host(),       quad_sum.host(),        cross_quad_max.host(),
          cross_quad_sum.host(), cross_octet_max.host(), cross_octet_sum.host(),
          warp_max.host(),       warp_sum.host(),        cross_octet_sum_each.host()};
}

std::vector<float> run_largest(const std::vector<float>& values) {
  const Array<float> in(values), out(values.size());
  largest<<<1, static_cast<unsigned>(values.size()) / kMaxValuesPerThread>>>(in.get(), out.get());
  return out.host();
}

std::vector<float> run_max_ignore_nan(const std::vector<float>& a, const std::vector<float>& b) {
  const Array<float> in_a(a), in_b(b), out(a.size());
  max_ignore_nan<<<1, static_cast<unsigned>(a.size())>>>(in_a.get(), in_b.get(), out.get());
  return out.host();
}

std::vector<float> run_load_all(Format format) {
  return format == Format::f16 ? load_every_pattern<__half>() : load_every_pattern<__nv_bfloat16>();
}

std::vector<std::uint16_t> run_store(Format format, const std::vector<float>& values) {
  return format == Format::f16 ? store_values<__half>(values) : store_values<__nv_bfloat16>(values);
}

std::vector<float> run_load_chunk(const ChunkCall& call) {
  switch (call.format) {
    case Format::f32: return chunk_of<float>(call);
    case Format::f16: return chunk_of<__half>(call);
    default: return chunk_of<__nv_bfloat16>(call);
  }
}

}  // namespace flashcore::gpu_test
