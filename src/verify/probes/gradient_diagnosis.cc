// Explains a wrong reading of P or dS by a known pattern: hidden pairs, lost or doubled tiles,
// exchanged heads or rows, a common factor, an error of delta, noise.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Relative error below which a result is imprecise, not wrong.
constexpr double kNoise = 0x1p-5;
/// Relative error of a rounding to the narrowest format, e4m3, with a margin.
constexpr double kCoarsest = 0x1.1p-4;
/// Part of the wrong entries that a pattern explains.
constexpr double kNearlyAll = 0.98;

std::string entry_name(const Reading& r, std::size_t entry) {
  const auto keys = static_cast<std::size_t>(r.keys), rows = static_cast<std::size_t>(r.rows);
  return "head " + decimal(entry / keys / rows) + ", row " + decimal(entry / keys % rows) +
         ", key " + decimal(entry % keys);
}

std::vector<std::size_t> wrong_entries(const Reading& r) {
  std::vector<std::size_t> wrong;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (r.wrong(e)) wrong.push_back(e);
  }
  return wrong;
}

/// The part of `entries` for which `holds`.
template <typename Holds>
double part(const std::vector<std::size_t>& entries, Holds holds) {
  const auto count = std::count_if(entries.begin(), entries.end(), holds);
  return static_cast<double>(count) / static_cast<double>(std::max<std::size_t>(entries.size(), 1));
}

bool close(const Reading& r, std::size_t entry, double got, double want) {
  return std::fabs(got - want) <= 2 * r.bound[entry] + 1e-6 * std::fabs(want);
}

Diagnosis hidden_pairs(const Reading& r, const std::vector<std::size_t>& wrong) {
  for (const std::size_t e : wrong) {
    if (!r.visible(e)) return {FaultStage::mask, "a hidden pair counts: " + shown(r, e), true};
  }
  return {};
}

/// True if a size of P or dS tells the entries of `found` from the right ones: they are lost for
/// their value, not for their place.
bool lost_by_value(const Reading& r, const std::vector<std::size_t>& found,
                   const std::vector<std::size_t>& right) {
  const auto splits = [&](auto size) {
    double least = INFINITY, most = -INFINITY;
    for (const std::size_t e : right) least = std::min(least, size(e));
    for (const std::size_t e : found) most = std::max(most, size(e));
    return most < least;
  };
  // Few entries may be the smallest ones by chance. Under uniform P all are equal.
  return splits([&](std::size_t e) { return r.want[e]; }) ||
         splits([&](std::size_t e) { return -r.want[e]; }) ||
         splits([&](std::size_t e) { return std::fabs(r.want[e]); }) ||
         splits([&](std::size_t e) { return r.p[e]; });
}

/// Terms `first` to `last` of a sum are in its last whole tile and in one that ends with the sum.
bool is_overlap(std::size_t first, std::size_t last, std::size_t count) {
  constexpr std::size_t kShortestTile = 4;
  const std::size_t tile = count - first;
  return tile >= kShortestTile && last + 1 < count && count / tile * tile == last + 1;
}

/// Whole rows or keys of a head that are missing or counted several times, beside correct ones.
Diagnosis lost_tiles(const Reading& r, const std::vector<std::size_t>& wrong) {
  // How often they count: 0, 2, or what the worst entry shows.
  const std::size_t worst = worst_entry(r);
  std::vector<std::size_t> found;
  double times = 0;
  for (const double count : {0.0, 2.0, r.got[worst] / r.want[worst]}) {
    if (!std::isfinite(count)) continue;
    std::vector<std::size_t> scaled;
    for (const std::size_t e : wrong) {
      if (std::fabs(r.want[e]) <= 4 * r.bound[e]) continue;
      const bool fits =
          count == 0 ? std::fabs(r.got[e]) <= r.bound[e] : close(r, e, r.got[e], count * r.want[e]);
      if (fits) scaled.push_back(e);
    }
    if (scaled.size() > found.size()) found = scaled, times = count;
  }
  if (times != 0 && times != 2 && (wrong.size() < 8 || std::fabs(times - 1) < 0.25)) return {};
  std::vector<std::size_t> right;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!r.wrong(e) && std::fabs(r.want[e]) > 4 * r.bound[e]) right.push_back(e);
  }
  if (found.empty() || right.empty() || lost_by_value(r, found, right) ||
      static_cast<double>(found.size()) < kNearlyAll * static_cast<double>(wrong.size())) {
    return {};
  }
  const auto keys = static_cast<std::size_t>(r.keys), rows = static_cast<std::size_t>(r.rows);
  std::size_t first_row = rows, last_row = 0, first_key = keys, last_key = 0, head = SIZE_MAX;
  for (const std::size_t e : found) {
    if (head == SIZE_MAX) head = e / keys / rows;
    if (e / keys / rows != head) continue;
    first_row = std::min(first_row, e / keys % rows),
    last_row = std::max(last_row, e / keys % rows);
    first_key = std::min(first_key, e % keys), last_key = std::max(last_key, e % keys);
  }
  const bool overlap = times == 2 && (r.from == kDq ? is_overlap(first_key, last_key, keys)
                                                    : is_overlap(first_row, last_row, rows));
  return {overlap ? FaultStage::tail : FaultStage::accumulate,
          "head " + decimal(head) + ", rows " + decimal(first_row) + " to " + decimal(last_row) +
              ", keys " + decimal(first_key) + " to " + decimal(last_key) +
              (times == 0 ? " are not added to " : " count " + number(times) + " times in ") +
              kGradientNames[r.from] + ": " + shown(r, found.front()),
          true};
}

/// Heads, rows or keys in each other's place.
Diagnosis exchanged(const Reading& r, const std::vector<std::size_t>& wrong, FaultStage fallback) {
  enum Axis { kHead, kRow, kKey };
  static constexpr const char* kNames[] = {"head", "row", "key"};
  const auto keys = static_cast<std::size_t>(r.keys), rows = static_cast<std::size_t>(r.rows),
             heads = static_cast<std::size_t>(r.heads);
  const auto index = [&](std::size_t h, std::size_t i, std::size_t j) {
    return (h * rows + i) * keys + j;
  };
  for (const Axis axis : {kHead, kRow, kKey}) {
    // A line is the set of entries with the same index on the axis; rows and keys within a head.
    const std::size_t count = axis == kHead ? heads : axis == kRow ? rows : keys;
    const std::size_t outer = axis == kHead ? 1 : heads;
    const auto entry = [&](std::size_t o, std::size_t line, std::size_t i) {
      return axis == kHead  ? index(line, i / keys, i % keys)
             : axis == kRow ? index(o, line, i)
                            : index(o, i, line);
    };
    const std::size_t length = axis == kHead ? rows * keys : axis == kRow ? keys : rows;
    if (length < 3) continue;
    bool all = true;
    std::string text;
    std::size_t explained = 0;
    for (std::size_t o = 0; o < outer && all; ++o) {
      for (std::size_t line = 0; line < count && all; ++line) {
        bool is_wrong = false;
        for (std::size_t i = 0; i < length && !is_wrong; ++i) is_wrong = r.wrong(entry(o, line, i));
        if (!is_wrong) continue;
        std::size_t other = 0;
        for (; other < count; ++other) {
          bool same = other != line;
          for (std::size_t i = 0; i < length && same; ++i) {
            same =
                close(r, entry(o, line, i), r.got[entry(o, line, i)], r.want[entry(o, other, i)]);
          }
          if (same) break;
        }
        all = other < count;
        ++explained;
        if (all && text.empty()) {
          text = std::string(kNames[axis]) + " " + decimal(line) + " holds " + name_of(r) + " of " +
                 kNames[axis] + " " + decimal(other);
        }
      }
    }
    if (all && explained > 0) {
      // dq has rows of its own and sums over keys; dk and dv the other way round.
      const Axis own = r.from == kDq ? kRow : kKey;
      const bool addressed = axis == kHead || axis == own;
      return {addressed ? FaultStage::layout : fallback, text + ": " + shown(r, wrong.front()),
              addressed, true};
    }
  }
  return {};
}

/// The name of a factor that a mistake with the scale explains; empty: none.
std::string scale_factor(double factor, const Reading& r) {
  const double scale = r.scale, of_dim = 1 / std::sqrt(r.head_dim);
  struct Known {
    double value;
    const char* name;
  };
  std::vector<Known> known{{scale, "the scale is applied twice"},
                           {1 / scale, "the scale is missing"},
                           {scale * scale, "the scale is applied three times"},
                           {1 / scale / scale, "the scale is divided by"},
                           {std::sqrt(scale), "the factor is the root of the scale"},
                           {1 / std::sqrt(scale), "the factor is the inverse root of the scale"},
                           {1 / std::log(2.0), "the factor is log2(e)"},
                           {std::log(2.0), "the factor is ln(2)"},
                           {scale / std::log(2.0), "the factor is scale * log2(e)"},
                           {1 / scale / std::log(2.0), "the factor is log2(e) / scale"},
                           {r.v_dim_scale / scale, "the scale is that of v_dim"},
                           {of_dim / scale, "the scale is the default one"},
                           {2, "the factor is 2"},
                           {0.5, "the factor is 1/2"}};
  for (const double step : {16, 32, 64, 128, 256}) {
    const double padded = std::ceil(r.head_dim / step) * step;
    if (padded > r.head_dim) {
      known.push_back({1 / std::sqrt(padded) / scale, "the scale is that of a padded head dim"});
    }
  }
  for (const Known& one : known) {
    if (std::fabs(factor / one.value - 1) < 0.004) return one.name;
  }
  return "";
}

/// The factor of all entries that fits best; NaN if they should all be 0.
double fitted_factor(const Reading& r) {
  double product = 0, want2 = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    product += r.got[e] * r.want[e];
    want2 += r.want[e] * r.want[e];
  }
  return product / want2;
}

/// One factor of all entries.
Diagnosis common_factor(const Reading& r, FaultStage fallback) {
  const double factor = fitted_factor(r);
  if (std::isnan(factor)) return {};
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    const double error = std::fabs(r.got[e] - factor * r.want[e]);
    if (!(error <= (1 + std::fabs(factor)) * r.bound[e] + 1e-5 * std::fabs(r.got[e]))) return {};
  }
  if (std::fabs(factor - 1) < kNoise / 4) return {};  // rounding may be the same for all entries
  const std::size_t worst = worst_entry(r);
  const std::string text = name_of(r) + " is " + number(factor) + " times as large everywhere";
  const std::string why = r.from == kDv ? "" : scale_factor(factor, r);
  if (!why.empty()) {
    return {FaultStage::scale, text + ", " + why + ": " + shown(r, worst), true, false, factor};
  }
  if (factor == 0) return {fallback, name_of(r) + " is 0 everywhere: " + shown(r, worst), false};
  return {fallback, text + ": " + shown(r, worst), false, false, factor};
}

/// dS / P is off by the same amount for all keys of a row.
Diagnosis delta_error(const Reading& r) {
  if (r.from == kDv) return {};
  std::size_t rows_off = 0, zero = 0, added = 0, clear = 0, seen = 0;
  std::string text;
  for (std::int64_t row = 0; row < r.heads * r.rows; ++row) {
    const auto first = static_cast<std::size_t>(row * r.keys);
    double shift = 0, weight = 0, least = INFINITY;
    bool off = false;
    for (std::size_t e = first; e < first + static_cast<std::size_t>(r.keys); ++e) {
      if (!r.visible(e)) continue;
      off = off || r.wrong(e);
      shift += (r.got[e] - r.want[e]) * r.dscore[e];
      weight += r.dscore[e] * r.dscore[e];
      least = std::min(least, r.bound[e]);
    }
    if (!off) continue;
    if (!std::isfinite(shift)) return {};
    shift /= weight;  // delta - delta'
    for (std::size_t e = first; e < first + static_cast<std::size_t>(r.keys); ++e) {
      if (!r.visible(e)) continue;
      if (!close(r, e, r.got[e], r.want[e] + shift * r.dscore[e])) return {};
      clear += std::fabs(shift) * r.dscore[e] > 2 * r.bound[e] ? 1 : 0;
      ++seen;
    }
    const double want = r.delta[static_cast<std::size_t>(row)], got = want - shift;
    const double small = 1e-2 * std::fabs(want);
    zero += std::fabs(got) <= small ? 1 : 0;
    added += std::fabs(got + want) <= small ? 1 : 0;
    if (rows_off++ == 0) {
      text = "delta of head " + decimal(row / r.rows) + ", row " + decimal(row % r.rows) + " is " +
             number(got) + " instead of " + number(want);
    }
  }
  if (2 * clear < seen || rows_off == 0) return {};  // a few coarse roundings fit any amount
  text += zero == rows_off    ? "; it is not subtracted"
          : added == rows_off ? "; it is added instead of subtracted"
                              : "";
  return {FaultStage::delta,
          text + ", in " + decimal(rows_off) + " rows; " + shown(r, worst_entry(r)), true};
}

/// dS is off by the same amount for all keys of a row, whatever their P.
Diagnosis unweighted_delta(const Reading& r) {
  if (r.from == kDv) return {};
  std::size_t rows_off = 0;
  for (std::int64_t row = 0; row < r.heads * r.rows; ++row) {
    const auto first = static_cast<std::size_t>(row * r.keys),
               end = first + static_cast<std::size_t>(r.keys);
    // (got - want) = a + b P: a delta that is not multiplied by P has both terms.
    double n = 0, sp = 0, spp = 0, sy = 0, spy = 0;
    bool off = false;
    for (std::size_t e = first; e < end; ++e) {
      if (!r.visible(e)) continue;
      const double y = r.got[e] - r.want[e], p = r.p[e];
      off = off || r.wrong(e);
      ++n, sp += p, spp += p * p, sy += y, spy += p * y;
    }
    if (!off) continue;
    const double det = n * spp - sp * sp;
    if (n < 5 || !(det > 1e-3 * n * spp) || !std::isfinite(sy)) return {};
    const double b = (n * spy - sp * sy) / det, a = (sy - b * sp) / n;
    double most = 0;
    for (std::size_t e = first; e < end; ++e) {
      if (!r.visible(e)) continue;
      if (!close(r, e, r.got[e], r.want[e] + a + b * r.p[e])) return {};
      most = std::max(most, r.bound[e]);
    }
    rows_off += std::fabs(a) > 4 * most ? 1 : 0;  // the delta of a row may be near 0
  }
  if (rows_off == 0) return {};
  return {FaultStage::ds,
          "delta is not multiplied by P, in " + decimal(rows_off) +
              " rows: " + shown(r, worst_entry(r)),
          true};
}

/// Every wrong row of P is off by one factor: its LSE is wrong.
Diagnosis row_factors(const Reading& r) {
  if (r.from != kDv) return {};
  std::size_t rows_off = 0;
  std::string text;
  for (std::int64_t row = 0; row < r.heads * r.rows; ++row) {
    const auto first = static_cast<std::size_t>(row * r.keys);
    const std::size_t end = first + static_cast<std::size_t>(r.keys);
    double product = 0, want2 = 0;
    bool off = false;
    for (std::size_t e = first; e < end; ++e) {
      off = off || r.wrong(e);
      product += r.got[e] * r.want[e], want2 += r.want[e] * r.want[e];
    }
    if (!off) continue;
    const double factor = product / want2;
    if (!std::isfinite(factor) || !(std::fabs(factor - 1) > kNoise)) return {};
    for (std::size_t e = first; e < end; ++e) {
      const double error = std::fabs(r.got[e] - factor * r.want[e]);
      if (!(error <= (1 + std::fabs(factor)) * r.bound[e] + 1e-5 * std::fabs(r.got[e]))) return {};
    }
    if (rows_off++ == 0) {
      text = "row " + decimal(row % r.rows) + " of head " + decimal(row / r.rows) + " is " +
             number(factor) + " times as large";
    }
  }
  if (rows_off == 0) return {};
  return {FaultStage::dv, text + ", as with a wrong LSE, in " + decimal(rows_off) + " rows", true};
}

/// P read from dv is a power of the correct one: scores times another scale.
Diagnosis score_scale(const Reading& r) {
  if (r.from != kDv) return {};
  double xy = 0, xx = 0;
  const auto each_row = [&](auto visit) {
    for (std::int64_t row = 0; row < r.heads * r.rows; ++row) {
      double x = 0, y = 0, n = 0;
      const auto first = static_cast<std::size_t>(row * r.keys);
      const auto usable = [&](std::size_t e) { return r.visible(e) && r.got[e] > 0; };
      for (std::size_t e = first; e < first + static_cast<std::size_t>(r.keys); ++e) {
        if (usable(e)) x += std::log(r.want[e]), y += std::log(r.got[e]), ++n;
      }
      for (std::size_t e = first; e < first + static_cast<std::size_t>(r.keys); ++e) {
        if (usable(e)) visit(e, std::log(r.want[e]) - x / n, std::log(r.got[e]) - y / n);
      }
    }
  };
  each_row([&](std::size_t, double x, double y) { xy += x * y, xx += x * x; });
  if (xx < 1e-6) return {};
  const double slope = xy / xx;
  bool fits = std::fabs(slope - 1) > 1e-3;
  each_row([&](std::size_t e, double x, double y) {
    fits = fits && std::fabs(y - slope * x) <= 4 * r.bound[e] / r.want[e] + 1e-4;
  });
  if (!fits) return {};
  return {FaultStage::scale,
          "the scores of P are multiplied by " + number(slope) + ": " + shown(r, worst_entry(r)),
          true};
}

/// dS lacks the factor P, or has it twice.
Diagnosis other_power_of_p(const Reading& r, const std::vector<std::size_t>& wrong) {
  if (r.from == kDv) return {};
  const auto explained = [&](auto power) {
    return part(wrong, [&](std::size_t e) {
             return r.visible(e) && close(r, e, r.got[e], power(r.want[e], r.p[e]));
           }) >= kNearlyAll;
  };
  // Entries that would be 0 either way show nothing.
  const auto shows = [&](auto power) {
    return part(wrong, [&](std::size_t e) {
             return std::fabs(power(r.want[e], r.p[e])) > 4 * r.bound[e];
           }) >= 0.5;
  };
  // Under uniform P the factor is that of all entries, and is known well.
  const auto [least, most] = std::minmax_element(r.p.begin(), r.p.end());
  if (*least > 0.99 * *most) {
    const double factor = fitted_factor(r), n = static_cast<double>(r.keys);
    if (std::fabs(factor / n - 1) > 0.02 && std::fabs(factor * n - 1) > 0.02) return {};
  }
  const auto squared = [](double want, double p) { return want * p; };
  const bool without = explained([](double want, double p) { return want / p; });
  if (!without && !(explained(squared) && shows(squared))) return {};
  return {FaultStage::ds,
          std::string("the factor P of dS is ") + (without ? "missing: " : "squared: ") +
              shown(r, wrong.front()),
          false};
}

/// Every wrong entry is off by a small part of itself, as by a rounding.
Diagnosis rounding(const Reading& r, const std::vector<std::size_t>& wrong) {
  for (const std::size_t e : wrong) {
    if (!(std::fabs(r.got[e] - r.want[e]) <= kCoarsest * std::fabs(r.want[e]))) return {};
  }
  return {FaultStage::precision,
          "every wrong " + name_of(r) + " is off by less than 1/" + number(1 / kCoarsest) + ": " +
              shown(r, worst_entry(r)),
          true};
}

std::vector<double> ratios_of(const Reading& r) {
  std::vector<double> ratios(r.got.size());
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    const double error = std::fabs(r.got[e] - r.want[e]);
    ratios[e] = error == 0 ? 0 : error / r.bound[e];
  }
  return ratios;
}

Diagnosis noise(const Reading& r) {
  double error2 = 0, want2 = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    error2 += (r.got[e] - r.want[e]) * (r.got[e] - r.want[e]);
    want2 += r.want[e] * r.want[e];
  }
  const double relative = std::sqrt(error2 / want2);
  if (!(relative < kNoise) || are_few_large_errors(ratios_of(r))) return {};
  return {
      FaultStage::precision,
      name_of(r) + " has a relative error of " + number(relative) + ": " + shown(r, worst_entry(r)),
      true};
}

/// The RMS of all errors relative to their bounds.
double rms(const Reading& r) {
  double sum = 0, count = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (r.bound[e] <= 0 || r.want[e] == 0) continue;
    const double ratio = (r.got[e] - r.want[e]) / r.bound[e];
    sum += ratio * ratio;
    ++count;
  }
  return count > 0 ? std::sqrt(sum / count) : 0;
}

}  // namespace

std::string shown(const Reading& r, std::size_t entry) {
  return name_of(r) + " of " + entry_name(r, entry) + " is " + number(r.got[entry]) +
         " instead of " + number(r.want[entry]) + " in " + kGradientNames[r.from];
}

Diagnosis diagnose(const Reading& r, FaultStage fallback) {
  const std::vector<std::size_t> wrong = wrong_entries(r);
  if (wrong.empty()) {
    if (rms(r) <= 0.5) return {};
    return {FaultStage::precision,
            "the RMS error of " + name_of(r) + " is " + number(rms(r)) +
                " times its bound: " + shown(r, worst_entry(r)),
            true};
  }
  if (Diagnosis d = hidden_pairs(r, wrong); d.structural) return d;
  if (Diagnosis d = fixed_steps(r); d.structural) return d;
  if (Diagnosis d = lost_tiles(r, wrong); d.structural) return d;
  if (Diagnosis d = added_lines(r, wrong); d.structural) return d;
  if (Diagnosis d = exchanged(r, wrong, fallback); d.stage != FaultStage::none) return d;
  if (Diagnosis d = other_power_of_p(r, wrong); d.stage != FaultStage::none) return d;
  if (Diagnosis d = common_factor(r, fallback); d.stage != FaultStage::none) return d;
  if (Diagnosis d = delta_error(r); d.structural) return d;
  if (Diagnosis d = delta_of_tiles(r); d.structural) return d;
  if (Diagnosis d = delta_of_keys(r); d.structural) return d;
  if (Diagnosis d = rounding(r, wrong); d.structural) return d;
  if (Diagnosis d = wrong_term(r, wrong); d.structural) return d;
  if (Diagnosis d = unweighted_delta(r); d.structural) return d;
  if (Diagnosis d = score_scale(r); d.structural) return d;
  if (Diagnosis d = noise(r); d.structural) return d;
  if (Diagnosis d = row_factors(r); d.structural) return d;
  return {fallback,
          shown(r, worst_entry(r)) + "; " + decimal(wrong.size()) + " of " + decimal(r.got.size()) +
              " entries are wrong",
          false};
}

}  // namespace flashcore::verify
