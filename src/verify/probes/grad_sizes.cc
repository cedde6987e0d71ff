// Probe grad_sizes: very small and very large dout and V, in all rows and in some. Every stage is
// correct at usual sizes by now.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// Sizes far from 1 at which the products of a correct implementation stay normal numbers.
struct Sizes {
  double small, large;
};

Sizes sizes_of(Format format) {
  if (format == Format::f16) return {0x1p-9, 0x1p8};
  return {0x1p-30, 0x1p12};
}

enum class Kind {
  small,
  large,
  mixed_rows,
  small_values,
  large_values,
  some_rows,
  no_values,
  large_keys,
  large_queries
};
constexpr std::pair<Kind, const char*> kKinds[] = {{Kind::small, "small dout"},
                                                   {Kind::large, "large dout"},
                                                   {Kind::mixed_rows, "rows of dout of all sizes"},
                                                   {Kind::small_values, "small V"},
                                                   {Kind::large_values, "large V"},
                                                   {Kind::some_rows, "dout of 0 in some rows"},
                                                   {Kind::no_values, "V of 0"},
                                                   {Kind::large_keys, "large K and small Q"},
                                                   {Kind::large_queries, "large Q and small K"}};

void multiply(const TensorView& t, double factor) {
  auto* x = static_cast<double*>(t.data);
  const std::int64_t count = t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3];
  for (std::int64_t i = 0; i < count; ++i) x[i] *= factor;
}

void resize(GradientCall& call, Kind kind, const Sizes& sizes) {
  const Tensors& t = call.forward.tensors;
  const TensorView& v = t.v;
  if (kind == Kind::large_keys || kind == Kind::large_queries) {
    constexpr double kLarge = 0x1p7;
    const bool keys = kind == Kind::large_keys;
    multiply(t.k, keys ? kLarge : 1 / kLarge);
    multiply(t.q, keys ? 1 / kLarge : kLarge);
    return;
  }
  const bool of_v =
      kind == Kind::small_values || kind == Kind::large_values || kind == Kind::no_values;
  const bool small = kind == Kind::small || kind == Kind::small_values;
  const double factor = kind == Kind::no_values ? 0 : small ? sizes.small : sizes.large;
  if (of_v) {
    multiply(v, factor);
    return;
  }
  const auto columns = static_cast<std::size_t>(v.shape[3]);
  const double of_sizes[] = {sizes.small, 1, sizes.large, std::sqrt(sizes.small),
                             std::sqrt(sizes.large)};
  const double of_zeros[] = {1, 0, 0, 1, 0};
  for (std::size_t i = 0; i < call.dout.size(); ++i) {
    const std::size_t row = i / columns % std::size(of_sizes);
    call.dout[i] *= kind == Kind::mixed_rows  ? of_sizes[row]
                    : kind == Kind::some_rows ? of_zeros[row]
                                              : factor;
  }
}

/// The stage of gradients that are wrong at these sizes only.
FaultStage stage_of(ProbeSequence& probes, const GradientCall& call, const RanGradients& ran,
                    std::int64_t head_dim, std::string& seen) {
  const bool dv = !ran.judged[kDv].ok(), dq = !ran.judged[kDq].ok(), dk = !ran.judged[kDk].ok();
  if (is_imprecise(ran.judged[ran.worst()])) return FaultStage::precision;
  if (dv != dq || dv != dk) {
    if (!dq && !dk) return FaultStage::dv;
    if (!dv && !dk) return FaultStage::dq;
    if (!dv && !dq) return FaultStage::dk;
  }
  if (dv) return FaultStage::unlocalised;
  for (const Reading& r : read_ds(probes, call, score_dims(head_dim)).all) {
    const Diagnosis d = diagnose(r, FaultStage::unlocalised);
    const bool of_ds =
        d.stage == FaultStage::dp || d.stage == FaultStage::delta || d.stage == FaultStage::ds;
    if (!of_ds || !d.structural) continue;
    seen = "; " + d.text;
    return d.stage;
  }
  return FaultStage::unlocalised;
}

}  // namespace

Finding probe_grad_sizes(ProbeSequence& probes, std::int64_t head_dim) {
  const Sizes sizes = sizes_of(probes.impl.formats().dtype);
  for (const auto& [kind, name] : kKinds) {
    GradientCall call = gradient_call(probes, probes.shape(10, 40, head_dim, false), probes.base());
    fill_random(call, 1, probes.seed);
    resize(call, kind, sizes);
    GradientCall same = call;
    const RanGradients ran = run_gradients(probes, same);
    if (auto f = failure_of(probes, ran.result, FaultStage::unlocalised)) return *f;
    if (!ran.result.ok() || ran.ok()) continue;
    const int g = ran.worst();
    std::string seen;
    const FaultStage stage = stage_of(probes, call, ran, head_dim, seen);
    return gradient_finding(
        probes, stage, std::string(name) + ": " + worst_element(call, ran, g) + seen, call, ran, g);
  }
  return {};
}

}  // namespace flashcore::verify
