#include "sm90_kernels.h"
#include "sm90_launch.cuh"

namespace flashcore::gpu_test {
namespace {

/// Slot of a warpgroup's Q tile in the CTA's second work tile.
template <typename C>
__device__ int q_slot(int group) {
  return static_cast<int>(typename C::Pipeline::QStage{1, group}.slot());
}

/// Fills all Q tiles of a work tile.
template <typename C, typename T>
__device__ void fill_queries(cuda::sm90::SharedStorage<C>& s, const T* g_q) {
  for (int group = 0; group < C::kConsumers; ++group) {
    fill_tile<typename C::QueryTile>(s.q[q_slot<C>(group)],
                                     g_q + group * core::kQTileRows * C::kHeadDim, core::kQTileRows,
                                     C::kHeadDim);
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    two_gemms(const std::uint16_t* g_q, const std::uint16_t* g_k, const std::uint16_t* g_v,
              float* g_out) {
  namespace sm90 = cuda::sm90;
  constexpr int kStage = C::kStages - 1;
  auto& s = shared_storage<sm90::SharedStorage<C>>();
  fill_queries<C>(s, g_q);
  fill_tile<typename C::KeyTile>(s.k[kStage], g_k, C::kTileK, C::kHeadDim);
  fill_tile<typename C::KeyTile>(s.v[kStage], g_v, C::kTileK, C::kHeadDim);
  publish_tiles();
  if (threadIdx.x < kGroupThreads) {
    cuda::setmaxnreg_dec<C::kProducerRegisters>();
    return;
  }
  cuda::setmaxnreg_inc<C::kConsumerRegisters>();
  const sm90::Thread<C> t(threadIdx.x);
  sm90::AccS<C> acc_s;
  sm90::AccO<C> acc_o;
  std::uint32_t a[C::kTileK / 16][4];
  cuda::wgmma_fence();
  sm90::issue_qk<C>(acc_s, s, q_slot<C>(t.group), kStage);
  cuda::wgmma_wait<0>();
  cuda::fence_registers(acc_s);
  sm90::pack_p<C>(a, acc_s);
  cuda::wgmma_fence();
  sm90::issue_pv<C>(acc_o, a, s, kStage, false);
  cuda::wgmma_wait<0>();
  cuda::fence_registers(acc_o);
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 2; ++i) {
    g_out[t.row(i / 2 % 2) * C::kHeadDim + t.column(i / 4, i % 2)] = acc_o[i];
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fp8_gemms(const std::uint8_t* g_q, const std::uint8_t* g_k, const std::uint8_t* g_v,
              const float* g_p, int keys, float* g_scores, std::uint8_t* g_transposed,
              float* g_out) {
  namespace sm90 = cuda::sm90;
  constexpr int kStage = C::kStages - 1;
  constexpr int kColumns = C::kHeadDim < C::kPvSliceColumns ? C::kHeadDim : C::kPvSliceColumns;
  auto& s = shared_storage<sm90::SharedStorage<C>>();
  fill_queries<C>(s, g_q);
  fill_tile<typename C::KeyTile>(s.k[kStage], g_k, C::kTileK, C::kHeadDim);
  fill_tile<typename C::KeyTile>(s.v_staging[C::kVStagingStages - 1], g_v, C::kTileK, C::kHeadDim);
  publish_tiles();
  if (threadIdx.x < 32 * C::kTransposers) {
    sm90::transpose_tile<C>(cuda::shared_address(s.v_staging[C::kVStagingStages - 1]),
                            cuda::shared_address(s.v[kStage]), threadIdx.x / 32, threadIdx.x % 32,
                            keys, ~0u);
  }
  publish_tiles();
  for (int i = threadIdx.x; i < C::kHeadDim * C::kTileK; i += blockDim.x) {
    g_transposed[i] = s.v[kStage][C::ValueTile::offset(i / C::kTileK, i % C::kTileK)];
  }
  if (threadIdx.x < kGroupThreads) {
    cuda::setmaxnreg_dec<C::kProducerRegisters>();
    return;
  }
  cuda::setmaxnreg_inc<C::kConsumerRegisters>();
  const sm90::Thread<C> t(threadIdx.x);
  sm90::AccS<C> acc_s;
  cuda::wgmma_fence();
  sm90::issue_qk<C>(acc_s, s, q_slot<C>(t.group), kStage);
  cuda::wgmma_wait<0>();
  cuda::fence_registers(acc_s);
#pragma unroll
  for (int i = 0; i < C::kTileK / 2; ++i) {
    const int at = t.row(i / 2 % 2) * C::kTileK + t.column(i / 4, i % 2);
    g_scores[at] = acc_s[i];
    acc_s[i] = g_p[at];
  }
  std::uint32_t a[C::kTileK / 32][4];
  sm90::pack_p_fp8<C>(a, acc_s);
#pragma unroll
  for (int first = 0; first < C::kHeadDim; first += kColumns) {
    float slice[kColumns / 2];
    cuda::wgmma_fence();
    sm90::issue_pv_slice<C, kColumns>(slice, a, s, kStage, first);
    cuda::wgmma_wait<0>();
    cuda::fence_registers(slice);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int column = core::column_of_row(first + t.column(i / 4, i % 2));
      g_out[t.row(i / 2 % 2) * C::kHeadDim + column] = slice[i];
    }
  }
}

template <typename C>
bool is_config_of(const KernelInfo& kernel) {
  return kernel.head_dim == C::kHeadDim && kernel.tile_q == C::kTileQ &&
         kernel.tile_k == C::kTileK &&
         kernel.smem_bytes == int{sizeof(cuda::sm90::SharedStorage<C>)};
}

/// Runs the configuration that matches the kernel.
template <typename C, typename... Others>
std::vector<float> two_gemms_of(const KernelInfo& kernel, const std::vector<std::uint16_t>& q,
                                const std::vector<std::uint16_t>& k,
                                const std::vector<std::uint16_t>& v) {
  if (!is_config_of<C>(kernel)) {
    if constexpr (sizeof...(Others) > 0) {
      return two_gemms_of<Others...>(kernel, q, k, v);
    } else {
      throw std::runtime_error(std::string(kernel.id) + ": add its shape to run_two_gemms()");
    }
  }
  const Array<std::uint16_t> in_q(q), in_k(k), in_v(v);
  const Array<float> out(q.size());
  launch<cuda::sm90::SharedStorage<C>>(two_gemms<C>, C::kThreads, in_q.get(), in_k.get(),
                                       in_v.get(), out.get());
  return out.host();
}

template <typename C, typename... Others>
Fp8Gemms fp8_gemms_of(const KernelInfo& kernel, const std::vector<std::uint8_t>& q,
                      const std::vector<std::uint8_t>& k, const std::vector<std::uint8_t>& v,
                      const std::vector<float>& p, int keys) {
  if (!is_config_of<C>(kernel)) {
    if constexpr (sizeof...(Others) > 0) {
      return fp8_gemms_of<Others...>(kernel, q, k, v, p, keys);
    } else {
      throw std::runtime_error(std::string(kernel.id) + ": add its shape to run_fp8_gemms()");
    }
  }
  const Array<std::uint8_t> in_q(q), in_k(k), in_v(v), transposed(v.size());
  const Array<float> in_p(p), scores(p.size()), out(q.size());
  launch<cuda::sm90::SharedStorage<C>>(fp8_gemms<C>, C::kThreads, in_q.get(), in_k.get(),
                                       in_v.get(), in_p.get(), keys, scores.get(), transposed.get(),
                                       out.get());
  return {scores.host(), transposed.host(), out.host()};
}

}  // namespace

std::vector<float> run_two_gemms(const KernelInfo& kernel, const std::vector<std::uint16_t>& q,
                                 const std::vector<std::uint16_t>& k,
                                 const std::vector<std::uint16_t>& v) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    return two_gemms_of<cuda::sm90::Config<T, 64, 192, 128, 4, 16, 512>,
                        cuda::sm90::Config<T, 64, 128, 128, 4, 16, 384>,
                        cuda::sm90::Config<T, 64, 128, 208, 2, 16, 384>,
                        cuda::sm90::Config<T, 64, 64, 128, 4, 16, 256>,
                        cuda::sm90::Config<T, 96, 192, 96, 2, 16, 512>,
                        cuda::sm90::Config<T, 128, 64, 160, 2, 16, 256>,
                        cuda::sm90::Config<T, 128, 128, 128, 2, 16, 384>,
                        cuda::sm90::Config<T, 128, 128, 160, 2, 16, 384>,
                        cuda::sm90::Config<T, 128, 128, 176, 2, 16, 384>,
                        cuda::sm90::Config<T, 192, 128, 112, 2, 16, 384>,
                        cuda::sm90::Config<T, 256, 128, 64, 2, 16, 384>>(kernel, q, k, v);
  };
  return with_element(kernel.dtype == DType::f16 ? HalfFormat::f16 : HalfFormat::bf16, run);
}

Fp8Gemms run_fp8_gemms(const KernelInfo& kernel, const std::vector<std::uint8_t>& q,
                       const std::vector<std::uint8_t>& k, const std::vector<std::uint8_t>& v,
                       const std::vector<float>& p, int keys) {
  using T = __half;  // type of the output, which this test does not use
  return fp8_gemms_of<cuda::sm90::Fp8Config<T, 64, 192, 192, 2, 16, 512>,
                      cuda::sm90::Fp8Config<T, 64, 192, 128, 4, 16, 512>,
                      cuda::sm90::Fp8Config<T, 64, 64, 128, 4, 16, 256>,
                      cuda::sm90::Fp8Config<T, 128, 192, 128, 4, 16, 512>,
                      cuda::sm90::Fp8Config<T, 256, 128, 128, 2, 16, 384>>(kernel, q, k, v, p,
                                                                           keys);
}

}  // namespace flashcore::gpu_test
