// Probes scores and softcap: scores read back from P, first one head dimension at a time, then all.
#include <algorithm>
#include <cmath>

#include "verify/inputs/call_variants.h"
#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"
#include "verify/probes/score_encodings.h"
#include "verify/probes/score_reading.h"

namespace flashcore::verify {
namespace {

/// Unstructured errors below this fraction of the scores belong to stage precision.
constexpr double kNoise = 0x1p-4;
constexpr std::int64_t kManyKeys = 300;

/// A quick run tests the head mapping at the first head dim only.
bool is_brief(const ProbeSequence& probes, std::int64_t head_dim) {
  return probes.quick && head_dim != probes.main_dim();
}

HostCall dimension_call(const ProbeSequence& probes, std::int64_t head_dim,
                        const Options& options) {
  const bool wide = !is_brief(probes, head_dim);
  HostCall call = probes.call(probes.shape(head_dim, 17, head_dim, wide), options);
  fill_one_dimension_per_row(call, probes.seed);
  return call;
}

/// 20 queries; one, which many implementations handle separately; or four on many keys, so that the
/// pipeline stages wrap around.
HostCall dense_call(const ProbeSequence& probes, std::int64_t head_dim, std::int64_t kv_len,
                    const Options& options) {
  const bool wide = !is_brief(probes, head_dim);
  const std::int64_t q_len = kv_len == 70 ? 1 : kv_len >= kManyKeys ? 4 : 20;
  HostCall call =
      probes.call(probes.shape(q_len, kv_len, head_dim, wide && kv_len < kManyKeys), options);
  fill_flat_maximum(call, 0.6, probes.seed);
  return call;
}

/// Reads scores. If weights are lost because scores are far too large, reads them with a smaller q.
ScoreReading read(ProbeSequence& probes, const HostCall& call) {
  ScoreReading reading(probes, call);
  for (double factor = 0x1p-2; reading.readable() && reading.lost() > 0 && factor >= 0x1p-6;
       factor *= 0x1p-2) {
    ScoreReading smaller(probes, with_scaled_scores(call, factor));
    if (smaller.readable() && smaller.lost() < reading.lost()) return smaller;
  }
  return reading;
}

std::string named_factor(double slope, double head_dim) {
  const struct {
    double value;
    const char* meaning;
  } known[] = {{std::sqrt(head_dim), "sqrt(head_dim): the scale is not applied"},
               {1 / std::sqrt(head_dim), "1/sqrt(head_dim): the scale is applied twice"},
               {std::log2(std::exp(1.0)), "log2(e): exp and exp2 are mixed up"},
               {std::log(2.0), "ln(2): exp and exp2 are mixed up"},
               {0, "0: the scores do not reach the softmax"},
               {-1, "-1: the sign is wrong"}};
  for (const auto& k : known) {
    if (std::fabs(slope - k.value) < 0.02 * std::max(std::fabs(k.value), 0.05)) {
      return std::string(" (") + k.meaning + ")";
    }
  }
  return "";
}

/// True if 8-bit scales explain the slope: one is missing, applied twice, or from another tensor.
bool is_ratio_of_scales(const std::vector<double>& s, double slope) {
  const auto near = [&](double value) {
    return std::fabs(slope / value - 1) < 0.03 && std::fabs(value - 1) > 0.03;
  };
  for (const double x : {s[0], s[1]}) {
    if (near(x) || near(1 / x) || near(s[2] / x)) return true;
  }
  return near(1 / (s[0] * s[1])) || near(s[0] / s[1]) || near(s[1] / s[0]) ||
         near(s[2] * s[2] / (s[0] * s[1]));
}

/// Keys are permuted, in K or in V. With Q = 0 the causal mask follows the order of the scores, so
/// a permuted V makes the visible keys look scattered.
FaultStage permuted_operand(ProbeSequence& probes, std::int64_t head_dim) {
  if (!probes.can.causal) return FaultStage::scores;
  Options options = probes.base();
  options.causal = true;
  HostCall call = probes.call(probes.shape(48, 48, head_dim, false), options);
  const std::vector<double> p = read_probabilities(probes, call);
  if (p.empty()) return FaultStage::scores;
  const auto n = static_cast<std::size_t>(call.tensors.k.shape[2]);
  for (std::size_t r = 0; r < p.size() / n; ++r) {
    bool zero_before = false;
    for (std::size_t j = 0; j < n; ++j) {
      if (p[r * n + j] == 0) zero_before = true;
      if (p[r * n + j] > 0 && zero_before) return FaultStage::pv;
    }
  }
  return FaultStage::scores;
}

/// "dimensions 64 to 127 of the head do not count"
std::string wrong_dimensions(const ScoreReading& one, std::int64_t head_dim) {
  std::vector<std::int64_t> missing, others;
  for (std::int64_t d = 0; d < std::min(head_dim, static_cast<std::int64_t>(one.rows())); ++d) {
    const ScoreReading::Fit f = one.fit_row(static_cast<std::size_t>(d));
    if (std::fabs(f.slope) < 0.25 && f.residual < 0.25) {
      missing.push_back(d);
    } else if (std::fabs(f.slope - 1) > 0.25 || f.residual > 0.25) {
      others.push_back(d);
    }
  }
  if (!missing.empty()) {
    return decimal(missing.size()) + " of " + decimal(head_dim) +
           " dimensions are missing in q·k; the first is " + decimal(missing.front());
  }
  if (!others.empty()) {
    return decimal(others.size()) + " of " + decimal(head_dim) +
           " dimensions have wrong factors in q·k; the first is " + decimal(others.front());
  }
  return "";
}

Finding slope_finding(ProbeSequence& probes, const ScoreReading& r, double slope,
                      std::int64_t head_dim) {
  const std::string seen = "scores are " + number(slope) + " times the expected ones" +
                           named_factor(slope, static_cast<double>(head_dim));
  FaultStage stage = FaultStage::scale;
  if (is_8bit(probes.impl.formats().dtype) && is_ratio_of_scales(r.scales(), slope)) {
    stage = FaultStage::dequant;
  }
  Finding f = probes.finding(
      stage, seen + (stage == FaultStage::dequant ? ": a ratio of the quantisation scales" : ""));
  f.evidence = r.evidence();
  return f;
}

/// True if one common factor explains the errors.
bool is_slope(const ScoreReading& r, ScoreReading::Fit fit) {
  const double tight =
      0.02 + 2 * r.noise() * std::max(1.0, 1 / std::max(std::fabs(fit.slope), 1e-3));
  return std::fabs(fit.slope - 1) > 0x1p-7 && fit.residual <= tight &&
         (std::fabs(fit.slope - 1) > 4 * fit.residual || fit.residual < 1e-3);
}

Finding explain(ProbeSequence& probes, const ScoreReading& one, const ScoreReading& dense,
                const HostCall& shown, std::int64_t head_dim) {
  const ScoreReading& wrong = one.readable() && !one.ok() ? one : dense;
  const auto found = [&](FaultStage stage, const std::string& detail) {
    Finding f = probes.finding(stage, detail);
    f.evidence = wrong.evidence();
    f.call = describe(shown);
    return f;
  };
  const ScoreReading::Fit fit = wrong.fit();
  if (wrong.lost() == 0 && std::fabs(fit.slope) < 0.02) {
    return found(FaultStage::scores, "P does not depend on q and k");
  }
  // With wide tolerances, encodings that are off by a factor each look like a common factor.
  for (const bool of_q : {false, true}) {
    if (!is_8bit(probes.impl.formats().dtype)) break;
    const ScoreEncodings encodings(probes, head_dim, of_q);
    if (encodings.is_other_table()) return found(FaultStage::dequant, encodings.wrong());
  }
  if (wrong.lost() == 0 && is_slope(wrong, fit)) {
    return slope_finding(probes, wrong, fit.slope, head_dim);
  }
  for (const ScoreReading* r : {&dense, &one}) {
    if (!r->readable() || r->ok() || r->lost() > 0) continue;
    if (const std::string heads = r->other_heads(); !heads.empty()) {
      return found(FaultStage::layout, heads);
    }
    if (r == &dense) {  // in `one` a row is a dimension
      if (const std::string rows = r->other_rows(); !rows.empty()) {
        return found(FaultStage::layout, rows);
      }
    }
    const std::vector<std::int64_t> order = r->key_order();
    if (!order.empty()) {
      std::size_t j = 0;
      while (order[j] == static_cast<std::int64_t>(j)) ++j;
      return found(
          permuted_operand(probes, head_dim),
          "keys are permuted: the weight of key " + decimal(order[j]) + " is at key " + decimal(j));
    }
  }
  const bool table = is_8bit(probes.impl.formats().dtype) && one.readable() && one.is_other_table();
  if (one.readable() && !one.ok() && !table) {
    if (const std::string dims = wrong_dimensions(one, head_dim); !dims.empty()) {
      return found(FaultStage::scores, dims);
    }
  }
  // `one` has few different values, `dense` many.
  const bool eight_bit = is_8bit(probes.impl.formats().dtype);
  if (eight_bit && wrong.lost() == 0 && (&wrong == &dense || one.is_other_table())) {
    return found(FaultStage::dequant,
                 &wrong == &dense
                     ? "scores are correct for a few values of q and k, wrong for others"
                     : "scores are a wrong function of the encodings of k");
  }
  if (wrong.lost() == 0 && fit.residual < kNoise && std::fabs(fit.slope - 1) < kNoise) {
    return found(FaultStage::precision,
                 "scores read back from P are off by " + number(fit.residual) +
                     " of their size in all rows: more than this format allows");
  }
  const std::size_t r = wrong.worst_row(), j = wrong.worst_key();
  if (wrong.lost() > 0) {
    return found(FaultStage::scores, "P is 0 or not finite at " + row_name(shown, r) + ", key " +
                                         decimal(j) +
                                         ", although its score is not smaller than "
                                         "others");
  }
  return found(FaultStage::scores, row_name(shown, r) + ", key " + decimal(j) + ": the score is " +
                                       number(wrong.got(r, j)) +
                                       " above the mean of the row; wanted " +
                                       number(wrong.want(r, j)));
}

Finding check_sums(ProbeSequence& probes, const ScoreReading& r) {
  if (!r.readable() || !r.ok() || !r.sums_are_wrong()) return {};
  // Sums on both sides of 1, off by less than a unit of bf16: rounding, not a missing key.
  if (r.sums_scatter() && std::fabs(r.worst_sum() - 1) < unit_of(Format::bf16)) {
    return probes.finding(FaultStage::precision,
                          "scores are correct, but the rows of P sum to values around 1, off by "
                          "up to " +
                              number(std::fabs(r.worst_sum() - 1)) +
                              ": the format of the row sum is too narrow");
  }
  return probes.finding(FaultStage::sum, "scores are correct, but a row of P sums to " +
                                             number(r.worst_sum()) + " instead of 1");
}

}  // namespace

Finding probe_scores(ProbeSequence& probes, std::int64_t head_dim) {
  std::vector<Options> all{probes.base()};
  if (probes.can.scale) {
    all.push_back(probes.base());
    all.back().scale = 1.7 / std::sqrt(static_cast<double>(head_dim));
  }
  for (const Options& options : all) {
    const HostCall one_call = dimension_call(probes, head_dim, options);
    const ScoreReading one = read(probes, one_call);
    if (one.failure()) return *one.failure();
    for (const std::int64_t kv_len :
         {std::int64_t{48}, std::int64_t{70}, std::int64_t{150}, kManyKeys}) {
      if (kv_len >= kManyKeys && !probes.can.cross) continue;
      if (kv_len > 70 && (is_brief(probes, head_dim) || (probes.quick && options.scale))) continue;
      const HostCall dense_one = dense_call(probes, head_dim, kv_len, options);
      const ScoreReading dense = read(probes, dense_one);
      if (dense.failure()) return *dense.failure();
      const bool one_ok = !one.readable() || one.ok(), dense_ok = !dense.readable() || dense.ok();
      if (one_ok && dense_ok) {
        if (Finding f = check_sums(probes, one); f.found()) return f;
        if (Finding f = check_sums(probes, dense); f.found()) return f;
        continue;
      }
      Finding f = explain(probes, one, dense, one_ok ? dense_one : one_call, head_dim);
      if (options.scale && f.stage == FaultStage::scale) f.detail += " (with an explicit scale)";
      return f;
    }
  }
  return {};
}

Finding probe_softcap(ProbeSequence& probes, std::int64_t head_dim) {
  Options options = probes.base();
  options.softcap = 1.5;
  const HostCall call = dense_call(probes, head_dim, 48, options);
  const ScoreReading reading(probes, call);
  if (reading.failure()) return *reading.failure();
  if (!reading.readable() || reading.ok()) return {};
  Finding f =
      probes.finding(FaultStage::scores,
                     "softcap 1.5: scores are not c·tanh(s/c); without softcap they are correct");
  f.evidence = reading.evidence();
  return f;
}

}  // namespace flashcore::verify
