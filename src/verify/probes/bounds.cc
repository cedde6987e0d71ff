// Probe bounds: memory around the tensors and in the padding of their strides must not affect the
// result and must not be written.
#include <cmath>
#include <limits>

#include "verify/probe_sequence.h"

namespace flashcore::verify {

Finding probe_bounds(ProbeSequence& probes, std::int64_t head_dim) {
  const double guards[] = {std::numeric_limits<double>::quiet_NaN(), 100.0};
  std::vector<std::pair<std::int64_t, std::int64_t>> lengths{{1, 1},   {5, 17},   {16, 63},
                                                             {33, 65}, {70, 100}, {3, 130}};
  if (probes.quick && head_dim != probes.main_dim()) lengths = {{5, 17}, {33, 65}};
  for (const auto& [q_len, kv_len] : lengths) {
    for (const bool causal : {false, true}) {
      if (causal ? !probes.can.causal : !probes.can.full) continue;
      for (const MemoryLayout layout : {MemoryLayout::heads_first, MemoryLayout::padded}) {
        Setting setting = probes.impl.default_setting();
        if (layout == MemoryLayout::padded) {
          if (!probes.can.strides) continue;
          setting.inputs = setting.out = layout;
        }
        setting.lse = probes.can.lse;
        Options options = probes.base();
        options.causal = causal;
        HostCall call = probes.call(probes.shape(q_len, kv_len, head_dim, kv_len < 20), options);
        fill_random(call.tensors.q, 1, probes.seed, 91);
        fill_random(call.tensors.k, 1, probes.seed, 92);
        fill_random(call.tensors.v, 1, probes.seed, 93);
        const CallResult clean = probes.impl.run(call, setting);
        if (auto f = failure_of(probes, clean, FaultStage::bounds)) return *f;
        if (!clean.ok()) continue;
        for (const double guard : guards) {
          // 8-bit formats without a NaN get their largest value.
          setting.guard = guard;
          const CallResult result = probes.impl.run(call, setting);
          if (auto f = failure_of(probes, result, FaultStage::bounds)) return *f;
          if (!result.ok() || result.bits == clean.bits) continue;
          std::size_t at = 0;
          while (at + 1 < result.out.size() && (result.out[at] == clean.out[at])) {
            ++at;
          }
          return probes.finding(
              FaultStage::bounds,
              std::string(layout == MemoryLayout::padded ? "padded rows and heads: " : "") +
                  "with " + number(guard) + " around the tensors " +
                  row_name(call, at / static_cast<std::size_t>(call.tensors.v.shape[3])) +
                  " becomes " + number(result.out[at]) + " instead of " + number(clean.out[at]) +
                  ": memory outside the tensors is read");
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
