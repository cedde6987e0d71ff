// Probe grad_accumulate: sums over many tiles. P, dS and their products are correct by now for
// short rows, so a wrong entry at a long row is a tile that is missing or counted twice.
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Long sums of equal signs: a narrow accumulator stops growing.
Finding check_growth(ProbeSequence& probes, std::int64_t head_dim, std::int64_t length) {
  GradientCall call =
      gradient_call(probes, probes.shape(length, 8, head_dim, false), probes.base());
  fill_random(call, 0, probes.seed);
  for (double& x : call.dout) x = 1;
  const RanGradients ran = run_gradients(probes, call);
  if (!ran.result.ok() || ran.judged[kDv].ok()) return {};
  // A narrow accumulator stops at a power of two times the term, a lost tile does not.
  const double got = ran.result.value[kDv][ran.judged[kDv].worst_at];
  const double terms = std::log2(got * 8);  // P = 1/8
  const bool small =
      ran.judged[kDv].non_finite == 0 &&
      (std::fabs(terms - std::round(terms)) < 1e-6 || ran.judged[kDv].relative_error < 0x1p-5);
  return gradient_finding(
      probes, small ? FaultStage::precision : FaultStage::accumulate,
      "dv sums " + decimal(length) + " equal terms: " + worst_element(call, ran, kDv), call, ran,
      kDv);
}

}  // namespace

Finding probe_grad_accumulate(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes{{9, 200}, {150, 9}, {131, 131}};
  if (!probes.quick) shapes.insert(shapes.end(), {{5, 1030}, {520, 5}});
  for (const auto& [q_len, kv_len] : shapes) {
    GradientCall call =
        gradient_call(probes, probes.shape(q_len, kv_len, head_dim, false), probes.base());
    fill_random(call, 0.5, probes.seed);
    // One call shows whether anything is wrong, the readings what.
    GradientCall plain = call;
    const RanGradients ran = run_gradients(probes, plain);
    if (auto f = failure_of(probes, ran.result, FaultStage::accumulate)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    if (!ran.judged[kDv].ok()) {
      Finding f = explain(probes, read_p(probes, call), call, FaultStage::accumulate, "long rows");
      if (f.found()) return f;
    }
    Finding f = explain(probes, read_ds(probes, call, score_dims(head_dim)), call,
                        FaultStage::accumulate, "long rows");
    if (f.found()) return f;
    const int g = ran.worst();
    const bool small = ran.judged[g].relative_error < 0x1p-5 && ran.judged[g].non_finite == 0;
    return gradient_finding(probes, small ? FaultStage::precision : FaultStage::accumulate,
                            "long rows: " + worst_element(call, ran, g), call, ran, g);
  }
  return check_growth(probes, head_dim, probes.quick ? 600 : 3000);
}

}  // namespace flashcore::verify
