// Probe uniform: with Q = 0, P is 1/n over the visible keys. Shows missing keys, wrong row sums,
// and the lengths at which they occur.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "verify/inputs/decimal.h"
#include "verify/inputs/lengths.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

HostCall uniform_call(const ProbeSequence& probes, const Shape& shape) {
  HostCall call = probes.call(shape);
  fill_random(call.tensors.k, 1, probes.seed, 51);
  fill_folded_one_hot(call);
  return call;
}

/// P of the first wrong row, and the expected P.
struct Row {
  std::vector<double> got, want;
};

/// Summary of got / want over a row.
struct Content {
  bool finite = true, uniform = true, keys_missing = false, keys_doubled = false;
  double factor = 1;          ///< got / want, if uniform
  std::int64_t last_key = 0;  ///< the last key with weight
};

Content content_of(const Row& row, double tolerance) {
  Content c;
  double least = 1e300, most = 0;
  for (std::size_t j = 0; j < row.got.size(); ++j) {
    if (!std::isfinite(row.got[j])) {
      c.finite = false;
      return c;
    }
    if (row.want[j] == 0) continue;
    const double ratio = row.got[j] / row.want[j];
    least = std::min(least, ratio);
    most = std::max(most, ratio);
    if (ratio != 0) c.last_key = static_cast<std::int64_t>(j);
  }
  c.uniform = most - least <= 2 * tolerance * std::max(most, 1e-30);
  c.factor = 0.5 * (least + most);
  c.keys_missing = least == 0;
  c.keys_doubled = most > 1.5 * std::max(least, 1e-30) && least > 0;
  return c;
}

/// A run of neighbouring keys with equal weights.
struct Run {
  double weight = 0, keys = 0;
};

/// Empty if a key has no weight.
std::vector<Run> runs_of(const Row& row, double tolerance) {
  std::vector<Run> runs;
  for (std::size_t j = 0; j < row.got.size(); ++j) {
    if (row.want[j] == 0) continue;
    if (row.got[j] <= 0) return {};
    if (runs.empty() || std::fabs(row.got[j] / runs.back().weight - 1) > tolerance) {
      runs.push_back({row.got[j], 0});
    }
    ++runs.back().keys;
  }
  return runs;
}

/// True if runs of keys have different weights although P sums to 1, or weights that depend on the
/// length of the run: partial results are combined with wrong weights.
bool runs_differ(const Row& row, double tolerance) {
  const std::vector<Run> runs = runs_of(row, 2 * tolerance);
  if (runs.size() < 2 || 4 * runs.size() > row.got.size()) return false;
  const double least = std::min_element(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
                         return a.keys < b.keys;
                       })->keys;
  const double sum = std::accumulate(row.got.begin(), row.got.end(), 0.0);
  if (least > 1 && std::fabs(sum - 1) <= 2 * tolerance) return true;
  const auto constant = [&](double power) {
    const auto value = [&](const Run& r) { return r.weight * std::pow(r.keys, power); };
    return std::all_of(runs.begin(), runs.end(), [&](const Run& r) {
      return std::fabs(value(r) / value(runs[0]) - 1) < 0.05;
    });
  };
  return constant(1) || constant(-1);
}

/// Keys whose weight differs from the median, up to the last key with the median weight.
std::vector<std::size_t> odd_keys(const Row& row, double tolerance) {
  std::vector<double> weights = row.got;
  std::nth_element(weights.begin(),
                   weights.begin() + static_cast<std::ptrdiff_t>(weights.size() / 2),
                   weights.end());
  const double median = weights[weights.size() / 2];
  std::vector<std::size_t> odd;
  std::size_t last = 0;
  for (std::size_t j = 0; j < row.got.size(); ++j) {
    if (std::fabs(row.got[j] - median) > 2 * tolerance * median) {
      odd.push_back(j);
    } else {
      last = j;
    }
  }
  while (!odd.empty() && odd.back() > last) odd.pop_back();
  return odd;
}

double p_tolerance(const ProbeSequence& probes, std::int64_t n) {
  const Arithmetic a = probes.impl.arithmetic();
  return 2 * a.out_unit + 4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(n))) + 0x1p-22;
}

std::optional<Row> first_wrong_row(ProbeSequence& probes, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(probes, probes.shape(3, n, head_dim, false));
  const std::vector<double> p = read_probabilities(probes, call);
  if (p.empty()) return std::nullopt;
  const reference::Oracle oracle = probes.oracle(call, true);
  const auto keys = static_cast<std::size_t>(call.tensors.k.shape[2]);
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    Row row{{p.begin() + static_cast<std::ptrdiff_t>(r * keys),
             p.begin() + static_cast<std::ptrdiff_t>((r + 1) * keys)},
            oracle.probabilities[r]};
    for (std::size_t j = 0; j < keys; ++j) {
      const double allowed = p_tolerance(probes, n) * row.want[j];
      if (!(std::fabs(row.got[j] - row.want[j]) <= allowed)) return row;
    }
  }
  return std::nullopt;
}

/// True if scores of 0 with nonzero Q and K are correct: then an all-zero Q is the cause.
bool zero_queries_alone_fail(ProbeSequence& probes, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(probes, probes.shape(3, n, head_dim, false));
  fill(call.tensors.q, [](auto, auto, auto, std::int64_t c) { return c == 0 ? 1.0 : 0.0; });
  fill(call.tensors.k, [](auto, auto, auto, std::int64_t c) { return c == 0 ? 0.0 : 1.0; });
  const CallResult result = probes.impl.run(call);
  return result.ok() && probes.judge(call, result).ok();
}

/// True if memory around the tensors changes the result.
bool reads_outside(ProbeSequence& probes, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(probes, probes.shape(3, n, head_dim, false));
  Setting other = probes.impl.default_setting();
  const CallResult before = probes.impl.run(call, other);
  other.guard = 3;
  const CallResult after = probes.impl.run(call, other);
  return before.ok() && after.ok() && before.bits != after.bits;
}

/// 8-bit: true if the output is correct with v_scale = 1. A wrong factor is then v_scale.
bool is_correct_with_unit_v_scale(ProbeSequence& probes, std::int64_t n, std::int64_t head_dim) {
  const Format format = probes.impl.formats().dtype;
  if (!is_8bit(format)) return false;
  const double value = rounded(format, 4);
  HostCall call = probes.call(probes.shape(3, n, head_dim, false));
  fill(call.tensors.v, [&](auto, auto, auto, auto) { return value; });
  Setting setting = probes.impl.default_setting();
  setting.v_unit_scale = true;
  const CallResult result = probes.impl.run(call, setting);
  return result.ok() && probes.judge(call, result).ok();
}

/// True if the factor is off by less than a unit of bf16, and never at powers of two, where 1/n is
/// exact: only rounding does that.
bool is_rounding(const LengthResults& results, double factor) {
  const auto exact = [](std::int64_t n) { return (n & (n - 1)) == 0; };
  return std::fabs(factor - 1) < unit_of(Format::bf16) &&
         std::all_of(results.begin(), results.end(),
                     [&](const auto& r) { return r.second || !exact(r.first); });
}

/// True if the keys with odd weights move in a longer row: they are at the edges of KV splits,
/// which grow with the row, not of tiles.
bool odd_keys_move(ProbeSequence& probes, const Row& row, std::int64_t n, std::int64_t head_dim) {
  const double tolerance = p_tolerance(probes, n);
  const std::vector<std::size_t> odd = odd_keys(row, tolerance);
  if (odd.empty() || 8 * odd.size() > row.got.size()) return false;
  const double sum = std::accumulate(row.got.begin(), row.got.end(), 0.0);
  if (std::fabs(sum - 1) > 2 * tolerance) return false;
  const std::optional<Row> longer = first_wrong_row(probes, 2 * n + 40, head_dim);
  if (!longer) return false;
  const std::vector<std::size_t> moved = odd_keys(*longer, p_tolerance(probes, 2 * n + 40));
  return !moved.empty() && !std::includes(moved.begin(), moved.end(), odd.begin(), odd.end());
}

/// True if the row sum stops growing at 2^11 (f16) or 2^8 (bf16).
bool sum_saturates(const LengthVerdict& lengths, const Content& c, std::int64_t n) {
  const double sum = static_cast<double>(n) / c.factor;
  const bool at_limit = std::fabs(sum - 2048) < 2 || std::fabs(sum - 256) < 0.5;
  return c.uniform && c.factor > 1 && at_limit && lengths.first > 250;
}

/// Weights that are integer multiples of 1/n mean that rows of V are dropped or doubled. Other
/// weights that still sum to 1 differed before the normalisation.
FaultStage stage_of_weights(const Row& row, double tolerance) {
  double sum = 0;
  bool whole = true;
  for (std::size_t j = 0; j < row.got.size(); ++j) {
    sum += row.got[j];
    if (row.want[j] == 0) continue;
    const double ratio = row.got[j] / row.want[j];
    whole = whole && std::fabs(ratio - std::round(ratio)) <= 2 * tolerance;
  }
  return !whole && std::fabs(sum - 1) <= 2 * tolerance ? FaultStage::scores : FaultStage::pv;
}

/// True if a length that passes also passes with random V. Folded one-hot V has the same mean as
/// many wrong V.
bool passes_with_random_values(ProbeSequence& probes, const LengthResults& results,
                               std::int64_t first, std::int64_t head_dim) {
  for (const auto& [n, passed] : results) {
    if (!passed || n < first) continue;
    HostCall call = probes.call(probes.shape(3, n, head_dim, false));
    fill_random(call.tensors.v, 1, probes.seed, 53);
    const CallResult result = probes.impl.run(call);
    return !result.ok() || probes.judge(call, result).ok();
  }
  return true;
}

/// Judges only the lengths at which a row sum that is off by `off_by` keys exceeds the tolerance.
LengthVerdict judge_informative(const ProbeSequence& probes, const LengthResults& results,
                                double off_by) {
  LengthResults informative;
  for (const auto& [n, passed] : results) {
    const bool visible = off_by / static_cast<double>(n) > 1.2 * p_tolerance(probes, n);
    if (!passed || visible) informative[n] = passed;
  }
  return judge_lengths(informative, "kv_len");
}

std::string describe_content(const Content& c, std::int64_t n) {
  if (!c.finite) return "P is not finite";
  if (c.uniform) {
    return "every weight is " + number(c.factor) + " times the expected one: the row sum is " +
           number(static_cast<double>(n) / c.factor) + " instead of " + decimal(n);
  }
  if (c.keys_missing) return "some keys have no weight";
  return "keys with equal scores have different weights";
}

Finding explain(ProbeSequence& probes, const LengthResults& results, LengthVerdict lengths,
                std::int64_t head_dim) {
  // Prefers a length above 1: one key gives little evidence.
  std::int64_t n = std::max<std::int64_t>(lengths.first, 2);
  std::optional<Row> row = first_wrong_row(probes, n, head_dim);
  if (!row && n > lengths.first) row = first_wrong_row(probes, n = lengths.first, head_dim);
  HostCall shown = uniform_call(probes, probes.shape(3, n, head_dim, false));
  const CallResult result = probes.impl.run(shown);
  const auto found = [&](FaultStage stage, const std::string& detail) {
    if (!result.ok()) return probes.finding(stage, detail);
    return probes.finding(stage, "Q = 0, kv_len " + decimal(n) + ": " + detail, shown, result,
                          probes.judge(shown, result));
  };
  if (!row) {
    return found(lengths.depends_on_length ? FaultStage::tail : FaultStage::pv,
                 lengths.text + ", with folded one-hot V only");
  }
  const Content c = content_of(*row, p_tolerance(probes, n));
  if (c.finite && c.uniform && c.factor > 0) {
    const auto keys = static_cast<double>(n);
    lengths = judge_informative(probes, results, std::fabs(keys / c.factor - keys));
  }
  if (!c.finite && zero_queries_alone_fail(probes, n, head_dim)) {
    return found(FaultStage::dequant,
                 "an all-zero Q gives NaN, other inputs with scores of 0 do not: the code divides "
                 "by a scale of 0; use a scale of 1 for an all-zero tensor");
  }
  const std::string seen = describe_content(c, n);
  if (c.finite && runs_differ(*row, p_tolerance(probes, n))) {
    return found(FaultStage::combine,
                 "runs of keys have different weights, although all scores are equal: partial "
                 "results are combined with wrong weights");
  }
  if (c.finite && c.uniform && is_correct_with_unit_v_scale(probes, n, head_dim)) {
    return found(FaultStage::dequant, "outputs are " + number(c.factor) +
                                          " times the expected ones, and correct with v_scale = 1");
  }
  if (c.finite && c.uniform && is_rounding(results, c.factor)) {
    return found(FaultStage::precision,
                 seen + ": rounding, since the error is smaller than one key");
  }
  if (lengths.depends_on_length &&
      passes_with_random_values(probes, results, lengths.first, head_dim)) {
    return found(FaultStage::tail, lengths.text + ": " + seen);
  }
  if (!c.keys_missing && reads_outside(probes, n, head_dim)) {
    return found(FaultStage::bounds, seen +
                                         "; other values around the tensors change the "
                                         "result: keys outside the tensors are read");
  }
  if (sum_saturates(lengths, c, n)) {
    return found(FaultStage::precision, seen + ": the format of the row sum is too narrow");
  }
  if (!c.finite || c.uniform) return found(FaultStage::sum, seen);
  if (odd_keys_move(probes, *row, n, head_dim)) {
    return found(FaultStage::combine,
                 seen + "; other keys in a longer row: the edges of the KV splits are wrong");
  }
  // Keys beyond a fixed limit are missing if a longer row ends at the same key.
  if (const std::optional<Row> longer = first_wrong_row(probes, 2 * n + 40, head_dim);
      c.keys_missing && longer) {
    const Content more = content_of(*longer, p_tolerance(probes, 2 * n + 40));
    if (more.finite && c.last_key + 2 == lengths.first && more.last_key == c.last_key) {
      return found(FaultStage::tail,
                   lengths.text + ": keys from " + decimal(c.last_key + 1) + " on are missing");
    }
  }
  return found(stage_of_weights(*row, p_tolerance(probes, n)), seen);
}

/// Many keys of equal weight and positive V: an accumulator in a narrow format stops growing.
Finding check_long_sums(ProbeSequence& probes, std::int64_t head_dim) {
  for (const std::int64_t n : {1000, 2500, 5000}) {
    if (probes.quick && n > 2500) break;
    HostCall call = probes.call(probes.shape(probes.can.cross ? 2 : n, n, head_dim, false));
    if (!probes.can.cross && n > 2500) break;
    Random random(probes.seed, 52);
    fill(call.tensors.v, [&](auto, auto, auto, auto) { return 1 + random.uniform(); });
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::precision)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (judged.ok()) continue;
    const double got = result.out[judged.worst_at], want = judged.oracle.out[judged.worst_at];
    return probes.finding(
        FaultStage::precision,
        "the mean of " + decimal(n) + " values between 1 and 2 is " + number(got) + " instead of " +
            number(want) +
            "; shorter rows are correct: the format of the accumulator is too narrow",
        call, result, judged);
  }
  return {};
}

}  // namespace

Finding probe_uniform(ProbeSequence& probes, std::int64_t head_dim) {
  LengthResults results;
  std::optional<Finding> failure;
  int deaths = 0;
  const bool main = head_dim == probes.main_dim();
  for (const std::int64_t n : lengths_to_try(probes.quick || !main, probes.can.length_step)) {
    if (!main && n > 130) break;
    if (!main && probes.quick && n > 20 && n % 32 > 1) continue;
    HostCall call = uniform_call(probes, probes.shape(3, n, head_dim, false));
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::sum)) {
      results[n] = false;
      if (!failure) failure = f;
      if (result.kind == CallResult::Kind::died && ++deaths == kMaxDeaths) break;
    }
    if (result.ok()) results[n] = probes.judge(call, result).ok();
  }
  const LengthVerdict lengths = judge_lengths(results, "kv_len");
  if (failure) {
    if (lengths.depends_on_length) failure->stage = FaultStage::tail;
    failure->detail = lengths.text + ": " + failure->detail;
    return *failure;
  }
  if (lengths.failed) return explain(probes, results, lengths, head_dim);
  return main ? check_long_sums(probes, head_dim) : Finding{};
}

}  // namespace flashcore::verify
