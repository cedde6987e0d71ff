// Probes grad_dp, grad_delta and grad_ds: dS is read from dq and dk. Under uniform P and with an
// output of 0, dS is dP / n; an output that is not 0 adds delta; random scores add P.
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

constexpr std::pair<std::int64_t, std::int64_t> kShapes[] = {{3, 7}, {5, 20}};

/// A call with P = 1/n. The values of each column sum to 0, so the output and delta are 0.
GradientCall uniform_call(ProbeSequence& probes, std::int64_t q_len, std::int64_t kv_len,
                          std::int64_t head_dim) {
  GradientCall call = gradient_call(probes, probes.shape(q_len, kv_len, head_dim), probes.base());
  // Values and dout are small integers, so every dP is exact in any format.
  Random random(probes.seed, 211);
  const TensorView& v = call.forward.tensors.v;
  fill(v, [&](auto, auto, auto, auto) { return static_cast<double>(random.between(-3, 3)); });
  auto* values = static_cast<double*>(v.data);
  const std::int64_t n = v.shape[2], d = v.shape[3];
  for (std::int64_t head = 0; head < v.shape[0] * v.shape[1]; ++head) {
    double* x = values + head * n * d;
    for (std::int64_t c = 0; c < d; ++c) {
      double sum = 0;
      for (std::int64_t j = 0; j + 1 < n; ++j) sum += x[j * d + c];
      x[(n - 1) * d + c] = -sum;
    }
  }
  for (double& x : call.dout) x = static_cast<double>(random.between(-1, 1));
  return call;
}

}  // namespace

Finding probe_grad_dp(ProbeSequence& probes, std::int64_t head_dim) {
  for (const auto& [q_len, kv_len] : kShapes) {
    GradientCall call = uniform_call(probes, q_len, kv_len, head_dim);
    Finding f = explain(probes, read_ds(probes, call, score_dims(head_dim)), call, FaultStage::dp,
                        "uniform P, output 0");
    if (f.found()) return f;
  }
  return {};
}

Finding probe_grad_delta(ProbeSequence& probes, std::int64_t head_dim) {
  // A large common row of V changes delta and dP alike, so a delta of low precision shows.
  for (const double shift : {0.5, 4.0}) {
    GradientCall call = uniform_call(probes, 5, 20, head_dim);
    const TensorView& v = call.forward.tensors.v;
    auto* x = static_cast<double*>(v.data);
    for (std::int64_t i = 0; i < v.shape[0] * v.shape[1] * v.shape[2] * v.shape[3]; ++i) {
      x[i] += shift;
    }
    for (double& y : call.dout) y += 0.25;
    Finding f = explain(probes, read_ds(probes, call, score_dims(head_dim)), call,
                        FaultStage::delta, "uniform P, mean of V " + number(shift));
    if (f.found()) return f;
  }
  return {};
}

Finding probe_grad_ds(ProbeSequence& probes, std::int64_t head_dim) {
  for (const auto& [q_len, kv_len] : kShapes) {
    for (const double sigma : {1.0, 2.0}) {
      GradientCall call =
          gradient_call(probes, probes.shape(q_len, kv_len, head_dim), probes.base());
      fill_random(call, sigma, probes.seed);
      Finding f = explain(probes, read_ds(probes, call, score_dims(head_dim)), call, FaultStage::ds,
                          "random scores");
      if (f.found()) return f;
      // All columns at once: the products beyond those that read dS.
      fill_random(call, sigma, probes.seed + 1);
      const RanGradients ran = run_gradients(probes, call);
      if (!ran.result.ok() || ran.ok()) continue;
      for (const int g : {kDq, kDk}) {
        if (ran.judged[g].ok()) continue;
        const bool small = ran.judged[g].non_finite == 0 && ran.judged[g].relative_error < 0x1p-5;
        const FaultStage stage = small      ? FaultStage::precision
                                 : g == kDq ? FaultStage::dq
                                            : FaultStage::dk;
        return gradient_finding(probes, stage, "dS is correct, but " + worst_element(call, ran, g),
                                call, ran, g);
      }
    }
  }
  return {};
}

}  // namespace flashcore::verify
