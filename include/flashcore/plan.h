// Planning: a pure function of a Problem and a DeviceInfo. It needs no GPU: a plan for any GPU can
// be made, printed and tested on any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "flashcore/problem.h"

namespace flashcore {

/// CPU instruction sets with kernels. `generic` is portable C++ and always available.
enum class Isa : std::int32_t {
  generic = 0,
  neon,
  avx2,
  avx512,
  vnni,  ///< integer dot products on top of avx512
  amx,   ///< AMX bf16 on top of vnni
  plain [[deprecated("use Isa::generic")]] = generic,
};

FLASHCORE_API const char* to_string(Isa isa) noexcept;

/// The properties of a device that the planner uses. Rates are datasheet figures or measurements.
/// They feed the roofline bounds of explain() and the cycle models, never a correctness decision.
struct DeviceInfo {
  Device device;
  char name[64] = {};
  double memory_gbs = 0;       ///< main memory bandwidth, GB/s
  double f32_tflops = 0;       ///< FMA units, all cores or SMs
  double tensor16_tflops = 0;  ///< dense f16/bf16 tensor cores; 0: none

  // CPU
  std::int32_t threads = 0;
  Isa isa = Isa::generic;

  // GPU
  std::int32_t compute_capability = 0;  ///< 90 for sm_90
  std::int32_t sm_count = 0;
  std::int32_t smem_per_block_bytes = 0;  ///< opt-in limit of a CTA
  std::int32_t smem_per_sm_bytes = 0;
  std::int32_t registers_per_sm = 65536;
  std::int32_t threads_per_sm = 0;
  std::int64_t l2_bytes = 0;
};

/// A device of this machine.
FLASHCORE_API Result<DeviceInfo> device_info(Device device) noexcept;

/// Measures the rates of a device of this machine that are still 0. Takes about a quarter of a
/// second on a CPU.
FLASHCORE_API Status measure_rates(DeviceInfo& info) noexcept;

/// The number of usable CUDA devices. If it is 0, `reason` says why.
struct CudaAvailability {
  int device_count = 0;
  std::string reason;
};
FLASHCORE_API CudaAvailability cuda_availability() noexcept;

/// A device by name: "h200", "h100", "a100", "l4", "t4", "cpu" (the CPU of this machine),
/// "cpu-neon", "cpu-avx2", "cpu-avx512", "cpu-amx", "cpu-generic".
FLASHCORE_API Result<DeviceInfo> named_device(const char* name) noexcept;

enum class Operation : std::int32_t { fwd, bwd };

/// A group of kernels that share sources and hardware requirements.
enum class Family : std::int32_t { cpu, simt, sm80, sm90 };

/// The element formats of q, k and v that a kernel is compiled for.
enum class Inputs : std::int32_t {
  native,  ///< q, k and v in the kernel's dtype; kernels without tensor cores also dequantize
  kv8,     ///< 8-bit k and v, dequantized to f16; q in the kernel's dtype or 8-bit
  fp8,     ///< e4m3 q, k and v, multiplied by 8-bit tensor cores
};

/// Options and layouts that a problem needs or a kernel implements: a bit set.
enum class Features : std::uint32_t {
  none = 0,
  bias = 1u << 0,
  mask = 1u << 1,  ///< a boolean mask or a block mask
  alibi = 1u << 2,
  softcap = 1u << 3,
  sinks = 1u << 4,
  window = 1u << 5,
  varlen = 1u << 6,
  paged = 1u << 7,
  any_stride = 1u << 8,  ///< rows that TMA cannot read or 8-byte stores cannot write
  f32_out = 1u << 9,     ///< an f32 output of 16-bit inputs
  partial = 1u << 10,
  num_splits = 1u << 11,              ///< more than one split, requested by the caller
  block_scales = 1u << 12,            ///< one scale per block of rows of an 8-bit tensor
  batch_invariant_scales = 1u << 13,  ///< block scales of v in a batch-invariant call
};
constexpr Features operator|(Features a, Features b) noexcept {
  return static_cast<Features>(static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b));
}
constexpr Features operator&(Features a, Features b) noexcept {
  return static_cast<Features>(static_cast<std::uint32_t>(a) & static_cast<std::uint32_t>(b));
}
constexpr Features operator~(Features a) noexcept {
  return static_cast<Features>(~static_cast<std::uint32_t>(a));
}
constexpr bool any(Features features) noexcept { return features != Features::none; }

/// One row of the kernel lists (src/cuda/kernels.def, src/cpu/kernels.def).
struct KernelInfo {
  const char* id;  ///< "fwd_simt_f16_d64_q64": its name in --kernel, tests and benchmark rows
  Operation op;
  Family family;
  Inputs inputs;
  DeviceType device;
  DType dtype;              ///< compute type: of native q, k and v
  DType probability_dtype;  ///< storage type of P; it sets the error bound
  Isa isa;                  ///< of CPU kernels
  std::int32_t min_compute_capability;
  std::int32_t max_compute_capability;  ///< of the GPUs that run its machine code or its PTX
  std::int32_t head_dim;                ///< largest head_dim
  std::int32_t v_dim;                   ///< largest v_dim
  std::int32_t tile_q;
  std::int32_t tile_k;  ///< 0: chosen by the plan
  std::int32_t threads;
  std::int32_t smem_bytes;
  std::int32_t blocks_per_sm;  ///< CTAs that the kernel's registers allow on an SM
  Features features;
  bool compiled;  ///< part of this build

  /// "cpu", "simt", "sm80", "sm80_8bit" (kv8), "sm90" or "sm90_e4m3" (fp8): the name in JSON,
  /// benchmark rows and source_fingerprint().
  FLASHCORE_API const char* family_name() const noexcept;
};

FLASHCORE_API std::span<const KernelInfo> kernels() noexcept;
FLASHCORE_API const KernelInfo* find_kernel(const char* id) noexcept;

/// Size of the workspace header: counters and the error slot. workspace_init() zeroes it once, and
/// every kernel leaves it zero.
inline constexpr std::size_t kWorkspaceHeaderBytes = 64 * 1024;

/// The method that combines the partial results of KV splits.
enum class CombineMode : std::int32_t {
  none,      ///< one split: nothing to combine
  kernel,    ///< a second kernel combines them
  last_cta,  ///< the last CTA of a tile to finish combines them
  cluster,   ///< the CTAs of a cluster exchange them in shared memory; last_cta if it does not fit
};

struct Plan {
  Problem problem;
  DeviceInfo device;
  const KernelInfo* kernel = nullptr;
  std::int32_t tile_q = 0;         ///< query rows per work tile
  std::int32_t tile_k = 0;         ///< keys per step of the online softmax
  std::int32_t heads_in_tile = 1;  ///< PackGQA: query heads whose rows share a work tile
  std::int32_t splits = 1;         ///< split-KV: key ranges computed independently
  std::int64_t keys_per_split = 0;
  CombineMode combine = CombineMode::none;
  union {
    std::int64_t num_tiles = 0;  ///< work tiles: (batch, head, query tile, split)
    [[deprecated("use num_tiles")]] std::int64_t work_items;
  };
  union {
    /// Tiles of the last partial wave that are split along the keys (sm_90).
    std::int64_t tail_tiles = 0;
    [[deprecated("use tail_tiles")]] std::int64_t cut_items;
  };
  union {
    std::int32_t tail_splits = 1;  ///< splits of each of them
    [[deprecated("use tail_splits")]] std::int32_t item_parts;
  };
  union {
    std::int64_t keys_per_tail_split = 0;
    [[deprecated("use keys_per_tail_split")]] std::int64_t keys_per_part;
  };
  /// Key ranges of a batch-invariant call (sm_90): a row's keys are read in parts of
  /// keys_per_range, and the results of the parts are merged in order. 1: all keys at once.
  std::int32_t key_ranges = 1;      ///< most ranges of a row
  std::int64_t keys_per_range = 0;  ///< depends on the kernel only
  bool ranges_apart = false;        ///< on several CTAs, which changes no bit

  // Byte offsets into the workspace. The header comes first.
  std::size_t scratch_offset = 0;  ///< CPU: tiles of each thread
  std::size_t scratch_bytes_per_thread = 0;
  /// [splits, batch, q_heads, q_len, v_dim], or the partial results of tail splits or key ranges.
  std::size_t partial_out_offset = 0;
  std::size_t partial_lse_offset = 0;  ///< [splits, batch, q_heads, q_len]
  std::size_t packed_mask_offset = 0;  ///< boolean or block mask as bits (large tiles)
  std::size_t workspace_bytes = kWorkspaceHeaderBytes;
};

FLASHCORE_API Result<Plan> make_plan(const Problem& problem, const DeviceInfo& device) noexcept;

/// Bytes run() needs for this plan, at 256-byte alignment.
inline std::size_t workspace_bytes(const Plan& plan) noexcept { return plan.workspace_bytes; }

/// True if run() reads or writes the workspace header: for counters, or for errors of a checked
/// call. Otherwise the header may hold anything and stays as it is.
FLASHCORE_API bool uses_header(const Plan& plan) noexcept;

/// The plan as text: kernel, tiles, splits, workspace, roofline bounds, and the reason against
/// every other kernel.
FLASHCORE_API std::string explain(const Plan& plan);

/// Arithmetic and memory traffic of a problem. Counts visible (query, key) pairs; variable lengths
/// count with their capacities.
struct Cost {
  double visible_pairs = 0;  ///< over all batches and query heads
  double flops = 0;          ///< 2 * (head_dim + v_dim) per pair
  double bytes = 0;          ///< every input read once, every output written once
};
FLASHCORE_API Cost cost(const Problem& problem) noexcept;

}  // namespace flashcore
