// Probes grad_scale, grad_softcap and grad_dlse: the options that change the formula of dS.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Reads P and dS of a random call with the options.
Finding check(ProbeSequence& probes, std::int64_t head_dim, const Options& options, double sigma,
              FaultStage fallback, const std::string& input) {
  GradientCall call = gradient_call(probes, probes.shape(5, 20, head_dim), options);
  fill_random(call, sigma, probes.seed);
  Finding f = explain(probes, read_p(probes, call), call, FaultStage::dv, input);
  if (f.found()) return f;
  return explain(probes, read_ds(probes, call, score_dims(head_dim)), call, fallback, input);
}

/// A call with dlse.
struct DlseCall {
  Shape shape;
  Options options;
  const char* name;
};

/// dlse alone, with every other option, and with many rows.
std::vector<DlseCall> dlse_calls(const ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<DlseCall> calls;
  const auto add = [&](std::int64_t q_len, const char* name) -> DlseCall& {
    return calls.emplace_back(
        DlseCall{probes.shape(q_len, 20, head_dim, q_len < 10), probes.base(), name});
  };
  add(5, "");
  if (probes.can.causal) add(5, "causal, ").options.causal = true;
  if (probes.can.window) add(5, "window, ").options.window_left = 4;
  if (probes.can.scale) add(5, "scale 0.3, ").options.scale = 0.3;
  for (const double cap : {1.0, 4.0}) {
    if (probes.can.softcap) add(5, "softcap, ").options.softcap = cap;
  }
  if (probes.can.v_dim) add(5, "narrow values, ").shape.v_dim = head_dim / 2;
  add(70, "many rows, ");
  return calls;
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
        check(probes, head_dim, options, sigma, FaultStage::scale, "scale " + number(scale));
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
    Finding f = check(probes, head_dim, options, 2, FaultStage::ds, "softcap " + number(cap));
    if (!f.found()) continue;
    // The scale is correct by now, so a factor is one of the slope.
    if (f.stage == FaultStage::scale && f.detail.find("dS") != std::string::npos) {
      f.stage = FaultStage::ds;
    }
    return f;
  }
  return {};
}

Finding probe_grad_dlse(ProbeSequence& probes, std::int64_t head_dim) {
  for (const DlseCall& one : dlse_calls(probes, head_dim)) {
    GradientCall call = gradient_call(probes, one.shape, one.options);
    fill_random(call, one.options.softcap > 0 ? 2 : 1, probes.seed);
    // The same call without dlse has passed an earlier probe, or passes now.
    GradientCall without = call;
    call.dlse.resize(call.dout.size() / static_cast<std::size_t>(one.shape.v_dim));
    fill_random(call.dlse, 1, probes.seed, 221);
    const std::string input = std::string(one.name) + "random dlse and dout";
    GradientCall plain = call;
    const RanGradients ran = run_gradients(probes, plain);
    if (auto f = failure_of(probes, ran.result, FaultStage::dlse)) return *f;
    if (!ran.result.ok() || ran.ok() || !run_gradients(probes, without).ok()) continue;
    Finding f;
    if (one.shape.q_len < 10) {
      f = explain(probes, read_ds(probes, call, score_dims(head_dim)), call, FaultStage::dlse,
                  input);
    }
    const int g = ran.worst();
    if (!f.found()) {
      f = gradient_finding(probes, FaultStage::dlse, input + ": " + worst_element(call, ran, g),
                           call, ran, g);
    }
    if (f.stage != FaultStage::coverage && f.stage != FaultStage::bounds)
      f.stage = FaultStage::dlse;
    return f;
  }
  return {};
}

}  // namespace flashcore::verify
