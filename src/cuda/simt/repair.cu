// Gradients of heads with inputs that are not finite. The Hopper kernel multiplies weights of 0
// with operands of hidden pairs, and 0 * NaN is NaN. So it marks such heads, and this kernel,
// launched behind it, computes them again. Without any, it reads the marks and ends.
#include "cuda/registry.h"
#include "cuda/simt/bwd.cuh"

namespace flashcore::cuda {
namespace {

using Config = simt::BwdConfig<256, kRepairRows, kRepairRows, 1, 0, kRepairThreads>;
static_assert(sizeof(simt::BwdStorage<Config>) == kRepairBytes);

__device__ __forceinline__ bool any_nonfinite_head(const core::BackwardParams& p) {
  const std::int64_t heads = std::int64_t{p.fwd.batch} * p.fwd.kv_heads;
  bool any = false;
  for (std::int64_t i = threadIdx.x; i < heads; i += kRepairThreads) {
    any |= p.nonfinite_heads[i] != 0;
  }
  return __syncthreads_or(any) != 0;
}

__global__ void __launch_bounds__(kRepairThreads, 2)
    repair_kernel(const __grid_constant__ core::BackwardParams p) {
  extern __shared__ __align__(16) unsigned char s_bytes[];
  if (!any_nonfinite_head(p)) return;
  simt::compute_tiles<Config>(*reinterpret_cast<simt::BwdStorage<Config>*>(s_bytes), p,
                              [&](const core::BackwardTile& tile) {
                                const bool keys = tile.output == core::BackwardOutput::dkdv;
                                const std::int32_t head = keys ? tile.head : tile.head / p.group;
                                return p.nonfinite_heads[tile.b * p.fwd.kv_heads + head] != 0;
                              });
}

}  // namespace

const void* repair_entry() noexcept { return reinterpret_cast<const void*>(&repair_kernel); }

}  // namespace flashcore::cuda
