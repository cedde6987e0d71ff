// Probes codes and scales: 8-bit inputs. The first probe decodes every encoding of V with one key,
// independent of all other stages. Encodings of q and k, and per-head scales, follow after the
// scores.
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"
#include "verify/probes/score_encodings.h"

namespace flashcore::verify {
namespace {

std::vector<double> factors_of(std::int64_t batch, std::int64_t heads, bool varied) {
  std::vector<double> factors;
  for (std::int64_t i = 0; varied && i < batch * heads; ++i) {
    factors.push_back(std::exp2(static_cast<double>(i % 3) - 1) * (i % 2 == 0 ? 1.0 : 1.25));
  }
  return factors;
}

/// Least-squares line through the points (value, value read).
class AffineFit {
 public:
  void add(double x, double y, double bound) {
    ++n_, x_ += x, y_ += y, xx_ += x * x, xy_ += x * y;
    bound_ = std::max(bound_, bound);
    points_.push_back({x, y});
  }
  /// The line at 0 if it fits all points, else 0.
  double at_zero() const {
    const double slope = (n_ * xy_ - x_ * y_) / (n_ * xx_ - x_ * x_);
    const double intercept = (y_ - slope * x_) / n_;
    for (const auto& [x, y] : points_) {
      if (!(std::fabs(slope * x + intercept - y) <= bound_)) return 0;
    }
    return std::fabs(intercept) > bound_ ? intercept : 0;
  }

 private:
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0, bound_ = 0;
  std::vector<std::pair<double, double>> points_;
};

/// Multiplies values by the factor of their head. Changes the scales, not the encodings.
void apply_factors(const TensorView& t, const std::vector<double>& factors) {
  if (factors.empty()) return;
  auto* data = static_cast<double*>(t.data);
  const std::int64_t per_head = t.shape[2] * t.shape[3];
  for (std::int64_t i = 0; i < t.shape[0] * t.shape[1] * per_head; ++i) {
    data[i] *= factors[static_cast<std::size_t>(i / per_head)];
  }
}

}  // namespace

/// One key, and all of V is one encoding: the output is its value in any layout.
Finding probe_encodings(ProbeSequence& probes, std::int64_t head_dim) {
  const Format format = probes.impl.formats().dtype;
  const Arithmetic a = probes.impl.arithmetic();
  int wrong = 0, tried = 0;
  std::string first;
  AffineFit line;
  for (int code = 0; code < 256; code += probes.quick ? 3 : 1) {
    const double value = decode_byte(format, static_cast<std::uint8_t>(code));
    if (!std::isfinite(value) || rounded(format, value) != value)
      continue;  // no quantizer produces it
    HostCall call = probes.call(probes.shape(2, 1, head_dim, false));
    fill_random(call.tensors.q, 1, probes.seed, 101);
    fill_random(call.tensors.k, 1, probes.seed, 102);
    fill(call.tensors.v, [&](auto, auto, auto, auto) { return value; });
    Setting setting = probes.impl.default_setting();
    setting.v_unit_scale = true;
    const CallResult result = probes.impl.run(call, setting);
    if (auto f = failure_of(probes, result, FaultStage::dequant)) return *f;
    if (!result.ok()) continue;
    ++tried;
    const double bound = std::fabs(value) * (2 * a.out_unit + 4 * 0x1p-11) + a.out_smallest;
    bool all_right = true;
    for (const double x : result.out) all_right = all_right && std::fabs(x - value) <= bound;
    line.add(value, result.out[0], bound);
    if (all_right) continue;
    if (wrong++ == 0) {
      first = "encoding " + decimal(code) + " decodes to " + number(result.out[0]) +
              " instead of " + number(value);
    }
  }
  if (wrong == 0) return {};
  // If every encoding is wrong, the decode table is not the cause. A wrong zero point is: unlike a
  // factor it moves 0.
  if (wrong == tried && tried > 1) {
    const double zero = line.at_zero();
    if (zero == 0) return {};
    return probes.finding(FaultStage::dequant, "V decodes as if 0 were " + number(zero) +
                                                   ": a zero point is missing or superfluous");
  }
  return probes.finding(FaultStage::dequant,
                        decimal(wrong) + " of " + decimal(tried) +
                            " encodings of V decode to a wrong value: " + first);
}

Finding probe_scales(ProbeSequence& probes, std::int64_t head_dim) {
  const char* names[] = {"q", "k", "v"};
  for (const bool of_q : {false, true}) {
    const ScoreEncodings encodings(probes, head_dim, of_q);
    if (encodings.wrong().empty()) continue;
    return probes.finding(FaultStage::dequant, encodings.wrong());
  }
  for (int tensor = 0; tensor < 3; ++tensor) {
    const Shape shape = probes.shape(20, 48, head_dim);
    HostCall call = probes.call(shape);
    fill_flat_maximum(call, 0.4, probes.seed);
    fill_random(call.tensors.v, 1, probes.seed, 103);
    Setting setting = probes.impl.default_setting();
    setting.q_factors = factors_of(shape.batch, shape.q_heads, tensor == 0);
    setting.k_factors = factors_of(shape.batch, shape.kv_heads, tensor == 1);
    setting.v_factors = factors_of(shape.batch, shape.kv_heads, tensor == 2);
    apply_factors(call.tensors.q, setting.q_factors);
    apply_factors(call.tensors.k, setting.k_factors);
    apply_factors(call.tensors.v, setting.v_factors);
    const CallResult result = probes.impl.run(call, setting);
    if (auto f = failure_of(probes, result, FaultStage::dequant)) return *f;
    if (!result.ok()) continue;
    const Judged judged = probes.judge(call, result);
    if (judged.ok()) continue;
    return probes.finding(
        FaultStage::dequant,
        std::string("with a different ") + names[tensor] + "_scale per head, " +
            row_name(call, judged.worst_at / static_cast<std::size_t>(shape.v_dim)) +
            " is wrong; with one scale for all heads it is correct",
        call, result, judged);
  }
  return {};
}

}  // namespace flashcore::verify
