#include "reference/gradient_pairs.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashcore::reference {
namespace {

constexpr double kLargestError = 1e100;  // infinity times a weight of 0 would be NaN

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

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

/// Sums of a row's operand with a panel of keys.
struct PanelSums {
  double sum[kPanel], magnitude[kPanel];
};

/// The sums of a row over the dimensions of v, and with a softcap of k, for panels of keys.
class PanelProducts {
 public:
  PanelProducts(const Problem& p, const GradientArithmetic& a, const Keys& keys, DType dout,
                const GradientRow& row)
      : keys_(keys),
        row_(row),
        softcap_(p.options.softcap > 0),
        cuts_(a.truncates_sums),
        factors_(cuts_ ? Factors(row.dout, dout) : Factors()) {}

  void multiply(std::size_t panel) {
    sums().products(row_.dout.data(), keys_.v_transposed.panel(panel), row_.dout.size(), dp.sum,
                    dp.magnitude);
    if (cuts_) cut_sums(factors_, keys_.v_factors, panel, cut);
    if (softcap_) {
      sums().products(row_.q.data(), keys_.k_transposed.panel(panel), row_.q.size(), z.sum,
                      z.magnitude);
    }
  }

  PanelSums dp, z;
  double cut[kPanel] = {};

 private:
  const Keys& keys_;
  const GradientRow& row_;
  bool softcap_, cuts_;
  Factors factors_;
};

bool is_hidden(const std::vector<double>& probabilities, std::size_t first, std::size_t last) {
  const double* begin = probabilities.data();
  return std::all_of(begin + first, begin + last, [](double x) { return x == 0; });
}

/// Σ P |dP|.
double mass_of_dp(const std::vector<double>& probabilities, const GradientRow& row,
                  PanelProducts& products) {
  double mass = 0;
  for (std::size_t first = 0; first < probabilities.size(); first += kPanel) {
    const std::size_t last = std::min(first + kPanel, probabilities.size());
    if (is_hidden(probabilities, first, last)) continue;
    products.multiply(first / kPanel);
    for (std::size_t j = first; j < last; ++j) {
      if (probabilities[j] == 0) continue;
      const double w = products.dp.sum[j - first] - row.delta;
      mass += probabilities[j] * std::fabs(w + row.delta);
    }
  }
  return mass;
}

}  // namespace

void load_keys(const Problem& p, const Tensors& t, std::int64_t b, std::int64_t head,
               bool cuts_sums, Keys& keys) {
  if (keys.b == b && keys.head == head) return;
  keys.b = b, keys.head = head;
  keys.lengths = lengths_of(p, t, b);
  const auto n = static_cast<std::size_t>(keys.lengths.kv_len);
  const auto head_dim = static_cast<std::size_t>(p.head_dim);
  const auto v_dim = static_cast<std::size_t>(p.v_dim);
  const bool softcap = p.options.softcap > 0;
  keys.k.reset(n, head_dim);
  keys.k_transposed.reset(softcap ? head_dim : 0, softcap ? n : 0);
  keys.v_transposed.reset(v_dim, n);
  keys.v_factors.reset(cuts_sums ? v_dim : 0, cuts_sums ? n : 0);
  keys.k_finite.assign(n, 1);
  std::vector<double> k(head_dim), v(v_dim);
  for (std::size_t j = 0; j < n; ++j) {
    const std::int64_t row = keys.lengths.k_row + static_cast<std::int64_t>(j);
    Operand{t.k.data, p.k}.read(b, head, row, p.head_dim, k.data());
    Operand{t.v.data, p.v}.read(b, head, row, p.v_dim, v.data());
    keys.k_finite[j] = all_finite(k) ? 1 : 0;
    keys.k.set_row(j, k.data());
    if (softcap) keys.k_transposed.set_column(j, k.data());
    keys.v_transposed.set_column(j, v.data());
    for (std::size_t c = 0; cuts_sums && c < v_dim; ++c) {
      keys.v_factors.set(c, j, factor_of(v[c], p.v.dtype));
    }
  }
}

GradientRow read_row(const Problem& p, const Tensors& t, const Gradients& g,
                     const GradientArithmetic& arithmetic, const Keys& keys, const Oracle& forward,
                     std::size_t r) {
  GradientRow row;
  row.id = forward.rows[r];
  const auto& [b, h, i] = row.id;
  const std::int64_t q_row = keys.lengths.q_row + i;
  const auto v_dim = static_cast<std::size_t>(p.v_dim);
  row.q.resize(static_cast<std::size_t>(p.head_dim));
  row.dout.resize(v_dim);
  std::vector<double> out(v_dim);
  Operand{t.q.data, p.q}.read(b, h, q_row, p.head_dim, row.q.data());
  Operand{g.dout.data, layout_like(g.dout, p.q_varlen)}.read(b, h, q_row, p.v_dim, row.dout.data());
  Operand{t.out.data, p.out}.read(b, h, q_row, p.v_dim, out.data());
  row.q_finite = all_finite(row.q);
  row.dout_finite = all_finite(row.dout);
  double magnitude = 0;
  for (std::size_t c = 0; c < v_dim; ++c) {
    const double product = row.dout[c] * out[c];
    row.delta += product;
    magnitude += std::fabs(product);
    if (!arithmetic.out_error.empty()) {
      row.delta_error += std::fabs(row.dout[c]) * arithmetic.out_error[r * v_dim + c];
    }
  }
  if (g.dlse.given()) {
    // lse has no batch axis if q is varlen: [q_heads, total_q].
    const TensorView& dlse = g.dlse;
    const std::int64_t at =
        p.q_varlen ? h * dlse.strides[0] + q_row * dlse.strides[1]
                   : b * dlse.strides[0] + h * dlse.strides[1] + q_row * dlse.strides[2];
    const double x = element(dlse.data, dlse.dtype, at);
    row.delta -= x;
    magnitude += std::fabs(x);
  }
  const double u = arithmetic.sum_unit, a = forward.magnitude[r];
  row.delta_error += u * (2 + std::sqrt(static_cast<double>(p.v_dim))) * magnitude;
  const auto head_dim = static_cast<double>(p.head_dim);
  const double cut = arithmetic.truncates_sums ? forward.largest_cut[r] : 0.0;
  row.score_error =
      u * (4 * a + std::max(std::sqrt(head_dim) * a, cut)) + 2 * u * std::fabs(forward.lse[r]);
  // Rounded once with each operand and once itself, a score is off by three units at most; the
  // row's normaliser by as much again.
  row.p_error = std::min(std::expm1(6 * arithmetic.score_unit * a), kLargestError);
  return row;
}

void RowPairs::resize(std::size_t keys, bool softcap) {
  for (auto* all : {&p, &w, &weight_error, &dz, &dz_error, &dz_mass}) all->resize(keys);
  for (auto* all : {&slope, &coherent}) all->resize(softcap ? keys : 0);
}

void RowPairs::clear(std::size_t first, std::size_t last) {
  for (auto* all : {&p, &w, &slope, &weight_error, &dz, &dz_error, &dz_mass, &coherent}) {
    if (!all->empty()) std::fill(all->data() + first, all->data() + last, 0.0);
  }
}

void find_pairs(const Problem& p, const GradientArithmetic& a, const Keys& keys,
                const std::vector<double>& probabilities, DType dout, GradientRow& row,
                RowPairs& pairs) {
  const double cap = p.options.softcap, u = a.sum_unit;
  const double cap_error = cap > 0 ? 18 * u : 0.0;
  const double walk = std::sqrt(static_cast<double>(p.v_dim));
  pairs.resize(probabilities.size(), cap > 0);
  PanelProducts products(p, a, keys, dout, row);
  if (a.dp_unit > 0) {
    const double mass = mass_of_dp(probabilities, row, products);
    row.delta_error += a.dp_unit * (2 * mass + std::fabs(row.delta));
  }
  double largest_q = 0;
  for (const double x : row.q) largest_q = std::max(largest_q, std::fabs(x));
  pairs.finite = row.q_finite && row.dout_finite && std::isfinite(row.score_error) &&
                 std::isfinite(row.delta_error * largest_q);
  pairs.seen = 0;
  double least = std::numeric_limits<double>::infinity(), most = 0;  // of |dZ|
  for (std::size_t first = 0; first < probabilities.size(); first += kPanel) {
    const std::size_t last = std::min(first + kPanel, probabilities.size());
    pairs.clear(first, last);
    if (is_hidden(probabilities, first, last)) continue;
    products.multiply(first / kPanel);
    for (std::size_t j = first; j < last; ++j) {
      const double weight = probabilities[j];
      if (weight == 0) continue;
      const std::size_t lane = j - first;
      const double dp = products.dp.sum[lane], magnitude = products.dp.magnitude[lane];
      const double dp_error = u * (2 * magnitude + std::max(walk * magnitude, products.cut[lane])) +
                              a.dp_unit * std::fabs(dp);
      const double w = dp - row.delta, size = std::fabs(w);
      double score_error = row.score_error, slope = 1;
      if (cap > 0) {
        const double tanh = std::tanh(p.scale * products.z.sum[lane] / cap);
        slope = 1 - tanh * tanh;
        score_error *= 1 + 2 * std::fabs(tanh) / cap;
        pairs.slope[j] = slope;
        pairs.coherent[j] = weight * slope;
      }
      const double weight_error = weight * ((score_error + row.p_error + 4 * u) * size + dp_error);
      // The rounded slope multiplies the computed w. Neither is 0 where the exact one is.
      const double dz_error =
          weight_error * slope + cap_error * weight * (size + dp_error + row.delta_error);
      const double dz = weight * w * slope;
      ++pairs.seen;
      pairs.p[j] = weight;
      pairs.w[j] = w;
      pairs.weight_error[j] = weight_error;
      pairs.dz[j] = dz;
      pairs.dz_error[j] = dz_error;
      pairs.dz_mass[j] = dz == 0 ? 0.0 : 1 + size;
      least = std::min(least, std::fabs(dz));
      most = std::max(most, std::fabs(dz));
      pairs.finite =
          pairs.finite && keys.k_finite[j] != 0 && std::isfinite(dz) && std::isfinite(dz_error);
    }
  }
  pairs.alike = most - least <= most / 16;
}

}  // namespace flashcore::reference
