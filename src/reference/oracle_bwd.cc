#include "reference/oracle_bwd.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "reference/gradient_blocks.h"
#include "reference/gradient_pairs.h"

namespace flashcore::reference {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

std::size_t count_of(const TensorView& t) {
  std::int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return static_cast<std::size_t>(count);
}

class GradientSums {
 public:
  GradientSums(const Problem& p, const Tensors& t, const Gradients& g, const GradientArithmetic& a,
               GradientOracle& result)
      : p_(p),
        t_(t),
        g_(g),
        a_(a),
        result_(result),
        targets_{result,
                 {p.q_heads, p.q_varlen ? p.total_q : p.q_len, p.head_dim, p.q_varlen},
                 {p.kv_heads, p.kv_varlen ? p.total_k : p.kv_len, p.head_dim, p.kv_varlen},
                 {p.kv_heads, p.kv_varlen ? p.total_k : p.kv_len, p.v_dim, p.kv_varlen}} {
    const std::int64_t group = p.kv_heads == 0 ? 1 : p.q_heads / p.kv_heads;
    group_ = std::max<std::int64_t>(group, 1);
    result.dq.resize(count_of(t.q), true);
    result.dk.resize(count_of(t.k), true);
    result.dv.resize(count_of(t.v), true);
    result.dbias.resize(count_of(t.bias), t.bias.given());
    result.dsinks.resize(static_cast<std::size_t>(p.q_heads), t.sinks.given());
    result.dslopes.assign(t.alibi_slopes.given() ? count_of(t.alibi_slopes) : 0, 0.0);
    targets_.dk_walk.assign(result.dk.value.size(), 0.0);
  }

  void add_row(const Oracle& forward, std::size_t r);
  void finish();

 private:
  void end_block();
  void add_bias(const GradientRow& row, std::size_t j, const RowPairs& pairs);
  void add_slope(const GradientRow& row, std::size_t j, const RowPairs& pairs);
  void add_sink(const GradientRow& row, double lse);
  void add_alike_terms(const RowPairs& pairs, std::size_t at);

  const Problem& p_;
  const Tensors& t_;
  const Gradients& g_;
  const GradientArithmetic& a_;
  GradientOracle& result_;
  GradientTargets targets_;
  std::int64_t group_ = 1;
  Keys keys_;
  RowBlock block_;
};

void GradientSums::add_bias(const GradientRow& row, std::size_t j, const RowPairs& pairs) {
  const std::int64_t* shape = t_.bias.shape;
  const auto along = [&](int axis, std::int64_t index) { return shape[axis] == 1 ? 0 : index; };
  const std::int64_t first =
      ((along(0, row.id.b) * shape[1] + along(1, row.id.h)) * shape[2] + along(2, row.id.i)) *
      shape[3];
  const std::size_t at = static_cast<std::size_t>(first) + j;
  const double ds = pairs.ds(j);
  Gradient& g = result_.dbias;
  g.value[at] += ds;
  g.noise[at] += ds * ds;
  g.error[at] += pairs.weight_error[j] + pairs.p[j] * row.delta_error;
  g.mass[at] += 1 + std::fabs(pairs.w[j]);
  g.terms[at] += 1;
  if (pairs.p[j] < kMayUnderflow && !std::isfinite(pairs.w[j])) g.excused[at] = 1;
}

void GradientSums::add_sink(const GradientRow& row, double lse) {
  const auto h = static_cast<std::size_t>(row.id.h);
  const double sink = static_cast<const float*>(t_.sinks.data)[row.id.h * p_.sinks.head];
  const double p = std::exp(sink - lse);
  Gradient& g = result_.dsinks;
  g.terms[h] += 1;
  if (p == 0) return;
  g.value[h] -= p * row.delta;
  g.noise[h] += p * row.delta * p * row.delta;
  g.error[h] += p * ((row.score_error + 4 * a_.sum_unit) * std::fabs(row.delta) + row.delta_error);
  g.mass[h] += std::fabs(row.delta);
  if (p < kMayUnderflow && !std::isfinite(row.delta)) g.excused[h] = 1;
}

void GradientSums::add_slope(const GradientRow& row, std::size_t j, const RowPairs& pairs) {
  const std::int64_t k_position = keys_.lengths.k_start + static_cast<std::int64_t>(j);
  const std::int64_t distance = keys_.lengths.q_start + row.id.i - k_position;
  const std::int64_t b = t_.alibi_slopes.rank == 2 ? row.id.b : 0;
  result_.dslopes[static_cast<std::size_t>(b * p_.q_heads + row.id.h)] -=
      pairs.ds(j) * static_cast<double>(std::llabs(distance));
}

void GradientSums::add_alike_terms(const RowPairs& pairs, std::size_t at) {
  const auto dim = static_cast<std::size_t>(p_.head_dim);
  for (std::size_t j = 0; j < pairs.p.size(); ++j) {
    if (pairs.p[j] == 0) continue;
    for (std::size_t d = 0; d < dim; ++d) {
      const double term = std::fabs(pairs.dz[j] * keys_.k.at(j, d));
      if (std::isfinite(term)) result_.dq.alike[at + d] += term;
    }
  }
}

void GradientSums::end_block() {
  if (block_.rows.empty()) return;
  add_block(keys_, block_, targets_);
  block_.rows.clear();
}

void GradientSums::add_row(const Oracle& forward, std::size_t r) {
  const RowId& id = forward.rows[r];
  if (!block_.rows.empty()) {
    const RowId& last = block_.rows.back().id;
    if (last.b != id.b || last.h != id.h || block_.rows.size() == RowBlock::kRows) end_block();
  }
  load_keys(p_, t_, id.b, id.h / group_, a_.truncates_sums, keys_);
  if (!result_.ds.empty()) result_.ds[r].assign(forward.scores[r].size(), 0.0);
  if (forward.lse[r] == kNothing) return;
  GradientRow row = read_row(p_, t_, g_, a_, keys_, forward, r);
  if (!result_.delta.empty()) result_.delta[r] = row.delta;
  RowPairs& pairs = block_.pairs[block_.rows.size()];
  find_pairs(p_, a_, keys_, forward.probabilities[r], g_.dout.dtype, row, pairs);
  const bool stages = !result_.ds.empty(), bias = t_.bias.given();
  const bool slopes = t_.alibi_slopes.given();
  for (std::size_t j = 0; j < pairs.p.size() && (stages || bias || slopes); ++j) {
    if (pairs.p[j] == 0) continue;
    if (stages) result_.ds[r][j] = pairs.ds(j);
    if (bias) add_bias(row, j, pairs);
    if (slopes) add_slope(row, j, pairs);
  }
  if (pairs.alike) add_alike_terms(pairs, targets_.q_at(keys_, row));
  if (t_.sinks.given() && !p_.options.partial) add_sink(row, forward.lse[r]);
  block_.rows.push_back(std::move(row));
}

void GradientSums::finish() {
  end_block();
  for (std::size_t i = 0; i < targets_.dk_walk.size(); ++i) {
    result_.dk.error[i] += 4 * std::sqrt(targets_.dk_walk[i]);
  }
  for (Gradient* g : {&result_.dq, &result_.dk}) {
    for (double& x : g->value) x = x == 0 ? 0.0 : x * p_.scale;
    for (double& x : g->noise) x *= p_.scale * p_.scale;
    for (double& x : g->error) x *= std::fabs(p_.scale);
    for (double& x : g->mass) x *= std::fabs(p_.scale);
    for (double& x : g->alike) x *= std::fabs(p_.scale);
  }
}

}  // namespace

void Gradient::resize(std::size_t count, bool given) {
  if (!given) count = 0;
  for (auto* one : {&value, &noise, &error, &mass, &alike, &terms}) one->assign(count, 0.0);
  excused.assign(count, 0);
}

GradientOracle compute_gradients(const Problem& problem, const Tensors& tensors,
                                 const Gradients& gradients, const GradientArithmetic& arithmetic,
                                 bool keep_stages) {
  const Oracle forward = compute(problem, tensors, all_rows(problem, tensors), kPartsForGradients,
                                 keep_stages ? 1 : 0);
  return compute_gradients(problem, tensors, gradients, arithmetic, forward, keep_stages);
}

GradientOracle compute_gradients(const Problem& problem, const Tensors& tensors,
                                 const Gradients& gradients, const GradientArithmetic& arithmetic,
                                 const Oracle& forward, bool keep_stages) {
  GradientOracle result;
  if (keep_stages) {
    result.delta.assign(forward.rows.size(), 0.0);
    result.ds.resize(forward.rows.size());
  }
  GradientSums sums(problem, tensors, gradients, arithmetic, result);
  for (std::size_t r = 0; r < forward.rows.size(); ++r) sums.add_row(forward, r);
  sums.finish();
  return result;
}

}  // namespace flashcore::reference
