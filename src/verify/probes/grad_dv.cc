// Probe grad_dv: with dout one-hot, dv is P as the backward pass computes it again. First Q = 0,
// where P is 1/n whatever the scores, then random scores, then scores far from 0.
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// All scores of a row are shifted by `shift`, which its LSE takes back.
Finding check_shifted(ProbeSequence& probes, std::int64_t head_dim, double shift) {
  GradientCall call = gradient_call(probes, probes.shape(5, 21, head_dim), probes.base());
  fill_random(call, 1, probes.seed);
  shift_scores(call, shift);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::dv)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  const int g = ran.worst();
  // If dv is correct, P is.
  const bool dq = !ran.judged[kDq].ok(), dk = !ran.judged[kDk].ok();
  const FaultStage stage = !ran.judged[kDv].ok() ? FaultStage::dv
                           : dq && dk            ? FaultStage::ds
                           : dq                  ? FaultStage::dq
                                                 : FaultStage::dk;
  return gradient_finding(probes, stage,
                          "scores near " + number(shift) + ": " + worst_element(call, ran, g), call,
                          ran, g);
}

/// True if entries that are correct in `before` are wrong in `after`.
bool has_other_errors(const Readings& before, const Readings& after) {
  if (before.all.empty() || after.all.empty()) return false;
  const Reading &a = before.all.front(), &b = after.all.front();
  std::size_t both = 0, later = 0;
  for (std::size_t e = 0; e < b.got.size(); ++e) {
    if (b.wrong(e)) ++(a.wrong(e) ? both : later);
  }
  return 20 * later > both;
}

}  // namespace

/// After dS: its own faults show in such calls, too.
Finding probe_grad_max(ProbeSequence& probes, std::int64_t head_dim) {
  for (const double shift : {200.0, -200.0}) {
    if (Finding f = check_shifted(probes, head_dim, shift); f.found()) return f;
  }
  return {};
}

Finding probe_grad_dv(ProbeSequence& probes, std::int64_t head_dim) {
  for (const auto& [q_len, kv_len] : {std::pair{5, 21}, {21, 9}, {7, 140}}) {
    if (probes.quick && kv_len > 100 && head_dim != probes.main_dim()) continue;
    for (const double sigma : {0.0, 1.0}) {
      GradientCall call =
          gradient_call(probes, probes.shape(q_len, kv_len, head_dim, kv_len < 100), probes.base());
      fill_random(call, sigma, probes.seed);
      const Readings readings = read_p(probes, call);
      Finding f = explain(probes, readings, call, FaultStage::dv,
                          sigma == 0 ? "Q = 0, dout one-hot" : "random scores, dout one-hot");
      if (f.stage == FaultStage::accumulate && sigma == 0) {
        // Equal weights hide whether others stand in the place of correct ones.
        fill_random(call, 1, probes.seed);
        const Readings other = read_p(probes, call);
        if (has_other_errors(readings, other)) {
          f = explain(probes, other, call, FaultStage::dv, "random scores, dout one-hot");
        }
      }
      if (f.stage == FaultStage::accumulate) {
        f.stage = stage_of_lost_terms(probes, probes.shape(q_len, kv_len, head_dim, false));
      }
      if (f.found()) return f;
    }
  }
  return {};
}

}  // namespace flashcore::verify
