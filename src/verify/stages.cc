#include "verify/stages.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>

#include "core/error.h"
#include "verify/case_memory.h"
#include "verify/probes.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Scores and probabilities of the whole tensor are kept, 8 bytes each: 1 GiB of each at most.
constexpr double kMostScores = 1 << 27;
/// Key ranges where the call does not say.
constexpr std::int32_t kDefaultSplits = 3;

/// What an element counts as when the worst is looked for: compare()'s order.
double severity(const Comparison& c) {
  return c.unwritten > 0 ? 4e300 : c.non_finite > 0 ? 2e300 : c.worst_ratio;
}

/// Collects the elements of one stage.
class Tally {
 public:
  explicit Tally(Stage stage) { report_.stage = stage; }

  /// `place` turns compare()'s element (row, column) into the stage's.
  template <typename Place>
  void add(const Comparison& c, const std::string& probe, Place place) {
    report_.elements += c.elements + c.lse_elements;
    report_.wrong += c.over_bound + c.unwritten + c.non_finite;
    report_.worst_ratio = std::max(report_.worst_ratio, c.worst_ratio);
    if (report_.reason.empty()) report_.reason = c.reason;
    if (severity(c) <= worst_severity_) return;
    StageElement e{c.worst.row, -1, -1, c.worst.column, c.worst.got, c.worst.want, c.worst.bound};
    place(e);
    note(e, probe, severity(c));
  }

  void add(const StageElement& e, const std::string& probe) {
    ++report_.elements;
    const bool finite = std::isfinite(e.got) && std::isfinite(e.want);
    if (!finite && e.got == e.want) return;  // both -inf
    const double ratio = finite ? std::fabs(e.got - e.want) / e.bound : 2e300;
    if (finite) report_.worst_ratio = std::max(report_.worst_ratio, ratio);
    if (!(ratio <= 1)) {
      ++report_.wrong;
      if (report_.reason.empty()) {
        report_.reason =
            finite ? "errors exceed their bounds" : "non-finite values stand at other places";
      }
    }
    note(e, probe, ratio);
  }

  StageReport& report() { return report_; }

 private:
  void note(const StageElement& e, const std::string& probe, double how_bad) {
    if (how_bad <= worst_severity_) return;
    worst_severity_ = how_bad;
    report_.worst = e;
    report_.probe = probe;
  }

  StageReport report_;
  double worst_severity_ = -1;
};

HostCall with_splits(const HostCall& call, std::int32_t splits) {
  HostCall probe = call;
  probe.options.num_splits = splits;
  return probe;
}

Arithmetic arithmetic_of(const RanCall& ran) {
  return verify::arithmetic_of(ran.problem.out.dtype, ran.plan.kernel->probability_dtype);
}

/// compare() of the output alone: the LSE is the scores' matter.
Comparison compare_out(const reference::Oracle& oracle, const RanCall& ran) {
  Tensors result = ran.after.tensors;
  result.lse = {};
  return compare(oracle, ran.problem, result, arithmetic_of(ran));
}

/// The oracle with its stages, of a call that was planned but need not have run.
Result<reference::Oracle> stages_of(const Problem& problem, const HostCall& call) {
  std::vector<reference::RowId> rows = reference::all_rows(problem, call.tensors);
  const double scores = static_cast<double>(rows.size()) * static_cast<double>(problem.kv_len);
  if (scores > kMostScores) {
    return unsupported(
        "%zu rows of %lld keys are %.3g scores, and stages keep all of them, at most %.3g; give "
        "fewer heads or shorter lengths",
        rows.size(), static_cast<long long>(problem.kv_len), scores, kMostScores);
  }
  reference::Oracle oracle = reference::compute(problem, call.tensors, std::move(rows), true);
  if (Status status = require_finite(oracle); !status.ok()) return status;
  return oracle;
}

// ---------------------------------------------------------------------------------------------
// scores

/// The power of two that keeps every weight exp(score - max) in the upper half of the exponents of
/// P's format, where it can be read back.
double readable_scale(const reference::Oracle& oracle, const Problem& problem,
                      const Tensors& tensors, const Arithmetic& arithmetic) {
  double spread = 0;
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    double top = oracle.max[r];
    if (top == -kInfinity) continue;
    if (tensors.sinks.given() && !problem.options.partial) {
      top = std::max(top, reference::element(tensors.sinks.data, DType::f32,
                                             oracle.rows[r].h * problem.sinks.head));
    }
    for (const double score : oracle.scores[r]) {
      if (score != -kInfinity) spread = std::max(spread, top - score);
    }
  }
  const double limit = -0.5 * std::log(arithmetic.p_smallest);
  return spread <= limit ? 1.0 : std::exp2(std::floor(std::log2(limit / spread)));
}

Result<StageReport> check_scores(CallRunner& runner, const HostCall& call) {
  Tally tally(Stage::scores);
  HostCall probe = with_wide_outputs(with_splits(call, 1));
  const Result<Plan> plan = runner.plan(probe);
  if (!plan.ok()) return plan.status();
  const Problem& first_problem = plan->problem;
  const Arithmetic arithmetic =
      verify::arithmetic_of(first_problem.out.dtype, plan->kernel->probability_dtype);
  Result<reference::Oracle> oracle = stages_of(first_problem, probe);
  if (!oracle.ok()) return oracle.status();
  const double factor = readable_scale(*oracle, first_problem, probe.tensors, arithmetic);
  std::string name = "one-hot V";
  if (factor < 1) {
    char text[64];
    std::snprintf(text, sizeof text, "one-hot V, scores times 2^%d", std::ilogb(factor));
    name = text;
    probe = with_scaled_scores(probe, factor);
  }
  const Result<Plan> scaled_plan = runner.plan(probe);
  if (!scaled_plan.ok()) return scaled_plan.status();
  const Problem& problem = scaled_plan->problem;
  if (factor < 1) oracle = stages_of(problem, probe);
  if (!oracle.ok()) return oracle.status();
  const Result<ReadProbabilities> read = read_probabilities(runner, probe, oracle->rows);
  if (!read.ok()) return read.status();

  for (std::size_t r = 0; r < oracle->rows.size(); ++r) {
    tally.add({oracle->rows[r], -1, -1, -1, read->lse[r], oracle->lse[r],
               lse_bound(*oracle, r, arithmetic)},
              name);
  }
  // A score is log(P) + LSE, so its bound is theirs together.
  std::int64_t wrong_p = 0;
  for (std::int64_t first = 0; first < std::max<std::int64_t>(problem.kv_len, 1);
       first += problem.v_dim) {
    const reference::Oracle columns = one_hot_oracle(*oracle, problem, probe.tensors, first);
    for (std::size_t r = 0; r < oracle->rows.size(); ++r) {
      const auto keys = static_cast<std::int64_t>(oracle->scores[r].size());
      for (std::int64_t j = first; j < std::min(first + problem.v_dim, keys); ++j) {
        const auto key = static_cast<std::size_t>(j);
        StageElement e{oracle->rows[r], -1, j, -1, 0, oracle->scores[r][key], 0};
        const double p = oracle->probabilities[r][key], got_p = read->p[r][key];
        e.got = got_p == 0 ? -kInfinity : std::log(got_p) + read->lse[r];
        if (e.want != -kInfinity) {
          const double p_bound =
              out_bound(columns, r, static_cast<std::size_t>(j - first), arithmetic);
          if (!(p_bound < 0.5 * p)) {
            ++tally.report().unmeasured;
            continue;
          }
          const double log_bound = -std::log1p(-p_bound / p);
          e.bound = log_bound + lse_bound(*oracle, r, arithmetic);
          if (!(std::fabs(std::log(got_p / p)) <= log_bound)) ++wrong_p;
        }
        tally.add(e, name);
      }
    }
  }
  StageReport& report = tally.report();
  if (report.wrong > 0 && wrong_p == 0) {
    report.note =
        "P is right: either the LSE is wrong, or all scores of a row are off by the same number";
  }
  return report;
}

// ---------------------------------------------------------------------------------------------
// probabilities, pv

Result<StageReport> check_probabilities(CallRunner& runner, const HostCall& call) {
  Tally tally(Stage::probabilities);
  const HostCall probe = with_wide_outputs(with_splits(call, 1));
  const Result<Plan> plan = runner.plan(probe);
  if (!plan.ok()) return plan.status();
  const Result<reference::Oracle> oracle = stages_of(plan->problem, probe);
  if (!oracle.ok()) return oracle.status();
  const Result<ReadProbabilities> read =
      read_probabilities(runner, probe, oracle->rows, [&](std::int64_t first, const RanCall& ran) {
        const reference::Oracle columns =
            one_hot_oracle(*oracle, ran.problem, probe.tensors, first);
        tally.add(compare_out(columns, ran), "one-hot V", [&](StageElement& e) {
          e.key = first + e.column;
          e.column = -1;
        });
      });
  if (!read.ok()) return read.status();
  return tally.report();
}

Result<StageReport> check_pv(CallRunner& runner, const HostCall& call) {
  Tally tally(Stage::pv);
  const HostCall single = with_splits(call, 1);
  const auto check = [&](const HostCall& probe, const char* name) -> Status {
    const Result<RanCall> ran = runner.run(probe);
    if (!ran.ok()) return ran.status();
    const reference::Oracle oracle = reference::compute(
        ran->problem, probe.tensors, reference::all_rows(ran->problem, probe.tensors));
    FLASHCORE_RETURN_IF_ERROR(require_finite(oracle));
    tally.add(compare_out(oracle, *ran), name, [](StageElement&) {});
    return {};
  };
  if (Status s = check(with_uniform_probabilities(single), "P uniform"); !s.ok()) return s;
  if (Status s = check(with_selected_keys(single), "P one key per query"); !s.ok()) return s;
  return tally.report();
}

// ---------------------------------------------------------------------------------------------
// partials, combine

/// The call with several key ranges, or why it has none.
Result<HostCall> split_call(CallRunner& runner, const HostCall& call, std::string& why_not) {
  if (call.options.reproducibility == Reproducibility::batch_invariant) {
    why_not = "a batch-invariant plan does not split keys";
    return call;
  }
  const std::int32_t asked = call.options.num_splits;
  HostCall probe = with_lse(with_splits(call, asked == 0 ? kDefaultSplits : asked));
  const Result<Plan> plan = runner.plan(probe);
  if (!plan.ok()) return plan.status();
  if (plan->splits < 2) {
    why_not = asked == 1 ? "one key range was asked for"
                         : "the keys are one tile, or too few to be split";
  }
  return probe;
}

/// Sequence b's first row in a packed q, out and lse; else 0.
std::int64_t packed_row(const RanCall& ran, const reference::RowId& row) {
  return reference::lengths_of(ran.problem, ran.after.tensors, row.b).q_row + row.i;
}

reference::Oracle split_oracle(const RanCall& ran, std::int64_t split) {
  const std::int64_t begin = std::min(split * ran.plan.keys_per_split, ran.problem.kv_len);
  const std::int64_t end = std::min(begin + ran.plan.keys_per_split, ran.problem.kv_len);
  return compute_on_keys(ran.problem, ran.after.tensors,
                         reference::all_rows(ran.problem, ran.after.tensors), begin, end);
}

/// One key range's results as if they were a call's outputs.
Tensors outputs_of_split(const RanCall& ran, Partials& partials, std::int64_t split,
                         Problem& layout) {
  const Problem& p = ran.problem;
  const std::int64_t rows = p.q_packed ? p.total_q : p.q_len;
  const std::int64_t size = size_of(partials.dtype);
  layout = p;
  layout.lse = {partials.dtype, 0, p.q_packed ? 0 : p.q_heads * rows, rows, 1, 0};
  layout.out = {partials.dtype, 0, layout.lse.batch * p.v_dim, rows * p.v_dim, p.v_dim, 1};
  Tensors result = ran.after.tensors;
  result.out.data = partials.out.data() + split * partials.rows * partials.v_dim * size;
  result.lse =
      view(partials.lse.data() + split * partials.rows * size, partials.dtype, {partials.rows});
  return result;
}

Result<StageReport> check_partials(CallRunner& runner, const HostCall& call) {
  Tally tally(Stage::partials);
  const Result<HostCall> probe = split_call(runner, call, tally.report().skipped);
  if (!probe.ok()) return probe.status();
  if (!tally.report().skipped.empty()) return tally.report();
  Result<RanCall> ran = runner.run(*probe);
  if (!ran.ok()) return ran.status();
  Partials partials = ran->partials;
  for (std::int64_t split = 0; split < partials.splits; ++split) {
    const reference::Oracle oracle = split_oracle(*ran, split);
    if (Status status = require_finite(oracle); !status.ok()) return status;
    // Where a range has no key for a row its out is never read, and may hold anything.
    for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
      if (oracle.lse[r] != -kInfinity) continue;
      const reference::RowId& row = oracle.rows[r];
      const std::int64_t at =
          partials.row_of(ran->problem, split, row.b, row.h, packed_row(*ran, row));
      for (std::int64_t c = 0; c < partials.v_dim; ++c) {
        store(partials.out.data(), partials.dtype, at * partials.v_dim + c, 0.0);
      }
    }
    Problem layout;
    const Tensors result = outputs_of_split(*ran, partials, split, layout);
    tally.add(compare(oracle, layout, result,
                      verify::arithmetic_of(partials.dtype, ran->plan.kernel->probability_dtype)),
              "the workspace after a run", [&](StageElement& e) { e.split = split; });
  }
  return tally.report();
}

/// The partial results as they should be, in the kernels' format. Out of a range without keys is
/// NaN: it must not be read.
Partials oracle_partials(const RanCall& planned) {
  Partials made(planned.plan);
  for (std::int64_t split = 0; split < made.splits; ++split) {
    const reference::Oracle oracle = split_oracle(planned, split);
    for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
      const reference::RowId& row = oracle.rows[r];
      const std::int64_t at =
          made.row_of(planned.problem, split, row.b, row.h, packed_row(planned, row));
      store(made.lse.data(), made.dtype, at, oracle.lse[r]);
      for (std::int64_t c = 0; c < made.v_dim; ++c) {
        const double value =
            oracle.out[r * static_cast<std::size_t>(made.v_dim) + static_cast<std::size_t>(c)];
        store(made.out.data(), made.dtype, at * made.v_dim + c,
              oracle.lse[r] == -kInfinity ? std::nan("") : value);
      }
    }
  }
  return made;
}

/// What joining these partial results must give. Joining is itself attention, of one query per row
/// whose keys are the key ranges: their scores are the LSEs, their values the outs.
reference::Oracle merge_oracle(const RanCall& ran) {
  const Problem& p = ran.problem;
  const Tensors& t = ran.after.tensors;
  const Partials& partials = ran.partials;
  std::vector<reference::RowId> rows = reference::all_rows(p, t);
  const auto count = static_cast<std::int64_t>(rows.size());
  const std::int64_t splits = partials.splits, v_dim = p.v_dim;
  std::vector<double> lse(static_cast<std::size_t>(count * splits));
  std::vector<double> out(lse.size() * static_cast<std::size_t>(v_dim), 0.0);
  std::vector<float> sinks(rows.size());
  std::vector<reference::RowId> merged_rows(rows.size());
  for (std::int64_t r = 0; r < count; ++r) {
    const reference::RowId& row = rows[static_cast<std::size_t>(r)];
    merged_rows[static_cast<std::size_t>(r)] = {0, static_cast<std::int32_t>(r), 0};
    if (t.sinks.given()) {
      sinks[static_cast<std::size_t>(r)] =
          static_cast<float>(reference::element(t.sinks.data, DType::f32, row.h * p.sinks.head));
    }
    for (std::int64_t split = 0; split < splits; ++split) {
      const std::int64_t from = partials.row_of(p, split, row.b, row.h, packed_row(ran, row));
      const std::int64_t to = r * splits + split;
      lse[static_cast<std::size_t>(to)] =
          reference::element(partials.lse.data(), partials.dtype, from);
      if (lse[static_cast<std::size_t>(to)] == -kInfinity) continue;  // its out is not to be read
      for (std::int64_t c = 0; c < v_dim; ++c) {
        out[static_cast<std::size_t>(to * v_dim + c)] =
            reference::element(partials.out.data(), partials.dtype, from * v_dim + c);
      }
    }
  }
  const double one = 1;
  Problem merge;
  merge.batch = 1;
  merge.q_heads = merge.kv_heads = count;
  merge.q_len = 1;
  merge.kv_len = splits;
  merge.head_dim = 1;
  merge.v_dim = v_dim;
  merge.scale = 1;
  merge.options.partial = p.options.partial;
  merge.q = {DType::f64, 0, 0, 0, 0, 0};
  merge.k = {DType::f64, 0, 0, splits, 1, 0};
  merge.v = {DType::f64, 0, 0, splits * v_dim, v_dim, 1};
  merge.sinks.head = 1;
  Tensors tensors;
  tensors.q = view(&one, DType::f64, {1, 1, 1, 1});
  tensors.k = view(lse.data(), DType::f64, {1, count, splits, 1});
  tensors.v = view(out.data(), DType::f64, {1, count, splits, v_dim});
  if (t.sinks.given()) tensors.sinks = view(sinks.data(), DType::f32, {count});
  reference::Oracle oracle = reference::compute(merge, tensors, std::move(merged_rows));
  oracle.rows = std::move(rows);
  return oracle;
}

Result<StageReport> check_combine(CallRunner& runner, const HostCall& call) {
  Tally tally(Stage::combine);
  const Result<HostCall> probe = split_call(runner, call, tally.report().skipped);
  if (!probe.ok()) return probe.status();
  if (!tally.report().skipped.empty()) return tally.report();
  const Result<RanCall> ran = runner.run(*probe);
  if (!ran.ok()) return ran.status();
  const DType partial_dtype = ran->partials.dtype;
  const Arithmetic arithmetic =
      verify::arithmetic_of(ran->problem.out.dtype, partial_dtype);  // weights are not rounded

  const reference::Oracle whole = reference::compute(
      ran->problem, probe->tensors, reference::all_rows(ran->problem, probe->tensors));
  if (Status status = require_finite(whole); !status.ok()) return status;
  const Result<RanCall> joined = runner.combine(*probe, oracle_partials(*ran));
  if (!joined.ok()) return joined.status();
  tally.add(compare(whole, joined->problem, joined->after.tensors, arithmetic),
            "the oracle's partial results joined", [](StageElement&) {});
  // A kernel that joins its splits itself does it here; the others show that they call the above
  // with the right arguments.
  tally.add(compare(merge_oracle(*ran), ran->problem, ran->after.tensors, arithmetic),
            "the kernel's own partial results joined", [](StageElement&) {});
  return tally.report();
}

}  // namespace

const char* to_string(Stage stage) {
  switch (stage) {
    case Stage::scores: return "scores";
    case Stage::probabilities: return "probabilities";
    case Stage::pv: return "pv";
    case Stage::partials: return "partials";
    case Stage::combine: return "combine";
  }
  return "";
}

std::optional<Stage> stage_named(std::string_view name) {
  for (const Stage stage : kStages) {
    if (name == to_string(stage)) return stage;
  }
  return std::nullopt;
}

std::string to_string(const StageElement& e) {
  char text[160];
  std::snprintf(text, sizeof text, "batch %d, head %d, row %d", e.row.b, e.row.h, e.row.i);
  std::string words = text;
  if (e.split >= 0) words += ", split " + std::to_string(e.split);
  if (e.key >= 0) return words + ", key " + std::to_string(e.key);
  if (e.column >= 0) return words + ", column " + std::to_string(e.column);
  return words + ", LSE";
}

Status require_finite(const reference::Oracle& oracle) {
  const auto v_dim = static_cast<std::size_t>(oracle.v_dim);
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    const double* out = oracle.out.data() + r * v_dim;
    const bool out_finite =
        std::all_of(out, out + v_dim, [](double x) { return std::isfinite(x); });
    if (out_finite && (std::isfinite(oracle.lse[r]) || oracle.lse[r] == -kInfinity)) continue;
    return invalid_argument(
        "batch %d, head %d, row %d sees NaN or an infinity in q, k, v, bias or sinks; a stage can "
        "be read with finite inputs only",
        oracle.rows[r].b, oracle.rows[r].h, oracle.rows[r].i);
  }
  return {};
}

Result<ReadProbabilities> read_probabilities(
    CallRunner& runner, const HostCall& call, const std::vector<reference::RowId>& rows,
    const std::function<void(std::int64_t, const RanCall&)>& each) {
  ReadProbabilities read;
  read.p.resize(rows.size());
  read.lse.resize(rows.size());
  std::int64_t first = 0, keys = 1;  // at least one run, also where there is no key
  while (first < keys) {
    const Result<HostCall> probe = with_one_hot_values(call, first);
    if (!probe.ok()) return probe.status();
    const Result<RanCall> ran = runner.run(*probe);
    if (!ran.ok()) return ran.status();
    const Problem& p = ran->problem;
    keys = p.kv_len;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const reference::RowId& row = rows[r];
      const std::int64_t q_row = packed_row(*ran, row);
      const std::int64_t kv_len = reference::lengths_of(p, call.tensors, row.b).kv_len;
      const std::int64_t out = row.b * p.out.batch + row.h * p.out.head + q_row * p.out.row;
      read.p[r].resize(static_cast<std::size_t>(kv_len));
      for (std::int64_t j = first; j < std::min(first + p.v_dim, kv_len); ++j) {
        read.p[r][static_cast<std::size_t>(j)] = reference::element(
            ran->after.tensors.out.data, p.out.dtype, out + (j - first) * p.out.column);
      }
      read.lse[r] =
          reference::element(ran->after.tensors.lse.data, p.lse.dtype,
                             row.b * p.lse.batch + row.h * p.lse.head + q_row * p.lse.row);
    }
    if (each) each(first, *ran);
    first += p.v_dim;
  }
  return read;
}

Result<StageReport> check_stage(Stage stage, CallRunner& runner, const HostCall& call) {
  switch (stage) {
    case Stage::scores: return check_scores(runner, call);
    case Stage::probabilities: return check_probabilities(runner, call);
    case Stage::pv: return check_pv(runner, call);
    case Stage::partials: return check_partials(runner, call);
    case Stage::combine: return check_combine(runner, call);
  }
  return invalid_argument("stage %d: there is no such stage", static_cast<int>(stage));
}

}  // namespace flashcore::verify
