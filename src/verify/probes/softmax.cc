// Probes rescale and max: the rescaling of the online softmax, and the maximum that keeps exp() in
// range.
#include <algorithm>
#include <cmath>

#include "verify/inputs/call_variants.h"
#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

/// Column 0 of V is 1, so column 0 of the output is the sum of P.
void fill_values(HostCall& call, std::uint64_t seed) {
  Random random(seed, 61);
  fill(call.tensors.v,
       [&](auto, auto, auto, std::int64_t c) { return c == 0 ? 1.0 : 0.5 + random.uniform(); });
}

struct Order {
  const char* name;
  /// Relative score, 0 to 1, where 1 is the largest.
  double (*height)(double position, std::int64_t j, std::int64_t query);
};
/// In the last order neighbouring queries need different factors. Only this order detects a factor
/// of another query.
const Order kOrders[] = {
    {"ascending", [](double x, std::int64_t, std::int64_t) { return x; }},
    {"descending", [](double x, std::int64_t, std::int64_t) { return 1 - x; }},
    {"shuffled",
     [](double, std::int64_t j, std::int64_t) {
       return static_cast<double>(mix(static_cast<std::uint64_t>(j)) % 1024) / 1024.0;
     }},
    {"alternately ascending and descending",
     [](double x, std::int64_t, std::int64_t query) { return query % 2 == 0 ? 1 - x : x; }},
};

/// Scores by key and parity of the query: even and odd queries use one dimension each.
template <typename Score>
void fill_scores_by_parity(HostCall& call, Score score) {
  const Tensors& t = call.tensors;
  const double d = static_cast<double>(t.q.shape[3]);
  const double size =
      std::exp2(std::round(0.5 * std::log2(d)));  // value of q for the default scale 1/√d
  fill(t.q, [&](auto, auto, std::int64_t i, std::int64_t c) { return c == i % 2 ? size : 0.0; });
  fill(t.k, [&](auto, auto, std::int64_t j, std::int64_t c) {
    return c < 2 ? score(j, c) * std::sqrt(d) / size : 0.0;
  });
}

/// True if runs of neighbouring keys are off by the same factor. Independent rounding of each
/// weight cannot cause that.
bool is_off_by_ranges(ProbeSequence& probes, const HostCall& call) {
  const std::vector<double> p = read_probabilities(probes, call);
  if (p.empty()) return false;
  const Arithmetic a = probes.impl.arithmetic();
  const reference::Oracle oracle = probes.oracle(call, true);
  const auto n = static_cast<std::size_t>(call.tensors.k.shape[2]);
  std::size_t runs = 0, keys = 0;
  double before = 0;
  for (std::size_t j = 0; j < n; ++j) {
    const double want = oracle.probabilities[0][j];
    if (!(want > 0) || !(p[j] > 0)) continue;
    const double score_error = (16 * a.sum_unit + a.score_unit) * oracle.magnitude[0];
    const double tolerance =
        2 * a.out_unit + 2 * a.p_unit + 2 * score_error + (a.out_smallest + a.p_smallest) / want;
    if (tolerance > 0x1p-6) continue;  // the weight is too small
    const double ratio = p[j] / want;
    if (keys++ == 0 || std::fabs(ratio / before - 1) > 2 * tolerance) ++runs;
    before = ratio;
  }
  return runs > 1 && 8 * runs <= keys;
}

struct Ordered {
  bool failed = false;
  std::string text;
  Finding finding;
};

/// Scores from -range to 0: exp() cannot overflow, with or without the maximum subtracted.
Ordered run_order(ProbeSequence& probes, const Order& order, double range, std::int64_t kv_len,
                  std::int64_t head_dim) {
  HostCall call = probes.call(probes.shape(3, kv_len, head_dim, false));
  const auto n = static_cast<double>(call.tensors.k.shape[2]);
  const auto score = [&](std::int64_t j, std::int64_t query) {
    return range * (order.height(static_cast<double>(j) / (n - 1), j, query) - 1);
  };
  if (order.height(0, 0, 0) == order.height(0, 0, 1)) {
    fill_scores_by_key(call, 0, [&](std::int64_t j) { return score(j, 0); });
  } else {
    fill_scores_by_parity(call, score);
  }
  fill_values(call, probes.seed);
  const CallResult result = probes.impl.run(call);
  Ordered ordered;
  if (auto f = failure_of(probes, result, FaultStage::rescale)) return {true, f->detail, *f};
  if (!result.ok()) return ordered;
  const Judged judged = probes.judge(call, result);
  if (judged.ok()) return ordered;
  ordered.failed = true;
  const double sum =
      result.out[judged.worst_at / static_cast<std::size_t>(call.tensors.v.shape[3]) *
                 static_cast<std::size_t>(call.tensors.v.shape[3])];
  ordered.text = std::string(order.name) + " scores over a range of " + number(range) + ": ";
  if (judged.non_finite > 0) {
    ordered.text += decimal(judged.non_finite) + " outputs are not finite";
  } else if (std::fabs(sum - 1) > 0.01) {
    ordered.text +=
        "P sums to " + number(sum) + ": accumulator and row sum are rescaled differently";
  } else {
    ordered.text += "P sums to 1 but the weights are wrong (relative error " +
                    number(judged.relative_error) + ")";
  }
  const bool noise =
      judged.non_finite == 0 && judged.relative_error < 0x1p-6 && !is_off_by_ranges(probes, call);
  ordered.finding = probes.finding(noise ? FaultStage::precision : FaultStage::rescale,
                                   ordered.text, call, result, judged);
  return ordered;
}

}  // namespace

Finding probe_rescale(ProbeSequence& probes, std::int64_t head_dim) {
  for (const std::int64_t kv_len : {20, 200, 600}) {
    if (!probes.can.cross && kv_len > 200) break;
    if (probes.quick && head_dim != probes.main_dim() && kv_len > 200) break;
    for (const double range : {6.0, 30.0}) {
      Ordered results[std::size(kOrders)];
      for (std::size_t i = 0; i < std::size(kOrders); ++i) {
        results[i] = run_order(probes, kOrders[i], range, kv_len, head_dim);
      }
      const bool up = results[0].failed, down = results[1].failed;
      for (const Ordered& r : results) {
        if (!r.failed) continue;
        Finding f = r.finding;
        if (&r == &results[std::size(kOrders) - 1]) {  // the only order that fails
          f.stage = FaultStage::rescale;
          f.detail +=
              "; it is correct if all queries have the same order: the rescale factor belongs to "
              "another "
              "query";
        } else if (up != down) {
          f.stage = FaultStage::rescale;  // rounding does not depend on the order
          f.detail += up ? "; descending scores, which never raise the maximum, are correct"
                         : "; ascending scores are correct";
        } else if (up && f.stage == FaultStage::rescale && !probes.can.splits) {
          // A running maximum rises in only one of the two orders; a combine step is wrong in both.
          f.stage = FaultStage::combine;
          f.detail +=
              "; descending scores are wrong too: partial results are combined with wrong weights";
        }
        return f;
      }
    }
  }
  return {};
}

Finding probe_max(ProbeSequence& probes, std::int64_t head_dim) {
  const auto explain = [&](const HostCall& call, const CallResult& result, const Judged& judged,
                           const std::string& what) {
    std::size_t zero = 0;
    for (const double x : result.out) zero += x == 0 ? 1 : 0;
    const bool lost = judged.non_finite > 0 || zero > result.out.size() / 4;
    const std::string seen = judged.non_finite > 0
                                 ? decimal(judged.non_finite) + " outputs are not finite"
                                 : "output " + number(result.out[judged.worst_at]) +
                                       " instead of " + number(judged.oracle.out[judged.worst_at]);
    return probes.finding(lost ? FaultStage::max : FaultStage::rescale, what + ": " + seen, call,
                          result, judged);
  };
  for (const double shift : {200.0, -200.0, 2000.0, -2000.0}) {
    HostCall call = probes.call(probes.shape(3, 100, head_dim, false));
    fill_scores_by_key(call, 1 % head_dim, [&](std::int64_t) { return shift; });
    fill_values(call, probes.seed);
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::max)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (judged.ok()) continue;
    Finding f = explain(call, result, judged, "all scores " + number(shift));
    f.stage = FaultStage::max;
    return f;
  }
  // Queries with distant scores: a maximum of another query flushes all weights of some rows.
  {
    HostCall call = probes.call(probes.shape(6, 100, head_dim, false));
    fill_scores_by_parity(call, [](std::int64_t j, std::int64_t query) {
      return (query == 0 ? 200.0 : -200.0) + static_cast<double>(j % 4);
    });
    fill_values(call, probes.seed);
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::max)) return *f;
    if (result.ok()) {
      const Judged judged = probes.judge(call, result);
      if (!judged.ok()) {
        return explain(call, result, judged,
                       "queries with scores of 200 next to queries with -200");
      }
    }
  }
  // Every query has one key far above the others, each at another position: a maximum over part of
  // the keys misses it.
  for (const std::int64_t kv_len : {40, 200}) {
    HostCall base = probes.call(probes.shape(64, kv_len, head_dim, false));
    fill_values(base, probes.seed);
    HostCall call = with_selected_keys(base);
    const CallResult result = probes.impl.run(call);
    if (auto f = failure_of(probes, result, FaultStage::max)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (!judged.ok()) {
      return explain(call, result, judged, "one key of each query far above all others");
    }
  }
  return {};
}

}  // namespace flashcore::verify
