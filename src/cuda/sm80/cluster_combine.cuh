// Split-KV in a cluster (sm_90, up to 8 CTAs): the CTAs of a work tile send each other their
// results through distributed shared memory, and each combines a share of the columns.
// core/cluster_buffer.h has the layout of the exchange, core/sm80_roles.h its order.
#pragma once

#include "core/sm80_roles.h"
#include "cuda/primitives/cluster.cuh"
#include "cuda/sm80/output.cuh"

namespace flashcore::cuda::sm80 {

using core::BufferBarrier;

/// The buffer behind a CTA's SharedStorage (core::ClusterBuffer), filled by the cluster's CTAs.
template <typename C>
struct ClusterBuffer {
  float4* s_out;        // [pass][split][kChunk]
  float2* s_row_stats;  // [pass][split][kChunk]

  __device__ __forceinline__ explicit ClusterBuffer(SharedStorage<C>& s)
      : s_out(at<float4>(s, kLayout.outputs)), s_row_stats(at<float2>(s, kLayout.row_stats)) {}

  /// Address `bytes` from the start of the buffer.
  template <typename T>
  static __device__ __forceinline__ T* at(SharedStorage<C>& s, int bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(&s + 1) + bytes);
  }
  static __device__ __forceinline__ std::uint64_t& barrier(SharedStorage<C>& s,
                                                           BufferBarrier barrier) {
    return at<std::uint64_t>(s, 0)[core::mbarrier_index(barrier)];
  }

 private:
  static constexpr core::ClusterBuffer::Layout kLayout =
      core::ClusterBuffer::layout_of_ctas(C::kTileQ, C::kHeadDim);
  static_assert(core::ClusterBuffer::kOutBytes == sizeof(float4) &&
                core::ClusterBuffer::kRowStatsBytes == sizeof(float2) &&
                core::ClusterBuffer::kBarrierBytes == 2 * sizeof(std::uint64_t));
};

/// A thread of a cluster, for the roles of core/sm80_roles.h.
template <typename C>
struct ClusterThread {
  static constexpr bool kSwapAB = C::kSwapAB;
  static constexpr int kThreads = C::kThreads;
  static constexpr int kWarpsN = C::kWarpsN;
  static constexpr int kRowVec4s = C::kHeadDim / 4;
  SharedStorage<C>& s;
  const AttentionParams& p;
  const WorkTile& work;

  __device__ __forceinline__ bool has_fault(InjectedFault fault) const { return p.fault.is(fault); }
  __device__ __forceinline__ bool has_first_thread() const { return threadIdx.x == 0; }
  __device__ __forceinline__ int index() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int rank() const { return work.split; }
  __device__ __forceinline__ int splits() const { return p.splits; }
  __device__ __forceinline__ int rows() const { return work.rows; }
  __device__ __forceinline__ int vec4s() const { return work.rows * kRowVec4s; }

  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void init(int arrivals) const {
    init_barrier(ClusterBuffer<C>::barrier(s, kBarrier), arrivals);
  }
  __device__ __forceinline__ void fence_init() const { fence_barrier_init(); }
  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void arrive_expect_tx(int bytes) const {
    cuda::arrive_expect_tx(ClusterBuffer<C>::barrier(s, kBarrier), bytes);
  }
  template <BufferBarrier kBarrier>
  __device__ __forceinline__ void wait() const {
    cuda::wait(ClusterBuffer<C>::barrier(s, kBarrier), 0);
  }
  __device__ __forceinline__ void arrive_at_cluster() const { cuda::arrive_at_cluster(); }
  __device__ __forceinline__ void wait_for_cluster() const { cuda::wait_for_cluster(); }
};

/// Destination of vec4 `index` of a CTA's results, as cluster addresses.
struct PeerSlot {
  std::uint32_t out, row_stats, barrier;

  template <typename C>
  __device__ __forceinline__ PeerSlot(SharedStorage<C>& s, const AttentionParams& p,
                                      const WorkTile& work, int index) {
    const ClusterBuffer<C> buffer(s);
    const core::ClusterSlot to = core::peer_slot_of_vec4(index, p.splits, work.split);
    out = cluster_address(buffer.s_out + to.index, to.rank);
    row_stats = cluster_address(buffer.s_row_stats + to.index, to.rank);
    barrier = cluster_address(&buffer.barrier(s, BufferBarrier::vec4s), to.rank);
  }
};

/// The vec4 that a thread combines in a pass, and where its output goes.
struct CombinedVec4 {
  int vec4;
  Row row;
  std::int64_t offset;

  template <typename C>
  __device__ __forceinline__ static CombinedVec4 of_pass(const AttentionParams& p,
                                                         const WorkTile& work, int pass) {
    CombinedVec4 combined;
    combined.vec4 =
        core::combined_vec4(pass, p.splits, work.split, static_cast<int>(threadIdx.x % 32));
    combined.row = row_of(p, work, min(combined.vec4 / (C::kHeadDim / 4), work.rows - 1));
    combined.offset = output_offset(p, work, combined.row);
    return combined;
  }
};

/// A thread's first destination and first combined vec4. Computed while other warps still work, so
/// that the addresses cost no latency.
template <typename C>
struct ClusterExchange {
  PeerSlot peer_slot;
  CombinedVec4 combined;

  __device__ __forceinline__ ClusterExchange(SharedStorage<C>& s, const AttentionParams& p,
                                             const WorkTile& work)
      : peer_slot(s, p, work, threadIdx.x),
        combined(CombinedVec4::of_pass<C>(p, work, threadIdx.x / 32)) {
    // Keeps the compiler from sinking the computation to its use.
    asm volatile(""
                 : "+r"(peer_slot.out), "+r"(peer_slot.row_stats), "+r"(peer_slot.barrier),
                   "+r"(combined.vec4), "+r"(combined.row.query), "+r"(combined.row.head),
                   "+l"(combined.offset));
  }
};

/// A thread of a CTA that sends its results as a whole.
template <typename C, bool kFastPath>
struct CtaExchangeThread : ClusterThread<C> {
  using PeerSlot = sm80::PeerSlot;
  using CombinedVec4 = sm80::CombinedVec4;
  static constexpr int kRowVec4s = C::kHeadDim / 4;
  static constexpr int kMaxSplits = core::ClusterBuffer::kMaxSplits;

  __device__ __forceinline__ int first_vec4() const { return threadIdx.x; }
  __device__ __forceinline__ PeerSlot peer_slot(int index) const {
    return PeerSlot(this->s, this->p, this->work, index);
  }
  __device__ __forceinline__ CombinedVec4 combined_in(int pass) const {
    return CombinedVec4::of_pass<C>(this->p, this->work, pass);
  }

  __device__ __forceinline__ void send_vec4(const PeerSlot& to, int index) const {
    float x[4] = {};
    const core::SoftmaxState<float> state =
        reduce_key_warps<C>(this->s.staged, index / kRowVec4s, 4 * (index % kRowVec4s), x);
    store_cluster(to.out, x, to.barrier);
    store_cluster(to.row_stats, {state.max, state.sum}, to.barrier);
  }

  __device__ __forceinline__ void combine_vec4(int pass, const CombinedVec4& combined) const {
    const AttentionParams& p = this->p;
    const WorkTile& work = this->work;
    const int column = 4 * (combined.vec4 % kRowVec4s);
    float x[4] = {};
    const ClusterBuffer<C> buffer(this->s);
    const int lane = threadIdx.x % 32;
    float4 out[kMaxSplits];
    float max[kMaxSplits], sum[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const int slot = core::vec4_slot(pass, p.splits, i, lane);
      const bool exists = i < p.splits;
      const float2 row_stats =
          exists ? buffer.s_row_stats[slot] : make_float2(core::negative_infinity<float>(), 0.f);
      max[i] = row_stats.x;
      sum[i] = row_stats.y;
      out[i] = exists ? buffer.s_out[slot] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    core::SoftmaxState<float> all{largest(max), 0.f};
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) {
      const float weight = core::partial_weight<FastMath>(max[i], all.max);
      all.sum = fmaf(sum[i], weight, all.sum);
      const float applied =
          p.fault.is(InjectedFault::combine_double_counts) ? weight * weight : weight;
      x[0] = fmaf(out[i].x, applied, x[0]);
      x[1] = fmaf(out[i].y, applied, x[1]);
      x[2] = fmaf(out[i].z, applied, x[2]);
      x[3] = fmaf(out[i].w, applied, x[3]);
    }
    const FinalRow final = finalize_row(p, combined.row, all, x);
    if (!fault_skips_row(p, work, combined.row)) {
      assert_row(p, work, combined.row, final, x);
      if (column == 0 && p.lse != nullptr) store_lse(p, work, combined.row, final.lse(p.fault));
      if (kFastPath || column < p.v_dim) {
        store_output_columns<C, kFastPath>(p, combined.offset, column, x);
      }
    }
  }
};

}  // namespace flashcore::cuda::sm80
