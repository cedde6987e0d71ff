// Planning: a pure function of a Problem and a DeviceInfo. It needs no GPU, so a plan for any GPU
// can be made, read and tested on any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "flashcore/problem.h"

namespace flashcore {

/// CPU instruction sets a kernel may be compiled for. Plain C++ is always there.
enum class Isa : std::int32_t {
  generic = 0,
  neon,
  avx2,
  avx512,
  plain [[deprecated("use Isa::generic")]] = generic,
};

FLASHCORE_API const char* to_string(Isa isa) noexcept;

/// What the planner knows of a device. Rates are vendors' figures or measurements; they feed
/// explain()'s floors, never a decision about correctness.
struct DeviceInfo {
  Device device;
  char name[64] = {};
  double memory_gbs = 0;       ///< main memory bandwidth, GB/s
  double f32_tflops = 0;       ///< FMA units, all cores or SMs
  double tensor16_tflops = 0;  ///< dense f16/bf16 matrix units; 0: none

  // CPU
  std::int32_t threads = 0;
  Isa isa = Isa::generic;

  // GPU
  std::int32_t compute_capability = 0;  ///< 90 for sm_90
  std::int32_t sm_count = 0;
  std::int32_t smem_per_block_bytes = 0;  ///< the opt-in limit
  std::int32_t smem_per_sm_bytes = 0;
  std::int32_t registers_per_sm = 65536;
  std::int32_t threads_per_sm = 0;
  std::int64_t l2_bytes = 0;
};

/// The device as found on this machine.
FLASHCORE_API Result<DeviceInfo> device_info(Device device) noexcept;

/// Fills in the rates of a device of this machine that are still 0, by measuring: about a quarter
/// of a second on a CPU.
FLASHCORE_API Status measure_rates(DeviceInfo& info) noexcept;

/// How many CUDA devices can be used, and when none, why in words a user can act on.
struct CudaAvailability {
  int device_count = 0;
  std::string reason;
};
FLASHCORE_API CudaAvailability cuda_availability() noexcept;

/// A device described by name: "h200", "h100", "a100", "l4", "t4", "cpu" (this machine's),
/// "cpu-neon", "cpu-avx2", "cpu-avx512", "cpu-generic".
FLASHCORE_API Result<DeviceInfo> named_device(const char* name) noexcept;

/// One row of the kernel lists (src/cuda/kernels.def, src/cpu/kernels.def).
struct KernelInfo {
  const char* id;      ///< e.g. "fwd_simt_f16_d64_q64": registry, filter, test and bench row name
  const char* family;  ///< "cpu", "simt", "sm80", "sm80_8bit" (k and v are 8-bit), "sm90",
                       ///< "sm90_e4m3" (q, k and v are): whose sources its fingerprint covers
  DeviceType device;
  DType dtype;              ///< of q, k and v
  DType probability_dtype;  ///< how P is stored: decides the error bound
  Isa isa;                  ///< CPU kernels
  std::int32_t min_compute_capability;
  std::int32_t head_dim;  ///< the largest head_dim and v_dim it takes
  std::int32_t tile_q;
  std::int32_t tile_k;
  std::int32_t threads;
  std::int32_t smem_bytes;
  std::int32_t blocks_per_sm;  ///< its registers leave room for
  bool packs_heads;  ///< a work item takes rows of a whole GQA group, not of one query head
  bool uses_tma;     ///< no bias, mask tensor, pages, splits; rows in 16-byte pieces
  bool compiled;     ///< part of this build
};

FLASHCORE_API std::span<const KernelInfo> kernels() noexcept;
FLASHCORE_API const KernelInfo* find_kernel(const char* id) noexcept;

/// Every workspace begins with this many bytes of counters and the error slot: zeroed once by
/// workspace_init(), left zero by every kernel.
inline constexpr std::size_t kWorkspaceHeaderBytes = 64 * 1024;

struct Plan {
  Problem problem;
  DeviceInfo device;
  const KernelInfo* kernel = nullptr;
  std::int32_t tile_q = 0;  ///< query rows per work item (CPU: rows of a GQA group together)
  std::int32_t tile_k = 0;  ///< keys per step of the online softmax
  /// Query heads, sharing K and V, that have rows in one work item.
  std::int32_t heads_in_tile = 1;
  std::int32_t splits = 1;  ///< key ranges computed apart
  std::int64_t keys_per_split = 0;
  bool combines_itself = false;  ///< the kernel joins its splits; no second kernel
  bool combines_in_cluster =
      false;                    ///< and does so among neighbouring SMs, if they fit one (sm_90)
  std::int64_t num_tiles = 0;   ///< independent (batch, head, query tile, split) units
  std::int64_t tail_tiles = 0;  ///< of them, at the end, that are cut into parts along the keys, so
                                ///< that no SM is idle while others do a last one (sm_90)
  std::int32_t tail_splits = 1;  ///< into so many
  std::int64_t keys_per_tail_split = 0;

  // Byte offsets into the workspace; the header comes first.
  std::size_t scratch_offset = 0;  ///< CPU: per-thread tiles
  std::size_t scratch_bytes_per_thread = 0;
  std::size_t partial_out_offset = 0;  ///< [splits, batch, q_heads, q_len, v_dim]; or what the
                                       ///< parts of cut items leave
  std::size_t partial_lse_offset = 0;  ///< [splits, batch, q_heads, q_len]
  std::size_t workspace_bytes = kWorkspaceHeaderBytes;
};

FLASHCORE_API Result<Plan> make_plan(const Problem& problem, const DeviceInfo& device) noexcept;

/// Bytes run() needs for this plan, at 256-byte alignment.
inline std::size_t workspace_bytes(const Plan& plan) noexcept { return plan.workspace_bytes; }

/// Whether run() reads or writes the workspace's header: to count, or to report what a checked call
/// finds. Where it does not, the header may hold anything, and is left as it is.
FLASHCORE_API bool uses_header(const Plan& plan) noexcept;

/// The plan in words: kernel, tiles, splits, workspace, why not the other kernels, arithmetic and
/// memory floor on the device, and which of the two bounds it.
FLASHCORE_API std::string explain(const Plan& plan);

/// Arithmetic and traffic of a problem, counted on visible (query, key) pairs where lengths are
/// fixed, on capacities otherwise.
struct Cost {
  double visible_pairs = 0;  ///< over all batches and query heads
  double flops = 0;          ///< 2 * (head_dim + v_dim) per pair
  double bytes = 0;          ///< every input read once, every output written once
};
FLASHCORE_API Cost cost(const Problem& problem) noexcept;

}  // namespace flashcore
