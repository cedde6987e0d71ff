// A test case: everything needed to build one problem with its data, from a few numbers. The same
// spec gives the same bytes everywhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashcore/plan.h"

namespace flashcore::verify {

/// How a tensor lies in memory.
enum class MemoryLayout : std::int32_t {
  heads_first = 0,  // [batch, heads, len, dim], compact
  rows_first,       // [batch, len, heads, dim], compact
  padded,           // heads_first with slack after every row and head
  misaligned,       // heads_first, starting one element off any boundary
  strided_columns,  // every second column: the last dimension is not contiguous
};
inline constexpr int kMemoryLayouts = 5;

/// A bias or mask: absent, or broadcast over some of its axes.
struct ScoreTensorSpec {
  bool given = false;
  bool per_batch = false, per_head = false, per_query = false;
};

/// The scales of an 8-bit tensor.
enum class ScaleKind : std::int32_t { none = 0, per_tensor, per_head, per_block };

struct CaseSpec {
  DType dtype = DType::f32;  ///< the kernel's, and that of out and of what is not stored otherwise
  /// 8-bit types q, k and v are stored in; none: dtype.
  DType q_storage = DType::none, k_storage = DType::none, v_storage = DType::none;
  ScaleKind q_scale{}, k_scale{}, v_scale{};  ///< their blocks are in options
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1;
  std::int64_t q_len = 1, kv_len = 1, head_dim = 64, v_dim = 64;
  Options options;
  bool out_f32 = false;  ///< f32 output for a narrower q
  bool lse = false;
  MemoryLayout q_layout{}, k_layout{}, v_layout{}, out_layout{};
  bool shared_kv = false;  ///< K and V have batch stride 0: all sequences read the same keys
  ScoreTensorSpec bias, mask;
  bool bias_f32 = false;
  bool bias_has_infinities = false;
  int alibi = 0;  ///< 1: [q_heads], 2: [batch, q_heads]
  bool sinks = false;
  bool q_varlen = false, kv_varlen = false;  ///< cu_seqlens; lengths are drawn up to q_len, kv_len
  bool used_k = false;
  std::vector<std::int64_t> used_lengths;  ///< the used_k of each sequence; empty: drawn
  std::int64_t page_size = 0;  ///< > 0: K and V are shuffled pages; then, without used_k, kv_len is
                               ///< a multiple of it
  bool shared_pages = false;   ///< a page may belong to several sequences, or to one more than once
  bool q_start = false, k_start = false;
  double sigma = 1.0;
  bool non_finite = false;  ///< a few NaN and infinities among the inputs
  std::uint64_t seed = 1;   ///< of the data
};

/// Every option a spec uses, by name: what coverage counts.
std::vector<std::string> features(const CaseSpec& spec);

/// One line: sizes and features.
std::string to_string(const CaseSpec& spec);

/// Changes what a kernel leaves to others (see KernelInfo::uses_tma and needs_8_bits()) into
/// something it takes.
void fit_to_kernel(const KernelInfo& kernel, CaseSpec& spec);

/// Random problem number `index` of `seed` for one kernel: sizes lean to the kernel's tile edges
/// and to 1, with about `target_work` multiply-adds on average; some are tall or large (see
/// case_sizes.h). `splits` and `sigma` fix what is
/// otherwise drawn.
struct CaseLimits {
  double target_work = 1 << 20;
  std::optional<double> sigma;
  std::optional<int> splits;
};
CaseSpec random_case(const KernelInfo& kernel, std::uint64_t seed, std::uint64_t index,
                     const CaseLimits& limits = {});

/// Multiply-adds of the problem as specified, masks not considered.
double work_of(const CaseSpec& spec);

}  // namespace flashcore::verify
