// The finding of all readings of a call together.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_reading.h"

namespace flashcore::verify {
namespace {

/// The errors of a reading by position, and the matrix with the largest one.
Evidence evidence_of(const Reading& reading, const std::string& call) {
  Evidence e;
  e.title = name_of(reading) + " read from " + kGradientNames[reading.from] + ": " + call;
  e.columns_are_keys = true;
  e.heads = reading.heads, e.rows = reading.rows;
  e.error.assign(static_cast<std::size_t>(e.heads * e.rows), 0.0);
  e.by_column.assign(static_cast<std::size_t>(reading.keys), 0.0);
  const auto keys = static_cast<std::size_t>(reading.keys);
  for (std::size_t i = 0; i < reading.got.size(); ++i) {
    const double error = std::fabs(reading.got[i] - reading.want[i]);
    const double ratio = error == 0 ? 0 : std::min(error / reading.bound[i], 1e30);
    const double shown = std::isnan(ratio) ? 1e30 : ratio;
    e.error[i / keys] = std::max(e.error[i / keys], shown);
    e.by_column[i % keys] = std::max(e.by_column[i % keys], shown);
  }
  e.p_rows = reading.rows, e.p_columns = reading.keys;
  const std::size_t per_head = static_cast<std::size_t>(e.p_rows) * keys;
  const std::size_t first = worst_entry(reading) / per_head * per_head;
  e.p_got.assign(reading.got.begin() + static_cast<std::ptrdiff_t>(first),
                 reading.got.begin() + static_cast<std::ptrdiff_t>(first + per_head));
  e.p_want.assign(reading.want.begin() + static_cast<std::ptrdiff_t>(first),
                  reading.want.begin() + static_cast<std::ptrdiff_t>(first + per_head));
  return e;
}

/// True if few entries are wrong, and by little: another fault may show at its edge.
bool is_close_to_bound(const Reading& r) {
  constexpr double kLittle = 16;
  std::size_t wrong = 0;
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (!r.wrong(e)) continue;
    ++wrong;
    if (!(std::fabs(r.got[e] - r.want[e]) <= kLittle * r.bound[e])) return false;
  }
  return 20 * wrong < r.got.size();
}

/// True if all are wrong by no more than roundings of the largest one in f32.
bool is_within_roundings(const Reading& r) {
  constexpr double kRoundings = 0x1p-19;
  double most = 0;
  for (const double x : r.want) most = std::max(most, std::fabs(x));
  for (std::size_t e = 0; e < r.got.size(); ++e) {
    if (r.wrong(e) && !(std::fabs(r.got[e] - r.want[e]) <= kRoundings * most)) return false;
  }
  return true;
}

/// True if the same entries are wrong in all readings.
bool same_entries(const Readings& readings) {
  const Reading& first = readings.all.front();
  return std::all_of(readings.all.begin(), readings.all.end(), [&](const Reading& r) {
    for (std::size_t e = 0; e < r.got.size(); ++e) {
      if (r.wrong(e) != first.wrong(e)) return false;
    }
    return true;
  });
}

}  // namespace

FaultStage stage_of_lost_terms(ProbeSequence& probes, const Shape& shape) {
  constexpr std::int64_t kLargeTile = 128;
  Shape whole = shape;
  for (std::int64_t* n : {&whole.q_len, &whole.kv_len}) {
    *n = (*n + kLargeTile - 1) / kLargeTile * kLargeTile;
  }
  if (whole.q_len == shape.q_len && whole.kv_len == shape.kv_len) return FaultStage::accumulate;
  if (!probes.can.cross) whole.q_len = whole.kv_len = std::max(whole.q_len, whole.kv_len);
  GradientCall call = gradient_call(probes, whole, probes.base());
  fill_random(call, 0.5, probes.seed);
  return run_gradients(probes, call).ok() ? FaultStage::tail : FaultStage::accumulate;
}

bool delta_explains(const GradientCall& call, const RanGradients& ran) {
  const Tensors& t = call.forward.tensors;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t rows = size(t.q.shape[2]), keys = size(t.k.shape[2]), d = size(t.q.shape[3]);
  const std::size_t group = size(t.q.shape[1] / t.k.shape[1]);
  if (!ran.judged[kDv].ok() || ran.judged[kDq].ok() || keys < 2) return false;
  for (std::size_t row = 0; row < ran.judged[kDq].ratio.size() / d; ++row) {
    const double* ratio = ran.judged[kDq].ratio.data() + row * d;
    if (std::all_of(ratio, ratio + d, [](double x) { return x <= 1; })) continue;
    const double* k = static_cast<const double*>(t.k.data) + row / rows / group * keys * d;
    const std::vector<double>& p = ran.expected.forward.probabilities[row];
    double along = 0, mean2 = 0, error2 = 0;
    for (std::size_t c = 0; c < d; ++c) {
      double mean = 0;
      for (std::size_t j = 0; j < keys; ++j) mean += p[j] * k[j * d + c];
      const std::size_t at = row * d + c;
      const double error = ran.result.value[kDq][at] - ran.expected.of(kDq).value[at];
      along += mean * error, mean2 += mean * mean, error2 += error * error;
    }
    if (!(along * along > 0.98 * mean2 * error2)) return false;
  }
  return true;
}

Finding explain(const ProbeSequence& probes, const Readings& readings, const GradientCall& call,
                FaultStage fallback, const std::string& input) {
  if (readings.failure) {
    Finding f = *readings.failure;
    if (f.stage == FaultStage::unlocalised) f.stage = fallback;
    return f;
  }
  std::vector<std::pair<Diagnosis, const Reading*>> faults;
  for (const Reading& r : readings.all) {
    const Diagnosis d = diagnose(r, fallback);
    if (d.stage != FaultStage::none) faults.emplace_back(d, &r);
  }
  if (faults.empty()) return {};
  // A pattern explains more than a fallback.
  std::stable_sort(faults.begin(), faults.end(), [](const auto& a, const auto& b) {
    return a.first.structural && !b.first.structural;
  });
  // Both products cannot exchange the same rows or keys: dS itself is of another pair.
  if (faults.size() == 2 && faults[0].first.stage == FaultStage::layout &&
      !faults[1].first.structural) {
    std::swap(faults[0], faults[1]);
  }
  const auto& [diagnosis, reading] = faults.front();
  FaultStage stage = diagnosis.stage;
  std::string text = diagnosis.text;
  if (stage == FaultStage::accumulate && faults.size() == 2 && same_entries(readings)) {
    const Diagnosis& other = faults[1].first;
    const bool is_known = other.structural && other.stage != FaultStage::accumulate;
    stage = is_known ? other.stage : fallback == FaultStage::accumulate ? FaultStage::ds : fallback;
    text += "; dq and dk show the same entries, so dS itself lacks them";
  }
  if (faults.size() < readings.all.size()) {
    text += std::string("; ") + (reading->from == kDq ? "dk" : "dq") + " shows the correct dS";
    // The other product shows a correct dS, so the wrong term of dS is in this product's own copy.
    const bool of_ds =
        stage == FaultStage::dp || stage == FaultStage::delta || stage == FaultStage::ds;
    const bool moved = stage == FaultStage::accumulate && reading->moved > 0;
    if (moved) text += "; and other columns, where 0 should be, have values";
    if (!diagnosis.structural || of_ds || moved) {
      stage = reading->from == kDq ? FaultStage::dq : FaultStage::dk;
    }
  }
  if (!readings.unwritten.empty() && !outranks_coverage(stage)) {
    stage = FaultStage::coverage;
    text = readings.unwritten + ": " + text;
  }
  Finding f = probes.finding(stage, input + ": " + text);
  f.call = describe(call);
  f.evidence = evidence_of(*reading, f.call);
  const bool one_product = faults.size() < readings.all.size();
  f.is_weak = (stage == FaultStage::precision && is_close_to_bound(*reading)) ||
              ((stage == FaultStage::precision || one_product) && is_within_roundings(*reading));
  return f;
}

FaultStage stage_by_gradients(const RanGradients& ran) {
  if (!ran.judged[kDv].ok()) return FaultStage::dv;
  const bool dq = !ran.judged[kDq].ok(), dk = !ran.judged[kDk].ok();
  return dq && dk ? FaultStage::ds : dq ? FaultStage::dq : FaultStage::dk;
}

Finding check_call(ProbeSequence& probes, const GradientCall& call, FaultStage fallback,
                   const std::string& input) {
  GradientCall plain = call;
  const RanGradients ran = run_gradients(probes, plain);
  if (auto f = failure_of(probes, ran.result, fallback)) return *f;
  if (!ran.result.ok() || ran.ok()) return {};
  Finding f = explain(probes, read_p(probes, call), call, FaultStage::dv, input);
  if (f.found()) return f;
  f = explain(probes, read_ds(probes, call, score_dims(call.forward.tensors.q.shape[3])), call,
              fallback, input);
  if (f.found()) return f;
  const int g = ran.worst();
  return gradient_finding(probes, stage_by_gradients(ran),
                          input + ": " + worst_element(call, ran, g), call, ran, g);
}

}  // namespace flashcore::verify
