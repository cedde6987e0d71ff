// Probe grad_layout: random gradients of several heads and in several strides. A fault that one
// head of one batch does not have is in an address, in a sum over the heads of a group, or in a
// stage that reads another head's values.
#include <array>
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
  // A wrong sum of products of single heads shows in its terms.
  const bool dv_alone = ran.judged[kDq].ok() && ran.judged[kDk].ok(),
             dk_alone = ran.judged[kDq].ok() && ran.judged[kDv].ok();
  if (needs_group && (dv_alone || dk_alone)) {
    const Readings readings =
        dv_alone ? read_p(probes, call) : read_ds(probes, call, score_dims(shape.head_dim));
    const FaultStage own = dv_alone ? FaultStage::dv : FaultStage::dk;
    FaultStage stage = own;
    std::string seen;
    for (const Reading& r : readings.all) {
      const Diagnosis d = diagnose(r, own);
      if (d.stage == FaultStage::none) continue;
      if (d.stage == FaultStage::accumulate || !std::isnan(d.factor))
        stage = FaultStage::accumulate;
      if (d.stage == FaultStage::precision) stage = FaultStage::precision;
      seen = d.text + "; ";
    }
    return gradient_finding(probes, stage, with + seen + worst_element(call, ran, worst), call, ran,
                            worst);
  }
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
      FaultStage stage = d.stage;
      if (stage == FaultStage::accumulate) {
        Shape whole = shape;
        whole.batch = needs_batch ? shape.batch : 1;
        stage = stage_of_lost_terms(probes, whole);
      }
      return gradient_finding(probes, stage, with + d.text, call, ran, worst);
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

/// One call of many heads.
Finding check_shape(ProbeSequence& probes, const Shape& shape) {
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

/// More batches, heads and heads of a group than the other probes have.
Finding check_many_heads(ProbeSequence& probes, std::int64_t head_dim) {
  if (probes.pinned || head_dim != probes.main_dim()) return {};
  for (const auto& [batch, q_heads, kv_heads] : {std::array{3, 16, 2}, {5, 7, 1}}) {
    Shape shape = probes.shape(3, 5, head_dim);
    if (probes.can.batch) shape.batch = batch;
    shape.q_heads = q_heads;
    shape.kv_heads = probes.can.gqa ? kv_heads : q_heads;
    if (Finding f = check_shape(probes, shape); f.found()) return f;
  }
  return {};
}

/// Strides of a call. No name: those of all other probes.
struct Strides {
  Setting setting;
  const char* name;
};

std::vector<Strides> all_strides(const ProbeSequence& probes) {
  const Setting native = probes.impl.default_setting();
  std::vector<Strides> all{{native, nullptr}};
  const auto add = [&](MemoryLayout layout, const char* name) {
    if (layout == native.inputs) return;
    all.push_back({native, name});
    all.back().setting.inputs = all.back().setting.out = layout;
  };
  if (!probes.can.strides) return all;
  add(MemoryLayout::padded, "padded rows and heads, in every tensor others: ");
  add(MemoryLayout::rows_first, "rows before heads in memory: ");
  if (probes.can.strided_columns) add(MemoryLayout::strided_columns, "a column stride of 2: ");
  if (probes.can.strided_rows) {
    all.push_back({native, "padded rows of the LSE and dlse: "});
    all.back().setting.of_rows = MemoryLayout::padded;
  }
  return all;
}

}  // namespace

Finding probe_grad_layout(ProbeSequence& probes, std::int64_t head_dim) {
  for (const Strides& strides : all_strides(probes)) {
    const Setting& setting = strides.setting;
    const bool native = strides.name == nullptr;
    const Shape shape = probes.shape(5, 9, head_dim);
    GradientCall call = gradient_call(probes, shape, probes.base());
    fill_random(call, 1, probes.seed);
    if (setting.of_rows != MemoryLayout{} && probes.can.dlse) {
      call.dlse.resize(call.dout.size() / static_cast<std::size_t>(shape.v_dim));
      fill_random(call.dlse, 1, probes.seed, 261);
      // A wrong dlse of compact tensors has a probe of its own.
      GradientCall compact = call;
      if (!run_gradients(probes, compact).ok()) call.dlse.clear();
    }
    const RanGradients ran = run_gradients(probes, call, setting);
    if (auto f = failure_of(probes, ran.result, FaultStage::layout)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    // With a fault of compact tensors, strides show nothing.
    if (native) return check_heads(probes, call, ran, shape);
    const int worst = ran.worst();
    return gradient_finding(probes, FaultStage::layout,
                            strides.name + worst_element(call, ran, worst) +
                                "; compact tensors give the correct gradients",
                            call, ran, worst);
  }
  return check_many_heads(probes, head_dim);
}

}  // namespace flashcore::verify
