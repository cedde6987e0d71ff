// The C++ API in one include.
//
//   auto problem = flashcore::make_problem(tensors, {.causal = true});
//   auto plan = flashcore::make_plan(*problem, *flashcore::device_info({}));
//   flashcore::Workspace workspace{buffer, flashcore::workspace_bytes(*plan)};
//   flashcore::workspace_init(workspace);            // once per buffer
//   flashcore::run(*plan, tensors, workspace);       // any number of times
//
// run() allocates nothing, does not synchronise and copies nothing to the host, so CUDA graphs can
// capture it. Every function may be called from any thread. A workspace is for one call at a time.
//
// CUDA graphs: initialise the workspace before the capture and capture only run(). Kernels leave
// the header zero, so the graph needs no memset. It has one kernel per call, and a second one if
// the plan combines its splits in a separate kernel. Calls that are captured on one stream may
// share a workspace. Each other stream of the capture, each other graph, and calls outside of
// graphs need their own.
#pragma once

#include <span>
#include <string>

#include "flashcore/plan.h"
#include "flashcore/problem.h"
#include "flashcore/status.h"
#include "flashcore/types.h"

namespace flashcore {

/// A cudaStream_t; null: the default stream. CPU calls ignore it and are synchronous.
using Stream = void*;

struct Workspace {
  void* data = nullptr;  ///< 256-byte aligned, on the problem's device
  std::size_t bytes = 0;
  Device device{};
  /// Null: data begins with the header. Otherwise a separate header of kWorkspaceHeaderBytes,
  /// 256-byte aligned, on the same GPU. data then has workspace_bytes(plan) -
  /// kWorkspaceHeaderBytes, and may be null if that is 0. A separate header can outlive the memory
  /// of a graph's partial results.
  void* header = nullptr;
};

/// Zeroes the header, in stream order. Call it once per buffer, before the first run(). Plans
/// without uses_header() do not need it.
FLASHCORE_API Status workspace_init(Workspace workspace, Stream stream = nullptr) noexcept;

/// Synchronises the stream, then returns and clears the error that a checked call found.
FLASHCORE_API Status workspace_status(Workspace workspace, Stream stream = nullptr) noexcept;

/// Computes out (and lse). If the call fails, the outputs are unchanged, unless it was cancelled
/// while it ran.
///
/// `cancel`: a flag that another thread sets to nonzero, atomically, to end the call early; null:
/// none. The flag must stay set until run() returns. CPU threads read it before each tile and about
/// every millisecond within a tile. When all threads have stopped, run() returns
/// StatusCode::cancelled. If the flag was set before the call, nothing is written; otherwise the
/// outputs are unspecified. The workspace stays usable. On a GPU the flag is read before each
/// launch; a running kernel is not stopped.
FLASHCORE_API Status run(const Plan& plan, const Tensors& tensors, Workspace workspace,
                         Stream stream = nullptr, const std::int32_t* cancel = nullptr) noexcept;

/// The id of the graph capture in progress on a CUDA stream, unique in the process; 0: none. If
/// `graph_ended` is given, a CUDA thread sets *graph_ended to 1 once the graph and all its
/// instances are destroyed and no longer run. Memory that the graph used, such as a header, is then
/// free again. *graph_ended must stay valid until then.
FLASHCORE_API Result<std::uint64_t> capture_id(Device device, Stream stream,
                                               std::int32_t* graph_ended = nullptr) noexcept;

/// A normalised result over some of the keys and its log-sum-exp, computed with `partial = true`.
/// Dense: out f32 [batch, q_heads, q_len, v_dim], lse f32 [batch, q_heads, q_len]. Varlen:
/// [total_q, q_heads, v_dim] and [q_heads, total_q]. Both are f64 for f64 problems.
struct PartialResult {
  TensorView out{}, lse{};
};
using Partial [[deprecated("use PartialResult")]] = PartialResult;

/// Up to this many partial results, merge() allocates nothing. For more it allocates a table of
/// their addresses, on a GPU with cudaMallocAsync.
inline constexpr int kMaxMergeParts = 32;

/// Merges any number of partial results, in the given order and in one pass. `lse` and `sinks` are
/// optional; pass the sinks to the last merge only. out may have any float type. `cancel`: as for
/// run().
FLASHCORE_API Status merge(std::span<const PartialResult> parts, TensorView out,
                           TensorView lse = {}, TensorView sinks = {}, Stream stream = nullptr,
                           const std::int32_t* cancel = nullptr) noexcept;

/// New keys and values and the KV cache, all of one type and on one device.
/// Cache: k [batch, kv_heads, capacity, head_dim], or with block_table pages
/// [pages, page_size, kv_heads, head_dim]; v likewise with v_dim.
/// New: k_new [batch, kv_heads, new_len, head_dim], or with cu_seqlens_new
/// [total_new, kv_heads, head_dim]; v_new likewise with v_dim.
struct AppendTensors {
  TensorView k_new{}, v_new{};
  TensorView k{}, v{};          ///< written, only in the rows of the new keys
  TensorView seqused_k{};       ///< i32 [batch]: keys in the cache before the append
  TensorView block_table{};     ///< i32 [batch, max_pages]
  TensorView cu_seqlens_new{};  ///< i32 [batch + 1], from 0 to total_new, never decreasing
  /// Scales of an 8-bit cache, as in Tensors. They are read, not written.
  TensorView k_scale{}, v_scale{};
  std::int64_t kv_scale_block = 0;  ///< keys per scale, if the scales have blocks
};

/// Writes the new keys and values of sequence b at seqused_k[b]. The caller passes the new lengths
/// to the attention call that follows. A page that several sequences share must not be written:
/// copy it for the writer first.
///
/// An 8-bit cache takes new rows in its own type, or in f32, f16 or bf16. The latter are quantized
/// as in quantize(), with the scales of their keys.
///
/// Invalid input: a row beyond the cache's capacity, an invalid length or page id, a NaN for int8
/// or byte, a scale that is not positive and finite. On the CPU append() then fails and writes
/// nothing. On a GPU it is one kernel and the host reads no data: the kernel skips invalid rows (a
/// NaN becomes 0), and workspace_status() reports them if a workspace of at least
/// kWorkspaceHeaderBytes is given. `cancel`: as for run().
FLASHCORE_API Status append(const AppendTensors& tensors, Workspace workspace = {},
                            Stream stream = nullptr, const std::int32_t* cancel = nullptr) noexcept;

/// "0.2.0"
FLASHCORE_API const char* version() noexcept;

/// Hash of the sources of the library (family "") or of a kernel family: "cpu", "simt", "sm80",
/// "sm80_8bit", "sm90", "sm90_e4m3". Null: unknown family.
FLASHCORE_API const char* source_fingerprint(const char* family = "") noexcept;

}  // namespace flashcore
