// Rung 13: random problems of many shapes against the oracle. What fails here is first taken back
// down the ladder, at its own shape; only what no rung then explains is unlocalised.
#include <algorithm>
#include <cmath>

#include "verify/decimal.h"
#include "verify/ladder.h"

namespace flashcore::verify {
namespace {

struct Drawn {
  Shape shape;
  Options options;
  double sigma = 1;
  std::uint64_t seed = 1;
};

Drawn draw(const Ladder& ladder, std::uint64_t index) {
  Random random(ladder.seed, 1000 + index);
  const Capabilities& can = ladder.can;
  const std::int64_t lengths[] = {1, 2, 7, 16, 31, 64, 65, 100, 128, 129, 191, 256, 300, 513};
  const double sigmas[] = {0.01, 1, 1, 10};
  Drawn d;
  d.seed = mix(ladder.seed + index);
  const std::int64_t dim = can.head_dims[static_cast<std::size_t>(
      random.below(static_cast<std::int64_t>(can.head_dims.size())))];
  d.shape = ladder.shape(random.pick(lengths), random.pick(lengths), dim);
  if (ladder.quick && d.shape.q_len * d.shape.kv_len > 40000) {
    d.shape = ladder.shape(33, d.shape.kv_len, dim);
  }
  if (can.batch) d.shape.batch = random.between(1, 3);
  d.shape.kv_heads = random.between(1, 3);
  d.shape.q_heads = d.shape.kv_heads * (can.gqa ? random.between(1, 4) : 1);
  if (can.v_dim && random.chance(0.2)) d.shape.v_dim = random.between(1, 2) * dim / 2;
  d.options = ladder.base();
  if (can.causal && random.chance(0.4)) d.options.causal = true;
  if (can.window && random.chance(0.2)) {
    d.options.window_left = random.between(0, d.shape.kv_len);
    d.options.window_right = random.between(-1, 20);
  }
  if (can.scale && random.chance(0.2)) d.options.scale = random.uniform();
  if (can.softcap && random.chance(0.15)) d.options.softcap = 1 + 20 * random.uniform();
  if (can.splits)
    d.options.num_splits = random.chance(0.5) ? 0 : static_cast<int>(random.between(1, 6));
  d.sigma = random.pick(sigmas);
  return d;
}

HostCall call_of(const Ladder& ladder, const Drawn& d) {
  HostCall call = ladder.call(d.shape, d.options);
  fill_random(call.tensors.q, d.sigma, d.seed, 1);
  fill_random(call.tensors.k, d.sigma, d.seed, 2);
  fill_random(call.tensors.v, d.sigma, d.seed, 3);
  return call;
}

struct Ran {
  HostCall call;
  Answer answer;
  std::optional<Judged> judged;
  bool failed(const Ladder& ladder) const {
    if (answer.kind == Answer::Kind::failed || answer.kind == Answer::Kind::died) return true;
    return judged && (!judged->ok() || (ladder.can.lse && judged->lse_wrong > 0));
  }
};

Ran run(Ladder& ladder, const Drawn& d) {
  Ran r{call_of(ladder, d), {}, std::nullopt};
  Setting setting = ladder.subject.plain();
  setting.lse = ladder.can.lse;
  r.answer = ladder.subject.run(r.call, setting);
  if (r.answer.ok()) r.judged = ladder.judge(r.call, r.answer);
  return r;
}

/// A smaller call that still fails: options dropped, sizes shrunk, one at a time.
Drawn smallest(Ladder& ladder, Drawn d) {
  const auto keep = [&](auto change) {
    Drawn smaller = d;
    change(smaller);
    smaller.shape.q_len = std::max<std::int64_t>(smaller.shape.q_len, ladder.can.length_step);
    if (!ladder.can.cross) smaller.shape.q_len = smaller.shape.kv_len;
    if (run(ladder, smaller).failed(ladder)) d = smaller;
  };
  keep([&](Drawn& s) { s.options.num_splits = ladder.base().num_splits; });
  keep([&](Drawn& s) { s.options.causal = ladder.base().causal; });
  keep([](Drawn& s) { s.options.window_left = s.options.window_right = -1; });
  keep([](Drawn& s) { s.options.softcap = 0; });
  keep([](Drawn& s) { s.options.scale.reset(); });
  keep([](Drawn& s) { s.shape.v_dim = s.shape.head_dim; });
  keep([](Drawn& s) { s.shape.batch = 1; });
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads; });
  keep([](Drawn& s) { s.shape.q_heads = s.shape.kv_heads = 1; });
  if (ladder.can.length_step > 1) return d;
  for (int round = 0; round < 6; ++round) {
    keep([](Drawn& s) { s.shape.q_len = (s.shape.q_len + 1) / 2; });
    keep([](Drawn& s) { s.shape.kv_len = (s.shape.kv_len + 1) / 2; });
  }
  return d;
}

/// The stage of a failing call by what about it matters, once it is as small as it gets.
FaultStage stage_of(const Ladder& ladder, const Drawn& d, const Ran& ran) {
  if (ran.judged && ran.judged->ok()) return FaultStage::lse;
  const Options base = ladder.base();
  if (d.options.num_splits != base.num_splits) return FaultStage::combine;
  if (d.options.causal != base.causal || d.options.window_left >= 0 ||
      d.options.window_right >= 0) {
    return FaultStage::mask;
  }
  if (d.options.softcap > 0) return FaultStage::scores;
  if (d.options.scale) return FaultStage::scale;
  if (d.shape.v_dim != d.shape.head_dim) return FaultStage::layout;
  if (!ran.judged) return FaultStage::unlocalised;
  const auto elements = static_cast<double>(ran.answer.out.size());
  const bool everywhere = static_cast<double>(ran.judged->wrong) > 0.1 * elements ||
                          (ran.judged->wrong == 0 && ran.judged->head_worst > 1);
  if (ran.judged->non_finite == 0 && everywhere && ran.judged->relative_error < 0x1p-5) {
    return FaultStage::precision;
  }
  return FaultStage::unlocalised;
}

/// The rungs again, with this shape's batch, heads and q_len.
Finding climb_at(Ladder& ladder, const Shape& shape) {
  Ladder here = ladder;
  here.pinned = shape;
  for (const auto probe : {probe_coverage, probe_layout, probe_uniform, probe_key_layout,
                           probe_scores, probe_rescale, probe_max}) {
    Finding f = probe(here, shape.head_dim);
    if (!f.found()) continue;
    f.detail += " (only with some batches, heads or lengths)";
    return f;
  }
  return {};
}

}  // namespace

Finding probe_random(Ladder& ladder, std::int64_t) {
  const std::uint64_t count = ladder.quick ? 16 : 96;
  for (std::uint64_t index = 0; index < count; ++index) {
    const Drawn drawn = draw(ladder, index);
    if (!run(ladder, drawn).failed(ladder)) continue;
    const Drawn d = smallest(ladder, drawn);
    const Ran ran = run(ladder, d);
    if (!ran.judged) {
      return ladder.finding(FaultStage::unlocalised, "the call failed: " + ran.answer.message);
    }
    const FaultStage stage = stage_of(ladder, d, ran);
    if (stage == FaultStage::unlocalised) {
      if (Finding f = climb_at(ladder, d.shape); f.found()) return f;
    }
    const Judged& j = *ran.judged;
    const std::string seen = stage == FaultStage::lse
                                 ? "the LSE of " + row_name(ran.call, j.lse_worst_at) + " is " +
                                       number(ran.answer.lse[j.lse_worst_at]) + " instead of " +
                                       number(j.oracle.lse[j.lse_worst_at])
                                 : decimal(j.wrong) + " of " + decimal(ran.answer.out.size()) +
                                       " outputs are wrong, by up to " + number(j.worst) +
                                       " times what rounding allows (relative error " +
                                       number(j.relative_error) + ")";
    Finding f = ladder.finding(
        stage,
        "random inputs of deviation " + number(d.sigma) + ", seed " + decimal(d.seed) + ": " + seen,
        ran.call, ran.answer, j);
    return f;
  }
  return {};
}

}  // namespace flashcore::verify
