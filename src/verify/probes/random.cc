// Probe random: random problems of many shapes against the oracle. A failing problem is shrunk, and
// the earlier probes run again at its shape. The stage is unlocalised only if none of them fails.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

/// Elements of P per call of a quick run.
constexpr std::int64_t kMaxWeights = 1 << 16;
constexpr double kSigmas[] = {1, 10, 1, 0.01};

struct Drawn {
  Shape shape;
  Options options;
  double sigma = 1;
  std::uint64_t seed = 1;
};

/// Options tested alone and in pairs before the random draws: two options may be correct alone and
/// wrong together.
enum Feature { kCausal, kWindow, kScale, kSoftcap, kSplits, kGroups, kValueDim, kFeatures };

bool can_use(const Capabilities& can, int feature) {
  const bool can_all[] = {can.causal, can.window, can.scale, can.softcap,
                          can.splits, can.gqa,    can.v_dim};
  return can_all[feature];
}

Drawn with_two_features(const ProbeSequence& probes, int one, int other) {
  Drawn d;
  d.seed = mix(probes.seed + static_cast<std::uint64_t>(kFeatures * one + other));
  d.shape = probes.shape(20, 70, probes.main_dim(), false);
  d.shape.q_heads = d.shape.kv_heads = 2;
  d.options = probes.base();
  for (const int feature : {one, other}) {
    if (feature == kCausal) d.options.causal = true;
    if (feature == kWindow) d.options.window_left = 9, d.options.window_right = 5;
    if (feature == kScale) d.options.scale = 0.3;
    if (feature == kSoftcap) d.options.softcap = 2;
    if (feature == kSplits) d.options.num_splits = 3;
    if (feature == kGroups) d.shape.q_heads = 6;
    if (feature == kValueDim) d.shape.v_dim = d.shape.head_dim / 2;
  }
  return d;
}

std::vector<Drawn> feature_pairs(const ProbeSequence& probes) {
  std::vector<Drawn> pairs;
  for (int one = 0; one < kFeatures; ++one) {
    for (int other = one; other < kFeatures; ++other) {
      if (!can_use(probes.can, one) || !can_use(probes.can, other)) continue;
      pairs.push_back(with_two_features(probes, one, other));
      pairs.back().sigma = kSigmas[pairs.size() % std::size(kSigmas)];
    }
  }
  return pairs;
}

Drawn draw(const ProbeSequence& probes, std::uint64_t index) {
  Random random(probes.seed, 1000 + index);
  const Capabilities& can = probes.can;
  const std::int64_t lengths[] = {1, 2, 7, 16, 31, 64, 65, 100, 128, 129, 191, 256, 300, 513};
  Drawn d;
  d.seed = mix(probes.seed + index);
  const std::int64_t dim = can.head_dims[static_cast<std::size_t>(
      random.below(static_cast<std::int64_t>(can.head_dims.size())))];
  d.shape = probes.shape(random.pick(lengths), random.pick(lengths), dim);
  if (can.batch) d.shape.batch = random.between(1, 3);
  d.shape.kv_heads = random.between(1, 3);
  d.shape.q_heads = d.shape.kv_heads * (can.gqa ? random.between(1, 4) : 1);
  const std::int64_t weights = d.shape.batch * d.shape.q_heads * d.shape.q_len * d.shape.kv_len;
  if (probes.quick && can.cross && can.length_step == 1 && weights > kMaxWeights) {
    d.shape.q_len = std::max<std::int64_t>(d.shape.q_len * kMaxWeights / weights, 1);
  }
  if (can.v_dim && random.chance(0.2)) d.shape.v_dim = random.between(1, 2) * dim / 2;
  d.options = probes.base();
  if (can.causal && random.chance(0.4)) d.options.causal = true;
  if (can.window && random.chance(0.2)) {
    d.options.window_left = random.between(0, d.shape.kv_len);
    d.options.window_right = random.between(-1, 20);
  }
  if (can.scale && random.chance(0.2)) d.options.scale = random.uniform();
  if (can.softcap && random.chance(0.15)) d.options.softcap = 1 + 20 * random.uniform();
  if (can.splits)
    d.options.num_splits = random.chance(0.5) ? 0 : static_cast<int>(random.between(1, 6));
  d.sigma = random.pick(kSigmas);
  return d;
}

HostCall call_of(const ProbeSequence& probes, const Drawn& d) {
  HostCall call = probes.call(d.shape, d.options);
  fill_random(call.tensors.q, d.sigma, d.seed, 1);
  fill_random(call.tensors.k, d.sigma, d.seed, 2);
  fill_random(call.tensors.v, d.sigma, d.seed, 3);
  return call;
}

struct Ran {
  HostCall call;
  CallResult result;
  std::optional<Judged> judged;
  bool failed(const ProbeSequence& probes) const {
    if (!result.ok()) return result.kind != CallResult::Kind::refused;
    return judged && (!judged->ok() || (probes.can.lse && judged->lse_wrong > 0));
  }
};

Ran run(ProbeSequence& probes, const Drawn& d) {
  Ran r{call_of(probes, d), {}, std::nullopt};
  Setting setting = probes.impl.default_setting();
  setting.lse = probes.can.lse;
  r.result = probes.impl.run(r.call, setting);
  if (r.result.ok()) r.judged = probes.judge(r.call, r.result);
  return r;
}

/// A smaller call that still fails: drops options and shrinks sizes one at a time.
Drawn smallest(ProbeSequence& probes, Drawn d) {
  const auto keep = [&](auto change) {
    Drawn smaller = d;
    change(smaller);
    smaller.shape.q_len = std::max<std::int64_t>(smaller.shape.q_len, probes.can.length_step);
    if (!probes.can.cross) smaller.shape.q_len = smaller.shape.kv_len;
    if (run(probes, smaller).failed(probes)) d = smaller;
  };
  // Sizes first, so that the later steps are cheap.
  keep([](Drawn& s) { s.shape.batch = 1; });
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads = 1; });
  for (int step = 0; step < 6 && probes.can.length_step == 1; ++step) {
    keep([](Drawn& s) { s.shape.q_len = (s.shape.q_len + 1) / 2; });
    keep([](Drawn& s) { s.shape.kv_len = (s.shape.kv_len + 1) / 2; });
  }
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads; });
  keep([&](Drawn& s) { s.options.num_splits = probes.base().num_splits; });
  keep([&](Drawn& s) { s.options.causal = probes.base().causal; });
  keep([](Drawn& s) { s.options.window_left = s.options.window_right = -1; });
  keep([](Drawn& s) { s.options.softcap = 0; });
  keep([](Drawn& s) { s.options.scale.reset(); });
  keep([](Drawn& s) { s.shape.v_dim = s.shape.head_dim; });
  return d;
}

/// Stage of a shrunk failing call, by the options it still needs.
FaultStage stage_of(const ProbeSequence& probes, const Drawn& d, const Ran& ran) {
  if (ran.judged && ran.judged->ok() && ran.judged->lse_wrong > 0) return FaultStage::lse;
  const Options base = probes.base();
  if (d.options.num_splits != base.num_splits) return FaultStage::combine;
  if (d.options.causal != base.causal || d.options.window_left >= 0 ||
      d.options.window_right >= 0) {
    return FaultStage::mask;
  }
  if (d.options.softcap > 0) return FaultStage::scores;
  if (d.options.scale) return FaultStage::scale;
  if (d.shape.v_dim != d.shape.head_dim) return FaultStage::layout;
  if (!ran.judged) return FaultStage::unlocalised;
  const auto elements = static_cast<double>(ran.result.out.size());
  const bool everywhere = static_cast<double>(ran.judged->wrong) > 0.1 * elements ||
                          (ran.judged->wrong == 0 && ran.judged->head_worst > 1);
  if (ran.judged->non_finite == 0 && everywhere && ran.judged->relative_error < 0x1p-5) {
    return FaultStage::precision;
  }
  return FaultStage::unlocalised;
}

/// Runs the earlier probes with the batch, heads, q_len and v_dim of this shape.
Finding run_probes_at(ProbeSequence& probes, const Shape& shape) {
  ProbeSequence here = probes;
  here.pinned = shape;
  for (const auto probe : {probe_coverage, probe_layout, probe_uniform, probe_key_layout,
                           probe_scores, probe_rescale, probe_max}) {
    Finding f = probe(here, shape.head_dim);
    if (!f.found()) continue;
    f.detail += " (only at some batch sizes, heads, lengths or v_dims)";
    return f;
  }
  return {};
}

}  // namespace

Finding probe_random(ProbeSequence& probes, std::int64_t) {
  std::vector<Drawn> all = feature_pairs(probes);
  for (std::uint64_t index = 0; index < (probes.quick ? 8 : 96); ++index) {
    all.push_back(draw(probes, index));
  }
  for (const Drawn& drawn : all) {
    if (!run(probes, drawn).failed(probes)) continue;
    const Drawn d = smallest(probes, drawn);
    const Ran ran = run(probes, d);
    if (!ran.judged) {
      return *failure_of(probes, ran.result, FaultStage::unlocalised);
    }
    if (const Ran again = run(probes, d); again.result.bits != ran.result.bits) {
      return probes.finding(FaultStage::determinism,
                            "random inputs: the same call returns different bits the second time");
    }
    const FaultStage stage = stage_of(probes, d, ran);
    if (stage == FaultStage::unlocalised || d.shape.v_dim != d.shape.head_dim) {
      if (Finding f = run_probes_at(probes, d.shape); f.found()) return f;
    }
    const Judged& j = *ran.judged;
    const std::string seen = stage == FaultStage::lse
                                 ? "the LSE of " + row_name(ran.call, j.lse_worst_at) + " is " +
                                       number(ran.result.lse[j.lse_worst_at]) + " instead of " +
                                       number(j.oracle.lse[j.lse_worst_at])
                                 : decimal(j.wrong) + " of " + decimal(ran.result.out.size()) +
                                       " outputs are wrong, by up to " + number(j.worst) +
                                       " times the rounding bound (relative error " +
                                       number(j.relative_error) + ")";
    Finding f = probes.finding(stage,
                               "random inputs of standard deviation " + number(d.sigma) +
                                   ", seed " + decimal(d.seed) + ": " + seen,
                               ran.call, ran.result, j);
    return f;
  }
  return {};
}

}  // namespace flashcore::verify
