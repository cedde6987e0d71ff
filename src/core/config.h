// Macros for code that runs on the host and on the device.
#pragma once

// Inlining is forced for correctness, not for speed: of several out-of-line copies the linker keeps
// one, and that could be the one of an AVX-512 object. scripts/checks/isa_leaks looks for such
// copies.
#if defined(__CUDACC__)
#define FLASHCORE_HD __host__ __device__ __forceinline__
#else
#define FLASHCORE_HD inline __attribute__((always_inline))
#endif

// Precedes a loop that a kernel must not unroll.
#if defined(__CUDACC__)
#define FLASHCORE_LOOP _Pragma("unroll 1")
#else
#define FLASHCORE_LOOP
#endif

// Precedes a role: code of a warp, in a kernel or in the CPU model (sm80_roles.h, sm90_roles.h).
#if defined(__CUDACC__)
#define FLASHCORE_ROLE __device__ __forceinline__
#else
#define FLASHCORE_ROLE inline
#endif
