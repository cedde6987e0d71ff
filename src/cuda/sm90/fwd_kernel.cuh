// Attention forward on Hopper (wgmma, TMA, sm_90a): O = softmax(scale Q K^T) V in one persistent,
// warp-specialized kernel, for many query rows.
//
// One step of the 16-bit mainloop (core::consume); K' and S' belong to the next step:
//
//   producer   TMA K''              TMA V'
//   tensor     | S' = Q K'^T        | O += P V               |
//   WG0         issue both           P' = softmax(S')         rescale O, pack P'
//   WG1               the same; with ping-pong, GEMMs of WG1 run during the softmax of WG0
//
//   role        threads                       registers   file
//   scheduler   thread 32 of warpgroup 0      40 (32)     scheduler.cuh: fetches work tiles
//   producer    thread 0                      40 (32)     producer.cuh: fills the pipelines by TMA
//               pages: warps 0, 2, 3 (fp8: 0) 40 (32)     paged_producer.cuh, page_gatherer.cuh
//   transposer  warps 2, 3 of warpgroup 0     40 (32)     transpose_v.cuh: fp8 V
//   consumer    2 (3) warpgroups, 64 rows each 232 (160)  mainloop.cuh, mainloop_fp8.cuh,
//                                                         score.cuh, softmax.cuh, epilogue.cuh
//   grid        one CTA per SM; each works through its tiles: tile_q query rows of one head, or of
//               several heads that share K and V (PackGQA)
//   smem        config.cuh: q [kQStages][64, head_dim], k, v [kStages][tile_k, head_dim], 128B
//               swizzle; mbarriers; the tile queue. S stays in registers: it is the accumulator of
//               Q K^T and, packed to 16 bits, the A fragment of P V
//   barriers    core/sm90_pipeline.h. The roles are templates in core/sm90_roles.h, so that a model
//               on the CPU runs the same lines (tests/protocol)
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernel_entry.h"
#include "cuda/primitives/pdl.cuh"
#include "cuda/sm90/mainloop.cuh"
#include "cuda/sm90/mainloop_fp8.cuh"
#include "cuda/sm90/page_gatherer.cuh"
#include "cuda/sm90/paged_producer.cuh"
#include "cuda/sm90/producer.cuh"
#include "cuda/sm90/scheduler.cuh"
#include "cuda/sm90/transpose_v.cuh"

namespace flashcore::cuda::sm90 {

__device__ __forceinline__ void prefetch_tensor_maps(const Params& params) {
  prefetch_tensor_map(params.q);
  prefetch_tensor_map(params.k);
  prefetch_tensor_map(params.v);
}

/// Called by thread 0.
template <typename C>
__device__ __forceinline__ void produce(SharedStorage<C>& s, const Params& params) {
  prefetch_tensor_maps(params);
  pdl_wait();
  Producer<C> producer{{{s, params}}};
  core::produce(producer);
}

/// Called by the warps with a rank >= 0.
template <typename C>
__device__ __forceinline__ void produce_pages(SharedStorage<C>& s, const Params& params, int rank) {
  if (threadIdx.x == 0) prefetch_tensor_maps(params);
  pdl_wait();
  if constexpr (C::kGathersPages) {
    if (params.gathers_pages) {
      PageGatherer<C> producer(s, params, rank);
      return core::produce(producer);
    }
  }
  PagedProducer<C> producer(s, params, rank);
  core::produce(producer);
}

template <typename C, Path kPath>
__device__ __forceinline__ void consume(SharedStorage<C>& s, const Params& params) {
  if constexpr (C::kFp8) {
    Fp8Consumer<C, kPath> warp(s, params);
    core::consume_fp8(warp);
  } else {
    Consumer<C, kPath> warp(s, params);
    core::consume(warp);
  }
}

/// The path of a call with a bias.
template <typename C>
__device__ __forceinline__ void consume_with_bias(SharedStorage<C>& s, const Params& params) {
  if constexpr (fits_staged_bias<C>()) {
    if (params.stages_bias) return consume<C, Path::biased>(s, params);
  }
  consume<C, Path::general_biased>(s, params);
}

/// The path of a call with options.
template <typename C>
__device__ __forceinline__ void consume_with_options(SharedStorage<C>& s, const Params& params) {
  if constexpr (C::kTakesMask) {
    if (params.mask.words != nullptr) {
      return params.call.fast_path ? consume<C, Path::masked>(s, params)
                                   : consume<C, Path::general_masked>(s, params);
    }
  }
  return params.call.fast_path ? consume<C, Path::fast>(s, params)
                               : consume<C, Path::general>(s, params);
}

template <typename C, KernelEntry kEntry>
__device__ __forceinline__ void run_cta(const Params& params) {
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedStorage<C>& s = *reinterpret_cast<SharedStorage<C>*>(s_bytes);
  pdl_launch_dependents();
  const bool paged = kEntry != KernelEntry::plain && params.call.pages.table != nullptr;
  if (threadIdx.x == 0) {
    init_barriers<C>(s, paged ? C::kPageProducers : 1,
                     params.call.fault.is(InjectedFault::arrivals_too_few));
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::kProducerRegisters>();
    if (paged) {
      const int rank = page_producer_rank<C>();
      if (rank >= 0) produce_pages(s, params, rank);
    } else if (threadIdx.x == 0) {
      produce(s, params);
    }
    if (threadIdx.x == 32) {
      pdl_wait();
      SchedulerThread<C> scheduler{{{s, params}}};
      core::schedule_tiles(scheduler);
    }
    if constexpr (C::kFp8) {
      if (threadIdx.x >= 64) {
        TransposerWarp<C> transposer{
            {s, params}, warp_uniform(threadIdx.x / 32) - 2, static_cast<int>(threadIdx.x % 32)};
        core::transpose_v(transposer);
      }
    }
  } else {
    setmaxnreg_inc<C::kConsumerRegisters>();
    if constexpr (kEntry == KernelEntry::plain) {
      consume<C, Path::plain>(s, params);
    } else if constexpr (kEntry == KernelEntry::bias) {
      consume_with_bias(s, params);
    } else {
      consume_with_options(s, params);
    }
  }
}

/// For plain calls (cuda/launch.cc: is_plain).
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel(const __grid_constant__ Params params) {
  run_cta<C, KernelEntry::plain>(params);
}

/// For calls with options: pages, masks, score modifications, f32 output.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel_general(const __grid_constant__ Params params) {
  run_cta<C, KernelEntry::general>(params);
}

/// For calls with a bias and any other options.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel_bias(const __grid_constant__ Params params) {
  run_cta<C, KernelEntry::bias>(params);
}

/// For calls with a softcap and without a bias.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel_softcap(const __grid_constant__ Params params) {
  run_cta<SoftcapConfig<C>, KernelEntry::general>(params);
}

/// For plain calls with key ranges.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel_ranges(const __grid_constant__ Params params) {
  run_cta<RangesConfig<C>, KernelEntry::plain>(params);
}

/// For other calls with key ranges.
template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    fwd_kernel_general_ranges(const __grid_constant__ Params params) {
  run_cta<RangesConfig<C>, KernelEntry::general>(params);
}

/// The kernels for calls with key ranges; null if C has none.
template <typename C>
void (*ranges_kernel(KernelEntry entry))(Params) {
  if constexpr (C::kPackGqa) {
    return entry == KernelEntry::ranges ? &fwd_kernel_ranges<C> : &fwd_kernel_general_ranges<C>;
  }
  return nullptr;
}

/// The kernel for calls with a bias; null if C takes none.
template <typename C>
void (*bias_kernel())(Params) {
  if constexpr (C::kTakesBias) return &fwd_kernel_bias<C>;
  return nullptr;
}

/// The kernel for calls with a softcap.
template <typename C>
void (*softcap_kernel())(Params) {
  if constexpr (C::kShape.caps_in_own_kernel()) return &fwd_kernel_softcap<C>;
  return &fwd_kernel_general<C>;
}

}  // namespace flashcore::cuda::sm90
