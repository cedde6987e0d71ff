#include "verify/probes/score_reading.h"
#include "verify/inputs/decimal.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace flashcore::verify {
namespace {

/// Relative distance below which a fit is exact, in addition to the tolerance.
constexpr double kExact = 0.02;
/// Limit of the tolerance term. Without it, 8-bit formats would accept any fit.
constexpr double kMaxTolerance = 0.15;

}  // namespace

/// Sums over the readable keys of one row.
struct ScoreReading::RowErrors {
  double score_error = 0, rounding = 0;  ///< tolerances of every weight of the row
  double sum = 0, mean_got = 0, mean_want = 0, mean_tolerance = 0, count = 0;
  std::vector<double> variance;  ///< of each weight
};

ScoreReading::ScoreReading(ProbeSequence& probes, const HostCall& call) : call_(call) {
  const Tensors& t = call_.tensors;
  keys_ = static_cast<std::size_t>(t.k.shape[2]);
  rows_per_head_ = static_cast<std::size_t>(t.q.shape[2]);
  q_heads_ = static_cast<std::size_t>(t.q.shape[1]);
  kv_heads_ = static_cast<std::size_t>(t.k.shape[1]);
  // Rounds q and k in call_ to the format of the implementation.
  const CallResult result = probes.impl.run(call_);
  failure_ = failure_of(probes, result, FaultStage::scores);
  if (!result.ok()) return;
  p_ = read_probabilities(probes, call_);
  scales_ = probes.impl.last_scales();
  if (p_.empty()) return;
  const reference::Oracle oracle = probes.oracle(call_, true);
  rows_ = oracle.rows.size();
  const Arithmetic arithmetic = probes.impl.arithmetic();
  got_.assign(rows_ * keys_, 0.0);
  want_ = tolerance_ = got_;
  used_.assign(rows_ * keys_, 0);
  for (std::size_t r = 0; r < rows_; ++r) {
    RowErrors errors;
    read_row(arithmetic, oracle, r, errors);
    judge_row(errors, r);
    judge_sum(arithmetic, oracle, errors, r);
  }
  noise_ = signal2_ > 0 ? std::sqrt(noise2_ / signal2_) : 0;
  rms_ratio_ = judged_ > 0 ? std::sqrt(ratio2_ / judged_) : 0;
}

/// Reads log P and the oracle's scores of the row's readable keys.
void ScoreReading::read_row(const Arithmetic& a, const reference::Oracle& oracle, std::size_t r,
                            RowErrors& e) {
  const double kept = score_bound(oracle, r, a);
  e.score_error =
      kept + a.score_unit * oracle.magnitude[r] + a.product_unit * oracle.largest_product[r];
  e.rounding = 2 * a.out_unit + 4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(keys_)));
  e.variance.assign(keys_, 0.0);
  for (std::size_t j = 0; j < keys_; ++j) {
    const std::size_t at = r * keys_ + j;
    const double p = oracle.probabilities[r][j];
    e.sum += p_[at];
    if (p == 0) continue;
    const double flushed = a.out_smallest + a.p_smallest * std::exp(oracle.max[r] - oracle.lse[r]);
    const double relative = e.rounding + 2 * e.score_error + flushed / p;
    if (relative > 0.5) continue;  // the weight is too small for this format
    if (!(p_[at] > 0) || !std::isfinite(p_[at])) {
      if (lost_++ == 0) {
        worst_row_ = r;
        worst_key_ = j;
      }
      continue;
    }
    used_[at] = 1;
    got_[at] = std::log(p_[at]);
    want_[at] = oracle.scores[r][j];
    tolerance_[at] = -std::log(1 - relative);
    // Each rounding is independent and uniform within one unit: its variance is a third of the unit
    // squared. A weight is rounded at most six times (docs/verify.md).
    const double s = oracle.scores[r][j], below_max = s - oracle.max[r];
    e.variance[j] = (a.out_unit * a.out_unit + 2 * a.p_unit * a.p_unit +
                     a.score_unit * a.score_unit * (2 * s * s + below_max * below_max) +
                     std::pow(kept, 2) + std::pow(flushed / p, 2)) /
                    3;
    e.mean_got += got_[at];
    e.mean_want += want_[at];
    e.mean_tolerance += tolerance_[at];
    ++e.count;
  }
}

/// Subtracts the row means, which are not measurable, and compares the scores.
void ScoreReading::judge_row(const RowErrors& e, std::size_t r) {
  // Subtracts the means a second time: the first subtraction loses digits that f64 inputs need.
  double mean_variance = 0, rest_got = 0, rest_want = 0;
  for (std::size_t j = 0; j < keys_; ++j) {
    const std::size_t at = r * keys_ + j;
    if (used_[at] == 0) continue;
    mean_variance += e.variance[j] / (e.count * e.count);
    got_[at] -= e.mean_got / e.count;
    want_[at] -= e.mean_want / e.count;
    rest_got += got_[at];
    rest_want += want_[at];
  }
  for (std::size_t j = 0; j < keys_ && e.count > 0; ++j) {
    const std::size_t at = r * keys_ + j;
    if (used_[at] == 0) continue;
    got_[at] -= rest_got / e.count;
    want_[at] -= rest_want / e.count;
    tolerance_[at] += e.mean_tolerance / e.count;
    signal2_ += want_[at] * want_[at];
    noise2_ += tolerance_[at] * tolerance_[at];
    const double ratio = std::fabs(got_[at] - want_[at]) / tolerance_[at];
    if (ratio > 1) ++wrong_;
    ratio2_ += std::pow(got_[at] - want_[at], 2) / (e.variance[j] + mean_variance);
    ++judged_;
    if (ratio > worst_ && lost_ == 0) {
      worst_ = ratio;
      worst_row_ = r;
      worst_key_ = j;
    }
  }
}

void ScoreReading::judge_sum(const Arithmetic& a, const reference::Oracle& oracle,
                             const RowErrors& e, std::size_t r) {
  least_sum_ = std::min(least_sum_, e.sum);
  most_sum_ = std::max(most_sum_, e.sum);
  // Weights round independently. Weights that are too small to be read may all be flushed.
  const double bound =
      e.rounding + 2 * e.score_error +
      a.p_smallest * static_cast<double>(keys_) * std::exp(oracle.max[r] - oracle.lse[r]);
  if (!(std::fabs(e.sum - 1) <= bound) && oracle.lse[r] > -1e300) {
    sums_wrong_ = true;
    if (!(std::fabs(e.sum - 1) <= std::fabs(worst_sum_ - 1))) worst_sum_ = e.sum;
  }
}

ScoreReading::Fit ScoreReading::fit() const {
  double gw = 0, ww = 0, rest = 0;
  for (std::size_t at = 0; at < got_.size(); ++at) {
    gw += got_[at] * want_[at];
    ww += want_[at] * want_[at];
  }
  Fit f;
  f.slope = ww > 0 ? gw / ww : 1;
  for (std::size_t at = 0; at < got_.size(); ++at) {
    rest += std::pow(got_[at] - f.slope * want_[at], 2);
  }
  f.residual = ww > 0 && f.slope != 0 ? std::sqrt(rest / ww) / std::fabs(f.slope) : 1e30;
  return f;
}

ScoreReading::Fit ScoreReading::fit_row(std::size_t row) const {
  double gw = 0, ww = 0, rest = 0;
  for (std::size_t j = 0; j < keys_; ++j) {
    gw += got(row, j) * want(row, j);
    ww += want(row, j) * want(row, j);
  }
  Fit f;
  f.slope = ww > 0 ? gw / ww : 1;
  for (std::size_t j = 0; j < keys_; ++j) {
    rest += std::pow(got(row, j) - f.slope * want(row, j), 2);
  }
  f.residual = ww > 0 ? std::sqrt(rest / ww) : 0;
  return f;
}

double ScoreReading::product(std::size_t row, std::size_t head_of_k, std::size_t key) const {
  const auto d = static_cast<std::size_t>(call_.tensors.q.shape[3]);
  const auto* q = static_cast<const double*>(call_.tensors.q.data) + row * d;
  const auto* k = static_cast<const double*>(call_.tensors.k.data) + (head_of_k * keys_ + key) * d;
  double sum = 0;
  for (std::size_t e = 0; e < d; ++e) sum += q[e] * k[e];
  return sum * call_.options.scale.value_or(1 / std::sqrt(static_cast<double>(d)));
}

std::string ScoreReading::other_rows() const {
  // A row of scores belongs to the row with the closest expected scores, if it is close enough.
  std::size_t moved = 0;
  std::string example;
  for (std::size_t r = 0; r < rows_; ++r) {
    const std::size_t head_of_k = r / rows_per_head_ / q_heads_ * kv_heads_ +
                                  r / rows_per_head_ % q_heads_ / (q_heads_ / kv_heads_);
    double best = 1e300, own = 0, signal = 0;
    std::size_t source = r;
    for (std::size_t other = 0; other < rows_; ++other) {
      std::vector<double> scores(keys_);
      double mean = 0, count = 0, distance = 0;
      for (std::size_t j = 0; j < keys_; ++j) {
        scores[j] = product(other, head_of_k, j);
        if (used_[r * keys_ + j] != 0) mean += scores[j], ++count;
      }
      if (count < 3) return "";
      for (std::size_t j = 0; j < keys_; ++j) {
        if (used_[r * keys_ + j] == 0) continue;
        distance += std::pow(got(r, j) - (scores[j] - mean / count), 2);
        if (other == r) signal += std::pow(scores[j] - mean / count, 2);
      }
      if (other == r) own = distance;
      if (distance < best) best = distance, source = other;
    }
    if (best > std::pow(kExact + 2 * noise_, 2) * std::max(signal, 1e-30)) return "";
    if (source != r && own > 4 * best) {
      if (moved++ == 0) {
        example = row_name(call_, r) + " has the scores of " + row_name(call_, source);
      }
    }
  }
  return example;
}

std::vector<std::size_t> ScoreReading::sources(std::size_t head) const {
  const std::size_t heads_of_k = static_cast<std::size_t>(call_.tensors.k.shape[0]) * kv_heads_;
  const std::size_t candidates = heads_of_k * keys_, first_row = head * rows_per_head_;
  std::vector<double> table(candidates * rows_per_head_);
  double signal = 0;
  for (std::size_t x = 0; x < candidates; ++x) {
    for (std::size_t i = 0; i < rows_per_head_; ++i) {
      table[x * rows_per_head_ + i] = product(first_row + i, x / keys_, x % keys_);
    }
  }
  for (std::size_t i = 0; i < rows_per_head_; ++i) {
    for (std::size_t j = 0; j < keys_; ++j) {
      if (used_[(first_row + i) * keys_ + j] == 0) return {};
      signal += std::pow(want(first_row + i, j), 2);
    }
  }
  const double close = std::pow(kExact + std::min(2 * noise_, kMaxTolerance), 2) * signal /
                       static_cast<double>(keys_);
  const std::size_t own =
      (head / q_heads_ * kv_heads_ + head % q_heads_ / (q_heads_ / kv_heads_)) * keys_;
  // The constant of each row is unknown. Tries each candidate for column 0, the expected one first.
  for (std::size_t turn = 0; turn < candidates; ++turn) {
    const std::size_t anchor = (own + turn) % candidates;
    std::vector<std::size_t> found{anchor};
    for (std::size_t j = 1; j < keys_; ++j) {
      double best = 1e300;
      std::size_t source = 0;
      for (std::size_t n = 0; n < candidates && best > close; ++n) {
        const std::size_t x = (own + j + n) % candidates;
        double distance = 0;
        for (std::size_t i = 0; i < rows_per_head_ && distance < best; ++i) {
          const double* column = table.data() + x * rows_per_head_ + i;
          const double constant = table[anchor * rows_per_head_ + i] - got(first_row + i, 0);
          distance += std::pow(got(first_row + i, j) + constant - *column, 2);
        }
        if (distance < best) best = distance, source = x;
      }
      if (best > close) break;
      found.push_back(source);
    }
    if (found.size() == keys_) return found;
  }
  return {};
}

std::string ScoreReading::other_heads() const {
  std::string example;
  std::size_t most_moved = 0;
  for (std::size_t head = 0; head < rows_ / rows_per_head_; ++head) {
    const std::vector<std::size_t> found = sources(head);
    if (found.empty()) return "";
    const std::size_t own = head / q_heads_ * kv_heads_ + head % q_heads_ / (q_heads_ / kv_heads_);
    std::size_t moved = 0;
    for (std::size_t j = 0; j < keys_; ++j) {
      if (found[j] / keys_ == own) continue;
      most_moved = std::max(most_moved, ++moved);
      if (!example.empty()) continue;
      example = "batch " + decimal(head / q_heads_) + ", head " + decimal(head % q_heads_) +
                " has at key " + decimal(j) + " the scores of key " + decimal(found[j] % keys_) +
                " of batch " + decimal(found[j] / keys_ / kv_heads_) + ", KV head " +
                decimal(found[j] / keys_ % kv_heads_);
    }
  }
  // A few keys match by chance. If the head mapping is wrong, most keys match another head.
  return 2 * most_moved > keys_ / 2 ? example : "";
}

bool ScoreReading::is_other_table() const {
  struct Group {
    double sum = 0, sum2 = 0, count = 0;
  };
  std::map<std::int64_t, Group> groups;  // by expected score relative to key 0
  double signal2 = 0, within2 = 0, count = 0;
  for (std::size_t r = 0; r < rows_; ++r) {
    for (std::size_t j = 1; j < keys_; ++j) {
      if (used_[r * keys_ + j] == 0 || used_[r * keys_] == 0) continue;
      const double difference = got(r, j) - got(r, 0);
      Group& g = groups[std::llround((want(r, j) - want(r, 0)) * 1e6)];
      g.sum += difference;
      g.sum2 += difference * difference;
      ++g.count;
      signal2 += std::pow(want(r, j) - want(r, 0), 2);
      ++count;
    }
  }
  for (const auto& [want, g] : groups) within2 += g.sum2 - g.sum * g.sum / g.count;
  return groups.size() > 4 && count > 8 * static_cast<double>(groups.size()) &&
         within2 < std::pow(0.05 + std::min(2 * noise_, kMaxTolerance), 2) * signal2;
}

std::vector<std::int64_t> ScoreReading::key_order() const {
  const std::vector<std::size_t> found = sources(0);
  std::vector<std::int64_t> order;
  bool moved = false;
  for (std::size_t j = 0; j < found.size(); ++j) {
    if (found[j] / keys_ != 0) return {};
    order.push_back(static_cast<std::int64_t>(found[j] % keys_));
    const bool both_top =
        is_top_key(order.back(), static_cast<std::int64_t>(keys_)) &&
        is_top_key(static_cast<std::int64_t>(j), static_cast<std::int64_t>(keys_));
    moved = moved || (found[j] % keys_ != j && !both_top);
  }
  return moved ? order : std::vector<std::int64_t>{};
}

Evidence ScoreReading::evidence() const {
  Evidence e;
  e.title = describe(call_);
  e.heads = static_cast<std::int64_t>(rows_ / rows_per_head_);
  e.rows = static_cast<std::int64_t>(rows_per_head_);
  e.columns_are_keys = true;
  e.error.assign(rows_, 0.0);
  e.by_column.assign(keys_, 0.0);
  for (std::size_t at = 0; at < got_.size(); ++at) {
    if (used_[at] == 0) continue;
    const double ratio = std::fabs(got_[at] - want_[at]) / tolerance_[at];
    e.error[at / keys_] = std::max(e.error[at / keys_], ratio);
    e.by_column[at % keys_] = std::max(e.by_column[at % keys_], ratio);
  }
  e.p_rows = e.rows;
  e.p_columns = static_cast<std::int64_t>(keys_);
  const std::size_t first = worst_row_ / rows_per_head_ * rows_per_head_ * keys_;
  for (std::size_t at = first; at < first + rows_per_head_ * keys_; ++at) {
    e.p_got.push_back(got_[at]);
    e.p_want.push_back(want_[at]);
  }
  return e;
}

}  // namespace flashcore::verify
