// Probe grad_bounds: memory around the tensors of a backward call must not affect the gradients and
// must not be written.
#include <cmath>
#include <limits>

#include "verify/gradient_call.h"

namespace flashcore::verify {
namespace {

/// One call and its memory.
struct Place {
  Shape shape;
  Options options;
  Setting setting;
  bool has_dlse;
  const char* name;
};

GradientCall call_of(const ProbeSequence& probes, const Place& place) {
  GradientCall call = gradient_call(probes, place.shape, place.options);
  fill_random(call, 1, probes.seed);
  if (place.has_dlse && probes.can.dlse) {
    call.dlse.resize(call.dout.size() / static_cast<std::size_t>(place.shape.v_dim));
    fill_random(call.dlse, 1, probes.seed, 241);
  }
  return call;
}

/// Finds a gradient that depends on what is around the tensors.
Finding check_guards(ProbeSequence& probes, const Place& place) {
  GradientCall call = call_of(probes, place);
  Setting setting = place.setting;
  const RanGradients clean = run_gradients(probes, call, setting);
  if (auto f = failure_of(probes, clean.result, FaultStage::bounds)) return *f;
  if (!clean.result.ok()) return {};
  for (const double guard : {std::numeric_limits<double>::quiet_NaN(), 100.0}) {
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
                              std::string(place.name) + "with " + number(guard) +
                                  " around the tensors " + element_name(call, g, at) + " becomes " +
                                  number(after) + " instead of " + number(before) +
                                  ": memory outside the tensors is read");
      }
    }
  }
  return {};
}

std::vector<Place> places(const ProbeSequence& probes, std::int64_t head_dim) {
  const Setting native = probes.impl.default_setting();
  Setting padded = native;
  padded.inputs = padded.out = MemoryLayout::padded;
  if (probes.can.strided_rows) padded.of_rows = MemoryLayout::padded;
  const bool has_padded = probes.can.strides && native.inputs != MemoryLayout::padded;
  std::vector<Place> all;
  for (const auto& [q_len, kv_len] : {std::pair{1, 1}, {5, 17}, {17, 5}, {33, 65}, {65, 70}}) {
    const Shape shape = probes.shape(q_len, kv_len, head_dim, kv_len < 20);
    all.push_back({shape, probes.base(), native, kv_len > 10, ""});
    if (!has_padded) continue;
    Options options = probes.base();
    if (q_len % 2 == 1 && q_len > 5) {
      options.causal = options.causal || probes.can.causal;
      if (q_len == 65 && probes.can.window) options.window_left = 9;
    }
    all.push_back({shape, options, padded, kv_len > 10, "padded rows and heads: "});
  }
  if (probes.can.strides) {
    Options options = probes.base();
    options.causal = options.causal || probes.can.causal;
    if (probes.can.window) options.window_left = 7;
    if (probes.can.softcap) options.softcap = 3;
    if (probes.can.scale) options.scale = 0.2;
    all.push_back({probes.shape(9, 19, head_dim), options, padded, true, "with all options, "});
  }
  // Head dims and v_dims with a rest, beside which a vector or a tile has no elements.
  const auto add_dims = [&](std::int64_t d, std::int64_t v_dim) {
    Shape shape = probes.shape(3, 5, d, false);
    shape.v_dim = v_dim;
    all.push_back({shape, probes.base(), has_padded ? padded : native, true, "another dim: "});
  };
  for (const auto& list : {probes.can.head_dims, probes.can.other_dims}) {
    for (const std::int64_t d : list) add_dims(d, d);
  }
  for (const std::int64_t d : probes.can.other_v_dims) add_dims(head_dim, d);
  return all;
}

}  // namespace

std::optional<Finding> stray_write(const ProbeSequence& probes) {
  if (probes.impl.first_stray().empty()) return std::nullopt;
  Finding f = probes.finding(
      FaultStage::bounds, "memory is written outside the outputs: at " + probes.impl.first_stray());
  f.call = probes.impl.first_stray_call();
  return f;
}

Finding probe_grad_bounds(ProbeSequence& probes, std::int64_t head_dim) {
  for (const Place& place : places(probes, head_dim)) {
    if (Finding f = check_guards(probes, place); f.found()) return f;
  }
  return stray_write(probes).value_or(Finding{});
}

}  // namespace flashcore::verify
