// Probe grad_bounds: memory around the tensors of a backward call must not affect the gradients and
// must not be written.
#include <cmath>
#include <limits>

#include "verify/gradient_call.h"

namespace flashcore::verify {

Finding probe_grad_bounds(ProbeSequence& probes, std::int64_t head_dim) {
  const double guards[] = {std::numeric_limits<double>::quiet_NaN(), 100.0};
  for (const auto& [q_len, kv_len] : {std::pair{1, 1}, {5, 17}, {17, 5}, {33, 65}, {65, 70}}) {
    for (const MemoryLayout layout : {probes.impl.default_setting().inputs, MemoryLayout::padded}) {
      Setting setting = probes.impl.default_setting();
      const bool padded = layout != setting.inputs;
      if (padded && !probes.can.strides) continue;
      setting.inputs = setting.out = layout;
      Options options = probes.base();
      if (padded && q_len % 2 == 1 && q_len > 5) {
        options.causal = options.causal || probes.can.causal;
        if (q_len == 65 && probes.can.window) options.window_left = 9;
      }
      GradientCall call =
          gradient_call(probes, probes.shape(q_len, kv_len, head_dim, kv_len < 20), options);
      fill_random(call, 1, probes.seed);
      if (probes.can.dlse && kv_len > 10) {
        call.dlse.resize(call.dout.size() /
                         static_cast<std::size_t>(call.forward.tensors.v.shape[3]));
        fill_random(call.dlse, 1, probes.seed, 241);
      }
      const RanGradients clean = run_gradients(probes, call, setting);
      if (auto f = failure_of(probes, clean.result, FaultStage::bounds)) return *f;
      if (!clean.result.ok()) continue;
      for (const double guard : guards) {
        setting.guard = guard;
        const GradientResult result = probes.impl.run_backward(call, setting);
        if (auto f = failure_of(probes, result, FaultStage::bounds)) return *f;
        if (!result.ok() || result.bits == clean.result.bits) continue;
        for (int g = 0; g < kGradients; ++g) {
          for (std::size_t at = 0; at < result.value[g].size(); ++at) {
            const double before = clean.result.value[g][at], after = result.value[g][at];
            // Sums in no fixed order may differ within rounding.
            const double off = std::fabs(after - before);
            if (after == before || off <= 2 * clean.judged[g].bound[at]) continue;
            return probes.finding(FaultStage::bounds,
                                  std::string(padded ? "padded rows and heads: " : "") + "with " +
                                      number(guard) + " around the tensors " +
                                      element_name(call, g, at) + " becomes " + number(after) +
                                      " instead of " + number(before) +
                                      ": memory outside the tensors is read");
          }
        }
      }
    }
  }
  if (!probes.impl.first_stray().empty()) {
    Finding f = probes.finding(FaultStage::bounds, "memory is written outside the outputs: at " +
                                                       probes.impl.first_stray());
    f.call = probes.impl.first_stray_call();
    return f;
  }
  return {};
}

}  // namespace flashcore::verify
