// Probes grad_dp, grad_delta and grad_ds: dS is read from dq and dk. Under uniform P and with an
// output of 0, dS is dP / n; an output that is not 0 adds delta; random scores add P.
#include <algorithm>
#include <cmath>

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

/// Adds a constant to each column of V, another one in each KV head: it adds a constant to dP and
/// to delta of each row, and none to dS.
void shift_values(GradientCall& call) {
  const TensorView& v = call.forward.tensors.v;
  auto* x = static_cast<double*>(v.data);
  const std::int64_t d = v.shape[3];
  for (std::int64_t row = 0; row < v.shape[0] * v.shape[1] * v.shape[2]; ++row) {
    const std::int64_t head = row / v.shape[2];
    for (std::int64_t c = 0; c < d; ++c) {
      x[row * d + c] += static_cast<double>((c * 7 + head * 3) % 5 - 2);
    }
  }
}

/// A fault of dS stays the same when dP and delta change alike; one of dP does not.
bool depends_on_ds_alone(ProbeSequence& probes, const GradientCall& call, std::int64_t head_dim) {
  GradientCall shifted = call;
  shift_values(shifted);
  const Readings before = read_ds(probes, call, score_dims(head_dim)),
                 after = read_ds(probes, shifted, score_dims(head_dim));
  if (before.failure || after.failure) return false;
  for (std::size_t i = 0; i < before.all.size(); ++i) {
    const Reading &a = before.all[i], &b = after.all[i];
    for (std::size_t e = 0; e < a.got.size(); ++e) {
      if (!(std::fabs(a.got[e] - b.got[e]) <= 2 * (a.bound[e] + b.bound[e]))) return false;
    }
  }
  return true;
}

/// True if dS is off by another factor than `factor` with another number of keys.
bool factor_of_length(ProbeSequence& probes, std::int64_t head_dim, double factor,
                      std::int64_t kv_len) {
  constexpr double kNothing = 1e-3;
  if (!(std::fabs(factor) > kNothing)) return false;
  for (const auto& [q_len, other_len] : kShapes) {
    if (other_len == kv_len) continue;
    const GradientCall call = uniform_call(probes, q_len, other_len, head_dim);
    const Readings readings = read_ds(probes, call, score_dims(head_dim));
    if (readings.all.empty()) continue;
    const Diagnosis other = diagnose(readings.all.front(), FaultStage::dp);
    if (std::fabs(other.factor) > kNothing && std::fabs(other.factor / factor - 1) > 0.01)
      return true;
  }
  return false;
}

/// True if random dS hold those of other pairs, with the P of these.
bool exchanges_random_ds(ProbeSequence& probes, std::int64_t head_dim) {
  GradientCall call = gradient_call(probes, probes.shape(5, 20, head_dim), probes.base());
  fill_random(call, 1, probes.seed);
  const Readings readings = read_ds(probes, call, score_dims(head_dim));
  return !readings.all.empty() &&
         std::all_of(readings.all.begin(), readings.all.end(),
                     [](const Reading& r) { return diagnose(r, FaultStage::ds).exchanged; });
}

/// Small dS are wrong, and so are all gradients if dout is small.
bool loses_small_results(ProbeSequence& probes, const GradientCall& call, std::int64_t head_dim) {
  const Readings readings = read_ds(probes, call, score_dims(head_dim));
  if (readings.all.empty() ||
      !std::all_of(readings.all.begin(), readings.all.end(), is_wrong_where_small)) {
    return false;
  }
  GradientCall small = call;
  for (double& x : small.dout) x *= probes.impl.formats().dtype == Format::f16 ? 0x1p-9 : 0x1p-24;
  const RanGradients ran = run_gradients(probes, small);
  return ran.result.ok() && !ran.judged[kDv].ok() && !ran.judged[kDq].ok() && !ran.judged[kDk].ok();
}

}  // namespace

Finding probe_grad_dp(ProbeSequence& probes, std::int64_t head_dim) {
  for (const auto& [q_len, kv_len] : kShapes) {
    GradientCall call = uniform_call(probes, q_len, kv_len, head_dim);
    const Readings readings = read_ds(probes, call, score_dims(head_dim));
    Finding f = explain(probes, readings, call, FaultStage::dp, "uniform P, output 0");
    if (!f.found()) continue;
    if (f.stage != FaultStage::dp && f.stage != FaultStage::scale) return f;
    const Diagnosis first =
        readings.all.empty() ? Diagnosis{} : diagnose(readings.all.front(), FaultStage::dp);
    if (factor_of_length(probes, head_dim, first.factor, kv_len)) {
      f.stage = FaultStage::ds;
      f.detail += "; the factor depends on the number of keys, so it is one of P";
    } else if (!depends_on_ds_alone(probes, call, head_dim)) {
      // Other factors than the scale are no mistake with it if delta does not have them.
      if (f.stage != FaultStage::scale) return f;
      const double powers = std::log(first.factor) / std::log(readings.all.front().scale);
      f.detail += "; but not of delta";
      if (std::fabs(std::fabs(powers) - 1) > 0.01) f.stage = FaultStage::dp;
    } else if (f.stage == FaultStage::dp && !first.exchanged) {
      // Keys of a row are shifted alike, so exchanged keys are not.
      f.stage = FaultStage::ds;
      f.detail += "; it stays the same when dP and delta change by the same amount";
    } else if (f.stage == FaultStage::dp && exchanges_random_ds(probes, head_dim)) {
      f.stage = FaultStage::ds;
      f.detail += "; with random scores, P is exchanged with it";
    }
    return f;
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
    if (!f.found()) continue;
    if (f.stage != FaultStage::delta) return f;
    // Under uniform P, a delta that is not multiplied by P is also off by one amount per row.
    call = gradient_call(probes, probes.shape(5, 20, head_dim), probes.base());
    fill_random(call, 1, probes.seed);
    Finding other = explain(probes, read_ds(probes, call, score_dims(head_dim)), call,
                            FaultStage::delta, "random scores");
    if (other.stage == FaultStage::ds) return other;
    const Readings random = read_ds(probes, call, score_dims(head_dim));
    if (!random.all.empty() &&
        std::all_of(random.all.begin(), random.all.end(),
                    [](const Reading& r) { return has_shifted_values(r); })) {
      f.stage = FaultStage::dp;
      f.detail = "random scores: dP is off by that of one row of V, or of their mean; " + f.detail;
    }
    return f;
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
      if (f.found()) {
        if (loses_small_results(probes, call, head_dim)) {
          f.stage = FaultStage::unlocalised;
          f.detail += "; small elements of all gradients are wrong";
        }
        return f;
      }
      // All columns at once: the products beyond those that read dS.
      fill_random(call, sigma, probes.seed + 1);
      const RanGradients ran = run_gradients(probes, call);
      if (!ran.result.ok() || ran.ok()) continue;
      for (const int g : {kDq, kDk}) {
        if (ran.judged[g].ok()) continue;
        const FaultStage stage = is_imprecise(ran.judged[g]) ? FaultStage::precision
                                 : g == kDq                  ? FaultStage::dq
                                                             : FaultStage::dk;
        return gradient_finding(probes, stage, "dS is correct, but " + worst_element(call, ran, g),
                                call, ran, g);
      }
    }
  }
  return {};
}

}  // namespace flashcore::verify
