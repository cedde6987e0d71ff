// Programmatic dependent launch (sm_90): a kernel starts while its predecessor in the stream still
// runs, and waits before it reads data of earlier kernels.
#pragma once

namespace flashcore::cuda {

/// Lets the next kernel in the stream start as soon as all CTAs of this one run.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the writes of earlier kernels in the stream are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashcore::cuda
