// Probe combine: several KV splits. Earlier probes have found one split correct, so a fault with
// several splits is in the combine step.
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

enum class Weights { uniform, ascending, random };

const char* name_of(Weights w) {
  return w == Weights::uniform ? "Q = 0" : w == Weights::ascending ? "ascending scores" : "random";
}

Finding check(ProbeSequence& probes, const Shape& shape, int splits, Weights weights, bool causal) {
  Options options = probes.base();
  options.num_splits = splits;
  options.causal = options.causal || causal;
  HostCall call = probes.call(shape, options);
  if (weights == Weights::ascending) {
    const auto n = static_cast<double>(shape.kv_len);
    fill_scores_by_key(call, 0,
                       [&](std::int64_t j) { return 8 * (static_cast<double>(j) / n - 1); });
  } else if (weights == Weights::random) {
    fill_random(call.tensors.q, 1, probes.seed, 81);
    fill_random(call.tensors.k, 1, probes.seed, 82);
  }
  Random random(probes.seed, 83);
  fill(call.tensors.v, [&](auto, auto, std::int64_t j, std::int64_t c) {
    return c == 0 ? 1.0 : random.uniform() + (4 * j < shape.kv_len ? 1.0 : 0.0);
  });
  const CallResult result = probes.impl.run(call);
  if (auto f = failure_of(probes, result, FaultStage::combine)) return *f;
  if (!result.ok()) return {};
  const Judged judged = probes.judge(call, result);
  if (judged.ok()) return {};
  const auto v_dim = static_cast<std::size_t>(shape.v_dim);
  const std::size_t row = judged.worst_at / v_dim;
  std::string seen = judged.non_finite > 0
                         ? decimal(judged.non_finite) + " outputs are not finite"
                         : row_name(call, row) + " is " + number(result.out[judged.worst_at]) +
                               " instead of " + number(judged.oracle.out[judged.worst_at]);
  const double sum = result.out[row * v_dim];
  if (std::fabs(sum - 1) > 0.01) seen += ", and the weights sum to " + number(sum);
  return probes.finding(
      FaultStage::combine,
      decimal(splits) + " splits, " + name_of(weights) + ": " + seen + "; one split is correct",
      call, result, judged);
}

}  // namespace

Finding probe_combine(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<int> counts{2, 3, 5, 8};
  if (!probes.quick) counts = {2, 3, 4, 5, 6, 7, 8, 16, 31};
  for (const std::int64_t kv_len : {130, 64, 5, 300}) {
    const Shape shape = probes.shape(4, kv_len, head_dim, false);
    for (const int splits : counts) {
      for (const Weights w : {Weights::uniform, Weights::ascending, Weights::random}) {
        if (Finding f = check(probes, shape, splits, w, false); f.found()) return f;
      }
      if (!probes.can.causal) continue;
      // Splits without a visible key for some rows.
      const Shape square = probes.shape(kv_len, kv_len, head_dim, false);
      if (kv_len > 130) continue;
      if (Finding f = check(probes, square, splits, Weights::random, true); f.found()) return f;
    }
  }
  return {};
}

}  // namespace flashcore::verify
