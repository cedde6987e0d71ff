// Probes grad_scale, grad_softcap and grad_dlse: the options that change the formula of dS.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Reads P and dS of a random call with the options.
Finding check(ProbeSequence& probes, std::int64_t head_dim, const Options& options, double sigma,
              bool with_dlse, FaultStage fallback, const std::string& input) {
  GradientCall call = gradient_call(probes, probes.shape(5, 20, head_dim), options);
  fill_random(call, sigma, probes.seed);
  if (with_dlse) {
    call.dlse.resize(call.dout.size() / static_cast<std::size_t>(call.forward.tensors.v.shape[3]));
    fill_random(call.dlse, 1, probes.seed, 221);
  } else {
    Finding f = explain(probes, read_p(probes, call), call, FaultStage::dv, input);
    if (f.found()) return f;
  }
  return explain(probes, read_ds(probes, call, score_dims(head_dim)), call, fallback, input);
}

}  // namespace

Finding probe_grad_scale(ProbeSequence& probes, std::int64_t head_dim) {
  for (const double scale : {0.3, 0.05, 1.7}) {
    Options options = probes.base();
    options.scale = scale;
    // Scores of about 2, so that 16-bit formats can tell factors.
    const double root = std::sqrt(static_cast<double>(head_dim));
    const double sigma = std::min(0.8, std::sqrt(2 / (scale * root)));
    Finding f =
        check(probes, head_dim, options, sigma, false, FaultStage::scale, "scale " + number(scale));
    if (!f.found()) continue;
    // The default scale is correct by now.
    const bool other = f.stage == FaultStage::bounds || f.stage == FaultStage::determinism;
    if (!other) f.stage = FaultStage::scale;
    return f;
  }
  return {};
}

Finding probe_grad_softcap(ProbeSequence& probes, std::int64_t head_dim) {
  for (const double cap : {1.0, 5.0}) {
    Options options = probes.base();
    options.softcap = cap;
    Finding f =
        check(probes, head_dim, options, 2, false, FaultStage::ds, "softcap " + number(cap));
    if (f.found()) return f;
  }
  return {};
}

Finding probe_grad_dlse(ProbeSequence& probes, std::int64_t head_dim) {
  Finding f =
      check(probes, head_dim, probes.base(), 1, true, FaultStage::dlse, "random dlse and dout");
  if (f.found() && f.stage != FaultStage::bounds) f.stage = FaultStage::dlse;
  if (f.found() || !probes.can.causal) return f;
  Options options = probes.base();
  options.causal = true;
  f = check(probes, head_dim, options, 1, true, FaultStage::dlse, "causal, random dlse and dout");
  if (f.found() && f.stage != FaultStage::bounds) f.stage = FaultStage::dlse;
  return f;
}

}  // namespace flashcore::verify
