// Probe grad_dv: with dout one-hot, dv is P as the backward pass computes it again. First Q = 0,
// where P is 1/n whatever the scores, then random scores.
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {

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
      if (f.found()) return f;
    }
  }
  return {};
}

}  // namespace flashcore::verify
