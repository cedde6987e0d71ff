// Stage::partials and Stage::combine: the partial results of KV splits, and their combination.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check/stage_checks.h"
#include "verify/inputs/call_variants.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Splits of a call with num_splits 0.
constexpr std::int32_t kDefaultSplits = 3;

/// The call with several KV splits. Sets `why_not` if it cannot be split.
Result<HostCall> split_call(CallRunner& runner, const HostCall& call, std::string& why_not) {
  if (call.options.reproducibility == Reproducibility::batch_invariant) {
    why_not = "a batch-invariant plan does not split keys";
    return call;
  }
  const std::int32_t requested = call.options.num_splits;
  HostCall probe = with_lse(with_splits(call, requested == 0 ? kDefaultSplits : requested));
  const Result<Plan> plan = runner.plan(probe);
  if (!plan.ok()) return plan.status();
  if (plan->splits < 2) {
    why_not =
        requested == 1 ? "num_splits is 1" : "the keys fill one tile, or are too few to split";
  }
  return probe;
}

reference::Oracle split_oracle(const RanCall& ran, std::int64_t split) {
  const std::int64_t begin = std::min(split * ran.plan.keys_per_split, ran.problem.kv_len);
  const std::int64_t end = std::min(begin + ran.plan.keys_per_split, ran.problem.kv_len);
  return compute_on_keys(ran.problem, ran.after.tensors,
                         reference::all_rows(ran.problem, ran.after.tensors), begin, end);
}

/// Views the partial results of one split as the outputs of a call. Sets `layout` to match.
Tensors outputs_of_split(const RanCall& ran, Partials& partials, std::int64_t split,
                         Problem& layout) {
  const Problem& p = ran.problem;
  const std::int64_t rows = p.q_varlen ? p.total_q : p.q_len;
  const std::int64_t size = size_of(partials.dtype);
  layout = p;
  layout.lse = {partials.dtype, 0, p.q_varlen ? 0 : p.q_heads * rows, rows, 1, 0};
  layout.out = {partials.dtype, 0, layout.lse.batch * p.v_dim, rows * p.v_dim, p.v_dim, 1};
  Tensors result = ran.after.tensors;
  result.out.data = partials.out.data() + split * partials.rows * partials.v_dim * size;
  result.lse =
      view(partials.lse.data() + split * partials.rows * size, partials.dtype, {partials.rows});
  return result;
}

/// The oracle's partial results in the kernels' format. The out of a split without keys is NaN: the
/// combine step must not read it.
Partials oracle_partials(const RanCall& planned) {
  Partials made(planned.plan);
  for (std::int64_t split = 0; split < made.splits; ++split) {
    const reference::Oracle oracle = split_oracle(planned, split);
    for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
      const reference::RowId& row = oracle.rows[r];
      const std::int64_t at =
          made.row_of(planned.problem, split, row.b, row.h, q_row_of(planned, row));
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

/// Stage::partials reports such a row. Its combination is NaN too and says nothing about the
/// combine step.
bool has_nan_partial(const RanCall& ran, const reference::RowId& row) {
  const Partials& partials = ran.partials;
  for (std::int64_t split = 0; split < partials.splits; ++split) {
    const std::int64_t at = partials.row_of(ran.problem, split, row.b, row.h, q_row_of(ran, row));
    if (std::isnan(reference::element(partials.lse.data(), partials.dtype, at))) return true;
  }
  return false;
}

/// The correct combination of the kernel's partial results. Combining is attention with one query
/// per row: the splits are its keys, the LSEs their scores, the outs their values.
reference::Oracle combine_oracle(const RanCall& ran) {
  const Problem& p = ran.problem;
  const Tensors& t = ran.after.tensors;
  const Partials& partials = ran.partials;
  std::vector<reference::RowId> rows = reference::all_rows(p, t);
  std::erase_if(rows, [&](const reference::RowId& row) { return has_nan_partial(ran, row); });
  const auto count = static_cast<std::int64_t>(rows.size());
  const std::int64_t splits = partials.splits, v_dim = p.v_dim;
  std::vector<double> lse(static_cast<std::size_t>(count * splits));
  std::vector<double> out(lse.size() * static_cast<std::size_t>(v_dim), 0.0);
  std::vector<float> sinks(rows.size());
  std::vector<reference::RowId> combined_rows(rows.size());
  for (std::int64_t r = 0; r < count; ++r) {
    const reference::RowId& row = rows[static_cast<std::size_t>(r)];
    combined_rows[static_cast<std::size_t>(r)] = {0, static_cast<std::int32_t>(r), 0};
    if (t.sinks.given()) {
      sinks[static_cast<std::size_t>(r)] =
          static_cast<float>(reference::element(t.sinks.data, DType::f32, row.h * p.sinks.head));
    }
    for (std::int64_t split = 0; split < splits; ++split) {
      const std::int64_t from = partials.row_of(p, split, row.b, row.h, q_row_of(ran, row));
      const std::int64_t to = r * splits + split;
      lse[static_cast<std::size_t>(to)] =
          reference::element(partials.lse.data(), partials.dtype, from);
      if (lse[static_cast<std::size_t>(to)] == -kInfinity) continue;  // out is undefined
      for (std::int64_t c = 0; c < v_dim; ++c) {
        out[static_cast<std::size_t>(to * v_dim + c)] =
            reference::element(partials.out.data(), partials.dtype, from * v_dim + c);
      }
    }
  }
  const double one = 1;
  Problem combine;
  combine.batch = 1;
  combine.q_heads = combine.kv_heads = count;
  combine.q_len = 1;
  combine.kv_len = splits;
  combine.head_dim = 1;
  combine.v_dim = v_dim;
  combine.scale = 1;
  combine.options.partial = p.options.partial;
  combine.q = {DType::f64, 0, 0, 0, 0, 0};
  combine.k = {DType::f64, 0, 0, splits, 1, 0};
  combine.v = {DType::f64, 0, 0, splits * v_dim, v_dim, 1};
  combine.sinks.head = 1;
  Tensors tensors;
  tensors.q = view(&one, DType::f64, {1, 1, 1, 1});
  tensors.k = view(lse.data(), DType::f64, {1, count, splits, 1});
  tensors.v = view(out.data(), DType::f64, {1, count, splits, v_dim});
  if (t.sinks.given()) tensors.sinks = view(sinks.data(), DType::f32, {count});
  reference::Oracle oracle = reference::compute(combine, tensors, std::move(combined_rows));
  oracle.rows = std::move(rows);
  return oracle;
}

}  // namespace

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
    // If a split has no keys for a row, the combine step does not read its out: ignore the value.
    for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
      if (oracle.lse[r] != -kInfinity) continue;
      const reference::RowId& row = oracle.rows[r];
      const std::int64_t at =
          partials.row_of(ran->problem, split, row.b, row.h, q_row_of(*ran, row));
      for (std::int64_t c = 0; c < partials.v_dim; ++c) {
        store(partials.out.data(), partials.dtype, at * partials.v_dim + c, 0.0);
      }
    }
    Problem layout;
    const Tensors result = outputs_of_split(*ran, partials, split, layout);
    tally.add(compare(oracle, layout, result,
                      verify::arithmetic_of(partials.dtype, ran->plan.kernel->probability_dtype)),
              "partial results in the workspace", [&](StageElement& e) { e.split = split; });
  }
  return tally.report();
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
      verify::arithmetic_of(ran->problem.out.dtype, partial_dtype);  // unrounded weights

  const reference::Oracle whole = reference::compute(
      ran->problem, probe->tensors, reference::all_rows(ran->problem, probe->tensors));
  if (Status status = require_finite(whole); !status.ok()) return status;
  const Result<RanCall> combined = runner.combine(*probe, oracle_partials(*ran));
  if (!combined.ok()) return combined.status();
  tally.add(compare(whole, combined->problem, combined->after.tensors, arithmetic),
            "the oracle's partial results combined", [](StageElement&) {});
  // Checks the combine modes inside a kernel, and for the others the arguments of the combine step.
  tally.add(compare(combine_oracle(*ran), ran->problem, ran->after.tensors, arithmetic),
            "the kernel's partial results combined", [](StageElement&) {});
  return tally.report();
}

}  // namespace flashcore::verify
