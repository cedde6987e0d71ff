#include "reference/gradient_blocks.h"

#include <algorithm>
#include <cmath>

namespace flashcore::reference {
namespace {

/// The keys that a row of the block sees.
std::vector<std::int32_t> keys_of(const RowBlock& block) {
  std::vector<std::int32_t> keys;
  for (std::size_t j = 0; j < block.pairs[0].p.size(); ++j) {
    for (std::size_t i = 0; i < block.rows.size(); ++i) {
      if (block.pairs[i].p[j] == 0) continue;
      keys.push_back(static_cast<std::int32_t>(j));
      break;
    }
  }
  return keys;
}

void copy(const GradientSlice& from, std::size_t count, const GradientSlice& to) {
  std::copy_n(from.value, count, to.value);
  std::copy_n(from.noise, count, to.noise);
  std::copy_n(from.error, count, to.error);
  std::copy_n(from.mass, count, to.mass);
  if (from.extra != nullptr && to.extra != nullptr) std::copy_n(from.extra, count, to.extra);
}

/// Calls use(GradientSlice) for `count` columns of a gradient and of the sums `extra` (may be
/// null). Fewer than a panel are copied to one.
template <typename Use>
void on_columns(Gradient& g, std::size_t at, std::size_t count, double* extra, Use use) {
  const GradientSlice columns{&g.value[at], &g.noise[at], &g.error[at], &g.mass[at], extra};
  if (count == kPanel) return use(columns);
  double panel[5][kPanel] = {};
  const GradientSlice copied{panel[0], panel[1], panel[2], panel[3], panel[4]};
  copy(columns, count, copied);
  use(copied);
  copy(copied, count, columns);
}

void add_terms(double count, std::size_t at, std::size_t width, Gradient& g) {
  for (std::size_t i = 0; i < width; ++i) g.terms[at + i] += count;
}

/// An error of delta is the same for all pairs of a row.
void add_coherent(const GradientRow& row, const double* coherent, std::size_t count,
                  double* error) {
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isfinite(coherent[i]) && coherent[i] != 0) {
      error[i] += row.delta_error * std::fabs(coherent[i]);
    }
  }
}

void add_queries(const Keys& keys, const RowBlock& block, const std::vector<std::int32_t>& seen,
                 GradientTargets& targets) {
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const RowPairs& pairs = block.pairs[i];
    const auto terms = static_cast<double>(pairs.seen);
    const GradientWeights weights{pairs.dz.data(), pairs.dz_error.data(), pairs.dz_mass.data(),
                                  pairs.weights_of_delta()};
    for (std::size_t panel = 0; panel < keys.k.count(); ++panel) {
      const std::size_t width = keys.k.width(panel);
      const std::size_t at = targets.q_at(keys, block.rows[i]) + panel * kPanel;
      double coherent[kPanel] = {};
      on_columns(targets.result.dq, at, width, coherent, [&](const GradientSlice& slice) {
        sums().gradient_q(keys.k.panel(panel), seen.data(), seen.size(), weights, slice);
      });
      add_terms(terms, at, width, targets.result.dq);
      add_coherent(block.rows[i], coherent, width, &targets.result.dq.error[at]);
    }
  }
}

/// One key in a block: the factors of its pairs with the rows that see it.
struct KeyColumn {
  std::array<std::int32_t, RowBlock::kRows> rows;
  std::size_t count = 0;
  std::array<double, RowBlock::kRows> p, p_error, one, dz, dz_error, dz_mass, walk;
};

KeyColumn column_of(const RowBlock& block, std::size_t j) {
  KeyColumn column;
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const GradientRow& row = block.rows[i];
    const RowPairs& pairs = block.pairs[i];
    if (pairs.p[j] == 0) continue;
    column.rows[column.count++] = static_cast<std::int32_t>(i);
    column.p[i] = pairs.p[j];
    column.p_error[i] = pairs.p[j] * (row.score_error + row.p_error);
    column.one[i] = 1;
    column.dz[i] = pairs.dz[j];
    column.dz_error[i] = pairs.dz_error[j];
    column.dz_mass[i] = pairs.dz_mass[j];
    column.walk[i] = row.delta_error * pairs.p[j] * pairs.slope_at(j);
  }
  return column;
}

/// The gradients of k and v.
void add_keys(const Keys& keys, const RowBlock& block, const std::vector<std::int32_t>& seen,
              GradientTargets& targets) {
  Panels<double> q, dout;
  q.reset(block.rows.size(), block.rows[0].q.size());
  dout.reset(block.rows.size(), block.rows[0].dout.size());
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    q.set_row(i, block.rows[i].q.data());
    dout.set_row(i, block.rows[i].dout.data());
  }
  for (const std::int32_t j : seen) {
    const KeyColumn see = column_of(block, static_cast<std::size_t>(j));
    const auto terms = static_cast<double>(see.count);
    const GradientWeights k_weights{see.dz.data(), see.dz_error.data(), see.dz_mass.data(),
                                    see.walk.data()};
    const GradientWeights v_weights{see.p.data(), see.p_error.data(), see.one.data(), nullptr};
    for (std::size_t panel = 0; panel < q.count(); ++panel) {
      const std::size_t at = targets.k_at(keys, j) + panel * kPanel, width = q.width(panel);
      on_columns(targets.result.dk, at, width, &targets.dk_walk[at],
                 [&](const GradientSlice& slice) {
                   sums().gradient_k(q.panel(panel), see.rows.data(), see.count, k_weights, slice);
                 });
      add_terms(terms, at, width, targets.result.dk);
    }
    for (std::size_t panel = 0; panel < dout.count(); ++panel) {
      const std::size_t at = targets.v_at(keys, j) + panel * kPanel, width = dout.width(panel);
      on_columns(targets.result.dv, at, width, nullptr, [&](const GradientSlice& slice) {
        sums().gradient_v(dout.panel(panel), see.rows.data(), see.count, v_weights, slice);
      });
      add_terms(terms, at, width, targets.result.dv);
    }
  }
}

/// Adds one pair, whose operands may not be finite.
void add_pair(const Keys& keys, const GradientRow& row, const RowPairs& pairs, std::size_t j,
              std::vector<double>& coherent, GradientTargets& targets) {
  GradientOracle& result = targets.result;
  const auto key = static_cast<std::int64_t>(j);
  const std::size_t q_at = targets.q_at(keys, row), k_at = targets.k_at(keys, key);
  const std::size_t v_at = targets.v_at(keys, key);
  const bool excused =
      pairs.p[j] < kMayUnderflow && (!std::isfinite(pairs.w[j]) || !row.dout_finite);
  const double dz = pairs.dz[j], dz_error = pairs.dz_error[j];
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
    add(result.dv, v_at + c, pairs.p[j], pairs.p[j] * (row.score_error + row.p_error), 1.0,
        row.dout[c]);
  }
  for (std::size_t d = 0; d < row.q.size(); ++d) {
    const double k = keys.k.at(j, d);
    add(result.dq, q_at + d, dz, dz_error, pairs.dz_mass[j], k);
    add(result.dk, k_at + d, dz, dz_error, pairs.dz_mass[j], row.q[d]);
    coherent[d] += pairs.weights_of_delta()[j] * k;
    const double walk = row.delta_error * pairs.p[j] * pairs.slope_at(j) * row.q[d];
    // A slope of 0 may meet infinity.
    if (std::isfinite(walk)) targets.dk_walk[k_at + d] += walk * walk;
  }
}

}  // namespace

void add_block(const Keys& keys, const RowBlock& block, GradientTargets& targets) {
  const auto end = block.pairs.begin() + static_cast<std::ptrdiff_t>(block.rows.size());
  if (std::all_of(block.pairs.begin(), end, [](const RowPairs& pairs) { return pairs.finite; })) {
    const std::vector<std::int32_t> seen = keys_of(block);
    add_queries(keys, block, seen, targets);
    add_keys(keys, block, seen, targets);
    return;
  }
  for (std::size_t i = 0; i < block.rows.size(); ++i) {
    const GradientRow& row = block.rows[i];
    std::vector<double> coherent(row.q.size(), 0.0);
    for (std::size_t j = 0; j < block.pairs[i].p.size(); ++j) {
      if (block.pairs[i].p[j] != 0) add_pair(keys, row, block.pairs[i], j, coherent, targets);
    }
    add_coherent(row, coherent.data(), coherent.size(),
                 &targets.result.dq.error[targets.q_at(keys, row)]);
  }
}

}  // namespace flashcore::reference
