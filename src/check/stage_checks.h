// Shared by the checks of single stages: stages.cc, stage_scores.cc and stage_splits.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "check/stages.h"

namespace flashcore::verify {

Result<StageReport> check_scores(CallRunner& runner, const HostCall& call);
Result<StageReport> check_partials(CallRunner& runner, const HostCall& call);
Result<StageReport> check_combine(CallRunner& runner, const HostCall& call);

/// The call with `splits` KV splits.
HostCall with_splits(const HostCall& call, std::int32_t splits);

/// The row's index in out and lse. Varlen rows count over all sequences.
std::int64_t q_row_of(const RanCall& ran, const reference::RowId& row);

/// The oracle of a planned call, with scores and probabilities. The call need not have run.
Result<reference::Oracle> stages_of(const Problem& problem, const HostCall& call);

/// Counts the elements of one stage and records the worst one.
class Tally {
 public:
  explicit Tally(Stage stage) { report_.stage = stage; }

  /// `relabel` turns compare()'s coordinates (row, column) into those of the stage.
  template <typename Relabel>
  void add(const Comparison& c, const std::string& probe, Relabel relabel) {
    report_.elements += c.elements + c.lse_elements;
    report_.wrong += c.over_bound + c.unwritten + c.non_finite;
    report_.worst_ratio = std::max(report_.worst_ratio, c.worst_ratio);
    StageElement e{c.worst.row, -1, -1, c.worst.column, c.worst.got, c.worst.want, c.worst.bound};
    relabel(e);
    note(e, probe, c.reason,
         c.unwritten > 0    ? kUnwritten
         : c.non_finite > 0 ? kNotFinite
                            : c.worst_ratio);
  }

  void add(const StageElement& e, const std::string& probe) {
    ++report_.elements;
    const bool finite = std::isfinite(e.got) && std::isfinite(e.want);
    if (!finite && e.got == e.want) return;  // both -inf
    const double ratio = finite ? std::fabs(e.got - e.want) / e.bound : kNotFinite;
    if (finite) report_.worst_ratio = std::max(report_.worst_ratio, ratio);
    const bool correct = ratio <= 1;
    if (!correct) ++report_.wrong;
    note(e, probe,
         correct  ? ""
         : finite ? "errors exceed their bounds"
                  : "non-finite values are at other places than in the oracle",
         ratio);
  }

  /// Adds the counts of another tally. Its worst element competes only if `with_worst` is set.
  void add(const Tally& other, bool with_worst) {
    report_.elements += other.report_.elements;
    report_.wrong += other.report_.wrong;
    if (with_worst) {
      report_.worst_ratio = std::max(report_.worst_ratio, other.report_.worst_ratio);
      note(other.report_.worst, other.report_.probe, other.report_.reason, other.worst_severity_);
    } else if (report_.reason.empty()) {
      report_.reason = other.report_.reason;
    }
  }

  StageReport& report() { return report_; }

 private:
  /// Severities above any ratio, in compare()'s order.
  static constexpr double kUnwritten = 4e300, kNotFinite = 2e300;

  /// The reason is that of the worst element. If the worst element has none, any other reason is
  /// used.
  void note(const StageElement& e, const std::string& probe, const std::string& reason,
            double severity) {
    const bool worse = severity > worst_severity_;
    if (!reason.empty() && (worse || report_.reason.empty())) report_.reason = reason;
    if (!worse) return;
    worst_severity_ = severity;
    report_.worst = e;
    report_.probe = probe;
  }

  StageReport report_;
  double worst_severity_ = -1;
};

}  // namespace flashcore::verify
