#include "verify/probes/score_encodings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

/// Largest |score| of a group; its smallest is half of it.
constexpr double kLargestScore = 4;
/// Encodings per call: each has its own dimension, even at the smallest head dim.
constexpr std::size_t kMaxGroup = 15;

/// Groups encodings by binary exponent, so that a group shares the other factor of its products.
std::vector<std::vector<int>> groups_of(Format format) {
  const auto value_of = [&](int code) {
    return decode_byte(format, static_cast<std::uint8_t>(code));
  };
  const auto size_of = [&](int code) { return std::ilogb(value_of(code)); };
  std::vector<int> encodings;
  for (int code = 0; code < 256; ++code) {
    const double value = value_of(code);
    if (std::isfinite(value) && value != 0 && rounded(format, value) == value) {
      encodings.push_back(code);
    }
  }
  std::stable_sort(encodings.begin(), encodings.end(),
                   [&](int a, int b) { return size_of(a) < size_of(b); });
  std::vector<std::vector<int>> groups;
  for (const int code : encodings) {
    if (groups.empty() || groups.back().size() == kMaxGroup ||
        size_of(groups.back().front()) != size_of(code)) {
      groups.emplace_back();
    }
    groups.back().push_back(code);
  }
  return groups;
}

}  // namespace

bool ScoreEncodings::Read::right() const { return std::fabs(score - want) <= tolerance; }

std::map<int, ScoreEncodings::Read> ScoreEncodings::read_all(ProbeSequence& probes,
                                                             std::int64_t head_dim, bool of_q,
                                                             std::int64_t turn) const {
  const Format format = probes.impl.formats().dtype;
  const Arithmetic a = probes.impl.arithmetic();
  Setting setting = probes.impl.default_setting();
  (of_q ? setting.q_unit_scale : setting.k_unit_scale) = true;
  std::map<int, Read> all;
  for (const std::vector<int>& group : groups_of(format)) {
    const auto code_at = [&](std::int64_t row) {
      return group[static_cast<std::size_t>(row - 1 + turn) % group.size()];
    };
    const auto value = [&](std::int64_t row) {  // row 0 scores 0
      if (row == 0 || row > static_cast<std::int64_t>(group.size())) return 0.0;
      return decode_byte(format, static_cast<std::uint8_t>(code_at(row)));
    };
    const double group_size = std::exp2(std::ilogb(value(1)));
    const auto rows = static_cast<std::int64_t>(group.size()) + 1;
    HostCall call = probes.call(probes.shape(rows, rows, head_dim, false));
    // A power of two is exact in any format.
    const double per_score = std::sqrt(static_cast<double>(head_dim)) / group_size;
    const double other = std::exp2(std::floor(std::log2(kLargestScore * per_score)) - 1);
    const auto dimension = [&](std::int64_t row) { return (row - 1 + turn) % head_dim; };
    const Tensors& t = call.tensors;
    fill(of_q ? t.q : t.k, [&](auto, auto, std::int64_t row, std::int64_t c) {
      return c == dimension(row) ? value(row) : 0.0;
    });
    fill(of_q ? t.k : t.q, [&](auto, auto, std::int64_t row, std::int64_t c) {
      return row > 0 && c == dimension(row) ? other : 0.0;
    });
    const std::vector<double> p = read_probabilities(probes, call, setting);
    if (p.empty()) return {};
    const reference::Oracle oracle = probes.oracle(call, true);
    const auto keys = static_cast<std::size_t>(t.k.shape[2]);
    for (std::size_t i = 1; i < static_cast<std::size_t>(rows); ++i) {
      const auto& want = oracle.probabilities[i];
      const double score_error = (16 * a.sum_unit + a.score_unit) * oracle.magnitude[i];
      const double rounding =
          2 * a.out_unit + 4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(keys)));
      const double flushed =
          a.out_smallest + a.p_smallest * std::exp(oracle.max[i] - oracle.lse[i]);
      double tolerance = 0;
      for (const std::size_t j : {std::size_t{0}, i}) {
        const double relative = rounding + 2 * score_error + flushed / want[j];
        tolerance += relative < 1 ? -std::log(1 - relative) : 1e300;
      }
      all[code_at(static_cast<std::int64_t>(i))] = {std::log(p[i * keys + i] / p[i * keys]),
                                                    oracle.scores[i][i], tolerance};
    }
  }
  return all;
}

ScoreEncodings::ScoreEncodings(ProbeSequence& probes, std::int64_t head_dim, bool of_q) {
  const auto any_wrong = [](const std::map<int, Read>& all) {
    return std::any_of(all.begin(), all.end(), [](const auto& r) { return !r.second.right(); });
  };
  const std::map<int, Read> here = read_all(probes, head_dim, of_q, 0);
  if (!any_wrong(here)) return;
  // Again at other keys and dimensions, to separate the encoding from its position.
  const std::map<int, Read> there = read_all(probes, head_dim, of_q, 5);
  int wrong = 0, alike = 0;
  double least = std::numeric_limits<double>::infinity(), most = -least, least_tolerance = 0;
  for (const auto& [code, r] : here) {
    const auto other = there.find(code);
    if (other == there.end()) return;
    const Read& s = other->second;
    const double slack = (r.tolerance + s.tolerance) / std::fabs(r.want);
    const bool same = r.factor() == s.factor() || std::fabs(r.factor() - s.factor()) <= slack ||
                      (std::isnan(r.factor()) && std::isnan(s.factor()));
    alike += same ? 1 : 0;
    if (!std::isnan(r.factor())) {
      if (r.factor() < least) least = r.factor(), least_tolerance = slack;
      most = std::max(most, r.factor());
    }
    if (r.right() || s.right()) continue;
    if (wrong++ == 0) {
      wrong_ = std::string("encoding ") + decimal(code) + " of " + (of_q ? "q" : "k") +
               " gives the score " + number(r.score) + " instead of " + number(r.want);
    }
  }
  if (wrong > 1) wrong_ += ", and " + decimal(wrong - 1) + " more encodings are wrong";
  other_table_ = alike == static_cast<int>(here.size()) && wrong > 0 &&
                 most - least > 2 * least_tolerance + 0.1;
}

}  // namespace flashcore::verify
