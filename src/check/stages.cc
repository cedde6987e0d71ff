#include "check/stages.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>

#include "check/stage_checks.h"
#include "core/error.h"
#include "verify/inputs/call_variants.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// The oracle stores scores and probabilities of all rows in 8 bytes each: at most 1 GiB each.
constexpr double kMaxScores = 1 << 27;

Arithmetic arithmetic_of(const RanCall& ran) {
  return verify::arithmetic_of(ran.problem.out.dtype, ran.plan.kernel->probability_dtype);
}

/// compare() of the output only. Stage::scores checks the LSE.
Comparison compare_out(const reference::Oracle& oracle, const RanCall& ran) {
  Tensors result = ran.after.tensors;
  result.lse = {};
  return compare(oracle, ran.problem, result, arithmetic_of(ran));
}

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

/// Adds the report of one probe to the report of the stage.
void add_report(StageReport& all, const StageReport& one, const char* probe) {
  all.elements += one.elements;
  all.wrong += one.wrong;
  all.unmeasured += one.unmeasured;
  if (all.probe.empty() || (all.ok() && !one.ok()) ||
      (all.ok() == one.ok() && one.worst_ratio > all.worst_ratio)) {
    all.worst = one.worst;
    all.probe = std::string(probe) + ", " + one.probe;
    all.reason = one.reason;
    all.note = one.note;
  }
  all.worst_ratio = std::max(all.worst_ratio, one.worst_ratio);
}

Result<StageReport> check_dequant(CallRunner& runner, const HostCall& call) {
  StageReport all;
  all.stage = Stage::dequant;
  const Tensors& t = call.tensors;
  if (stages_of(t).front() != Stage::dequant) {
    all.skipped = "q, k and v are not 8-bit";
    return all;
  }
  const HostCall single = with_splits(call, 1);
  if (is_8bit(t.v.dtype)) {
    const HostCall probe = with_selected_keys(single);
    const Result<RanCall> ran = runner.run(probe);
    if (!ran.ok()) return ran.status();
    const reference::Oracle oracle = reference::compute(
        ran->problem, probe.tensors, reference::all_rows(ran->problem, probe.tensors));
    if (Status status = require_finite(oracle); !status.ok()) return status;
    Tally tally(Stage::dequant);
    tally.add(compare_out(oracle, *ran), "P one key per query", [](StageElement&) {});
    add_report(all, tally.report(), "V");
  }
  if (is_8bit(t.k.dtype)) {
    const Result<StageReport> keys = check_scores(runner, with_one_column_queries(single));
    if (!keys.ok()) return keys;
    add_report(all, *keys, "K, one column per query");
  }
  if (is_8bit(t.q.dtype)) {
    const Result<StageReport> queries = check_scores(runner, with_one_column_keys(single));
    if (!queries.ok()) return queries;
    add_report(all, *queries, "Q, one column per key");
  }
  return all;
}

}  // namespace

std::vector<Stage> stages_of(const Tensors& t) {
  std::vector<Stage> stages(kStages.begin(), kStages.end());
  if (is_8bit(t.q.dtype) || is_8bit(t.k.dtype) || is_8bit(t.v.dtype)) {
    stages.insert(stages.begin(), Stage::dequant);
  }
  return stages;
}

HostCall with_splits(const HostCall& call, std::int32_t splits) {
  HostCall probe = call;
  probe.options.num_splits = splits;
  return probe;
}

std::int64_t q_row_of(const RanCall& ran, const reference::RowId& row) {
  return reference::lengths_of(ran.problem, ran.after.tensors, row.b).q_row + row.i;
}

Result<reference::Oracle> stages_of(const Problem& problem, const HostCall& call) {
  std::vector<reference::RowId> rows = reference::all_rows(problem, call.tensors);
  const double scores = static_cast<double>(rows.size()) * static_cast<double>(problem.kv_len);
  if (scores > kMaxScores) {
    return unsupported(
        "%zu rows of %lld keys have %.3g scores; a stage check stores all of them, at most %.3g; "
        "give fewer heads or shorter lengths",
        rows.size(), static_cast<long long>(problem.kv_len), scores, kMaxScores);
  }
  reference::Oracle oracle = reference::compute(problem, call.tensors, std::move(rows), true);
  if (Status status = require_finite(oracle); !status.ok()) return status;
  return oracle;
}

const char* to_string(Stage stage) {
  switch (stage) {
    case Stage::scores: return "scores";
    case Stage::probabilities: return "probabilities";
    case Stage::pv: return "pv";
    case Stage::partials: return "partials";
    case Stage::combine: return "combine";
    case Stage::dequant: return "dequant";
  }
  return "";
}

std::optional<Stage> stage_named(std::string_view name) {
  for (const Stage stage : kStages) {
    if (name == to_string(stage)) return stage;
  }
  if (name == to_string(Stage::dequant)) return Stage::dequant;
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
        "batch %d, head %d, row %d reads NaN or an infinity from q, k, v, bias or sinks; stages "
        "can be read with finite inputs only",
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
  std::int64_t first = 0, keys = 1;  // at least one run, even without keys
  while (first < keys) {
    const Result<HostCall> probe = with_one_hot_values(call, first);
    if (!probe.ok()) return probe.status();
    const Result<RanCall> ran = runner.run(*probe);
    if (!ran.ok()) return ran.status();
    const Problem& p = ran->problem;
    keys = p.kv_len;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const reference::RowId& row = rows[r];
      const std::int64_t q_row = q_row_of(*ran, row);
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
    case Stage::dequant: return check_dequant(runner, call);
  }
  return invalid_argument("stage %d does not exist", static_cast<int>(stage));
}

}  // namespace flashcore::verify
