// Probe lse: the log-sum-exp. Earlier probes have found its scores and sums correct.
#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

/// Names a known mistake that explains all values; empty: none.
std::string explain(const Judged& judged, const CallResult& result, double head_dim) {
  const auto all = [&](auto candidate) {
    std::size_t agree = 0, count = 0;
    for (std::size_t r = 0; r < result.lse.size(); ++r) {
      if (std::isinf(judged.oracle.lse[r])) continue;
      ++count;
      const double want = candidate(r);
      agree += std::fabs(result.lse[r] - want) <= 1e-3 * (1 + std::fabs(want)) ? 1 : 0;
    }
    return count > 0 && agree == count;
  };
  const auto& o = judged.oracle;
  const double ln2 = std::log(2.0);
  if (all([&](std::size_t r) { return o.lse[r] / ln2; })) {
    return "it is in base 2; if that is intended, declare lse_base = 2";
  }
  if (all([&](std::size_t r) { return o.lse[r] * ln2; })) return "it is multiplied by ln(2)";
  if (all([&](std::size_t r) { return -o.lse[r]; })) return "its sign is wrong";
  if (all([&](std::size_t r) { return o.lse[r] - o.max[r]; })) {
    return "it is log(sum) without the maximum";
  }
  if (all([&](std::size_t r) { return o.max[r]; })) return "it is the maximum alone";
  if (all([&](std::size_t r) { return std::exp(o.lse[r]); })) return "it is the sum, not its log";
  if (all([&](std::size_t r) { return o.sum[r]; })) return "it is the row sum, not its log";
  if (all([&](std::size_t r) { return std::log(o.sum[r]) - o.max[r]; })) {
    return "the maximum is subtracted, not added";
  }
  if (all([&](std::size_t r) { return o.lse[r] - o.max[r] + o.max[r] * std::sqrt(head_dim); })) {
    return "its maximum is taken over unscaled scores";
  }
  return "";
}

enum class Scores { random, uniform, ascending, shifted };

Finding check(ProbeSequence& probes, const Shape& shape, const Options& options, Scores scores,
              double sigma) {
  HostCall call = probes.call(shape, options);
  fill_random(call.tensors.v, 1, probes.seed, 113);
  if (scores == Scores::random) {
    fill_random(call.tensors.q, sigma, probes.seed, 111);
    fill_random(call.tensors.k, sigma, probes.seed, 112);
  } else if (scores != Scores::uniform) {
    const auto n = static_cast<double>(shape.kv_len);
    fill_scores_by_key(call, 0, [&](std::int64_t j) {
      return scores == Scores::shifted ? 200.0 : 10 * (static_cast<double>(j) / n - 0.5);
    });
  }
  Setting setting = probes.impl.default_setting();
  setting.lse = true;
  const CallResult result = probes.impl.run(call, setting);
  if (auto f = failure_of(probes, result, FaultStage::lse)) return *f;
  if (!result.ok()) return {};
  const Judged judged = probes.judge(call, result);
  for (std::size_t r = 0; r < result.lse.size(); ++r) {
    if (std::isinf(judged.oracle.lse[r]) && std::isnan(result.lse[r])) {
      return probes.finding(FaultStage::lse, "the LSE of " + row_name(call, r) +
                                                 ", which has no visible key, is NaN");
    }
  }
  if (judged.lse_wrong == 0) return {};
  const std::size_t row = judged.lse_worst_at;
  std::string text = "the LSE of " + row_name(call, row) + " is " + number(result.lse[row]) +
                     " instead of " + number(judged.oracle.lse[row]);
  if (result.lse_unwritten > 0) {
    text = decimal(result.lse_unwritten) + " LSEs are never written";
  } else if (const std::string why = explain(judged, result, static_cast<double>(shape.head_dim));
             !why.empty()) {
    text += ": " + why;
  }
  return probes.finding(FaultStage::lse, text, call, result, judged);
}

}  // namespace

Finding probe_lse(ProbeSequence& probes, std::int64_t head_dim) {
  const Options base = probes.base();
  for (const auto& [q_len, kv_len] :
       {std::pair<std::int64_t, std::int64_t>{9, 40}, {5, 150}, {70, 66}, {1, 300}}) {
    if (probes.quick && head_dim != probes.main_dim() && kv_len > 50) break;
    const Shape shape = probes.shape(q_len, kv_len, head_dim, kv_len < 50);
    for (const Scores s : {Scores::random, Scores::uniform, Scores::ascending, Scores::shifted}) {
      if (Finding f = check(probes, shape, base, s, 1); f.found()) return f;
    }
    std::vector<Options> more;
    if (probes.can.causal) {
      more.push_back(base);
      more.back().causal = true;
    }
    if (probes.can.splits) {
      more.push_back(base);
      more.back().num_splits = 3;
    }
    if (probes.can.scale) {
      more.push_back(base);
      more.back().scale = 0.3;
    }
    if (probes.can.softcap) {
      more.push_back(base);
      more.back().softcap = 2;
    }
    for (const Options& options : more) {
      if (Finding f = check(probes, shape, options, Scores::random, 1); f.found()) return f;
    }
  }
  return {};
}

}  // namespace flashcore::verify
