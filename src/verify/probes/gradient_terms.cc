// Explains a wrong dS = P (dP - delta) by one of its terms: a delta of each tile, or the dP or P of
// another pair.
#include <algorithm>
#include <set>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Part of the wrong entries that a pattern explains.
constexpr double kNearlyAll = 0.98;
/// Fewest wrong entries that show a pattern, and shortest tile.
constexpr std::size_t kFewest = 6;
constexpr std::int64_t kShortestTile = 4;

/// One term of every entry, as read and as it should be.
struct Term {
  std::vector<double> got, want, tolerance;
  double size = 0;  ///< root mean square of `want`

  bool fits(std::size_t entry, double value) const {
    return std::fabs(got[entry] - value) <= tolerance[entry] + 1e-6 * std::fabs(value);
  }
  /// An entry that tells two values of usual size apart.
  bool is_clear(std::size_t entry) const { return tolerance[entry] < 0.05 * size; }
};

Term blank_term(const Reading& r) {
  Term t;
  for (std::vector<double>* x : {&t.got, &t.want, &t.tolerance}) x->assign(r.got.size(), 0.0);
  return t;
}

void set_size(const Reading& r, Term& t) {
  double sum = 0, count = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (r.visible(e)) sum += t.want[e] * t.want[e], ++count;
  }
  t.size = std::sqrt(sum / std::max(count, 1.0));
}

/// dP = dS / P + delta
Term read_dp(const Reading& r) {
  Term t = blank_term(r);
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!r.visible(e)) continue;
    const double delta = r.delta[e / static_cast<std::size_t>(r.keys)];
    t.got[e] = r.got[e] / r.p[e] + delta;
    t.want[e] = r.want[e] / r.p[e] + delta;
    t.tolerance[e] = 2 * r.bound[e] / r.p[e];
  }
  set_size(r, t);
  return t;
}

/// P = dS / (dP - delta)
Term read_p_of_ds(const Reading& r) {
  Term t = blank_term(r);
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!r.visible(e) || r.want[e] == 0) {
      t.tolerance[e] = INFINITY;
      continue;
    }
    const double difference = r.want[e] / r.p[e];
    t.got[e] = r.got[e] / difference;
    t.want[e] = r.p[e];
    t.tolerance[e] = 2 * r.bound[e] / std::fabs(difference);
  }
  set_size(r, t);
  return t;
}

template <typename Value>
bool explains(const Term& t, const std::vector<std::size_t>& wrong, Value value) {
  std::size_t clear = 0, fit = 0;
  for (const std::size_t e : wrong) {
    if (!t.is_clear(e)) continue;
    ++clear;
    fit += t.fits(e, value(e)) ? 1 : 0;
  }
  return clear >= kFewest && 2 * clear >= wrong.size() &&
         static_cast<double>(fit) >= kNearlyAll * static_cast<double>(clear);
}

/// The wrong entries of every line (a key or a row of a head) have the values of another line.
bool is_of_other_lines(const Reading& r, const Term& t, const std::vector<std::size_t>& wrong,
                       bool of_keys) {
  const auto keys = static_cast<std::size_t>(r.keys), rows = static_cast<std::size_t>(r.rows);
  const std::size_t lines = of_keys ? keys : rows;
  // By head and line: the entries of a line share the other one.
  std::vector<std::vector<std::size_t>> by_line(static_cast<std::size_t>(r.heads) * lines);
  std::size_t clear = 0, fit = 0;
  for (const std::size_t e : wrong) {
    if (!t.is_clear(e)) continue;
    ++clear;
    by_line[e / keys / rows * lines + (of_keys ? e % keys : e / keys % rows)].push_back(e);
  }
  for (std::size_t at = 0; at < by_line.size(); ++at) {
    std::size_t most = 0;
    for (std::size_t other = 0; other < lines; ++other) {
      std::size_t count = 0;
      for (const std::size_t e : by_line[at]) {
        const std::size_t there =
            of_keys ? e - e % keys + other : (e / keys / rows * rows + other) * keys + e % keys;
        count += there != e && r.visible(there) && t.fits(e, t.want[there]) ? 1 : 0;
      }
      most = std::max(most, count);
    }
    fit += by_line[at].size() > 1 ? most : 0;
  }
  return clear >= kFewest && 2 * clear >= wrong.size() &&
         static_cast<double>(fit) >= kNearlyAll * static_cast<double>(clear);
}

/// The factor of all wrong entries.
double factor_of(const Term& t, const std::vector<std::size_t>& wrong) {
  double product = 0, want2 = 0;
  for (const std::size_t e : wrong) {
    if (t.is_clear(e)) product += t.got[e] * t.want[e], want2 += t.want[e] * t.want[e];
  }
  return product / want2;
}

/// All wrong entries have one magnitude, and no correct one exceeds it.
bool is_limited(const Reading& r, const Term& t, const std::vector<std::size_t>& wrong) {
  double limit = 0, count = 0;
  for (const std::size_t e : wrong) {
    if (t.is_clear(e)) limit += std::fabs(t.got[e]), ++count;
  }
  limit /= count;
  if (!explains(t, wrong, [&](std::size_t e) { return std::copysign(limit, t.want[e]); })) {
    return false;
  }
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (r.visible(e) && !r.wrong(e) && std::fabs(t.want[e]) > limit + 2 * t.tolerance[e]) {
      return false;
    }
  }
  return true;
}

/// dP is off by a multiple of the score.
bool has_scores(const Reading& r, const Term& dp, const std::vector<std::size_t>& wrong) {
  const auto score = [&](std::size_t e) {
    return std::log(r.p[e]) + r.lse[e / static_cast<std::size_t>(r.keys)];
  };
  double product = 0, size = 0;
  for (const std::size_t e : wrong) {
    if (!dp.is_clear(e)) continue;
    product += score(e) * (dp.got[e] - dp.want[e]);
    size += score(e) * score(e);
  }
  if (!(size > 0)) return false;
  const double factor = product / size;
  return explains(dp, wrong, [&](std::size_t e) { return dp.want[e] + factor * score(e); });
}

/// dS itself.
Term read_ds_itself(const Reading& r) {
  Term t = blank_term(r);
  t.got = r.got, t.want = r.want;
  for (std::size_t e = 0; e < r.got.size(); ++e) t.tolerance[e] = 2 * r.bound[e];
  set_size(r, t);
  return t;
}

/// Rows as runs of keys with one shift of dS / P each.
struct Runs {
  std::set<std::int64_t> starts;    ///< first keys of all runs but the first of a row
  std::size_t count = 0, keys = 0;  ///< of runs with a shift; of their keys with a clear one
};

void find_runs(const Reading& r, std::size_t row, Runs& runs) {
  std::size_t keys = 0;  // of this run
  const auto end_run = [&] {
    runs.count += keys > 0 ? 1 : 0;
    runs.keys += keys;
    keys = 0;
  };
  double low = -INFINITY, high = INFINITY;
  const auto first = row * static_cast<std::size_t>(r.keys);
  for (std::int64_t j = 0; j < r.keys; ++j) {
    const std::size_t e = first + static_cast<std::size_t>(j);
    if (!r.visible(e)) continue;
    const double shift = (r.got[e] - r.want[e]) / r.p[e];
    const double tolerance = (2 * r.bound[e] + 1e-6 * std::fabs(r.want[e])) / r.p[e];
    const double next_low = std::max(low, shift - tolerance),
                 next_high = std::min(high, shift + tolerance);
    if (next_low <= next_high) {
      low = next_low, high = next_high;
    } else {
      end_run();
      runs.starts.insert(j);
      low = shift - tolerance, high = shift + tolerance;
    }
    keys += std::fabs(shift) > 2 * tolerance ? 1 : 0;
  }
  end_run();
}

}  // namespace

Diagnosis delta_of_tiles(const Reading& r) {
  if (r.from == kDv) return {};
  Runs runs;
  std::size_t wrong = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!std::isfinite(r.got[e])) return {};
    wrong += r.wrong(e) ? 1 : 0;
  }
  for (std::size_t row = 0; row < static_cast<std::size_t>(r.heads * r.rows); ++row) {
    find_runs(r, row, runs);
  }
  // Single entries that are off are no tiles.
  if (runs.starts.empty() || 2 * runs.keys < wrong || runs.keys < 3 * runs.count) return {};
  std::int64_t before = 0;
  for (const std::int64_t start : runs.starts) {
    if (start - before < kShortestTile) return {};
    before = start;
  }
  return {
      FaultStage::delta,
      "dS / P is off by one amount from key " + decimal(*runs.starts.begin()) +
          " on and by another before, as with a delta of each tile: " + shown(r, worst_entry(r)),
      true};
}

Diagnosis wrong_term(const Reading& r, const std::vector<std::size_t>& wrong) {
  if (r.from == kDv || wrong.size() < kFewest) return {};
  for (const std::size_t e : wrong) {
    if (!r.visible(e) || !std::isfinite(r.got[e])) return {};
  }
  const Term dp = read_dp(r);
  double delta2 = 0;
  for (const double x : r.delta) delta2 += x * x;
  // Without delta, dS shows dP times P only.
  if (delta2 > 1e-3 * dp.size * dp.size * static_cast<double>(r.delta.size())) {
    const double factor = factor_of(dp, wrong);
    const char* what = nullptr;
    if (explains(dp, wrong, [](std::size_t) { return 0.0; })) {
      what = "0";
    } else if (std::fabs(factor - 1) > 0.02 &&
               explains(dp, wrong, [&](std::size_t e) { return factor * dp.want[e]; })) {
      what = "a multiple of the correct one";
    } else if (explains(dp, wrong, [&](std::size_t e) { return std::fabs(dp.want[e]); })) {
      what = "its magnitude";
    } else if (has_scores(r, dp, wrong)) {
      what = "added to a multiple of the score";
    } else if (is_limited(r, dp, wrong)) {
      what = "limited";
    } else if (is_of_other_lines(r, dp, wrong, true)) {
      what = "that of another key";
    } else if (is_of_other_lines(r, dp, wrong, false)) {
      what = "that of another row";
    }
    if (what != nullptr) {
      return {FaultStage::dp,
              std::string("dS is that with a dP that is ") + what + ": " + shown(r, worst_entry(r)),
              true};
    }
    if (is_limited(r, read_ds_itself(r), wrong)) {
      return {FaultStage::ds, "dS is limited: " + shown(r, worst_entry(r)), true};
    }
  }
  const Term p = read_p_of_ds(r);
  for (const bool of_keys : {true, false}) {
    if (!is_of_other_lines(r, p, wrong, of_keys)) continue;
    return {FaultStage::ds,
            std::string("dS is that with P of another ") + (of_keys ? "key: " : "row: ") +
                shown(r, worst_entry(r)),
            true};
  }
  return {};
}

}  // namespace flashcore::verify
