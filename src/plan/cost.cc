// Arithmetic and traffic of a problem.
#include <algorithm>
#include <cmath>

#include "flashcore/plan.h"

namespace flashcore {
namespace {

/// Visible pairs of one head. Query i sees keys [i + offset - left, i + offset + right] within
/// [0, kv_len). The count is the number of pairs with key <= i + offset + right minus the number
/// with key < i + offset - left.
double visible_pairs(const Problem& problem) noexcept {
  const double q_len = static_cast<double>(problem.q_len);
  const double kv_len = static_cast<double>(problem.kv_len);
  const double offset = kv_len - q_len;        // default alignment: q_start is device data
  const auto pairs_up_to = [&](double edge) {  // Σ_i clamp(i + edge + 1, 0, kv_len)
    const double first = std::clamp(-edge, 0.0, q_len);             // earlier rows see no key
    const double full = std::clamp(kv_len - 1 - edge, 0.0, q_len);  // later rows see all keys
    const double ramp = std::max(full - first, 0.0);
    return ramp * (first + edge + 1) + ramp * (ramp - 1) / 2 + (q_len - full) * kv_len;
  };
  const Options& o = problem.options;
  const double right = o.causal ? 0.0 : static_cast<double>(o.window_right);
  double pairs = right >= 0 ? pairs_up_to(offset + right) : q_len * kv_len;
  if (o.window_left >= 0) pairs -= pairs_up_to(offset - static_cast<double>(o.window_left) - 1);
  return std::max(pairs, 0.0);
}

/// Bytes of all tensors, each read or written once.
double tensor_bytes(const Problem& problem) noexcept {
  const double batch = static_cast<double>(problem.batch);
  const double heads = static_cast<double>(problem.q_heads);
  const double q_len = static_cast<double>(problem.q_len);
  const double kv_len = static_cast<double>(problem.kv_len);
  const double q_rows = problem.q_varlen ? static_cast<double>(problem.total_q) : batch * q_len;
  const double k_rows = problem.kv_varlen ? static_cast<double>(problem.total_k) : batch * kv_len;
  const auto width = [](const Layout& layout, std::int64_t columns) {
    return static_cast<double>(size_of(layout.dtype) * columns);
  };
  double bytes =
      q_rows * heads * width(problem.q, problem.head_dim) +
      k_rows * static_cast<double>(problem.kv_heads) *
          (width(problem.k, problem.head_dim) + width(problem.v, problem.v_dim)) +
      q_rows * heads * static_cast<double>(problem.v_dim * size_of(problem.out.dtype)) +
      (problem.lse.given() ? q_rows * heads * static_cast<double>(size_of(problem.lse.dtype))
                           : 0.0);
  const auto extent = [](std::int64_t stride, double full) { return stride == 0 ? 1.0 : full; };
  for (const Layout& score : {problem.bias, problem.mask}) {
    if (!score.given()) continue;
    bytes += extent(score.batch, batch) * extent(score.head, heads) * extent(score.row, q_len) *
             kv_len * static_cast<double>(size_of(score.dtype));
  }
  if (problem.mask_blocks.given()) {
    const double blocks = std::ceil(q_len / static_cast<double>(problem.mask_block_q)) *
                          std::ceil(kv_len / static_cast<double>(problem.mask_block_k));
    bytes += extent(problem.mask_blocks.batch, batch) * extent(problem.mask_blocks.head, heads) *
             blocks * 4.0;  // the number of mixed blocks is data
  }
  return bytes;
}

}  // namespace

Cost cost(const Problem& problem) noexcept {
  const double heads = static_cast<double>(problem.q_heads);
  const double dims = static_cast<double>(problem.head_dim + problem.v_dim);
  Cost result;
  result.visible_pairs = static_cast<double>(problem.batch) * heads * visible_pairs(problem);
  result.flops = 2.0 * dims * result.visible_pairs;
  result.bytes = tensor_bytes(problem);
  return result;
}

}  // namespace flashcore
