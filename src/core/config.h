// Marks for code that runs on the host and on the device.
#pragma once

// Forced inlining is not for speed: an out-of-line copy compiled in an AVX-512 object could be the
// one the linker keeps for everybody. scripts/checks/isa_leaks looks for such copies.
#if defined(__CUDACC__)
#define FLASHCORE_HD __host__ __device__ __forceinline__
#else
#define FLASHCORE_HD inline __attribute__((always_inline))
#endif

// In front of a loop that a kernel must not unroll.
#if defined(__CUDACC__)
#define FLASHCORE_LOOP _Pragma("unroll 1")
#else
#define FLASHCORE_LOOP
#endif

// In front of a role: what a warp of a kernel, or of a model on the CPU, does (sm80_roles.h,
// sm90_roles.h).
#if defined(__CUDACC__)
#define FLASHCORE_ROLE __device__ __forceinline__
#else
#define FLASHCORE_ROLE inline
#endif
