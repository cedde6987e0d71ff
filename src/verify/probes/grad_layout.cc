// Probe grad_layout: random gradients of several heads and in several strides. A fault that one
// head of one batch does not have is in an address, in a sum over the heads of a group, or in a
// stage that reads another head's values.
#include <cmath>

#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_heads.h"
#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// True if calls with these heads are correct, on as many heads in total as the shape has.
bool correct_with(ProbeSequence& probes, Shape shape, std::int64_t batch, std::int64_t q_heads,
                  std::int64_t kv_heads) {
  const std::int64_t total = shape.batch * shape.q_heads;
  shape.batch = batch, shape.q_heads = q_heads, shape.kv_heads = kv_heads;
  for (std::int64_t done = 0; done < total; done += batch * q_heads) {
    GradientCall call = gradient_call(probes, shape, probes.base());
    fill_random(call, 1, probes.seed + static_cast<std::uint64_t>(done));
    if (!run_gradients(probes, call).ok()) return false;
  }
  return true;
}

/// The stage of a call whose gradients are wrong, but correct with one head and one batch.
Finding explain_heads(ProbeSequence& probes, GradientCall& call, const RanGradients& ran,
                      const Shape& shape) {
  const int worst = ran.worst();
  if (const std::string unwritten = unwritten_elements(ran.result); !unwritten.empty()) {
    return gradient_finding(probes, FaultStage::coverage,
                            unwritten + ": " + worst_element(call, ran, worst), call, ran, worst);
  }
  const bool needs_batch =
      shape.batch > 1 && correct_with(probes, shape, 1, shape.q_heads, shape.kv_heads);
  const bool needs_group =
      !needs_batch && shape.q_heads > shape.kv_heads &&
      correct_with(probes, shape, shape.batch, shape.kv_heads, shape.kv_heads) &&
      correct_with(probes, shape, shape.batch, shape.q_heads, shape.q_heads);
  const std::string with = needs_batch   ? "only with several batches: "
                           : needs_group ? "only with several query heads per KV head: "
                                         : "only with several heads: ";
  if (needs_group && ran.judged[kDq].ok()) {
    return gradient_finding(probes, FaultStage::accumulate,
                            with + "dq is correct, but " + worst_element(call, ran, worst), call,
                            ran, worst);
  }
  // A stage may have its own fault in some heads.
  const Readings readings = ran.judged[kDv].ok() ? read_ds(probes, call, score_dims(shape.head_dim))
                                                 : read_p(probes, call);
  for (const Reading& r : readings.all) {
    const Diagnosis d = diagnose(r, FaultStage::layout);
    if (d.stage != FaultStage::layout && d.structural) {
      return gradient_finding(probes, d.stage, with + d.text, call, ran, worst);
    }
  }
  return gradient_finding(probes, FaultStage::layout, with + worst_element(call, ran, worst), call,
                          ran, worst);
}

/// Finds nothing if the fault does not depend on heads and batches.
Finding check_heads(ProbeSequence& probes, GradientCall& call, const RanGradients& ran,
                    const Shape& shape) {
  HeadDiagnosis d = exchanged_gradients(call, ran);
  if (d.stage == FaultStage::none && probes.can.full) {
    d = exchanged_axes(call, ran, probes.impl.default_setting().inputs);
  }
  if (d.stage == FaultStage::none) d = mixed_heads(call, ran);
  if (d.stage == FaultStage::none) d = operand_of_another_head(call, ran);
  if (d.stage == FaultStage::none && probes.can.full) d = tensor_of_another_head(call, ran);
  const int worst = ran.worst();
  if (d.stage != FaultStage::none) {
    return gradient_finding(probes, d.stage, d.text + ": " + worst_element(call, ran, worst), call,
                            ran, worst);
  }
  if (is_imprecise(ran.judged[worst]) || shape.batch * shape.q_heads == 1 ||
      !correct_with(probes, shape, 1, 1, 1))
    return {};
  return explain_heads(probes, call, ran, shape);
}

/// More batches, heads and heads of a group than the other probes have.
Finding check_many_heads(ProbeSequence& probes, std::int64_t head_dim) {
  Shape shape = probes.shape(3, 5, head_dim);
  if (probes.pinned || head_dim != probes.main_dim()) return {};
  if (probes.can.batch) shape.batch = 3;
  shape.q_heads = 16;
  shape.kv_heads = probes.can.gqa ? 2 : shape.q_heads;
  GradientCall call = gradient_call(probes, shape, probes.base());
  fill_random(call, 1, probes.seed);
  const RanGradients ran = run_gradients(probes, call);
  if (auto f = failure_of(probes, ran.result, FaultStage::layout)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  // In so many elements a narrow format exceeds a bound by chance; later probes read it.
  const JudgedGradient& j = ran.judged[ran.worst()];
  const bool by_chance = j.worst < 8 && 20 * j.wrong < static_cast<std::int64_t>(j.ratio.size());
  return by_chance ? Finding{} : check_heads(probes, call, ran, shape);
}

}  // namespace

Finding probe_grad_layout(ProbeSequence& probes, std::int64_t head_dim) {
  for (const MemoryLayout layout :
       {probes.impl.default_setting().inputs, MemoryLayout::padded, MemoryLayout::rows_first}) {
    Setting setting = probes.impl.default_setting();
    const bool native = layout == setting.inputs;
    if (!native && !probes.can.strides) continue;
    setting.inputs = setting.out = layout;
    const Shape shape = probes.shape(5, 9, head_dim);
    GradientCall call = gradient_call(probes, shape, probes.base());
    fill_random(call, 1, probes.seed);
    const RanGradients ran = run_gradients(probes, call, setting);
    if (auto f = failure_of(probes, ran.result, FaultStage::layout)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    // With a fault of compact tensors, strides show nothing.
    if (native) return check_heads(probes, call, ran, shape);
    const int worst = ran.worst();
    return gradient_finding(probes, FaultStage::layout,
                            std::string(layout == MemoryLayout::padded
                                            ? "padded rows and heads, in every tensor others: "
                                            : "rows before heads in memory: ") +
                                worst_element(call, ran, worst) +
                                "; compact tensors give the correct gradients",
                            call, ran, worst);
  }
  return check_many_heads(probes, head_dim);
}

}  // namespace flashcore::verify
