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

/// A call with the options. It is read only if it is wrong.
Finding check_once(ProbeSequence& probes, std::int64_t head_dim, const Options& options,
                   double sigma, FaultStage fallback, const std::string& input) {
  GradientCall call = gradient_call(probes, probes.shape(5, 20, head_dim), options);
  fill_random(call, sigma, probes.seed);
  return check_call(probes, call, fallback, input);
}

/// Scales that are round numbers, negative or 0.
Finding check_unusual_scales(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<double> scales{1, 2, 0x1p-9};
  if (probes.can.negative_scale) scales.insert(scales.end(), {-0.4, -1});
  if (probes.can.zero_scale) scales.push_back(0);
  for (const double scale : scales) {
    Options options = probes.base();
    options.scale = scale;
    GradientCall call = gradient_call(probes, probes.shape(5, 20, head_dim), options);
    fill_random(call, scale > 0.9 ? 0.4 : 0.8, probes.seed);
    const RanGradients ran = run_gradients(probes, call);
    if (auto f = failure_of(probes, ran.result, FaultStage::scale)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    const int g = ran.worst();
    return gradient_finding(probes, FaultStage::scale,
                            "scale " + number(scale) + ": " + worst_element(call, ran, g), call,
                            ran, g);
  }
  return {};
}

/// A call with dlse.
struct DlseCall {
  Shape shape;
  Options options;
  const char* name;
  double dout_sigma = 1, dlse_sigma = 1;
  bool clears_rows = false;  ///< dout is 0 in every second row
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
  add(5, "dout of 0, ").dout_sigma = 0;
  add(5, "dout of 0 in some rows, ").clears_rows = true;
  add(5, "small dout, ").dout_sigma = 0x1p-8;
  add(5, "large dlse, ").dlse_sigma = 64;
  add(1, "one row, ");
  if (probes.can.causal && probes.can.cross) {
    add(25, "rows without keys, ").options.causal = true;
  }
  add(70, "many rows, ");
  return calls;
}

void resize_dout(const DlseCall& one, GradientCall& call) {
  const auto columns = static_cast<std::size_t>(one.shape.v_dim);
  for (std::size_t i = 0; i < call.dout.size(); ++i) {
    const bool is_cleared = one.clears_rows && i / columns % 2 == 1;
    call.dout[i] *= is_cleared ? 0 : one.dout_sigma;
  }
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
  return check_unusual_scales(probes, head_dim);
}

Finding probe_grad_softcap(ProbeSequence& probes, std::int64_t head_dim) {
  for (const double cap : {1.0, 5.0}) {
    Options options = probes.base();
    options.softcap = cap;
    Finding f = check(probes, head_dim, options, 2, FaultStage::ds, "softcap " + number(cap));
    if (!f.found()) continue;
    // The scale is correct by now, so a factor is one of the slope, unless it is the scale's.
    if (f.stage == FaultStage::scale && f.detail.find("dS") != std::string::npos &&
        f.detail.find("the scale is ") == std::string::npos) {
      f.stage = FaultStage::ds;
    }
    return f;
  }
  // Slopes near 0 and near 1.
  for (const auto& [cap, sigma] : {std::pair{0.03, 3.0}, {0.2, 2.0}, {30.0, 5.0}, {300.0, 1.0}}) {
    Options options = probes.base();
    options.softcap = cap;
    Finding f =
        check_once(probes, head_dim, options, sigma, FaultStage::ds, "softcap " + number(cap));
    if (f.found()) return f;
  }
  return {};
}

Finding probe_grad_dlse(ProbeSequence& probes, std::int64_t head_dim) {
  for (const DlseCall& one : dlse_calls(probes, head_dim)) {
    GradientCall call = gradient_call(probes, one.shape, one.options);
    fill_random(call, one.options.softcap > 0 ? 2 : 1, probes.seed);
    resize_dout(one, call);
    // The same call without dlse has passed an earlier probe, or passes now.
    GradientCall without = call;
    call.dlse.resize(call.dout.size() / static_cast<std::size_t>(one.shape.v_dim));
    fill_random(call.dlse, one.dlse_sigma, probes.seed, 221);
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
