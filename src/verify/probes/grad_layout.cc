// Probe grad_layout: random gradients in several strides, and gradients that hold those of other
// heads.
#include <cmath>

#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"

namespace flashcore::verify {
namespace {

/// The matrix of one head whose elements all match `got`'s head; -1: none.
std::int64_t head_that_matches(const RanGradients& ran, int g, std::size_t head,
                               std::size_t per_head) {
  const std::vector<double>& want = ran.expected.of(g).value;
  const std::vector<double>& got = ran.result.value[g];
  for (std::size_t other = 0; other < want.size() / per_head; ++other) {
    bool same = true;
    for (std::size_t i = 0; i < per_head && same; ++i) {
      const double bound = ran.judged[g].bound[other * per_head + i];
      same = std::fabs(got[head * per_head + i] - want[other * per_head + i]) <= 2 * bound;
    }
    if (same) return static_cast<std::int64_t>(other);
  }
  return -1;
}

/// "dk of head 1 holds that of head 3", if every wrong head holds another one's gradient.
std::string exchanged_heads(const GradientCall& call, const RanGradients& ran, int g) {
  const TensorView& t = g == kDq ? call.forward.tensors.q : call.forward.tensors.k;
  const std::int64_t heads = t.shape[0] * t.shape[1];
  const std::size_t per_head = ran.judged[g].ratio.size() / static_cast<std::size_t>(heads);
  std::string text;
  for (std::int64_t head = 0; head < heads; ++head) {
    const auto at = static_cast<std::size_t>(head);
    bool wrong = false;
    for (std::size_t i = 0; i < per_head; ++i) {
      wrong = wrong || !(ran.judged[g].ratio[at * per_head + i] <= 1);
    }
    if (!wrong) continue;
    const std::int64_t other = head_that_matches(ran, g, at, per_head);
    if (other < 0) return "";
    if (text.empty()) {
      text = std::string(kGradientNames[g]) + " of head " + decimal(head) +
             " (counted over all batches) holds that of head " + decimal(other);
    }
  }
  return text;
}

}  // namespace

Finding probe_grad_layout(ProbeSequence& probes, std::int64_t head_dim) {
  bool native_is_right = true;
  for (const MemoryLayout layout :
       {probes.impl.default_setting().inputs, MemoryLayout::padded, MemoryLayout::rows_first}) {
    Setting setting = probes.impl.default_setting();
    const bool native = layout == setting.inputs;
    if (!native && (!probes.can.strides || !native_is_right)) continue;
    setting.inputs = setting.out = layout;
    GradientCall call = gradient_call(probes, probes.shape(5, 9, head_dim), probes.base());
    fill_random(call, 1, probes.seed);
    const RanGradients ran = run_gradients(probes, call, setting);
    if (auto f = failure_of(probes, ran.result, FaultStage::layout)) return *f;
    if (!ran.result.ok()) continue;
    for (int g = 0; g < kGradients; ++g) {
      if (ran.judged[g].ok()) continue;
      if (const std::string why = exchanged_heads(call, ran, g); !why.empty()) {
        return gradient_finding(probes, FaultStage::layout,
                                why + ": " + worst_element(call, ran, g), call, ran, g);
      }
      if (!native) {
        return gradient_finding(
            probes, FaultStage::layout,
            std::string(layout == MemoryLayout::padded ? "padded rows and heads: "
                                                       : "rows before heads in memory: ") +
                worst_element(call, ran, g) + "; compact tensors give the correct gradients",
            call, ran, g);
      }
    }
    if (native) native_is_right = ran.ok();
  }
  return {};
}

}  // namespace flashcore::verify
