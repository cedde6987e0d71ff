// Probes grad_mask and grad_window: hidden pairs must not count. The same call without a mask is
// correct by now, so any error is the mask's.
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// True if a sum over heads lacks all pairs of some heads, but of others none.
bool loses_heads(const Readings& readings) {
  for (const Reading& r : readings.all) {
    std::int64_t lost = 0, kept = 0;
    for (std::int64_t head = 0; r.from != kDq && head < r.heads; ++head) {
      std::size_t clear = 0, missing = 0, wrong = 0;
      for (std::size_t e = r.at(head, 0, 0); e < r.at(head + 1, 0, 0); ++e) {
        wrong += r.wrong(e) ? 1 : 0;
        if (std::fabs(r.want[e]) <= 4 * r.bound[e]) continue;
        ++clear;
        missing += std::fabs(r.got[e]) <= r.bound[e] ? 1 : 0;
      }
      lost += clear > 0 && missing == clear ? 1 : 0;
      kept += wrong == 0 ? 1 : 0;
    }
    if (lost > 0 && lost + kept == r.heads) return true;
  }
  return false;
}

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
      const bool own = f.stage == FaultStage::bounds || f.stage == FaultStage::delta ||
                       (f.stage == FaultStage::accumulate && loses_heads(readings));
      if (!own) f.stage = FaultStage::mask;
      return f;
    }
  }
  return gradient_finding(probes, FaultStage::mask, worst_element(call, ran, g), call, ran, g);
}

Finding check_shapes(ProbeSequence& probes, std::int64_t head_dim,
                     const std::vector<Options>& all) {
  for (const auto& [q_len, kv_len] :
       {std::pair{9, 9}, {5, 17}, {17, 5}, {1, 12}, {12, 1}, {66, 66}, {40, 130}, {130, 40}}) {
    if (probes.quick && all.size() > 1 && kv_len > 100) continue;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Options& options = all[i];
      const bool small = q_len + kv_len < 30;
      if (probes.quick && !small && i % 3 != 0) continue;
      const Shape shape = probes.shape(q_len, kv_len, head_dim, small);
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
  // Precision at such scores is no matter of the mask; it shows with one key as in the first row.
  for (const std::int64_t keys : {1, 9}) {
    GradientCall unmasked =
        gradient_call(probes, probes.shape(9, keys, head_dim, false), probes.base());
    fill_random(unmasked, 1, probes.seed);
    shift_scores(unmasked, -2000);
    if (probes.can.full && !run_gradients(probes, unmasked).ok()) return {};
  }
  const int g = ran.worst();
  return gradient_finding(probes, FaultStage::mask,
                          "scores near -2000: " + worst_element(call, ran, g), call, ran, g);
}

/// Hidden keys far above the visible ones: their exp(score - LSE) is infinite, also times 0.
Finding check_high_scores(ProbeSequence& probes, std::int64_t head_dim, const Options& options,
                          bool rising) {
  constexpr double kStep = 25;  // from key to key
  const auto ramp = [&](const Options& of_call) {
    GradientCall call = gradient_call(probes, probes.shape(9, 9, head_dim, false), of_call);
    fill_random(call, 1, probes.seed);
    shift_scores(call, kStep);
    const double root = std::sqrt(static_cast<double>(head_dim));
    const TensorView& view = call.forward.tensors.k;
    auto* k = static_cast<double*>(view.data);
    const std::int64_t keys = view.shape[2];
    for (std::int64_t row = 0; row < view.shape[0] * view.shape[1] * keys; ++row) {
      const std::int64_t j = row % keys;
      k[row * head_dim] = root * static_cast<double>(rising ? j : keys - 1 - j);
    }
    return call;
  };
  GradientCall call = ramp(options);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::mask)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  GradientCall unmasked = ramp(probes.base());
  if (probes.can.full && !run_gradients(probes, unmasked).ok()) return {};
  const int g = ran.worst();
  return gradient_finding(
      probes, FaultStage::mask,
      "hidden scores far above the visible ones: " + worst_element(call, ran, g), call, ran, g);
}

}  // namespace

Finding probe_grad_mask(ProbeSequence& probes, std::int64_t head_dim) {
  Options options = probes.base();
  options.causal = true;
  if (Finding f = check_shapes(probes, head_dim, {options}); f.found()) return f;
  if (Finding f = check_low_scores(probes, head_dim, options); f.found()) return f;
  return check_high_scores(probes, head_dim, options, true);
}

Finding probe_grad_window(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<Options> all;
  for (const auto& [left, right] :
       {std::pair{3, 2}, {-1, 4}, {20, 0}, {0, -1}, {0, 0}, {-1, 0}, {5, -1}, {2, 7}, {99, 99}}) {
    Options options = probes.base();
    options.window_left = left, options.window_right = right;
    all.push_back(options);
  }
  if (probes.can.causal) {
    all.push_back(all[2]);
    all.back().causal = true;
    all.push_back(all[1]);
    all.back().causal = true;
  }
  if (Finding f = check_shapes(probes, head_dim, all); f.found()) return f;
  // Windows whose first and last tiles lie in other tiles than the diagonal.
  for (const auto& [q_len, kv_len] : {std::pair{40, 150}, {150, 40}}) {
    Options options = probes.base();
    options.window_left = 40, options.window_right = 70;
    const Shape shape = probes.shape(q_len, kv_len, head_dim, false);
    if (Finding f = check(probes, shape, options); f.found()) return f;
  }
  Options left = probes.base();
  left.window_left = 2;
  return check_high_scores(probes, head_dim, left, false);
}

}  // namespace flashcore::verify
