#include "reference/gradient_blocks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace flashcore::reference {
namespace {

/// Weights of the pairs of a block: [rows][keys]. 0 where a row does not see a key.
struct BlockWeights {
  std::vector<std::int32_t> keys;  ///< that a row of the block sees
  std::vector<double> p, p_error, one, dz, dz_error, dz_mass, coherent, walk;
};

/// True if everything is finite: then a weight of 0 adds nothing, and no pair needs a look at its
/// operands.
bool is_finite(const Keys& keys, const RowBlock& block) {
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const GradientRow& row = block.rows[i];
    double largest = 0;
    for (const double x : row.q) largest = std::max(largest, std::fabs(x));
    if (!row.q_finite || !row.dout_finite || !std::isfinite(row.score_error) ||
        !std::isfinite(row.delta_error * largest)) {
      return false;
    }
    for (std::size_t j = 0; j < block.pairs[i].size(); ++j) {
      const Pair& pair = block.pairs[i][j];
      if (pair.p == 0) continue;
      if (keys.k_finite[j] == 0 || !std::isfinite(pair.dz()) || !std::isfinite(pair.dz_error)) {
        return false;
      }
    }
  }
  return true;
}

BlockWeights weights_of(const RowBlock& block) {
  BlockWeights weights;
  const std::size_t rows = block.rows.size();
  for (std::size_t j = 0; j < block.pairs[0].size(); ++j) {
    const auto sees = [&](const std::vector<Pair>& pairs) { return pairs[j].p != 0; };
    if (std::any_of(block.pairs.begin(), block.pairs.end(), sees)) {
      weights.keys.push_back(static_cast<std::int32_t>(j));
    }
  }
  const std::size_t count = weights.keys.size();
  for (auto* all : {&weights.p, &weights.p_error, &weights.one, &weights.dz, &weights.dz_error,
                    &weights.dz_mass, &weights.coherent, &weights.walk}) {
    all->assign(rows * count, 0.0);
  }
  for (std::size_t i = 0; i < rows; ++i) {
    const GradientRow& row = block.rows[i];
    for (std::size_t n = 0; n < count; ++n) {
      const Pair& pair = block.pairs[i][static_cast<std::size_t>(weights.keys[n])];
      if (pair.p == 0) continue;
      const std::size_t at = i * count + n;
      weights.p[at] = pair.p;
      weights.p_error[at] = pair.p * (row.score_error + row.p_error);
      weights.one[at] = 1;
      weights.dz[at] = pair.dz();
      weights.dz_error[at] = pair.dz_error;
      weights.dz_mass[at] = pair.dz() == 0 ? 0.0 : 1 + std::fabs(pair.w);
      weights.coherent[at] = pair.p * pair.slope;
      weights.walk[at] = row.delta_error * pair.p * pair.slope;
    }
  }
  return weights;
}

/// Some columns of a gradient and of sums beside it.
class Columns {
 public:
  Columns(Gradient& g, std::size_t at, std::size_t count, double* extra = nullptr)
      : g_(g), extra_(extra), at_(at), count_(count) {}

  GradientSlice load() const {
    GradientSlice slice{};
    std::copy_n(&g_.value[at_], count_, slice.value);
    std::copy_n(&g_.noise[at_], count_, slice.noise);
    std::copy_n(&g_.error[at_], count_, slice.error);
    std::copy_n(&g_.mass[at_], count_, slice.mass);
    if (extra_ != nullptr) std::copy_n(extra_, count_, slice.extra);
    return slice;
  }
  void store(const GradientSlice& slice, double terms) {
    std::copy_n(slice.value, count_, &g_.value[at_]);
    std::copy_n(slice.noise, count_, &g_.noise[at_]);
    std::copy_n(slice.error, count_, &g_.error[at_]);
    std::copy_n(slice.mass, count_, &g_.mass[at_]);
    if (extra_ != nullptr) std::copy_n(slice.extra, count_, extra_);
    for (std::size_t i = 0; i < count_; ++i) g_.terms[at_ + i] += terms;
  }

 private:
  Gradient& g_;
  double* extra_;
  std::size_t at_, count_;
};

/// An error of delta is the same for all pairs of a row.
void add_coherent(const GradientRow& row, const double* coherent, std::size_t count,
                  double* error) {
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isfinite(coherent[i]) && coherent[i] != 0) {
      error[i] += row.delta_error * std::fabs(coherent[i]);
    }
  }
}

void add_queries(const Keys& keys, const RowBlock& block, const BlockWeights& weights,
                 GradientTargets& targets) {
  const std::size_t count = weights.keys.size();
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const std::size_t begin = i * count;
    const double* one = weights.one.data() + begin;
    const double terms = std::accumulate(one, one + count, 0.0);
    const GradientWeights row_weights{weights.dz.data() + begin, weights.dz_error.data() + begin,
                                      weights.dz_mass.data() + begin,
                                      weights.coherent.data() + begin, 1};
    for (std::size_t panel = 0; panel < keys.k.count(); ++panel) {
      const std::size_t width = keys.k.width(panel);
      const std::size_t at = targets.q_at(keys, block.rows[i]) + panel * kPanel;
      Columns columns(targets.result.dq, at, width);
      GradientSlice slice = columns.load();
      sums().gradient_q(keys.k.panel(panel), weights.keys.data(), count, row_weights, slice);
      columns.store(slice, terms);
      add_coherent(block.rows[i], slice.extra, width, &targets.result.dq.error[at]);
    }
  }
}

/// The gradients of k and v.
void add_keys(const Keys& keys, const RowBlock& block, const BlockWeights& weights,
              GradientTargets& targets) {
  const std::size_t rows = block.rows.size(), count = weights.keys.size();
  Panels<double> q, dout;
  q.reset(rows, block.rows[0].q.size());
  dout.reset(rows, block.rows[0].dout.size());
  std::int32_t all_rows[RowBlock::kRows];
  for (std::size_t i = 0; i < rows; ++i) {
    q.set_row(i, block.rows[i].q.data());
    dout.set_row(i, block.rows[i].dout.data());
    all_rows[i] = static_cast<std::int32_t>(i);
  }
  for (std::size_t n = 0; n < count; ++n) {
    const std::int64_t j = weights.keys[n];
    double terms = 0;
    for (std::size_t i = 0; i < rows; ++i) terms += weights.one[i * count + n];
    for (std::size_t panel = 0; panel < q.count(); ++panel) {
      const std::size_t at = targets.k_at(keys, j) + panel * kPanel;
      Columns columns(targets.result.dk, at, q.width(panel), &targets.dk_walk[at]);
      GradientSlice slice = columns.load();
      sums().gradient_k(
          q.panel(panel), all_rows, rows,
          {&weights.dz[n], &weights.dz_error[n], &weights.dz_mass[n], &weights.walk[n], count},
          slice);
      columns.store(slice, terms);
    }
    for (std::size_t panel = 0; panel < dout.count(); ++panel) {
      const std::size_t at = targets.v_at(keys, j) + panel * kPanel;
      Columns columns(targets.result.dv, at, dout.width(panel));
      GradientSlice slice = columns.load();
      sums().gradient_v(dout.panel(panel), all_rows, rows,
                        {&weights.p[n], &weights.p_error[n], &weights.one[n], nullptr, count},
                        slice);
      columns.store(slice, terms);
    }
  }
}

/// Adds one pair, whose operands may not be finite.
void add_pair(const Keys& keys, const GradientRow& row, std::int64_t j, const Pair& pair,
              std::vector<double>& coherent, GradientTargets& targets) {
  GradientOracle& result = targets.result;
  const std::size_t q_at = targets.q_at(keys, row), k_at = targets.k_at(keys, j);
  const std::size_t v_at = targets.v_at(keys, j);
  const bool excused = pair.p < kMayUnderflow && (!std::isfinite(pair.w) || !row.dout_finite);
  const double dz = pair.dz();
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
    add(result.dv, v_at + c, pair.p, pair.p * (row.score_error + row.p_error), 1.0, row.dout[c]);
  }
  for (std::size_t d = 0; d < row.q.size(); ++d) {
    const double k = keys.k.at(static_cast<std::size_t>(j), d);
    add(result.dq, q_at + d, dz, pair.dz_error, 1 + std::fabs(pair.w), k);
    add(result.dk, k_at + d, dz, pair.dz_error, 1 + std::fabs(pair.w), row.q[d]);
    coherent[d] += pair.p * pair.slope * k;
    const double walk = row.delta_error * pair.p * pair.slope * row.q[d];
    // A slope of 0 may meet infinity.
    if (std::isfinite(walk)) targets.dk_walk[k_at + d] += walk * walk;
  }
}

}  // namespace

void add_block(const Keys& keys, const RowBlock& block, GradientTargets& targets) {
  if (is_finite(keys, block)) {
    const BlockWeights weights = weights_of(block);
    add_queries(keys, block, weights, targets);
    add_keys(keys, block, weights, targets);
    return;
  }
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const GradientRow& row = block.rows[i];
    std::vector<double> coherent(row.q.size(), 0.0);
    for (std::size_t j = 0; j < block.pairs[i].size(); ++j) {
      const Pair& pair = block.pairs[i][j];
      if (pair.p == 0) continue;
      add_pair(keys, row, static_cast<std::int64_t>(j), pair, coherent, targets);
    }
    add_coherent(row, coherent.data(), coherent.size(),
                 &targets.result.dq.error[targets.q_at(keys, row)]);
  }
}

}  // namespace flashcore::reference
