// Probe grad_tail: random gradients at many lengths. It reports elements that are never written,
// and other faults only if some lengths have them and larger ones do not, which is the mark of a
// partial tile. All others have probes of their own.
#include <algorithm>

#include "verify/inputs/lengths.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

constexpr std::int64_t kOther = 5;  // the length that stays

/// The shape of one call of a sweep of keys or rows.
Shape shape_of(const ProbeSequence& probes, std::int64_t head_dim, bool of_keys, std::int64_t n) {
  return probes.shape(of_keys ? kOther : n, of_keys ? n : kOther, head_dim, false);
}

/// Runs one call per length, keys or rows. `first` becomes the finding of the first that fails.
LengthResults sweep(ProbeSequence& probes, std::int64_t head_dim, bool of_keys, std::uint64_t seed,
                    std::optional<Finding>& first) {
  LengthResults results;
  const std::int64_t deaths = probes.impl.deaths();
  for (const std::int64_t n : gradient_lengths(probes)) {
    if (probes.impl.deaths() - deaths >= kMaxDeaths) break;
    GradientCall call =
        gradient_call(probes, shape_of(probes, head_dim, of_keys, n), probes.base());
    fill_random(call, 1, seed + static_cast<std::uint64_t>(n));
    const RanGradients ran = run_gradients(probes, call);
    if (ran.result.kind == CallOutcome::Kind::refused) continue;
    results[n] = ran.ok();
    if (ran.ok() || first) continue;
    first = failure_of(probes, ran.result, FaultStage::tail);
    if (first) continue;
    const int g = ran.worst();
    const std::int64_t* unwritten = ran.result.unwritten;
    const bool covered = std::all_of(unwritten, unwritten + kGradients,
                                     [](std::int64_t count) { return count == 0; });
    first = gradient_finding(
        probes, covered ? FaultStage::tail : FaultStage::coverage,
        (covered ? "" : "elements are never written: ") + worst_element(call, ran, g), call, ran,
        g);
  }
  return results;
}

/// True if other numbers change which lengths fail: the numbers decide, not the length.
bool depends_on_numbers(ProbeSequence& probes, std::int64_t head_dim, bool of_keys,
                        const LengthResults& results) {
  std::optional<Finding> ignored;
  const LengthResults again = sweep(probes, head_dim, of_keys, mix(probes.seed), ignored);
  std::size_t failed = 0, changed = 0, passed = 0, lucky = 0;  // passed after a failure; by chance
  for (const auto& [n, ok] : results) {
    const auto other = again.find(n);
    const bool differs = other != again.end() && other->second != ok;
    changed += differs ? 1 : 0;
    if (!ok) ++failed;
    if (ok && failed > 0) ++passed, lucky += differs ? 1 : 0;
  }
  if (2 * lucky >= passed) return true;
  return 5 * changed > failed;
}

/// True if delta is wrong, but not in partial tiles: if there are fewer keys than rows, or in calls
/// of several heads.
bool is_delta_of_other_rows(ProbeSequence& probes, std::int64_t head_dim, bool of_keys,
                            const LengthResults& results) {
  std::int64_t last = 0;
  bool is_of_few_keys = of_keys;
  for (const auto& [n, ok] : results) {
    if (!ok) last = n;
    is_of_few_keys = is_of_few_keys && ok == (n >= kOther);
  }
  Shape shape = shape_of(probes, head_dim, of_keys, last);
  const auto run = [&](GradientCall& call) {
    call = gradient_call(probes, shape, probes.base());
    fill_random(call, 1, probes.seed + static_cast<std::uint64_t>(last));
    return run_gradients(probes, call);
  };
  GradientCall call;
  const RanGradients ran = run(call);
  if (!ran.result.ok() || !delta_explains(call, ran)) return false;
  if (is_of_few_keys) return true;
  shape.batch = shape.q_heads = shape.kv_heads = 1;
  return run(call).ok();
}

}  // namespace

Finding probe_grad_tail(ProbeSequence& probes, std::int64_t head_dim) {
  for (const bool of_keys : {true, false}) {
    std::optional<Finding> first;
    const std::int64_t deaths = probes.impl.deaths();
    const LengthResults results = sweep(probes, head_dim, of_keys, probes.seed, first);
    const LengthVerdict verdict = judge_lengths(results, of_keys ? "kv_len" : "q_len");
    if (!first || (!verdict.depends_on_length && first->stage == FaultStage::tail)) continue;
    const bool died = probes.impl.deaths() > deaths;
    if (verdict.depends_on_length && first->stage == FaultStage::coverage) {
      first->stage = FaultStage::tail;
    } else if (!died && first->stage == FaultStage::tail &&
               depends_on_numbers(probes, head_dim, of_keys, results)) {
      continue;
    }
    if (!died && first->stage == FaultStage::tail &&
        is_delta_of_other_rows(probes, head_dim, of_keys, results)) {
      first->stage = FaultStage::delta;
      first->detail = "dq is off along the mean of the keys, as by delta: " + first->detail;
    }
    first->detail = verdict.text + ": " + first->detail;
    return *first;
  }
  return {};
}

}  // namespace flashcore::verify
