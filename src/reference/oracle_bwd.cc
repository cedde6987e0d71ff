#include "reference/oracle_bwd.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/cut_sums.h"

namespace flashcore::reference {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr double kLargestError = 1e100;  // infinity times a weight of 0 would be NaN
constexpr double kMayUnderflow = 1e-30;  // a weight below this may be 0 in f32

double read(const TensorView& t, const Layout& l, std::int64_t b, std::int64_t h, std::int64_t row,
            std::int64_t column) {
  return element(t.data, l.dtype, b * l.batch + h * l.head + row * l.row + column * l.column);
}

/// The layout of a tensor with the axes of q (or k): dense, or varlen with rows first.
Layout layout_like(const TensorView& t, bool varlen) {
  Layout l;
  l.dtype = t.dtype;
  if (varlen) {
    l.row = t.strides[0], l.head = t.strides[1], l.column = t.rank > 2 ? t.strides[2] : 0;
  } else {
    l.batch = t.strides[0], l.head = t.strides[1], l.row = t.strides[2];
    l.column = t.rank > 3 ? t.strides[3] : 0;
  }
  return l;
}

/// The position of an element in the logical order of a dense or varlen tensor.
struct Order {
  std::int64_t heads, rows, columns;
  bool varlen;
  std::size_t at(std::int64_t b, std::int64_t h, std::int64_t row) const {
    const std::int64_t first = varlen ? row * heads + h : (b * heads + h) * rows + row;
    return static_cast<std::size_t>(first * columns);
  }
};

/// K and V of one (batch, KV head).
struct Keys {
  std::int64_t b = -1, head = -1;
  Lengths lengths{};
  std::vector<double> k, v;
  Factors v_factors;  // of v, [v_dim][kv_len]; empty unless tensor cores multiply it
};

void load_keys(const Problem& p, const Tensors& t, std::int64_t b, std::int64_t head,
               bool cuts_sums, Keys& keys) {
  if (keys.b == b && keys.head == head) return;
  keys.b = b, keys.head = head;
  keys.lengths = lengths_of(p, t, b);
  keys.k.clear(), keys.v.clear();
  for (std::int64_t j = 0; j < keys.lengths.kv_len; ++j) {
    const std::int64_t row = keys.lengths.k_row + j;
    for (std::int64_t d = 0; d < p.head_dim; ++d) keys.k.push_back(read(t.k, p.k, b, head, row, d));
    for (std::int64_t c = 0; c < p.v_dim; ++c) keys.v.push_back(read(t.v, p.v, b, head, row, c));
  }
  keys.v_factors.clear();
  for (std::int64_t c = 0; cuts_sums && c < p.v_dim; ++c) {
    for (std::int64_t j = 0; j < keys.lengths.kv_len; ++j) {
      keys.v_factors.add(keys.v[static_cast<std::size_t>(j * p.v_dim + c)], p.v.dtype);
    }
  }
}

/// One query row: its operands, delta and the errors that all of its pairs share.
struct Row {
  RowId id{};
  std::vector<double> q, dout;
  bool dout_finite = true;
  double delta = 0;
  double delta_error = 0;      ///< of delta
  double score_error = 0;      ///< of a score, absolute
  double p_error = 0;          ///< of P, relative, from scores in a narrow format
  std::vector<double> dp_cut;  ///< by key: what tensor cores may cut from dP, in units of 2⁻²⁴
};

/// One visible pair of a row and a key.
struct Pair {
  double p = 0;      ///< probability
  double w = 0;      ///< dP - delta
  double slope = 1;  ///< 1 - tanh², of the softcap
  double dp_error = 0;
  double weight_error = 0;  ///< of dS before the softcap's derivative
  double ds() const { return p == 0 ? 0.0 : p * w; }
  double dz() const { return p == 0 ? 0.0 : p * w * slope; }
};

using Pairs = std::vector<std::pair<std::size_t, Pair>>;  // of a row, by key

class GradientSums {
 public:
  GradientSums(const Problem& p, const Tensors& t, const Gradients& g, const GradientArithmetic& a,
               GradientOracle& result)
      : p_(p), t_(t), g_(g), a_(a), result_(result) {
    const std::int64_t group = p.kv_heads == 0 ? 1 : p.q_heads / p.kv_heads;
    group_ = std::max<std::int64_t>(group, 1);
    q_order_ = {p.q_heads, p.q_varlen ? p.total_q : p.q_len, p.head_dim, p.q_varlen};
    k_order_ = {p.kv_heads, p.kv_varlen ? p.total_k : p.kv_len, p.head_dim, p.kv_varlen};
    v_order_ = {p.kv_heads, k_order_.rows, p.v_dim, p.kv_varlen};
    result.dq.resize(count_of(t.q), true);
    result.dk.resize(count_of(t.k), true);
    result.dv.resize(count_of(t.v), true);
    result.dbias.resize(count_of(t.bias), t.bias.given());
    result.dsinks.resize(static_cast<std::size_t>(p.q_heads), t.sinks.given());
    result.dslopes.assign(t.alibi_slopes.given() ? count_of(t.alibi_slopes) : 0, 0.0);
    dk_walk_.assign(result.dk.value.size(), 0.0);
  }

  void add_row(const Oracle& forward, std::size_t r);
  void finish();

 private:
  static std::size_t count_of(const TensorView& t) {
    std::int64_t count = 1;
    for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
    return static_cast<std::size_t>(count);
  }

  Row read_row(const Oracle& forward, std::size_t r) const;
  Pair make_pair(const Row& row, std::int64_t j, double p) const;
  void add_pair(const Row& row, std::int64_t j, const Pair& pair, std::vector<double>& coherent);
  void add_bias(const Row& row, std::int64_t j, const Pair& pair);
  void add_sink(const Row& row, double lse);
  void add_alike_terms(const Pairs& pairs, std::size_t at);

  const Problem& p_;
  const Tensors& t_;
  const Gradients& g_;
  const GradientArithmetic& a_;
  GradientOracle& result_;
  Order q_order_{}, k_order_{}, v_order_{};
  std::int64_t group_ = 1;
  Keys keys_;
  std::vector<double> dk_walk_;  // Σ (error of delta · P · slope · q)², independent between rows
};

Row GradientSums::read_row(const Oracle& forward, std::size_t r) const {
  Row row;
  row.id = forward.rows[r];
  const auto& [b, h, i] = row.id;
  const std::int64_t q_row = keys_.lengths.q_row + i;
  const Layout dout = layout_like(g_.dout, p_.q_varlen);
  const auto row_width = static_cast<std::size_t>(p_.v_dim);
  double magnitude = 0;
  for (std::int64_t d = 0; d < p_.head_dim; ++d) row.q.push_back(read(t_.q, p_.q, b, h, q_row, d));
  for (std::int64_t c = 0; c < p_.v_dim; ++c) {
    const double x = read(g_.dout, dout, b, h, q_row, c);
    const double out = read(t_.out, p_.out, b, h, q_row, c);
    row.dout.push_back(x);
    row.dout_finite = row.dout_finite && std::isfinite(x);
    row.delta += x * out;
    magnitude += std::fabs(x * out);
    if (!a_.out_error.empty()) {
      row.delta_error += std::fabs(x) * a_.out_error[r * row_width + static_cast<std::size_t>(c)];
    }
  }
  if (g_.dlse.given()) {
    // lse has no batch axis if q is varlen: [q_heads, total_q].
    const TensorView& t = g_.dlse;
    const std::int64_t at = p_.q_varlen
                                ? h * t.strides[0] + q_row * t.strides[1]
                                : b * t.strides[0] + h * t.strides[1] + q_row * t.strides[2];
    const double dlse = element(t.data, t.dtype, at);
    row.delta -= dlse;
    magnitude += std::fabs(dlse);
  }
  const double u = a_.sum_unit, a = forward.magnitude[r];
  row.delta_error += u * (2 + std::sqrt(static_cast<double>(p_.v_dim))) * magnitude;
  const auto head_dim = static_cast<double>(p_.head_dim);
  const double cut = a_.truncates_sums ? forward.largest_cut[r] : 0.0;
  row.score_error =
      u * (4 * a + std::max(std::sqrt(head_dim) * a, cut)) + 2 * u * std::fabs(forward.lse[r]);
  // Rounded once with each operand and once itself, a score is off by three units at most; the
  // row's normaliser by as much again.
  row.p_error = std::min(std::expm1(6 * a_.score_unit * a), kLargestError);
  if (a_.truncates_sums) {
    Factors factors;
    for (const double x : row.dout) factors.add(x, g_.dout.dtype);
    const auto keys = static_cast<std::size_t>(keys_.lengths.kv_len);
    row.dp_cut = cut_sums(factors, keys_.v_factors, keys);
  }
  return row;
}

Pair GradientSums::make_pair(const Row& row, std::int64_t j, double p) const {
  Pair pair;
  pair.p = p;
  const double* k = keys_.k.data() + j * p_.head_dim;
  const double* v = keys_.v.data() + j * p_.v_dim;
  double dp = 0, magnitude = 0;
  for (std::size_t c = 0; c < row.dout.size(); ++c) {
    const double product = row.dout[c] * v[c];
    dp += product;
    magnitude += std::fabs(product);
  }
  pair.w = dp - row.delta;
  const double u = a_.sum_unit;
  const auto v_dim = static_cast<double>(p_.v_dim);
  const double cut = row.dp_cut.empty() ? 0.0 : row.dp_cut[static_cast<std::size_t>(j)];
  pair.dp_error = u * (2 * magnitude + std::max(std::sqrt(v_dim) * magnitude, cut)) +
                  a_.dp_unit * std::fabs(dp);
  double score_error = row.score_error;
  if (p_.options.softcap > 0) {
    double z = 0;
    for (std::size_t d = 0; d < row.q.size(); ++d) z += row.q[d] * k[d];
    const double tanh = std::tanh(p_.scale * z / p_.options.softcap);
    pair.slope = 1 - tanh * tanh;
    score_error *= 1 + 2 * std::fabs(tanh) / p_.options.softcap;
  }
  pair.weight_error = p * ((score_error + row.p_error + 4 * u) * std::fabs(pair.w) + pair.dp_error);
  return pair;
}

void GradientSums::add_pair(const Row& row, std::int64_t j, const Pair& pair,
                            std::vector<double>& coherent) {
  const std::int64_t head = row.id.h / group_;
  const std::size_t q_at = q_order_.at(row.id.b, row.id.h, keys_.lengths.q_row + row.id.i);
  const std::size_t k_at = k_order_.at(row.id.b, head, keys_.lengths.k_row + j);
  const std::size_t v_at = v_order_.at(row.id.b, head, keys_.lengths.k_row + j);
  const double* k = keys_.k.data() + j * p_.head_dim;
  const bool excused = pair.p < kMayUnderflow && (!std::isfinite(pair.w) || !row.dout_finite);
  const double dz = pair.dz(), cap = p_.options.softcap > 0 ? 18 * a_.sum_unit : 0.0;
  // The rounded slope multiplies the computed w. Neither is 0 where the exact one is.
  const double w = std::fabs(pair.w) + pair.dp_error + row.delta_error;
  const double dz_error = pair.weight_error * pair.slope + cap * pair.p * w;
  const auto add = [&](Gradient& g, std::size_t at, double weight, double error, double flushed,
                       double operand) {
    if (excused) g.excused[at] = 1;
    g.terms[at] += 1;
    if (weight == 0) {
      if (error > 0 && std::isfinite(operand)) g.error[at] += error * std::fabs(operand);
      return;
    }
    g.value[at] += weight * operand;
    if (!std::isfinite(operand)) return;
    g.noise[at] += weight * operand * weight * operand;
    g.error[at] += error * std::fabs(operand);
    g.mass[at] += flushed * std::fabs(operand);
  };
  for (std::size_t c = 0; c < row.dout.size(); ++c) {
    add(result_.dv, v_at + c, pair.p, pair.p * (row.score_error + row.p_error), 1.0, row.dout[c]);
  }
  for (std::size_t d = 0; d < row.q.size(); ++d) {
    add(result_.dq, q_at + d, dz, dz_error, 1 + std::fabs(pair.w), k[d]);
    add(result_.dk, k_at + d, dz, dz_error, 1 + std::fabs(pair.w), row.q[d]);
    coherent[d] += pair.p * pair.slope * k[d];
    const double walk = row.delta_error * pair.p * pair.slope * row.q[d];
    if (std::isfinite(walk)) dk_walk_[k_at + d] += walk * walk;  // a slope of 0 may meet infinity
  }
  if (t_.bias.given()) add_bias(row, j, pair);
  if (t_.alibi_slopes.given()) {
    const std::int64_t distance = keys_.lengths.q_start + row.id.i - keys_.lengths.k_start - j;
    const std::int64_t b = t_.alibi_slopes.rank == 2 ? row.id.b : 0;
    result_.dslopes[static_cast<std::size_t>(b * p_.q_heads + row.id.h)] -=
        pair.ds() * static_cast<double>(std::llabs(distance));
  }
}

void GradientSums::add_bias(const Row& row, std::int64_t j, const Pair& pair) {
  const std::int64_t* shape = t_.bias.shape;
  const auto along = [&](int axis, std::int64_t index) { return shape[axis] == 1 ? 0 : index; };
  const auto at = static_cast<std::size_t>(
      ((along(0, row.id.b) * shape[1] + along(1, row.id.h)) * shape[2] + along(2, row.id.i)) *
          shape[3] +
      j);
  Gradient& g = result_.dbias;
  g.value[at] += pair.ds();
  g.noise[at] += pair.ds() * pair.ds();
  g.error[at] += pair.weight_error + pair.p * row.delta_error;
  g.mass[at] += 1 + std::fabs(pair.w);
  g.terms[at] += 1;
  if (pair.p < kMayUnderflow && !std::isfinite(pair.w)) g.excused[at] = 1;
}

void GradientSums::add_sink(const Row& row, double lse) {
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

/// True if dS of a row differs by a few units in the last place of 16-bit formats at most.
bool are_alike(const Pairs& pairs) {
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const auto& [j, pair] : pairs) {
    least = std::min(least, std::fabs(pair.dz()));
    most = std::max(most, std::fabs(pair.dz()));
  }
  return most - least <= most / 16;
}

void GradientSums::add_alike_terms(const Pairs& pairs, std::size_t at) {
  const auto dim = static_cast<std::size_t>(p_.head_dim);
  for (const auto& [j, pair] : pairs) {
    for (std::size_t d = 0; d < dim; ++d) {
      const double term = std::fabs(pair.dz() * keys_.k[j * dim + d]);
      if (std::isfinite(term)) result_.dq.alike[at + d] += term;
    }
  }
}

void GradientSums::add_row(const Oracle& forward, std::size_t r) {
  const RowId& id = forward.rows[r];
  load_keys(p_, t_, id.b, id.h / group_, a_.truncates_sums, keys_);
  const std::vector<double>& scores = forward.scores[r];
  if (!result_.ds.empty()) result_.ds[r].assign(scores.size(), 0.0);
  if (forward.lse[r] == kNothing) return;
  Row row = read_row(forward, r);
  if (!result_.delta.empty()) result_.delta[r] = row.delta;
  std::vector<double> coherent(row.q.size(), 0.0);
  Pairs pairs;
  double dp_mass = 0;  // Σ P |dP|
  for (std::size_t j = 0; j < scores.size(); ++j) {
    // A weight of 0 contributes nothing, even if its operands are not finite.
    if (scores[j] == kNothing || forward.probabilities[r][j] == 0) continue;
    pairs.emplace_back(j,
                       make_pair(row, static_cast<std::int64_t>(j), forward.probabilities[r][j]));
    const Pair& pair = pairs.back().second;
    dp_mass += pair.p * std::fabs(pair.w + row.delta);
  }
  if (a_.dp_unit > 0) row.delta_error += a_.dp_unit * (2 * dp_mass + std::fabs(row.delta));
  for (const auto& [j, pair] : pairs) {
    const auto key = static_cast<std::int64_t>(j);
    if (!result_.ds.empty()) result_.ds[r][j] = pair.ds();
    add_pair(row, key, pair, coherent);
  }
  const std::size_t at = q_order_.at(id.b, id.h, keys_.lengths.q_row + id.i);
  if (are_alike(pairs)) add_alike_terms(pairs, at);
  for (std::size_t d = 0; d < coherent.size(); ++d) {
    if (std::isfinite(coherent[d]) && coherent[d] != 0)
      result_.dq.error[at + d] += row.delta_error * std::fabs(coherent[d]);
  }
  if (t_.sinks.given() && !p_.options.partial) add_sink(row, forward.lse[r]);
}

void GradientSums::finish() {
  for (std::size_t i = 0; i < dk_walk_.size(); ++i) {
    result_.dk.error[i] += 4 * std::sqrt(dk_walk_[i]);
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
  const Oracle forward =
      compute(problem, tensors, all_rows(problem, tensors), true, keep_stages ? 1 : 0);
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
