// Probes grad_mask and grad_window: hidden pairs must not count. The same call without a mask is
// correct by now, so any error is the mask's.
#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

Finding check(ProbeSequence& probes, const Shape& shape, const Options& options) {
  GradientCall call = gradient_call(probes, shape, options);
  fill_random(call, 1, probes.seed);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::mask)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  const int g = ran.worst();
  if (shape.q_len * shape.kv_len < 200) {
    // Small enough to be read entry by entry; a hidden pair is the clearest evidence.
    const Readings readings =
        g == kDv ? read_p(probes, call) : read_ds(probes, call, score_dims(shape.head_dim));
    Finding f = explain(probes, readings, call, FaultStage::mask, "masked");
    if (f.found()) {
      // With a wrong set of pairs, dS / P is not off by one amount per row.
      const bool own = f.stage == FaultStage::bounds || f.stage == FaultStage::delta;
      if (!own) f.stage = FaultStage::mask;
      return f;
    }
  }
  return gradient_finding(probes, FaultStage::mask, worst_element(call, ran, g), call, ran, g);
}

Finding check_shapes(ProbeSequence& probes, std::int64_t head_dim,
                     const std::vector<Options>& all) {
  for (const auto& [q_len, kv_len] :
       {std::pair{9, 9}, {5, 17}, {17, 5}, {66, 66}, {40, 130}, {130, 40}}) {
    if (probes.quick && all.size() > 1 && kv_len > 100) continue;
    for (const Options& options : all) {
      const Shape shape = probes.shape(q_len, kv_len, head_dim, q_len + kv_len < 30);
      if (Finding f = check(probes, shape, options); f.found()) return f;
    }
  }
  return {};
}

/// Scores far below 0: a finite score of hidden keys is above them.
Finding check_low_scores(ProbeSequence& probes, std::int64_t head_dim, const Options& options) {
  GradientCall call = gradient_call(probes, probes.shape(9, 9, head_dim, false), options);
  fill_random(call, 1, probes.seed);
  shift_scores(call, -2000);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::mask)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  const int g = ran.worst();
  return gradient_finding(probes, FaultStage::mask,
                          "scores near -2000: " + worst_element(call, ran, g), call, ran, g);
}

}  // namespace

Finding probe_grad_mask(ProbeSequence& probes, std::int64_t head_dim) {
  Options options = probes.base();
  options.causal = true;
  Finding f = check_shapes(probes, head_dim, {options});
  return f.found() ? f : check_low_scores(probes, head_dim, options);
}

Finding probe_grad_window(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<Options> all;
  for (const auto& [left, right] : {std::pair{3, 2}, {-1, 4}, {20, 0}, {0, -1}}) {
    Options options = probes.base();
    options.window_left = left, options.window_right = right;
    all.push_back(options);
  }
  if (probes.can.causal) {
    all.push_back(all[2]);
    all.back().causal = true;
  }
  return check_shapes(probes, head_dim, all);
}

}  // namespace flashcore::verify
