// Probe grad_dv: with dout one-hot, dv is P as the backward pass computes it again. First Q = 0,
// where P is 1/n whatever the scores, then random scores.
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

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

/// P is off by a factor near 1.
bool is_small_factor(const Readings& readings) {
  constexpr double kSmall = 0.07;
  if (readings.all.empty()) return false;
  const double factor = diagnose(readings.all.front(), FaultStage::dv).factor;
  return std::fabs(factor - 1) < kSmall;
}

}  // namespace

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
      if (sigma == 0 && f.found() && is_small_factor(readings)) {
        // Steps of P, too, are one factor of equal weights.
        GradientCall other = call;
        fill_random(other, 1, probes.seed);
        const Finding g = explain(probes, read_p(probes, other), other, FaultStage::dv,
                                  "random scores, dout one-hot");
        if (g.stage == FaultStage::precision) return g;
      }
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
