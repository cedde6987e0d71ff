#include "reference/scores.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "reference/elements.h"

namespace flashcore::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSmallCap = 256;  // docs/numerics.md

/// f32 and f64 are multiplied on CUDA cores and CPUs only.
bool may_cut_sums(const Problem& p) { return size_of(p.q.dtype) <= 2; }

bool is_visible(const Options& o, std::int64_t q_position, std::int64_t k_position) {
  if (o.causal && k_position > q_position) return false;
  if (o.window_left >= 0 && q_position - k_position > o.window_left) return false;
  if (o.window_right >= 0 && k_position - q_position > o.window_right) return false;
  return true;
}

void find_visible(const Problem& p, const Tensors& t, const RowId& row, const Lengths& lengths,
                  RowScores& s) {
  const std::size_t n = s.visible.size();
  for (std::size_t j = 0; j < n; ++j) {
    const bool visible = is_visible(p.options, lengths.q_start + row.i,
                                    lengths.k_start + static_cast<std::int64_t>(j));
    s.visible[j] = visible ? 1 : 0;
  }
  if (t.mask.given()) {
    std::vector<double> mask(n);
    Operand{t.mask.data, p.mask}.read(row.b, row.h, row.i, lengths.kv_len, mask.data());
    for (std::size_t j = 0; j < n; ++j)
      if (mask[j] == 0) s.visible[j] = 0;
  }
  if (!t.mask_blocks.given()) return;
  for (std::size_t j = 0; j < n; ++j) {
    if (s.visible[j] != 0 && !block_shows(p, t, row, static_cast<std::int64_t>(j))) {
      s.visible[j] = 0;
    }
  }
}

/// q·k and the sizes in its sum, in panels of keys. Leaves out panels without a visible key.
void multiply_keys(const Problem& p, const Tensors& t, const RowId& row, const Head& head,
                   RowScores& s) {
  const auto dim = static_cast<std::size_t>(p.head_dim);
  const double q_scale = scale_at(t.q_scale, row.b, row.h, row.i, p.options.q_scale_block);
  std::vector<double> q(dim);
  Operand{t.q.data, p.q}.read(row.b, row.h, head.lengths.q_row + row.i, p.head_dim, q.data());
  for (double& x : q) x *= q_scale;
  const Factors factors = s.cut.empty() ? Factors() : Factors(q, p.q.dtype, q_scale);
  for (std::size_t panel = 0; panel < head.k.count(); ++panel) {
    const std::size_t at = panel * kPanel;
    const auto first = s.visible.begin() + static_cast<std::ptrdiff_t>(at);
    const auto last = first + static_cast<std::ptrdiff_t>(head.k.width(panel));
    if (std::find(first, last, 1) == last) continue;
    sums().scores(q.data(), head.k.panel(panel), dim, &s.score[at], &s.magnitude[at],
                  &s.largest_product[at], &s.largest_sum[at]);
    if (!s.cut.empty()) cut_sums(factors, head.k_factors, panel, &s.cut[at]);
  }
}

}  // namespace

void load_head(const Problem& p, const Tensors& t, std::int64_t b, std::int64_t kv_head,
               const OracleParts& parts, Head& head) {
  if (head.b == b && head.kv_head == kv_head) return;
  head.b = b;
  head.kv_head = kv_head;
  head.lengths = lengths_of(p, t, b);
  const std::int64_t n = head.lengths.kv_len;
  const auto keys = static_cast<std::size_t>(n);
  head.k.reset(static_cast<std::size_t>(p.head_dim), keys);
  head.v.reset(keys, static_cast<std::size_t>(p.v_dim));
  head.v_scale_ratio.assign(keys, 1.0);
  head.v_finite.assign(keys, 1);
  const bool cuts = parts.cut_sums && may_cut_sums(p);
  head.k_factors.reset(cuts ? head.k.rows() : 0, cuts ? keys : 0);
  double largest = 0;
  const Operand k{t.k.data, p.k}, v{t.v.data, p.v};
  std::vector<double> k_row(head.k.rows()), v_row(static_cast<std::size_t>(p.v_dim));
  for (std::size_t key = 0; key < keys; ++key) {
    const auto j = static_cast<std::int64_t>(key);
    const double k_scale = scale_at(t.k_scale, b, kv_head, j, p.options.kv_scale_block);
    const double v_scale = scale_at(t.v_scale, b, kv_head, j, p.options.kv_scale_block);
    head.v_scale_ratio[key] = std::fabs(v_scale);
    largest = std::max(largest, std::fabs(v_scale));
    read_key(p, t, k, b, kv_head, head.lengths, j, p.head_dim, k_row.data());
    read_key(p, t, v, b, kv_head, head.lengths, j, p.v_dim, v_row.data());
    for (double& x : k_row) x *= k_scale;
    for (double& x : v_row) x *= v_scale;
    head.k.set_column(key, k_row.data());
    head.v.set_row(key, v_row.data());
    const auto finite = [](double x) { return std::isfinite(x); };
    head.v_finite[key] = std::all_of(v_row.begin(), v_row.end(), finite) ? 1 : 0;
    for (std::size_t d = 0; cuts && d < k_row.size(); ++d) {
      head.k_factors.set(d, key, factor_of(k_row[d], p.k.dtype, k_scale));
    }
  }
  head.equal_v_scales = true;
  for (double& scale : head.v_scale_ratio) {
    scale = scale > 0 ? largest / scale : 1.0;
    head.equal_v_scales = head.equal_v_scales && scale == 1.0;
  }
}

void compute_scores(const Problem& p, const Tensors& t, const RowId& row, const Head& head,
                    RowScores& s) {
  const auto n = static_cast<std::size_t>(head.lengths.kv_len);
  const std::size_t padded = head.k.count() * kPanel;
  for (auto* all : {&s.score, &s.magnitude, &s.largest_product, &s.largest_sum}) {
    all->resize(padded);
  }
  s.cut.resize(head.k_factors.value.rows() > 0 ? padded : 0);
  s.visible.resize(n);
  find_visible(p, t, row, head.lengths, s);
  multiply_keys(p, t, row, head, s);
  s.score.resize(n);
  s.magnitude.resize(n);

  const Options& o = p.options;
  std::vector<double> biases(t.bias.given() ? n : 0);
  if (t.bias.given()) {
    Operand{t.bias.data, p.bias}.read(row.b, row.h, row.i, head.lengths.kv_len, biases.data());
  }
  double slope = 0;
  if (t.alibi_slopes.given()) {
    slope = static_cast<const float*>(
        t.alibi_slopes.data)[row.b * p.alibi_slopes.batch + row.h * p.alibi_slopes.head];
  }
  for (std::size_t j = 0; j < n; ++j) {
    if (s.visible[j] == 0) {
      s.score[j] = -kInfinity;
      s.magnitude[j] = 0.0;
      continue;
    }
    double x = p.scale * s.score[j];
    double magnitude = std::fabs(p.scale) * s.magnitude[j];
    if (o.softcap > 0) {
      x = o.softcap * std::tanh(x / o.softcap);
      const bool finite = std::isfinite(magnitude);
      if (!finite) magnitude = 0.0;  // tanh(inf) is exact
      // With a small cap, kernels may compute tanh with the error of a score of the cap's size.
      if (o.softcap <= kSmallCap || !finite) magnitude += o.softcap;
    }
    if (t.alibi_slopes.given()) {
      const std::int64_t k_position = head.lengths.k_start + static_cast<std::int64_t>(j);
      const std::int64_t distance = head.lengths.q_start + row.i - k_position;
      const double alibi = slope * static_cast<double>(std::llabs(distance));
      x -= alibi;
      magnitude += std::fabs(alibi);
    }
    if (t.bias.given()) {
      x += biases[j];
      if (std::isfinite(biases[j])) magnitude += std::fabs(biases[j]);
    }
    s.score[j] = x;
    s.magnitude[j] = magnitude;
  }
}

}  // namespace flashcore::reference
