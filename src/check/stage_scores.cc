// Stage::scores: reads a score as log(P) + LSE.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check/stage_checks.h"
#include "verify/inputs/call_variants.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The power of two, at most 1, that brings every weight exp(score - max) into the upper half of
/// the exponent range of P's format. Smaller weights cannot be read back.
double readable_scale(const reference::Oracle& oracle, const Problem& problem,
                      const Tensors& tensors, const Arithmetic& arithmetic) {
  double range = 0;
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    double top = oracle.max[r];
    if (top == -kInfinity) continue;
    if (tensors.sinks.given() && !problem.options.partial) {
      top = std::max(top, reference::element(tensors.sinks.data, DType::f32,
                                             oracle.rows[r].h * problem.sinks.head));
    }
    for (const double score : oracle.scores[r]) {
      if (score != -kInfinity) range = std::max(range, top - score);
    }
  }
  const double limit = -0.5 * std::log(arithmetic.p_smallest);
  return range <= limit ? 1.0 : std::exp2(std::floor(std::log2(limit / range)));
}

/// Checks the score of one key, log(P) + LSE, against the sum of the bounds of both. The key is
/// column `c` of the one-hot oracle `columns`.
struct ScoreJudge {
  Tally& tally;
  const Arithmetic& arithmetic;
  const std::string& probe;
  std::int64_t wrong_p = 0;

  void judge(const reference::Oracle& columns, std::size_t r, std::int64_t c, StageElement e,
             double got_p, double got_lse) {
    e.got = got_p == 0 ? -kInfinity : std::log(got_p) + got_lse;
    if (e.want != -kInfinity) {
      const auto column = static_cast<std::size_t>(c);
      const double p = columns.out[r * static_cast<std::size_t>(columns.v_dim) + column];
      const double p_bound = out_bound(columns, r, column, arithmetic);
      if (!(p_bound < 0.5 * p)) {
        ++tally.report().unmeasured;
        return;
      }
      const double log_bound = -std::log1p(-p_bound / p);
      e.bound = log_bound + lse_bound(columns, r, arithmetic);
      if (!(std::fabs(std::log(got_p / p)) <= log_bound)) ++wrong_p;
    }
    tally.add(e, probe);
  }
};

/// Reads all scores of a row from calls over all keys.
Result<StageReport> check_scores_at_once(CallRunner& runner, const HostCall& probe,
                                         const Problem& problem, const reference::Oracle& oracle,
                                         const Arithmetic& arithmetic, const std::string& name) {
  const Result<ReadProbabilities> read = read_probabilities(runner, probe, oracle.rows);
  if (!read.ok()) return read.status();
  Tally tally(Stage::scores);
  ScoreJudge scores{tally, arithmetic, name};
  Tally lse(Stage::scores);
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    lse.add(
        {oracle.rows[r], -1, -1, -1, read->lse[r], oracle.lse[r], lse_bound(oracle, r, arithmetic)},
        name);
  }
  for (std::int64_t first = 0; first < problem.kv_len; first += problem.v_dim) {
    const reference::Oracle columns = one_hot_oracle(oracle, problem, probe.tensors, first);
    for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
      if (oracle.lse[r] == -kInfinity) continue;  // a row without keys has no scores
      const auto keys = static_cast<std::int64_t>(oracle.scores[r].size());
      for (std::int64_t j = first; j < std::min(first + problem.v_dim, keys); ++j) {
        const auto key = static_cast<std::size_t>(j);
        scores.judge(columns, r, j - first,
                     {oracle.rows[r], -1, j, -1, 0, oracle.scores[r][key], 0}, read->p[r][key],
                     read->lse[r]);
      }
    }
  }
  // A wrong score makes the LSE wrong too. Then the report names the key, not the LSE.
  tally.add(lse, scores.wrong_p == 0);
  StageReport& report = tally.report();
  if (report.wrong > 0 && scores.wrong_p == 0) {
    report.note =
        "P is correct: the LSE is wrong, or all scores of a row are off by the same number";
  }
  return report;
}

/// Reads the scores of every KV tile from its own split, so that no maximum is carried from tile to
/// tile. Skipped if the keys cannot be split into single tiles.
Result<StageReport> check_scores_by_tile(CallRunner& runner, HostCall probe, const Plan& single,
                                         const Arithmetic& arithmetic, const std::string& name) {
  Tally tally(Stage::scores);
  const std::int64_t tiles = (single.problem.kv_len + single.tile_k - 1) / single.tile_k;
  if (tiles < 2 || probe.options.reproducibility == Reproducibility::batch_invariant) {
    tally.report().skipped = "the keys fill one tile, or the call is batch-invariant";
    return tally.report();
  }
  probe.options.num_splits = static_cast<std::int32_t>(tiles);
  ScoreJudge scores{tally, arithmetic, name};
  std::vector<reference::Oracle> oracles;
  for (std::int64_t first = 0; first < single.problem.kv_len; first += single.problem.v_dim) {
    const Result<HostCall> one_hot = with_one_hot_values(probe, first);
    if (!one_hot.ok()) return one_hot.status();
    const Result<RanCall> ran = runner.run(*one_hot);
    if (!ran.ok()) return ran.status();
    if (ran->plan.keys_per_split != single.tile_k || ran->partials.splits < tiles) {
      tally.report().skipped = "the plan does not make every tile a split";
      return tally.report();
    }
    Problem part = ran->problem;
    part.options.partial = true;  // the combine step adds the sinks
    for (std::int64_t split = first / single.tile_k;
         split < tiles && split * single.tile_k < first + part.v_dim; ++split) {
      const std::int64_t begin = split * single.tile_k;
      while (static_cast<std::int64_t>(oracles.size()) <= split) {
        const auto next = static_cast<std::int64_t>(oracles.size()) * single.tile_k;
        oracles.push_back(compute_on_keys(part, probe.tensors,
                                          reference::all_rows(part, probe.tensors), next,
                                          next + single.tile_k, true));
      }
      const reference::Oracle& tile = oracles[static_cast<std::size_t>(split)];
      const reference::Oracle columns = one_hot_oracle(tile, part, probe.tensors, first - begin);
      for (std::size_t r = 0; r < tile.rows.size(); ++r) {
        if (tile.lse[r] == -kInfinity) continue;
        const reference::RowId& row = tile.rows[r];
        const Partials& partials = ran->partials;
        const std::int64_t at = partials.row_of(part, split, row.b, row.h, q_row_of(*ran, row));
        const double got_lse = reference::element(partials.lse.data(), partials.dtype, at);
        const std::int64_t end = begin + static_cast<std::int64_t>(tile.scores[r].size());
        for (std::int64_t j = std::max(first, begin); j < std::min(first + part.v_dim, end); ++j) {
          scores.judge(
              columns, r, j - first,
              {row, split, j, -1, 0, tile.scores[r][static_cast<std::size_t>(j - begin)], 0},
              reference::element(partials.out.data(), partials.dtype, at * part.v_dim + j - first),
              got_lse);
        }
      }
    }
  }
  return tally.report();
}

}  // namespace

Result<StageReport> check_scores(CallRunner& runner, const HostCall& call) {
  HostCall probe = with_wide_outputs(with_splits(call, 1));
  Result<Plan> plan = runner.plan(probe);
  if (!plan.ok()) return plan.status();
  const Arithmetic arithmetic =
      verify::arithmetic_of(plan->problem.out.dtype, plan->kernel->probability_dtype);
  Result<reference::Oracle> oracle = stages_of(plan->problem, probe);
  if (!oracle.ok()) return oracle.status();
  std::string name = "one-hot V";
  const double factor = readable_scale(*oracle, plan->problem, probe.tensors, arithmetic);
  if (factor < 1) {
    name += ", scores times 2^" + std::to_string(std::ilogb(factor));
    probe = with_scaled_scores(probe, factor);
    plan = runner.plan(probe);
    if (!plan.ok()) return plan.status();
    oracle = stages_of(plan->problem, probe);
    if (!oracle.ok()) return oracle.status();
  }
  Result<StageReport> at_once =
      check_scores_at_once(runner, probe, plan->problem, *oracle, arithmetic, name);
  if (!at_once.ok() || at_once->ok() || !at_once->note.empty()) return at_once;
  Result<StageReport> by_tile = check_scores_by_tile(runner, probe, *plan, arithmetic, name);
  if (!by_tile.ok() || !by_tile->skipped.empty() || !by_tile->ok()) return at_once;
  StageReport report = *by_tile;
  report.note = "correct within every tile, but " + std::to_string(at_once->wrong) + " of " +
                std::to_string(at_once->elements) +
                " are wrong over all tiles: a value carried from tile to tile is wrong";
  return report;
}

}  // namespace flashcore::verify
