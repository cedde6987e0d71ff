// Probes grad_lse and grad_max: rows whose LSE or scores are special numbers.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Large tiles are multiples of the others.
constexpr std::int64_t kWholeTile = 128;

/// Scores near a number that is not 0, or far from each other.
struct Scores {
  double shift, sigma;
  const char* name;
};

GradientCall call_with(const ProbeSequence& probes, const Scores& scores, const Shape& shape) {
  GradientCall call = gradient_call(probes, shape, probes.base());
  fill_random(call, scores.sigma, probes.seed);
  if (scores.shift != 0) shift_scores(call, scores.shift);
  return call;
}

/// True if the same scores are correct with lengths that fill all tiles.
bool passes_whole_tiles(ProbeSequence& probes, const Scores& scores, Shape shape) {
  shape.batch = 1, shape.q_heads = shape.kv_heads = 1;
  shape.q_len = shape.kv_len = kWholeTile;
  GradientCall call = call_with(probes, scores, shape);
  return run_gradients(probes, call).ok();
}

Finding check_scores(ProbeSequence& probes, std::int64_t head_dim, const Scores& scores) {
  const Shape shape = probes.shape(5, 21, head_dim, scores.sigma == 1);
  GradientCall call = call_with(probes, scores, shape);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::dv)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  const int g = ran.worst();
  const bool tail = passes_whole_tiles(probes, scores, shape);
  return gradient_finding(probes, tail ? FaultStage::tail : stage_by_gradients(ran),
                          std::string(scores.name) + (tail ? ", only in partial tiles: " : ": ") +
                              worst_element(call, ran, g),
                          call, ran, g);
}

/// Every row sees one key, or one key far above the others, so its LSE is that key's score: 0 in
/// some rows, `score` in others.
GradientCall one_key_call(const ProbeSequence& probes, const Shape& shape, double score,
                          double others) {
  GradientCall call = gradient_call(probes, shape, probes.base());
  fill_random(call, 0, probes.seed);
  const Tensors& t = call.forward.tensors;
  const double root = std::sqrt(static_cast<double>(shape.head_dim));
  // The first column adds `others` to all keys but the first, the second the score of a row.
  fill(t.k, [&](auto, auto, std::int64_t j, std::int64_t c) {
    return c == 0 ? (j == 0 ? 0.0 : others) : c == 1 ? root : 0.0;
  });
  fill(t.q, [&](auto, auto, std::int64_t i, std::int64_t c) {
    return c == 0 ? root : c == 1 && i % 3 == 1 ? score : 0.0;
  });
  return call;
}

}  // namespace

Finding probe_grad_lse(ProbeSequence& probes, std::int64_t head_dim) {
  for (const double score : {1.0, -1.0, -30.0}) {
    for (const std::int64_t keys : {1, 9}) {
      const Shape shape = probes.shape(7, keys, head_dim);
      GradientCall call = one_key_call(probes, shape, score, -128);
      const RanGradients ran = run_gradients(probes, call);
      if (auto f = failure_of(probes, ran.result, FaultStage::dv)) return *f;
      if (!ran.result.ok() || ran.ok()) continue;
      // Other rows are correct by now, so there is nothing to read.
      const int g = ran.worst();
      return gradient_finding(
          probes, stage_by_gradients(ran),
          "rows with an LSE of 0 and of " + number(score) + ": " + worst_element(call, ran, g),
          call, ran, g);
    }
  }
  return {};
}

/// After dS and the options: their own faults show in such calls, too.
Finding probe_grad_max(ProbeSequence& probes, std::int64_t head_dim) {
  for (const Scores& scores : {Scores{200, 1, "scores near 200"},
                               {-200, 1, "scores near -200"},
                               {0, 8, "scores of standard deviation 64"}}) {
    if (Finding f = check_scores(probes, head_dim, scores); f.found()) return f;
  }
  return {};
}

}  // namespace flashcore::verify
