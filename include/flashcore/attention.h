// The C++ API in one include.
//
//   auto problem = flashcore::make_problem(tensors, {.causal = true});
//   auto plan = flashcore::make_plan(*problem, *flashcore::device_info({}));
//   flashcore::Workspace workspace{buffer, flashcore::workspace_bytes(*plan)};
//   flashcore::workspace_init(workspace);            // once per buffer
//   flashcore::run(*plan, tensors, workspace);       // as often as you like
//
// run() allocates nothing, synchronises nothing and reads nothing back, so on a GPU it can be
// captured in a graph. Every function may be called from any thread; one workspace serves one
// call in flight.
//
// In a graph: initialise the workspace once, before the capture, and capture run() alone. Kernels
// leave the header zero, so the graph needs no memset: it has a kernel for each call, and one more
// where the plan's splits are joined by a kernel of their own. Calls captured on one stream follow
// each other and may share a workspace. Every other stream of the capture, every other graph, and
// calls outside of graphs need their own.
#pragma once

#include <span>
#include <string>

#include "flashcore/plan.h"
#include "flashcore/problem.h"
#include "flashcore/status.h"
#include "flashcore/types.h"

namespace flashcore {

/// A cudaStream_t; null is the default stream. The CPU ignores it and returns when done.
using Stream = void*;

struct Workspace {
  void* data = nullptr;  ///< 256-byte aligned, on the problem's device
  std::size_t bytes = 0;
  Device device{};
  /// Null: data begins with the header. Or kWorkspaceHeaderBytes elsewhere, 256-byte aligned, on
  /// the same GPU: data is then what follows the header, workspace_bytes(plan) -
  /// kWorkspaceHeaderBytes, and may be null where that is 0. So a header can outlive the memory of
  /// a graph's partial results.
  void* header = nullptr;
};

/// Zeroes the header, in stream order. Once per buffer, before its first run(); not at all for
/// plans without uses_header().
FLASHCORE_API Status workspace_init(Workspace workspace, Stream stream = nullptr) noexcept;

/// Synchronises the stream and returns what checked mode found, clearing it.
FLASHCORE_API Status workspace_status(Workspace workspace, Stream stream = nullptr) noexcept;

/// Computes out (and lse). On failure the outputs are untouched, except by a call that was
/// cancelled while it ran.
///
/// `cancel`: null, or a flag that another thread sets to nonzero, atomically, to end the call
/// early. It must then stay set until run() returns. The CPU reads it before each work item, and
/// within one every millisecond or so; once all threads have stopped, run() returns
/// StatusCode::cancelled. If the flag was set before the call, nothing is written; else the outputs
/// are unspecified. The workspace stays usable. On a GPU the flag is read before each launch; a
/// launched kernel is not stopped.
FLASHCORE_API Status run(const Plan& plan, const Tensors& tensors, Workspace workspace,
                         Stream stream = nullptr, const std::int32_t* cancel = nullptr) noexcept;

/// The number of the capture into a graph that is under way on a CUDA stream, never used twice in a
/// process; 0: none is. With `graph_ended`, *graph_ended becomes 1 (written by a thread of CUDA's)
/// when the graph and everything instantiated from it is destroyed and no longer runs: then what
/// the graph used, such as a header, is free again. The memory it points to must last until then.
FLASHCORE_API Result<std::uint64_t> capture_id(Device device, Stream stream,
                                               std::int32_t* graph_ended = nullptr) noexcept;

/// One normalised result over some of the keys and its log-sum-exp, as `partial = true` gives it.
/// out f32 [batch, q_heads, q_len, v_dim], lse f32 [batch, q_heads, q_len] (both f64 or, packed,
/// [total_q, q_heads, v_dim] and [q_heads, total_q]).
struct PartialResult {
  TensorView out{}, lse{};
};
using Partial [[deprecated("use PartialResult")]] = PartialResult;

inline constexpr int kMaxMergeParts = 32;

/// Joins up to kMaxMergeParts partials, in the order given. `lse` and `sinks` are optional; give
/// the sinks in the last merge only. out may be any float type. `cancel`: as for run().
FLASHCORE_API Status merge(std::span<const PartialResult> parts, TensorView out,
                           TensorView lse = {}, TensorView sinks = {}, Stream stream = nullptr,
                           const std::int32_t* cancel = nullptr) noexcept;

/// New keys and values for a cache, and the cache. All tensors have one type and lie on one device.
/// Cache: k [batch, kv_heads, capacity, head_dim], or with block_table pages
/// [pages, page_size, kv_heads, head_dim]; v likewise with v_dim.
/// New: k_new [batch, kv_heads, new_len, head_dim], or with cu_seqlens_new
/// [total_new, kv_heads, head_dim]; v_new likewise with v_dim.
struct AppendTensors {
  TensorView k_new{}, v_new{};
  TensorView k{}, v{};          ///< written, at the new keys' rows only
  TensorView seqused_k{};       ///< i32 [batch]: keys in the cache before the append
  TensorView block_table{};     ///< i32 [batch, max_pages]
  TensorView cu_seqlens_new{};  ///< i32 [batch + 1], from 0 to total_new, never decreasing
  /// Of an 8-bit cache, as attention takes them (Tensors::k_scale); they are read, not written.
  TensorView k_scale{}, v_scale{};
  std::int64_t kv_scale_block = 0;  ///< keys that share a scale, where these have blocks
};

/// Writes sequence b's new keys and values at seqused_k[b]; the attention that follows is told the
/// new lengths. A page that several sequences share must not be written: give the writer a copy
/// first. An 8-bit cache takes new rows of f32, f16 or bf16, which become codes of the scale at
/// their key as quantize() makes them, or codes of its own type. A NaN that int8 and byte cannot
/// say, or a scale that is not positive and finite, is bad as a length may be. On a GPU it is one
/// kernel, and lengths and page ids are not read by the host: rows that have no place in the cache
/// are left out, and reported by workspace_status() if a workspace (of kWorkspaceHeaderBytes or
/// more) is given. On the CPU they make append() fail with nothing written. `cancel`: as for run().
FLASHCORE_API Status append(const AppendTensors& tensors, Workspace workspace = {},
                            Stream stream = nullptr, const std::int32_t* cancel = nullptr) noexcept;

/// "0.1.0"
FLASHCORE_API const char* version() noexcept;

/// Hash of the sources this library was built from; family "" is the whole library, "cpu" and
/// "simt" those kernels. Null for an unknown family.
FLASHCORE_API const char* source_fingerprint(const char* family = "") noexcept;

}  // namespace flashcore
