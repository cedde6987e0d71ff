// Partial results of key ranges, and joining them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check/stage_parts.h"
#include "verify/inputs/call_variants.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Key ranges where the call does not say.
constexpr std::int32_t kDefaultSplits = 3;

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

/// Such a row is the partials' matter: whatever it is joined to, it tells nothing of the joining.
bool has_nan_partial(const RanCall& ran, const reference::RowId& row) {
  const Partials& partials = ran.partials;
  for (std::int64_t split = 0; split < partials.splits; ++split) {
    const std::int64_t at = partials.row_of(ran.problem, split, row.b, row.h, packed_row(ran, row));
    if (std::isnan(reference::element(partials.lse.data(), partials.dtype, at))) return true;
  }
  return false;
}

/// What joining these partial results must give. Joining is itself attention, of one query per row
/// whose keys are the key ranges: their scores are the LSEs, their values the outs.
reference::Oracle merge_oracle(const RanCall& ran) {
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

}  // namespace flashcore::verify
