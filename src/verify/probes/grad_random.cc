// Probe grad_random: gradients of random problems, every option alone and with every other. A
// failing problem is shrunk. If it needs no option, the earlier probes run again at its shape. Else
// its P or dS is read.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

constexpr double kSigmas[] = {1, 3, 1, 0.05};
/// Pairs of a row and a key per call of a quick run: the oracle visits each.
constexpr std::int64_t kMaxPairs = 6000;

struct Drawn {
  Shape shape;
  Options options;
  bool dlse = false;
  double sigma = 1, dout_sigma = 1;
  std::uint64_t seed = 1;
};

enum Feature { kCausal, kWindow, kScale, kSoftcap, kDlse, kGroups, kValueDim, kFeatures };

bool can_use(const Capabilities& can, int feature) {
  const bool can_all[] = {can.causal, can.window, can.scale, can.softcap,
                          can.dlse,   can.gqa,    can.v_dim};
  return can_all[feature];
}

void add_feature(int feature, Drawn& d) {
  if (feature == kCausal) d.options.causal = true;
  if (feature == kWindow) d.options.window_left = 9, d.options.window_right = 5;
  if (feature == kScale) d.options.scale = 0.3;
  if (feature == kSoftcap) d.options.softcap = 2;
  if (feature == kDlse) d.dlse = true;
  if (feature == kGroups) d.shape.q_heads = 3 * d.shape.kv_heads;
  if (feature == kValueDim) d.shape.v_dim = d.shape.head_dim / 2;
}

/// One call per head dim, and one with values wider than keys.
std::vector<Drawn> dims(const ProbeSequence& probes) {
  std::vector<Drawn> all;
  for (const auto& list : {probes.can.head_dims, probes.can.other_dims}) {
    for (const std::int64_t d : list) {
      Drawn drawn;
      drawn.seed = mix(probes.seed + static_cast<std::uint64_t>(d));
      drawn.shape = probes.shape(7, 24, d, false);
      drawn.options = probes.base();
      all.push_back(drawn);
    }
  }
  for (const std::int64_t d : probes.can.other_v_dims) {
    all.push_back(all.front());
    all.back().shape.v_dim = d;
  }
  if (probes.can.wide_values) {
    all.push_back(all.front());
    all.back().shape.v_dim = 2 * all.back().shape.head_dim;
  }
  return all;
}

std::vector<Drawn> feature_pairs(const ProbeSequence& probes) {
  std::vector<Drawn> pairs;
  for (int one = 0; one < kFeatures; ++one) {
    for (int other = one; other < kFeatures; ++other) {
      if (!can_use(probes.can, one) || !can_use(probes.can, other)) continue;
      Drawn d;
      d.seed = mix(probes.seed + static_cast<std::uint64_t>(kFeatures * one + other));
      d.shape = probes.shape(20, 70, probes.main_dim(), false);
      d.shape.q_heads = d.shape.kv_heads = 1;
      d.options = probes.base();
      d.sigma = kSigmas[pairs.size() % std::size(kSigmas)];
      add_feature(one, d), add_feature(other, d);
      // Small scores leave a softcap without effect.
      if (d.options.softcap > 0) d.sigma = std::max(d.sigma, 2.0);
      pairs.push_back(d);
    }
  }
  return pairs;
}

Drawn draw(const ProbeSequence& probes, std::uint64_t index) {
  Random random(probes.seed, 3000 + index);
  static constexpr std::int64_t kLengths[] = {1, 2, 7, 16, 31, 64, 65, 100, 129, 191, 300};
  Drawn d;
  d.seed = mix(probes.seed + index);
  const auto& dims = probes.can.head_dims;
  d.shape = probes.shape(
      random.pick(kLengths), random.pick(kLengths),
      dims[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(dims.size())))]);
  if (probes.can.batch) d.shape.batch = random.between(1, 3);
  d.shape.kv_heads = random.between(1, 3);
  d.shape.q_heads = d.shape.kv_heads * (probes.can.gqa ? random.between(1, 4) : 1);
  const std::int64_t others = d.shape.batch * d.shape.q_heads * d.shape.kv_len;
  const std::int64_t most = probes.quick ? kMaxPairs : 10 * kMaxPairs;
  if (probes.can.cross && probes.can.length_step == 1) {
    d.shape.q_len = std::clamp<std::int64_t>(most / others, 1, d.shape.q_len);
  }
  d.options = probes.base();
  for (int feature = 0; feature < kFeatures; ++feature) {
    if (feature != kGroups && can_use(probes.can, feature) && random.chance(0.25)) {
      add_feature(feature, d);
    }
  }
  d.sigma = random.pick(kSigmas);
  static constexpr double kDoutSigmas[] = {1, 1, 0.01, 30};
  d.dout_sigma = random.pick(kDoutSigmas);
  return d;
}

struct Ran {
  GradientCall call;
  RanGradients ran;
  bool failed() const {
    return ran.result.ok() ? !ran.ok() : ran.result.kind != CallOutcome::Kind::refused;
  }
};

Ran run(ProbeSequence& probes, const Drawn& d) {
  Ran r{gradient_call(probes, d.shape, d.options), {}};
  fill_random(r.call, d.sigma, d.seed);
  for (double& x : r.call.dout) x *= d.dout_sigma;
  if (d.dlse) {
    r.call.dlse.resize(static_cast<std::size_t>(d.shape.batch * d.shape.q_heads * d.shape.q_len));
    fill_random(r.call.dlse, d.dout_sigma, d.seed, 231);
  }
  r.ran = run_gradients(probes, r.call);
  return r;
}

/// A smaller call that still fails: drops options and shrinks sizes one at a time.
Drawn smallest(ProbeSequence& probes, Drawn d) {
  const auto keep = [&](auto change) {
    Drawn smaller = d;
    change(smaller);
    smaller.shape.q_len = std::max<std::int64_t>(smaller.shape.q_len, probes.can.length_step);
    if (!probes.can.cross) smaller.shape.q_len = smaller.shape.kv_len;
    if (run(probes, smaller).failed()) d = smaller;
  };
  keep([](Drawn& s) { s.dout_sigma = 1; });
  keep([](Drawn& s) { s.shape.batch = 1; });
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads = 1; });
  for (int step = 0; step < 6 && probes.can.length_step == 1; ++step) {
    keep([](Drawn& s) { s.shape.q_len = (s.shape.q_len + 1) / 2; });
    keep([](Drawn& s) { s.shape.kv_len = (s.shape.kv_len + 1) / 2; });
  }
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads; });
  keep([](Drawn& s) { s.dlse = false; });
  keep([&](Drawn& s) { s.options.causal = probes.base().causal; });
  keep([](Drawn& s) { s.options.window_left = s.options.window_right = -1; });
  keep([](Drawn& s) { s.options.softcap = 0; });
  keep([](Drawn& s) { s.options.scale.reset(); });
  keep([](Drawn& s) { s.shape.v_dim = s.shape.head_dim; });
  keep([](Drawn& s) { s.sigma = 1; });
  return d;
}

bool has_mask(const ProbeSequence& probes, const Drawn& d) {
  return d.options.causal != probes.base().causal || d.options.window_left >= 0 ||
         d.options.window_right >= 0;
}

/// True if P and dS are wrong, and dS is not that of the wrong P.
bool has_two_causes(ProbeSequence& probes, const Ran& r) {
  if (r.ran.judged[kDv].ok() || r.ran.judged[kDq].ok() || r.ran.judged[kDk].ok()) return false;
  const Tensors& t = r.call.forward.tensors;
  const std::int64_t d = t.q.shape[3], used = score_dims(d);
  GradientCall call = r.call;
  // The columns that read dS take no part in the scores.
  for (const TensorView* view : {&call.forward.tensors.q, &call.forward.tensors.k}) {
    auto* x = static_cast<double*>(view->data);
    for (std::int64_t row = 0; row < view->shape[0] * view->shape[1] * view->shape[2]; ++row) {
      std::fill(x + row * d + used, x + (row + 1) * d, 0.0);
    }
  }
  const Readings p = read_p(probes, call), ds = read_ds(probes, call, used);
  if (p.all.empty() || ds.all.empty()) return false;
  const Reading &of_p = p.all.front(), &of_ds = ds.all.front();
  std::size_t wrong = 0, explained = 0;
  for (std::size_t e = 0; e < of_p.got.size(); ++e) {
    if (!of_p.wrong(e) || !of_p.visible(e)) continue;
    const double got = of_ds.got[e] * of_p.want[e], want = of_p.got[e] * of_ds.want[e];
    ++wrong;
    explained += std::fabs(got - want) <= 0.02 * std::fabs(want) ? 1 : 0;
  }
  return wrong >= 4 && 2 * explained < wrong;
}

/// Stage of a shrunk failing call that needs options, by P and dS of the call. `seen` gets the
/// evidence.
FaultStage stage_with_options(ProbeSequence& probes, const Drawn& d, const Ran& r,
                              std::string& seen) {
  const bool mask = has_mask(probes, d);
  if (mask && d.options.softcap > 0 && !d.dlse && has_two_causes(probes, r)) {
    seen = "; neither P nor the slope of the softcap explains dS alone";
    return FaultStage::unlocalised;
  }
  const FaultStage fallback = d.dlse                  ? FaultStage::dlse
                              : d.options.softcap > 0 ? FaultStage::ds
                              : d.options.scale       ? FaultStage::scale
                                                      : FaultStage::mask;
  const Readings readings = r.ran.judged[kDv].ok()
                                ? read_ds(probes, r.call, score_dims(d.shape.head_dim))
                                : read_p(probes, r.call);
  for (const Reading& reading : readings.all) {
    const Diagnosis found = diagnose(reading, fallback);
    if (found.stage == FaultStage::none) continue;
    seen = "; " + found.text;
    const bool pairs = found.stage == FaultStage::mask || found.stage == FaultStage::accumulate;
    if (mask && pairs && found.structural) return FaultStage::mask;
    // An error of dlse is one of delta.
    if (found.stage == FaultStage::delta) return d.dlse ? FaultStage::dlse : FaultStage::delta;
    if (found.structural && !d.options.scale && !d.dlse) return found.stage;
    if (fallback == FaultStage::ds && reading.from == kDv) return FaultStage::dv;
    return fallback;
  }
  return fallback;
}

/// Stage of a shrunk failing call without options, by the gradients that are wrong.
FaultStage stage_of(const Drawn& d, const RanGradients& ran) {
  if (d.shape.v_dim != d.shape.head_dim) return FaultStage::layout;
  if (is_imprecise(ran.judged[ran.worst()])) return FaultStage::precision;
  const bool dv = !ran.judged[kDv].ok(), dq = !ran.judged[kDq].ok(), dk = !ran.judged[kDk].ok();
  if (dv && !dq && !dk) return FaultStage::dv;
  if (dq && !dk) return FaultStage::dq;
  if (dk && !dq) return FaultStage::dk;
  return FaultStage::unlocalised;
}

/// Runs the earlier probes with the batch, heads, q_len, head_dim and v_dim of this shape.
Finding run_probes_at(ProbeSequence& probes, const Shape& shape) {
  ProbeSequence here = probes;
  here.pinned = shape;
  for (const auto probe : {probe_grad_coverage, probe_grad_layout, probe_grad_dv, probe_grad_dp,
                           probe_grad_delta, probe_grad_ds}) {
    Finding f = probe(here, shape.head_dim);
    if (!f.found()) continue;
    f.detail += " (only at some batch sizes, heads, lengths or dims)";
    return f;
  }
  return {};
}

/// The same call with lengths that show more of a pattern, if it fails, too.
Drawn longer(ProbeSequence& probes, const Drawn& d) {
  Drawn more = d;
  more.shape.q_len = std::max<std::int64_t>(d.shape.q_len, 7 * probes.can.length_step);
  more.shape.kv_len = std::max<std::int64_t>(d.shape.kv_len, 24 * probes.can.length_step);
  if (!probes.can.cross) more.shape.q_len = more.shape.kv_len;
  return run(probes, more).failed() ? more : d;
}

/// The finding of a call that failed.
Finding explain_random(ProbeSequence& probes, const Drawn& drawn) {
  const Drawn shrunk = smallest(probes, drawn);
  const Ran r = run(probes, shrunk);
  if (!r.ran.result.ok()) {
    const auto f = failure_of(probes, r.ran.result, FaultStage::unlocalised);
    return f ? *f : Finding{};
  }
  if (r.ran.ok()) {
    return probes.finding(FaultStage::determinism,
                          "random inputs: a call that was wrong is correct the next time");
  }
  const Drawn clearer = longer(probes, shrunk);
  FaultStage stage = FaultStage::none;
  std::string seen;
  if (has_mask(probes, shrunk) || shrunk.dlse || shrunk.options.softcap > 0 ||
      shrunk.options.scale) {
    stage = stage_with_options(probes, clearer, run(probes, clearer), seen);
  } else {
    if (Finding f = run_probes_at(probes, clearer.shape); f.found()) return f;
    stage = stage_of(clearer, run(probes, clearer).ran);
  }
  const int g = r.ran.worst();
  return gradient_finding(probes, stage,
                          "random inputs of standard deviation " + number(shrunk.sigma) +
                              ", seed " + decimal(shrunk.seed) + ": " +
                              worst_element(r.call, r.ran, g) + seen,
                          r.call, r.ran, g);
}

}  // namespace

Finding probe_grad_random(ProbeSequence& probes, std::int64_t) {
  std::vector<Drawn> all = dims(probes);
  const std::vector<Drawn> pairs = feature_pairs(probes);
  all.insert(all.end(), pairs.begin(), pairs.end());
  for (std::uint64_t index = 0; index < (probes.quick ? 6 : 60); ++index) {
    all.push_back(draw(probes, index));
  }
  for (const Drawn& drawn : all) {
    if (!run(probes, drawn).failed()) continue;
    if (Finding f = explain_random(probes, drawn); f.found()) return f;
  }
  return stray_write(probes).value_or(Finding{});
}

}  // namespace flashcore::verify
