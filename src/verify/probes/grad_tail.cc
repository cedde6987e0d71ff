// Probe grad_tail: random gradients at many lengths. It reports a fault only if some lengths have
// it and larger ones do not, which is the mark of a partial tile. Other faults have probes of their
// own.
#include "verify/gradient_call.h"
#include "verify/inputs/lengths.h"

namespace flashcore::verify {

Finding probe_grad_tail(ProbeSequence& probes, std::int64_t head_dim) {
  constexpr std::int64_t kOther = 5;  // the length that stays
  for (const bool of_keys : {true, false}) {
    LengthResults results;
    std::optional<Finding> first;
    const std::int64_t deaths = probes.impl.deaths();
    for (const std::int64_t n : gradient_lengths(probes)) {
      if (probes.impl.deaths() - deaths >= kMaxDeaths) break;
      const Shape shape = probes.shape(of_keys ? kOther : n, of_keys ? n : kOther, head_dim, false);
      GradientCall call = gradient_call(probes, shape, probes.base());
      fill_random(call, 1, probes.seed + static_cast<std::uint64_t>(n));
      const RanGradients ran = run_gradients(probes, call);
      if (ran.result.kind == CallOutcome::Kind::refused) continue;
      results[n] = ran.ok();
      if (ran.ok() || first) continue;
      first = failure_of(probes, ran.result, FaultStage::tail);
      if (first) continue;
      const int g = ran.worst();
      first = gradient_finding(probes, FaultStage::tail, worst_element(call, ran, g), call, ran, g);
    }
    const LengthVerdict verdict = judge_lengths(results, of_keys ? "kv_len" : "q_len");
    if (!first || (!verdict.depends_on_length && first->stage == FaultStage::tail)) continue;
    first->detail = verdict.text + ": " + first->detail;
    return *first;
  }
  return {};
}

}  // namespace flashcore::verify
