// A test case: a few numbers that determine one problem and its data. The same spec gives the same
// bytes on every machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashcore/plan.h"

namespace flashcore::verify {

/// Memory layout of a tensor.
enum class MemoryLayout : std::int32_t {
  heads_first = 0,  // [batch, heads, len, dim], compact
  rows_first,       // [batch, len, heads, dim], compact
  padded,           // heads_first, padding after every row and head
  misaligned,       // heads_first, one element past an aligned address
  strided_columns,  // column stride 2
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
  DType dtype = DType::f32;  ///< type of the kernel, of out, and of inputs without a storage type
  /// 8-bit storage types of q, k and v; none: dtype.
  DType q_storage = DType::none, k_storage = DType::none, v_storage = DType::none;
  ScaleKind q_scale{}, k_scale{}, v_scale{};  ///< the block sizes are in options
  std::int64_t batch = 1, q_heads = 1, kv_heads = 1;
  std::int64_t q_len = 1, kv_len = 1, head_dim = 64, v_dim = 64;
  Options options;
  bool out_f32 = false;  ///< f32 output for a narrower q
  bool lse = false;
  MemoryLayout q_layout{}, k_layout{}, v_layout{}, out_layout{};
  bool shared_kv = false;  ///< K and V have batch stride 0
  ScoreTensorSpec bias, mask;
  /// > 0: the mask is a block mask with blocks of this size, and is always per query.
  std::int64_t mask_block_q = 0, mask_block_k = 0;
  bool bias_f32 = false;
  bool bias_has_infinities = false;
  int alibi = 0;  ///< 1: [q_heads], 2: [batch, q_heads]
  bool sinks = false;
  bool q_varlen = false, kv_varlen = false;  ///< cu_seqlens; lengths up to q_len, kv_len
  bool used_k = false;
  std::vector<std::int64_t> used_lengths;  ///< used_k of each sequence; empty: random
  std::int64_t page_size = 0;  ///< > 0: K and V are shuffled pages; without used_k, kv_len
                               ///< is a multiple of it
  bool shared_pages = false;   ///< a page may occur several times in the table
  bool q_start = false, k_start = false;
  double sigma = 1.0;
  bool non_finite = false;  ///< a few NaN and infinities among the inputs
  std::uint64_t seed = 1;   ///< seed of the data
};

/// Names of all options of a spec, as coverage counts them.
std::vector<std::string> features(const CaseSpec& spec);

/// Sizes and features in one line.
std::string to_string(const CaseSpec& spec);

/// Replaces the options, formats and layouts that a kernel does not support (KernelInfo::features
/// and inputs) by supported ones.
void fit_to_kernel(const KernelInfo& kernel, CaseSpec& spec);

/// Random problem `index` of `seed` for one kernel. Sizes favour the tile edges of the kernel and
/// 1, with about `target_work` multiply-adds on average; some are tall or large (case_sizes.h).
/// `splits` and `sigma` are fixed if given.
struct CaseLimits {
  double target_work = 1 << 20;
  std::optional<double> sigma;
  std::optional<int> splits;
};
CaseSpec random_case(const KernelInfo& kernel, std::uint64_t seed, std::uint64_t index,
                     const CaseLimits& limits = {});

/// Multiply-adds of the problem without its mask.
double work_of(const CaseSpec& spec);

}  // namespace flashcore::verify
