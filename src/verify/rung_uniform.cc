// Rungs 3 and 4: Q = 0, so P is 1/n over the visible keys. Which keys are missing, how the row is
// normalised, and at which lengths.
#include <algorithm>
#include <cmath>

#include "verify/decimal.h"
#include "verify/ladder.h"
#include "verify/lengths.h"

namespace flashcore::verify {
namespace {

HostCall uniform_call(const Ladder& ladder, const Shape& shape) {
  HostCall call = ladder.call(shape);
  fill_random(call.tensors.k, 1, ladder.seed, 51);
  fill_folded_one_hot(call);
  return call;
}

/// P of the first row that is wrong, beside what it should be.
struct Row {
  std::vector<double> got, want;
};

/// A row's P as got / want: all alike, or not.
struct Content {
  bool finite = true, uniform = true, keys_missing = false, keys_doubled = false;
  double factor = 1;          ///< got / want, where uniform
  std::int64_t last_key = 0;  ///< the last that has weight
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

/// Blocks of neighbouring keys that weigh differently, each by its own length: partial results
/// whose sums were counted twice, or not at all.
bool weighs_blocks_by_length(const Row& row) {
  std::vector<std::pair<double, double>> blocks;  // weight of a key, keys
  for (std::size_t j = 0; j < row.got.size(); ++j) {
    if (row.want[j] == 0) continue;
    if (row.got[j] <= 0) return false;
    if (blocks.empty() || std::fabs(row.got[j] / blocks.back().first - 1) > 0.02) {
      blocks.push_back({row.got[j], 0});
    }
    ++blocks.back().second;
  }
  if (blocks.size() < 2 || blocks.size() > row.got.size() / 2) return false;
  const auto constant = [&](double power) {
    const auto value = [&](const auto& b) { return b.first * std::pow(b.second, power); };
    return std::all_of(blocks.begin(), blocks.end(), [&](const auto& b) {
      return std::fabs(value(b) / value(blocks[0]) - 1) < 0.05;
    });
  };
  return constant(1) || constant(-1);
}

double p_tolerance(const Ladder& ladder, std::int64_t n) {
  const Arithmetic a = ladder.subject.arithmetic();
  return 2 * a.out_unit + 4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(n))) + 0x1p-22;
}

std::optional<Row> first_wrong_row(Ladder& ladder, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(ladder, ladder.shape(3, n, head_dim, false));
  const std::vector<double> p = read_probabilities(ladder, call);
  if (p.empty()) return std::nullopt;
  const reference::Oracle oracle = ladder.oracle(call, true);
  const auto keys = static_cast<std::size_t>(call.tensors.k.shape[2]);
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    Row row{{p.begin() + static_cast<std::ptrdiff_t>(r * keys),
             p.begin() + static_cast<std::ptrdiff_t>((r + 1) * keys)},
            oracle.probabilities[r]};
    for (std::size_t j = 0; j < keys; ++j) {
      const double allowed = p_tolerance(ladder, n) * row.want[j];
      if (!(std::fabs(row.got[j] - row.want[j]) <= allowed)) return row;
    }
  }
  return std::nullopt;
}

/// An all-zero Q may be the trouble itself: a score of 0 with Q and K other than 0 tells.
bool zero_queries_alone_fail(Ladder& ladder, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(ladder, ladder.shape(3, n, head_dim, false));
  fill(call.tensors.q, [](auto, auto, auto, std::int64_t c) { return c == 0 ? 1.0 : 0.0; });
  fill(call.tensors.k, [](auto, auto, auto, std::int64_t c) { return c == 0 ? 0.0 : 1.0; });
  const Answer answer = ladder.subject.run(call);
  return answer.ok() && ladder.judge(call, answer).ok();
}

/// Whether what lies around the tensors matters.
bool reads_outside(Ladder& ladder, std::int64_t n, std::int64_t head_dim) {
  HostCall call = uniform_call(ladder, ladder.shape(3, n, head_dim, false));
  Setting other = ladder.subject.plain();
  const Answer before = ladder.subject.run(call, other);
  other.guard = 3;
  const Answer after = ladder.subject.run(call, other);
  return before.ok() && after.ok() && before.bits != after.bits;
}

/// The row sum stops growing at 2^11 (f16) or 2^8 (bf16): it is kept in that format.
bool sum_saturates(const LengthVerdict& lengths, const Content& c, std::int64_t n) {
  const double sum = static_cast<double>(n) / c.factor;
  const bool at_limit = std::fabs(sum - 2048) < 2 || std::fabs(sum - 256) < 0.5;
  return c.uniform && c.factor > 1 && at_limit && lengths.first > 250;
}

/// Keys weigh differently, but by whole numbers: rows of V are left out or taken twice. Weights of
/// other kinds that still add up to 1 were different before they were normalised.
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

/// A row sum that is off by so many keys is lost in the rounding of long rows: those that pass say
/// nothing then.
LengthVerdict judge_informative(const Ladder& ladder, const LengthResults& results, double off_by) {
  LengthResults informative;
  for (const auto& [n, passed] : results) {
    const bool visible = off_by / static_cast<double>(n) > 1.2 * p_tolerance(ladder, n);
    if (!passed || visible) informative[n] = passed;
  }
  return judge_lengths(informative, "kv_len");
}

Finding explain(Ladder& ladder, const LengthResults& results, LengthVerdict lengths,
                std::int64_t head_dim) {
  // The first failing length past 1 says more: with one key there is little to get wrong.
  const std::int64_t n = std::max<std::int64_t>(lengths.first, 2);
  const std::optional<Row> row = first_wrong_row(ladder, n, head_dim);
  HostCall shown = uniform_call(ladder, ladder.shape(3, n, head_dim, false));
  const Answer answer = ladder.subject.run(shown);
  const auto found = [&](FaultStage stage, const std::string& detail) {
    if (!answer.ok()) return ladder.finding(stage, detail);
    return ladder.finding(stage, "Q = 0, kv_len " + decimal(n) + ": " + detail, shown, answer,
                          ladder.judge(shown, answer));
  };
  if (!row) {
    return found(lengths.depends_on_length ? FaultStage::tail : FaultStage::pv,
                 lengths.text + ", with folded one-hot V only");
  }
  const Content c = content_of(*row, p_tolerance(ladder, n));
  if (c.finite && c.uniform && c.factor > 0) {
    const auto keys = static_cast<double>(n);
    lengths = judge_informative(ladder, results, std::fabs(keys / c.factor - keys));
  }
  std::string seen;
  if (!c.finite) {
    if (zero_queries_alone_fail(ladder, n, head_dim)) {
      return found(FaultStage::dequant,
                   "an all-zero Q gives NaN, scores of 0 by other inputs do not: a scale of 0 is "
                   "divided by; the scale of an all-zero tensor must be 1");
    }
    seen = "P is not finite";
  } else if (c.uniform) {
    seen = "every key weighs " + number(c.factor) + " times what it should: the row sum is " +
           number(static_cast<double>(n) / c.factor) + " instead of " + decimal(n);
  } else if (c.keys_missing) {
    seen = "some keys have no weight at all";
  } else {
    seen = "keys that score alike weigh differently";
  }
  if (c.finite && weighs_blocks_by_length(*row)) {
    return found(FaultStage::combine,
                 "key ranges weigh by their number of keys once too often or too seldom: partial "
                 "results are joined with wrong weights");
  }
  if (lengths.depends_on_length) return found(FaultStage::tail, lengths.text + ": " + seen);
  if (!c.keys_missing && reads_outside(ladder, n, head_dim)) {
    return found(FaultStage::bounds, seen +
                                         ", and differently when other values lie around the "
                                         "tensors: keys outside of them are read");
  }
  if (sum_saturates(lengths, c, n)) {
    return found(FaultStage::precision, seen + ": the sum is kept in too narrow a format");
  }
  if (!c.finite || c.uniform) return found(FaultStage::sum, seen);
  // Keys beyond a limit are left out: also of a longer row, where holes would not end it.
  if (const std::optional<Row> longer = first_wrong_row(ladder, 2 * n + 40, head_dim);
      c.keys_missing && longer) {
    const Content more = content_of(*longer, p_tolerance(ladder, 2 * n + 40));
    if (more.finite && c.last_key + 2 == lengths.first && more.last_key == c.last_key) {
      return found(FaultStage::tail,
                   lengths.text + ": keys from " + decimal(c.last_key + 1) + " on are left out");
    }
  }
  return found(stage_of_weights(*row, p_tolerance(ladder, n)), seen);
}

/// Many keys of equal weight, V positive: a narrow accumulator stops growing.
Finding check_long_sums(Ladder& ladder, std::int64_t head_dim) {
  for (const std::int64_t n : {1000, 2500, 5000}) {
    if (ladder.quick && n > 2500) break;
    HostCall call = ladder.call(ladder.shape(ladder.can.cross ? 2 : n, n, head_dim, false));
    if (!ladder.can.cross && n > 2500) break;
    Random random(ladder.seed, 52);
    fill(call.tensors.v, [&](auto, auto, auto, auto) { return 1 + random.uniform(); });
    const Answer answer = ladder.subject.run(call);
    if (auto f = failure_of(ladder, answer, FaultStage::precision)) return *f;
    if (!answer.ok()) continue;
    const Judged judged = ladder.judge(call, answer);
    if (judged.ok()) continue;
    const double got = answer.out[judged.worst_at], want = judged.oracle.out[judged.worst_at];
    return ladder.finding(FaultStage::precision,
                          "the mean of " + decimal(n) + " values between 1 and 2 is " +
                              number(got) + " instead of " + number(want) +
                              ", right for fewer: sums are kept in too narrow a format",
                          call, answer, judged);
  }
  return {};
}

}  // namespace

Finding probe_uniform(Ladder& ladder, std::int64_t head_dim) {
  LengthResults results;
  std::optional<Finding> failure;
  int deaths = 0;
  const bool main = head_dim == ladder.main_dim();
  for (const std::int64_t n : lengths_to_try(ladder.quick || !main, ladder.can.length_step)) {
    if (!main && n > 130) break;
    HostCall call = uniform_call(ladder, ladder.shape(3, n, head_dim, false));
    const Answer answer = ladder.subject.run(call);
    if (auto f = failure_of(ladder, answer, FaultStage::sum)) {
      results[n] = false;
      if (!failure) failure = f;
      if (answer.kind == Answer::Kind::died && ++deaths == kMostDeaths) break;
    }
    if (answer.ok()) results[n] = ladder.judge(call, answer).ok();
  }
  const LengthVerdict lengths = judge_lengths(results, "kv_len");
  if (failure) {
    if (lengths.depends_on_length) failure->stage = FaultStage::tail;
    failure->detail = lengths.text + ": " + failure->detail;
    return *failure;
  }
  if (lengths.failed) return explain(ladder, results, lengths, head_dim);
  return main ? check_long_sums(ladder, head_dim) : Finding{};
}

}  // namespace flashcore::verify
