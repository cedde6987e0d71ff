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
  if (stage == FaultStage::accumulate && faults.size() == 2 &&
      faults[1].first.stage == FaultStage::accumulate && same_entries(readings)) {
    stage = fallback == FaultStage::accumulate ? FaultStage::ds : fallback;
    text += "; dq and dk show the same entries, so dS itself lacks them";
  }
  if (faults.size() < readings.all.size()) {
    text += std::string("; ") + (reading->from == kDq ? "dk" : "dq") + " shows the correct dS";
    if (!diagnosis.structural) stage = reading->from == kDq ? FaultStage::dq : FaultStage::dk;
  }
  if (!readings.unwritten.empty() && !outranks_coverage(stage)) {
    stage = FaultStage::coverage;
    text = readings.unwritten + ": " + text;
  }
  Finding f = probes.finding(stage, input + ": " + text);
  f.call = describe(call);
  f.evidence = evidence_of(*reading, f.call);
  return f;
}

}  // namespace flashcore::verify
