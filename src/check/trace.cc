#include "check/trace.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check/stages.h"
#include "core/error.h"
#include "verify/inputs/call_variants.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double ratio_of(double got, double want, double bound) {
  if (got == want) return 0;
  if (!std::isfinite(got) || !std::isfinite(want)) return kInfinity;
  return std::fabs(got - want) / bound;
}

/// Reads out and lse of one row after a run, or of split `tile.split` if there are several.
void read_state(const RanCall& ran, const reference::RowId& row, TracedTile& tile) {
  const Problem& p = ran.problem;
  const std::int64_t q_row = reference::lengths_of(p, ran.after.tensors, row.b).q_row + row.i;
  const Partials& partials = ran.partials;
  tile.out.resize(static_cast<std::size_t>(p.v_dim));
  const bool split = partials.splits > 1;
  const std::int64_t at = split ? partials.row_of(p, tile.split, row.b, row.h, q_row)
                                : row.b * p.lse.batch + row.h * p.lse.head + q_row * p.lse.row;
  tile.lse.got = split ? reference::element(partials.lse.data(), partials.dtype, at)
                       : reference::element(ran.after.tensors.lse.data, p.lse.dtype, at);
  const std::int64_t out =
      split ? at * p.v_dim : row.b * p.out.batch + row.h * p.out.head + q_row * p.out.row;
  for (std::int64_t c = 0; c < p.v_dim; ++c) {
    tile.out[static_cast<std::size_t>(c)] =
        split ? reference::element(partials.out.data(), partials.dtype, out + c)
              : reference::element(ran.after.tensors.out.data, p.out.dtype, out + c * p.out.column);
  }
}

void compare_state(const RanCall& ran, const reference::Oracle& oracle, TracedTile& tile) {
  const Arithmetic arithmetic =
      arithmetic_of(ran.problem.out.dtype, ran.plan.kernel->probability_dtype);
  tile.max.want = oracle.max[0];
  tile.sum.want = oracle.sum[0];
  tile.lse.want = oracle.lse[0];
  tile.lse_bound = lse_bound(oracle, 0, arithmetic);
  tile.want_out = oracle.out;
  for (std::size_t c = 0; c < tile.out.size(); ++c) {
    tile.out_bounds.push_back(out_bound(oracle, 0, c, arithmetic));
    // The out of a split without keys for the row is undefined.
    if (tile.lse.want == -kInfinity && ran.partials.splits > 1) tile.out[c] = 0;
  }
}

/// Reads P and scores of the tile's keys from `truncated`, whose keys end with the tile. The
/// oracle's key 0 is key `first`.
Status read_keys(CallRunner& runner, const HostCall& truncated, const reference::RowId& row,
                 const reference::Oracle& oracle, std::int64_t first, TracedTile& tile) {
  for (std::int64_t begin = tile.begin; begin < tile.end;) {
    const Result<HostCall> probe = with_one_hot_values(truncated, begin);
    if (!probe.ok()) return probe.status();
    const Result<RanCall> ran = runner.run(*probe);
    if (!ran.ok()) return ran.status();
    TracedTile read;
    read.split = tile.split;
    read_state(*ran, row, read);
    const std::int64_t end = std::min(begin + ran->problem.v_dim, tile.end);
    for (std::int64_t j = begin; j < end; ++j) {
      const auto at = static_cast<std::size_t>(j - first);
      TracedKey key;
      key.key = j;
      key.score.want = oracle.scores[0][at];
      key.probability.want = oracle.probabilities[0][at];
      // A row without visible keys up to here has no P; in the workspace its out is undefined.
      key.probability.got =
          oracle.lse[0] == -kInfinity ? 0.0 : read.out[static_cast<std::size_t>(j - begin)];
      key.score.got =
          key.probability.got == 0 ? -kInfinity : std::log(key.probability.got) + read.lse.got;
      tile.keys.push_back(key);
    }
    begin = end;
  }
  return {};
}

}  // namespace

double TracedTile::worst_ratio() const {
  double worst = ratio_of(lse.got, lse.want, lse_bound);
  if (!out.empty()) {
    const std::size_t c = worst_column();
    worst = std::max(worst, ratio_of(out[c], want_out[c], out_bounds[c]));
  }
  return worst;
}

std::size_t TracedTile::worst_column() const {
  std::size_t worst = 0;
  double worst_ratio = -1;
  for (std::size_t c = 0; c < out.size(); ++c) {
    const double ratio = ratio_of(out[c], want_out[c], out_bounds[c]);
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      worst = c;
    }
  }
  return worst;
}

bool Trace::ok() const {
  return std::all_of(tiles.begin(), tiles.end(),
                     [](const TracedTile& tile) { return tile.worst_ratio() <= 1; });
}

Result<Trace> trace_row(CallRunner& runner, const HostCall& call, reference::RowId row) {
  HostCall base = with_wide_outputs(call);
  base.tensors.sinks = {};
  Trace trace;
  trace.row = row;
  const Result<Plan> plan = runner.plan(base);
  if (!plan.ok()) return plan.status();
  trace.plan = *plan;
  base.options.num_splits = plan->splits;  // the same splits for every truncated call
  const Problem& p = plan->problem;
  const auto is_below = [](std::int32_t value, std::int64_t end) {
    return value >= 0 && value < end;
  };
  if (!is_below(row.b, p.batch) || !is_below(row.h, p.q_heads) ||
      !is_below(row.i, reference::lengths_of(p, base.tensors, row.b).q_len)) {
    return invalid_argument(
        "row %d,%d,%d does not exist: the call has %lld sequences, %lld heads%s", row.b, row.h,
        row.i, static_cast<long long>(p.batch), static_cast<long long>(p.q_heads),
        is_below(row.b, p.batch)
            ? (", " + std::to_string(reference::lengths_of(p, base.tensors, row.b).q_len) +
               " queries in that sequence")
                  .c_str()
            : "");
  }
  const reference::Oracle whole = reference::compute(p, base.tensors, {row});
  if (Status status = require_finite(whole); !status.ok()) return status;

  const std::int64_t keys = reference::lengths_of(p, base.tensors, row.b).kv_len;
  for (std::int64_t split = 0; split < plan->splits; ++split) {
    const std::int64_t first = plan->splits > 1 ? std::min(split * plan->keys_per_split, keys) : 0;
    const std::int64_t last =
        plan->splits > 1 ? std::min(first + plan->keys_per_split, keys) : keys;
    double max = -kInfinity;
    for (std::int64_t begin = first; begin < last; begin += plan->tile_k) {
      TracedTile tile;
      tile.split = split;
      tile.begin = begin;
      tile.end = std::min(begin + plan->tile_k, last);
      const HostCall truncated = with_keys_up_to(base, p, tile.end);
      const Result<RanCall> ran = runner.run(truncated);
      if (!ran.ok()) return ran.status();
      const reference::Oracle oracle =
          compute_on_keys(p, base.tensors, {row}, first, tile.end, true);
      read_state(*ran, row, tile);
      compare_state(*ran, oracle, tile);
      if (Status s = read_keys(runner, truncated, row, oracle, first, tile); !s.ok()) return s;
      for (const TracedKey& key : tile.keys) {
        if (key.score.got > max) max = key.score.got;
      }
      tile.max.got = max;
      tile.sum.got = max == -kInfinity ? 0.0 : std::exp(tile.lse.got - max);
      trace.tiles.push_back(std::move(tile));
    }
  }
  return trace;
}

}  // namespace flashcore::verify
