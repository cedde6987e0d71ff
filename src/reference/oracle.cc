#include "reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "reference/scores.h"

namespace flashcore::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Softmax of one row: weights, their sum, and the magnitudes that the error bound needs.
struct RowSoftmax {
  double max = -kInfinity, base = 0;   ///< largest score; the value subtracted before exp()
  double sum = 0, keys_sum = 0;        ///< with and without the sink
  double sink_weight = 0, factor = 0;  ///< factor: 1 / sum
  double magnitude = 0, largest_product = 0, largest_sum = 0, largest_cut = 0;
  std::vector<double> weight;  ///< exp(score - base)
};

void find_magnitudes(const Problem& p, const RowScores& s, RowSoftmax& x) {
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    if (!std::isfinite(s.score[j])) continue;
    // A score far below the maximum has no weight, whatever its error.
    if (s.score[j] + 1e-3 * s.magnitude[j] < x.max - 1000) continue;
    x.magnitude = std::max(x.magnitude, s.magnitude[j]);
    // With a softcap these may be infinite.
    const double product = std::fabs(p.scale) * s.largest_product[j];
    if (std::isfinite(product)) x.largest_product = std::max(x.largest_product, product);
    const double sum = std::fabs(p.scale) * s.largest_sum[j];
    if (std::isfinite(sum)) x.largest_sum = std::max(x.largest_sum, sum);
    if (!s.cut.empty()) x.largest_cut = std::max(x.largest_cut, std::fabs(p.scale) * s.cut[j]);
  }
}

RowSoftmax softmax(const Problem& p, const Tensors& t, const RowId& row, const RowScores& s) {
  RowSoftmax x;
  for (const double score : s.score) {
    x.max = std::max(x.max, score);  // std::max keeps its first argument if the second is NaN
  }
  find_magnitudes(p, s, x);
  const bool has_sink = t.sinks.given() && !p.options.partial;
  const double sink =
      has_sink ? static_cast<const float*>(t.sinks.data)[row.h * p.sinks.head] : -kInfinity;
  const double top = std::max(x.max, sink);
  x.base = top == -kInfinity ? 0.0 : top;
  x.weight.resize(s.score.size());
  double lost = 0;  // Kahan: thousands of equal small terms round in the same direction
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    x.weight[j] = s.score[j] == -kInfinity ? 0.0 : std::exp(s.score[j] - x.base);
    const double term = x.weight[j] - lost;
    const double next = x.sum + term;
    lost = (next - x.sum) - term;
    x.sum = next;
  }
  x.keys_sum = x.sum;
  if (has_sink) {
    x.sink_weight = std::exp(sink - x.base);
    x.sum += x.sink_weight;
    if (std::fabs(sink) > x.magnitude && std::isfinite(sink)) x.magnitude = std::fabs(sink);
  }
  constexpr double kMaxMagnitude = 1e100;  // keeps bounds and their squares finite
  x.magnitude = std::min(x.magnitude, kMaxMagnitude);
  x.factor = x.sum == 0 ? 0.0 : 1.0 / x.sum;
  return x;
}

/// The keys that a row sees, and their normalised weights.
struct SeenKeys {
  std::vector<std::int32_t> keys;
  std::vector<double> weight, v_scale_ratio;
};

SeenKeys normalise(const Head& head, const RowScores& s, RowSoftmax& x) {
  SeenKeys seen;
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    if (s.visible[j] == 0 || s.score[j] == -kInfinity) continue;
    x.weight[j] *= x.factor;
    seen.keys.push_back(static_cast<std::int32_t>(j));
    seen.weight.push_back(x.weight[j]);
    if (!head.equal_v_scales) seen.v_scale_ratio.push_back(head.v_scale_ratio[j]);
  }
  return seen;
}

/// True if a hidden key has a non-finite V.
bool hides_non_finite(const Head& head, const RowScores& s) {
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    if (head.v_finite[j] == 0 && (s.visible[j] == 0 || s.score[j] == -kInfinity)) return true;
  }
  return false;
}

/// O = P V and, if wanted, the sums over V of the error bound. Normalises the weights.
void multiply_values(const Head& head, const RowScores& s, std::size_t r, bool bound, RowSoftmax& x,
                     Oracle& result) {
  const SeenKeys seen = normalise(head, s, x);
  const auto v_dim = static_cast<std::size_t>(result.v_dim);
  double out[kPanel], spread[kPanel], mass[kPanel], scaled_mass[kPanel], deviation[kPanel];
  for (std::size_t panel = 0; panel < head.v.count(); ++panel) {
    const WeightedRows v{head.v.panel(panel), seen.keys.data(), seen.weight.data(),
                         seen.keys.size()};
    const std::size_t first = r * v_dim + panel * kPanel, width = head.v.width(panel);
    if (!bound) {
      sums().outputs(v, out);
      std::copy_n(out, width, &result.out[first]);
      continue;
    }
    const bool scaled = !head.equal_v_scales;
    sums().values(v,
                  {out, spread, mass, scaled ? scaled_mass : nullptr, seen.v_scale_ratio.data()});
    sums().deviations(v, out, deviation);
    for (std::size_t c = 0; c < width; ++c) {
      result.out[first + c] = out[c];
      result.spread[first + c] = std::sqrt(spread[c]);
      result.v_mass[first + c] = mass[c] * x.factor;
      result.v_mass_in_steps[first + c] = (scaled ? scaled_mass : mass)[c] * x.factor;
      // The sink is a key with V = 0.
      result.deviation[first + c] = deviation[c] + x.sink_weight * x.factor * std::fabs(out[c]);
    }
  }
}

/// The most keys whose scores are equal in f32, without one of them. A score 40 below the maximum
/// has no weight in any sum, in f64 neither.
std::int32_t count_equal_keys(const RowScores& s, double max) {
  std::vector<double> scores;
  for (const double score : s.score) {
    if (std::isfinite(score) && score > max - 40) scores.push_back(score);
  }
  std::sort(scores.begin(), scores.end());
  std::size_t most = 0, first = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    while (scores[j] - scores[first] > 0x1p-24 * std::max(1.0, std::fabs(scores[j]))) ++first;
    most = std::max(most, j - first);
  }
  return static_cast<std::int32_t>(most);
}

void compute_row(const Problem& p, const Tensors& t, std::size_t r, const Head& head,
                 const OracleParts& parts, RowScores& s, Oracle& result) {
  const RowId& row = result.rows[r];
  compute_scores(p, t, row, head, s);
  RowSoftmax x = softmax(p, t, row, s);
  multiply_values(head, s, r, parts.bound, x, result);
  result.lse[r] = x.sum == 0 ? -kInfinity : x.base + std::log(x.sum);
  result.max[r] = x.max;
  result.sum[r] = x.max == -kInfinity ? 0.0 : x.keys_sum * std::exp(x.base - x.max);
  result.magnitude[r] = x.magnitude;
  result.largest_product[r] = x.largest_product;
  result.largest_sum[r] = x.largest_sum;
  result.largest_cut[r] = x.largest_cut;
  result.kv_len[r] = static_cast<std::int32_t>(s.score.size());
  if (parts.bound) result.equal_keys[r] = count_equal_keys(s, x.max);
  result.may_be_poisoned[r] = hides_non_finite(head, s) ? 1 : 0;
  if (!result.scores.empty()) {
    for (std::size_t j = 0; j < s.score.size(); ++j) {
      if (s.score[j] == -kInfinity) x.weight[j] = 0.0;
    }
    result.scores[r] = s.score;
    result.probabilities[r] = std::move(x.weight);
  }
}

}  // namespace

bool block_shows(const Problem& p, const Tensors& t, const RowId& row, std::int64_t j) {
  const Layout& layout = p.mask_blocks;
  const std::int32_t entry = static_cast<const std::int32_t*>(
      t.mask_blocks.data)[row.b * layout.batch + row.h * layout.head +
                          row.i / p.mask_block_q * layout.row + j / p.mask_block_k * layout.column];
  if (entry == 1) return true;
  if (entry < 2 || entry - 2 >= t.mask_bits.shape[0]) return false;
  const std::int64_t words = p.mask_block_k / 32;
  const std::int64_t bit = j % p.mask_block_k;
  const std::int64_t at =
      ((entry - 2) * p.mask_block_q + row.i % p.mask_block_q) * words + bit / 32;
  const auto word =
      static_cast<std::uint32_t>(static_cast<const std::int32_t*>(t.mask_bits.data)[at]);
  return (word >> (bit % 32) & 1u) != 0;
}

std::vector<RowId> all_rows(const Problem& problem, const Tensors& tensors) {
  std::vector<RowId> rows;
  for (std::int32_t b = 0; b < problem.batch; ++b) {
    const auto q_len = static_cast<std::int32_t>(lengths_of(problem, tensors, b).q_len);
    for (std::int32_t h = 0; h < problem.q_heads; ++h) {
      for (std::int32_t i = 0; i < q_len; ++i) rows.push_back({b, h, i});
    }
  }
  return rows;
}

Oracle compute(const Problem& problem, const Tensors& tensors, std::vector<RowId> rows,
               bool keep_stages, int threads) {
  return compute(problem, tensors, std::move(rows), {.stages = keep_stages}, threads);
}

Oracle compute(const Problem& problem, const Tensors& tensors, std::vector<RowId> rows,
               const OracleParts& parts, int threads) {
  Oracle result;
  result.rows = std::move(rows);
  result.head_dim = problem.head_dim;
  result.v_dim = problem.v_dim;
  const std::size_t count = result.rows.size();
  const std::size_t elements = count * static_cast<std::size_t>(problem.v_dim);
  result.out.assign(elements, 0.0);
  for (auto* array : {&result.spread, &result.deviation, &result.v_mass, &result.v_mass_in_steps}) {
    array->assign(parts.bound ? elements : 0, 0.0);
  }
  for (auto* array : {&result.lse, &result.max, &result.sum, &result.magnitude,
                      &result.largest_product, &result.largest_sum, &result.largest_cut}) {
    array->assign(count, 0.0);
  }
  result.kv_len.assign(count, 0);
  result.equal_keys.assign(count, 0);
  result.may_be_poisoned.assign(count, 0);
  if (parts.stages) {
    result.scores.resize(count);
    result.probabilities.resize(count);
  }

  // Neighbouring rows share a head, so each thread takes consecutive rows.
  const auto work = [&](std::size_t begin, std::size_t end) {
    Head head;
    RowScores scores;
    const std::int64_t group = problem.q_heads / std::max<std::int64_t>(problem.kv_heads, 1);
    for (std::size_t r = begin; r < end; ++r) {
      const RowId& row = result.rows[r];
      load_head(problem, tensors, row.b, row.h / group, parts, head);
      compute_row(problem, tensors, r, head, parts, scores, result);
    }
  };
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  // A thread costs about as much as 1e6 multiply-adds.
  const double work_estimate = static_cast<double>(elements) * static_cast<double>(problem.kv_len);
  threads = std::clamp(static_cast<int>(work_estimate / 1e6), 1, threads);
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) {
    workers.emplace_back(
        work, count * static_cast<std::size_t>(i) / static_cast<std::size_t>(threads),
        count * static_cast<std::size_t>(i + 1) / static_cast<std::size_t>(threads));
  }
  work(0, count / static_cast<std::size_t>(threads));
  for (std::thread& worker : workers) worker.join();
  return result;
}

}  // namespace flashcore::reference
