// Probes grad_coverage and grad_determinism: every element of the gradients is written, whatever
// was there, and the same call gives the same gradients.
#include <algorithm>
#include <cmath>

#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"
#include "verify/inputs/lengths.h"

namespace flashcore::verify {
namespace {

/// A number that memory may hold before a call.
constexpr double kOldContent = 3;

/// The fault of one shape: elements that stay, or results that depend on what was there.
std::string uncovered(ProbeSequence& probes, const Shape& shape, std::optional<Finding>& failure) {
  GradientCall call = gradient_call(probes, shape, probes.base());
  fill_random(call, 1, probes.seed);
  GradientResult clean, over;
  Setting setting = probes.impl.default_setting();
  for (GradientResult* result : {&clean, &over}) {
    setting.out_before = result == &clean ? std::nan("") : kOldContent;
    *result = run_only(probes, call, setting);
    if (!result->ok()) {
      failure = failure_of(probes, *result, FaultStage::coverage);
      return failure ? failure->detail : "";
    }
  }
  for (int g = 0; g < kGradients; ++g) {
    const std::vector<double>&a = clean.value[g], &b = over.value[g];
    for (std::size_t at = 0; at < a.size(); ++at) {
      if (clean.unwritten[g] > 0 && over.unwritten[g] > 0 && b[at] == kOldContent) {
        return decimal(clean.unwritten[g]) + " of " + decimal(a.size()) +
               " elements are never written, the first: " + element_name(call, g, at);
      }
      const bool stale = std::isnan(a[at]) && std::isfinite(b[at]);
      const bool moved = std::fabs(b[at] - a[at] - kOldContent) < 1e-3 && clean.unwritten[g] == 0;
      if (stale || moved) {
        return element_name(call, g, at) + " is " + number(b[at]) + " over an old " +
               number(kOldContent) + " and " + number(a[at]) + " over NaN: old content is added";
      }
    }
  }
  return "";
}

}  // namespace

Finding probe_grad_coverage(ProbeSequence& probes, std::int64_t head_dim) {
  const std::vector<std::int64_t> lengths = gradient_lengths(probes);
  for (const bool of_keys : {false, true}) {
    if (of_keys && !probes.can.cross) break;
    LengthResults results;
    std::optional<Finding> first;
    const std::int64_t deaths = probes.impl.deaths();
    for (const std::int64_t n : lengths) {
      if (n > 300 || probes.impl.deaths() - deaths >= kMaxDeaths) break;
      const Shape shape =
          probes.shape(of_keys ? 4 : n, of_keys ? n : 4, head_dim, n < 10 || n == 64);
      std::optional<Finding> failure;
      const std::string fault = uncovered(probes, shape, failure);
      results[n] = fault.empty();
      if (fault.empty() || first) continue;
      first = failure ? failure : probes.finding(FaultStage::coverage, fault);
    }
    if (!first) continue;
    const LengthVerdict verdict = judge_lengths(results, of_keys ? "kv_len" : "q_len");
    if (verdict.depends_on_length && first->stage == FaultStage::coverage) {
      first->stage = FaultStage::tail;
    }
    first->detail = verdict.text + ": " + first->detail;
    return *first;
  }
  return {};
}

Finding probe_grad_determinism(ProbeSequence& probes, std::int64_t head_dim) {
  const int times = probes.quick ? 8 : 20;
  for (const auto& [q_len, kv_len] : {std::pair{9, 70}, {70, 40}, {130, 130}}) {
    if (probes.quick && q_len > 100) continue;
    GradientCall call =
        gradient_call(probes, probes.shape(q_len, kv_len, head_dim, kv_len == 70), probes.base());
    fill_random(call, 1, probes.seed);
    const RanGradients first = run_gradients(probes, call);
    if (auto f = failure_of(probes, first.result, FaultStage::determinism)) return *f;
    if (!first.result.ok()) continue;
    for (int i = 1; i < times; ++i) {
      const GradientResult again = probes.impl.run_backward(call, probes.impl.default_setting());
      if (auto f = failure_of(probes, again, FaultStage::determinism)) return *f;
      if (!again.ok() || again.bits == first.result.bits) continue;
      // Sums in no fixed order differ within rounding; a race does not.
      double worst = -1;
      std::string text;
      for (int g = 0; g < kGradients; ++g) {
        for (std::size_t at = 0; at < again.value[g].size(); ++at) {
          const double a = first.result.value[g][at], b = again.value[g][at];
          if (a == b || (std::isnan(a) && std::isnan(b))) continue;
          const double off =
              std::isnan(a - b) ? INFINITY : std::fabs(a - b) / first.judged[g].bound[at];
          if (off <= worst) continue;
          worst = off;
          text = element_name(call, g, at) + " is " + number(a) + " in the first run and " +
                 number(b) + " in run " + decimal(i + 1) + " of the same call, " + number(off) +
                 " times its bound apart";
        }
      }
      probes.conventions.gradients_vary = true;
      if (probes.deterministic || worst > 2) return probes.finding(FaultStage::determinism, text);
    }
  }
  return {};
}

}  // namespace flashcore::verify
