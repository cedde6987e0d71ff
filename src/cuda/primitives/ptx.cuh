// Thin wrappers of the PTX instructions the tensor-core kernels use (sm_80 and up).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashcore::cuda {

/// The same value, of which the compiler knows nothing: what is computed from it inside a loop
/// stays there. Addresses kept in registers over a loop cost more than computing them again.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* s_data) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(s_data));
}

/// Copies `bytes` (0 … 16) from global to shared memory in the background and fills the rest of the
/// 16 bytes with zeros. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

/// The same with `bytes` (0 or 4) of 4; addresses are multiples of 4.
__device__ __forceinline__ void cp_async_4(std::uint32_t s_to, const void* g_from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(s_to), "l"(g_from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(std::uint32_t s_to, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" : : "r"(s_to), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_16(std::uint32_t s_to, const std::uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(s_to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/// Ends a group of copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `kPending` of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8×8 matrices of 16-bit elements; see core/mma_layout.h for the addresses.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

/// An 8×8 matrix of 16-bit elements, a row in each quad of lanes, transposed.
__device__ __forceinline__ std::uint32_t movmatrix_trans(std::uint32_t r) {
  std::uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
  return transposed;
}

/// c += a b, 16 × 8 × 16, f32 accumulators.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                                     std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4],
                                                            const std::uint32_t (&a)[4],
                                                            std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A kernel may be launched while the one before it in the stream still runs (programmatic dependent
// launch, sm_90): its blocks then wait here before they touch memory.

/// The next kernel's blocks may come as soon as all of this one's have.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Everything earlier kernels of the stream wrote is there.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Counts up to `last`, then from 0 again; returns the count before. Whoever counts later sees what
/// this thread, and those it met at a barrier, wrote before: far less than two __threadfence().
__device__ __forceinline__ std::uint32_t atomic_inc_acq_rel(std::uint32_t* g_counter,
                                                            std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(g_counter), "r"(last)
               : "memory");
  return before;
}

/// Two floats as 16-bit elements in one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}

template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}

}  // namespace flashcore::cuda
