// Context parallelism: one attention over a sequence whose rows are divided between ranks.
//
//   flashcore::DistributedProblem problem;                     // shapes, mask, ranks
//   auto plan = flashcore::plan_distributed(problem, speeds);  // scheme, reason, bytes, time
//   std::puts(flashcore::explain(*plan).c_str());              // needs no GPU and no other rank
//
//   flashcore::Comm comm{...};                                 // three callbacks: MPI, NCCL, ...
//   flashcore::distributed_attention(comm, tensors, options);  // this rank's rows
//
// FlashCore has no transport. docs/distributed.md describes schemes, placement and contracts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "flashcore/backward.h"

namespace flashcore {

/// The numbers are part of the C ABI.
enum class Scheme : std::int32_t {
  automatic = 0,
  ring = 1,     ///< K and V travel from rank to rank
  gather = 2,   ///< each rank receives all keys that its rows see
  ulysses = 3,  ///< an all-to-all exchanges rows for heads
  two_d = 4,    ///< "2d": heads inside a machine, a ring between machines
  halo = 5,     ///< windows: each rank receives the keys inside the window
  decode = 6,   ///< plans of distributed_decode(); never chosen, and no scheme of an attention
};

enum class Sharding : std::int32_t {
  zigzag = 0,      ///< rank r of c holds parts r and 2c-1-r of 2c equal parts
  contiguous = 1,  ///< rank r holds the rows after those of rank r-1
};

FLASHCORE_API const char* to_string(Scheme scheme) noexcept;

/// One attention over all ranks. Scheme::decode: q_rows are the new queries, the same number on
/// every rank, and k_rows the keys of the longest sequence that each rank holds, see
/// decode_length().
struct DistributedProblem {
  DType dtype = DType::bf16;
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1, head_dim = 128, v_dim = 128;
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;  ///< as in Options
  Reproducibility reproducibility = Reproducibility::deterministic;
  std::vector<std::int64_t> q_rows, k_rows;  ///< of each rank; zigzag: as distributed_rows() says
  /// Packed documents: the first row of each, then the length. Empty: one document.
  std::vector<std::int64_t> documents;
  Sharding sharding = Sharding::zigzag;
  Scheme scheme = Scheme::automatic;
  std::int32_t ranks_per_node = 8;
  std::int32_t head_ranks = 0;  ///< two_d: ranks that divide the heads; 0: chosen
  bool by_heads = false;        ///< decode: see DecodeOptions
  /// Ulysses and two_d: distributed_backward() exchanges q, k, v, out and lse again. False: the
  /// caller has kept them by heads.
  bool separate_backward = false;
};

/// The rows of each rank, as equal as possible.
FLASHCORE_API std::vector<std::int64_t> distributed_rows(std::int64_t length, std::int32_t ranks,
                                                         Sharding sharding);

struct LinkSpeed {
  double bandwidth = 0;  ///< bytes per second in one direction
  double latency = 0;    ///< seconds until the first byte arrives
};
/// Nominal speeds: "nvlink", "pcie", "infiniband" or "ethernet".
FLASHCORE_API Result<LinkSpeed> link_speed(const char* name) noexcept;

struct ClusterSpeeds {
  LinkSpeed link{450e9, 10e-6};                            ///< inside a machine
  LinkSpeed net{50e9, 20e-6};                              ///< between machines
  double forward_flops = 650e12, backward_flops = 450e12;  ///< of the attention kernels
  double memory_bandwidth = 4.8e12;  ///< bytes per second of device memory, for decode
};
/// Sets the FLOP/s and the memory bandwidth of a device: "h200", "h100", "a100" or "cpu".
FLASHCORE_API Status set_device_speed(ClusterSpeeds& speeds, const char* name) noexcept;
/// {"links": {name: [bandwidth, latency]}, "devices": {name: [forward, backward, memory]}}
FLASHCORE_API std::string speeds_json();

/// A step on the rank that sends most in it.
struct DistributedStep {
  std::string name;
  std::int64_t bytes = 0;
  double transfer_s = 0;
  double hidden_s = 0;  ///< the part of transfer_s that is behind work
};

/// The costs of one direction, forward or backward. Nothing is measured.
struct DistributedCosts {
  std::vector<DistributedStep> steps;
  std::vector<std::int64_t> bytes;  ///< sent by each of DistributedPlan::sampled
  double work_s = 0;                ///< of the rank with most work

  FLASHCORE_API double transfer_s() const noexcept;
  /// The share of the time of messages that is behind work; 1 if nothing is sent.
  FLASHCORE_API double hidden() const noexcept;
  FLASHCORE_API double total_s() const noexcept;
};

struct DistributedPlan {
  DistributedProblem problem;
  Scheme scheme = Scheme::ring;  ///< never automatic
  std::int32_t head_ranks = 1;
  std::string reason;
  std::vector<std::int32_t> sampled;  ///< all ranks; of many, the first, the middle and the last
  DistributedCosts forward, backward;
};

/// Chooses the scheme and head_ranks, and says why. Reads no rows.
struct SchemeChoice {
  Scheme scheme = Scheme::ring;
  std::int32_t head_ranks = 1;
  std::string reason;
};
FLASHCORE_API Result<SchemeChoice> choose_scheme(const DistributedProblem& problem) noexcept;

FLASHCORE_API Result<DistributedPlan> plan_distributed(const DistributedProblem& problem,
                                                       const ClusterSpeeds& speeds) noexcept;

/// (step, bytes) that one rank sends, in order.
struct SentBytes {
  std::string step;
  std::int64_t bytes = 0;
};
FLASHCORE_API Result<std::vector<SentBytes>> sent_bytes(const DistributedProblem& problem,
                                                        std::int32_t rank, bool backward) noexcept;

FLASHCORE_API std::string explain(const DistributedPlan& plan);
FLASHCORE_API std::string plan_json(const DistributedPlan& plan);

/// The engine that moves data, as three callbacks over all ranks. A callback returns 0, or another
/// number for a failure. `stream` is that of the call: with a stream, a callback enqueues its work
/// there (NCCL), or synchronises it first (MPI). Memory is on the device of the tensors, except
/// that headers, of 512 bytes a rank, are in host memory and have a null stream.
struct Comm {
  void* context = nullptr;
  std::int32_t rank = 0, size = 1;
  /// Sends to one rank and receives from another. 0 bytes: there is no message in that direction.
  std::int32_t (*sendrecv)(void* context, const void* send, std::size_t send_bytes, std::int32_t to,
                           void* recv, std::size_t recv_bytes, std::int32_t from,
                           void* stream) = nullptr;
  /// Rank r gets send_bytes[r] bytes; messages are in order of ranks without gaps.
  std::int32_t (*all_to_all)(void* context, const void* send, const std::size_t* send_bytes,
                             void* recv, const std::size_t* recv_bytes, void* stream) = nullptr;
  /// Every rank gets the messages of all ranks, in order. recv_bytes[rank] bytes are this rank's.
  std::int32_t (*all_gather)(void* context, const void* send, void* recv,
                             const std::size_t* recv_bytes, void* stream) = nullptr;
};

struct DistributedOptions {
  Scheme scheme = Scheme::automatic;
  Sharding sharding = Sharding::zigzag;
  std::int32_t ranks_per_node = 0;  ///< 0: all ranks are in one machine
  std::int32_t head_ranks = 0;
  /// Packed documents, in host memory: the first row of each in the whole sequence, then its
  /// length. A document may span ranks. Every sequence of a batch has the same. Empty: one
  /// document.
  std::span<const std::int64_t> documents{};
};

/// Attention of this rank's rows over the keys of all ranks. Every rank makes the call, with its
/// shard of q, k, v, out and lse (dense, see Tensors), and the whole sinks. Of the options, causal,
/// window_left, window_right, scale, softcap and reproducibility apply. Contiguous shards may have
/// any lengths, also 0. Last dimensions must be contiguous.
///
/// The ranks first compare shapes, types and options: if they disagree, every rank returns the same
/// invalid_argument before any data moves. A callback that fails ends the call with `internal`;
/// the message names the scheme, the step and the peer. The call allocates its buffers.
FLASHCORE_API Status distributed_attention(const Comm& comm, const Tensors& tensors,
                                           const Options& options,
                                           const DistributedOptions& distributed = {},
                                           Stream stream = nullptr) noexcept;

/// The bytes of workspace that distributed_backward() needs on a rank. The options of the call are
/// those of the problem.
FLASHCORE_API Result<std::size_t> distributed_backward_workspace(const DistributedProblem& problem,
                                                                 std::int32_t rank,
                                                                 Device device = {}) noexcept;

/// Gradients of distributed_attention(). Every rank makes the call, with its shards: those of the
/// forward call, of which out and lse are inputs here, and those of dout, dlse (or not given), dq,
/// dk and dv, in q's type. dsinks, if given, is this rank's part of the sum over ranks. Sums over
/// ranks are f32, in a fixed order: the same bits for the same number of ranks.
///
/// Mistakes are found as in distributed_attention(), before data moves. The workspace is 256-byte
/// aligned and needs no initialisation; without one the call allocates its buffers.
FLASHCORE_API Status distributed_backward(const Comm& comm, const Tensors& tensors,
                                          const Gradients& gradients, const Options& options,
                                          const DistributedOptions& distributed = {},
                                          Workspace workspace = {},
                                          Stream stream = nullptr) noexcept;

struct DecodeOptions {
  std::int64_t interleave = 1;  ///< key p is on rank (p / interleave) % size
  /// False: every rank gets the whole result, by all-gather. True: each rank gets its
  /// q_heads / size heads, by all-to-all; out is then [batch, q_heads / size, q_len, v_dim].
  bool by_heads = false;
};

/// How many of the first `length` keys of a sequence a rank holds.
FLASHCORE_API std::int64_t decode_length(std::int64_t length, std::int32_t rank, std::int32_t ranks,
                                         std::int64_t interleave) noexcept;

/// A few new queries, the same on all ranks, over a KV cache whose keys are divided between ranks.
/// k and v hold this rank's keys, dense or paged (block_table). `lengths`, in host memory, are the
/// lengths of the whole sequences, with the keys of the new queries. out has q's type. A rank
/// attends to its keys before the ranks compare their arguments, so that whatever is wrong on one
/// rank is an error on all.
FLASHCORE_API Status distributed_decode(const Comm& comm, const Tensors& tensors,
                                        std::span<const std::int32_t> lengths,
                                        const Options& options, const DecodeOptions& decode = {},
                                        Stream stream = nullptr) noexcept;

}  // namespace flashcore
