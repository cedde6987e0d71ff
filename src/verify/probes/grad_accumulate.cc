// Probe grad_accumulate: sums over many tiles. P, dS and their products are correct by now for
// short rows, so a wrong entry at a long row is a tile that is missing or counted twice.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Long sums of equal signs: a narrow accumulator stops growing.
Finding check_growth(ProbeSequence& probes, std::int64_t head_dim, std::int64_t length) {
  GradientCall call =
      gradient_call(probes, probes.shape(length, 8, head_dim, false), probes.base());
  fill_random(call, 0, probes.seed);
  for (double& x : call.dout) x = 1;
  const RanGradients ran = run_gradients(probes, call);
  if (!ran.result.ok() || ran.judged[kDv].ok()) return {};
  // A narrow accumulator stops at a power of two times the term, a lost tile does not.
  const double got = ran.result.value[kDv][ran.judged[kDv].worst_at];
  const double terms = std::log2(got * 8);  // P = 1/8
  const bool small =
      ran.judged[kDv].non_finite == 0 &&
      (std::fabs(terms - std::round(terms)) < 1e-6 || ran.judged[kDv].relative_error < 0x1p-5);
  return gradient_finding(
      probes, small ? FaultStage::precision : FaultStage::accumulate,
      "dv sums " + decimal(length) + " equal terms: " + worst_element(call, ran, kDv), call, ran,
      kDv);
}

/// The finding of a long call; its P and dS have too many entries to be read.
Finding explain_long(ProbeSequence& probes, const GradientCall& call, const RanGradients& ran,
                     const Shape& shape) {
  const int g = ran.worst();
  const bool small = is_imprecise(ran.judged[g]);
  const bool delta = !small && delta_explains(call, ran);
  // A lost tile of keys leaves the dv of all others correct.
  const JudgedGradient& dv = ran.judged[kDv];
  const bool all_p = shape.kv_len > shape.q_len && dv.wrong > 0 &&
                     10 * dv.wrong > 9 * static_cast<std::int64_t>(dv.ratio.size());
  const FaultStage stage = small   ? FaultStage::precision
                           : delta ? FaultStage::delta
                           : all_p ? FaultStage::dv
                                   : stage_of_lost_terms(probes, shape);
  return gradient_finding(probes, stage,
                          std::string("long rows: ") +
                              (delta ? "dq is off along the mean of the keys, as by delta: " : "") +
                              worst_element(call, ran, g),
                          call, ran, g);
}

/// One gradient alone is wrong, by a factor of each tile: short sums with the same P and dS are
/// correct. `p` is read if dv is wrong, `ds` if another gradient alone is.
bool is_wrong_sum(const RanGradients& ran, const Readings& p, const Readings& ds) {
  int wrong = 0, which = kDv;
  for (const int g : {kDv, kDq, kDk}) {
    if (!ran.judged[g].ok()) ++wrong, which = g;
  }
  if (wrong != 1 || is_imprecise(ran.judged[which])) return false;
  const Readings& readings = which == kDv ? p : ds;
  return std::any_of(readings.all.begin(), readings.all.end(),
                     [&](const Reading& r) { return r.from == which && is_weighted_by_tiles(r); });
}

}  // namespace

Finding probe_grad_accumulate(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes{
      {9, 200}, {150, 9}, {131, 131}, {2, 1100}, {1100, 2}};
  if (!probes.quick) shapes.insert(shapes.end(), {{520, 5}, {3, 4200}, {4200, 3}});
  for (const auto& [q_len, kv_len] : shapes) {
    const bool is_long = std::max(q_len, kv_len) > 1000;
    Shape shape = probes.shape(q_len, kv_len, head_dim, false);
    if (is_long) shape.q_heads = shape.kv_heads;
    GradientCall call = gradient_call(probes, shape, probes.base());
    fill_random(call, 0.5, probes.seed);
    // One call shows whether anything is wrong, the readings what.
    GradientCall plain = call;
    const RanGradients ran = run_gradients(probes, plain);
    if (auto f = failure_of(probes, ran.result, FaultStage::accumulate)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    Finding f;
    Readings p, ds;
    if (!is_long && !ran.judged[kDv].ok()) {
      p = read_p(probes, call);
      f = explain(probes, p, call, FaultStage::dv, "long rows");
    }
    if (!is_long && !f.found()) {
      ds = read_ds(probes, call, score_dims(head_dim));
      f = explain(probes, ds, call, FaultStage::accumulate, "long rows");
    }
    if (!is_long && f.stage != FaultStage::tail && is_wrong_sum(ran, p, ds))
      f.stage = FaultStage::accumulate;
    if (f.stage == FaultStage::accumulate) f.stage = stage_of_lost_terms(probes, shape);
    return f.found() ? f : explain_long(probes, call, ran, shape);
  }
  return check_growth(probes, head_dim, probes.quick ? 600 : 3000);
}

}  // namespace flashcore::verify
