// Shared by all probes: shapes, calls, oracle, comparison, findings.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "verify/inputs/call_variants.h"
#include "verify/inputs/decimal.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Rows and columns of P in the report.
constexpr std::int64_t kEvidenceRows = 48, kEvidenceColumns = 96;

std::int64_t rounded_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

Evidence evidence_of(const HostCall& call, const CallResult& result, const Judged& judged) {
  const Tensors& t = call.tensors;
  Evidence e;
  e.title = describe(call);
  e.heads = t.q.shape[0] * t.q.shape[1];
  e.rows = t.q.shape[2];
  const std::int64_t v_dim = t.v.shape[3];
  e.error.assign(static_cast<std::size_t>(e.heads * e.rows), 0.0);
  e.by_column.assign(static_cast<std::size_t>(v_dim), 0.0);
  for (std::size_t at = 0; at < judged.ratio.size(); ++at) {
    const double ratio = std::min(judged.ratio[at], 1e30);
    double& of_row = e.error[at / static_cast<std::size_t>(v_dim)];
    double& of_column = e.by_column[at % static_cast<std::size_t>(v_dim)];
    of_row = std::max(of_row, ratio);
    of_column = std::max(of_column, ratio);
  }
  e.p_rows = std::min(e.rows, kEvidenceRows);
  e.p_columns = std::min(v_dim, kEvidenceColumns);
  const std::size_t head =
      judged.worst_at / static_cast<std::size_t>(v_dim) / static_cast<std::size_t>(e.rows);
  for (std::int64_t i = 0; i < e.p_rows; ++i) {
    for (std::int64_t c = 0; c < e.p_columns; ++c) {
      const auto at = (head * static_cast<std::size_t>(e.rows) + static_cast<std::size_t>(i)) *
                          static_cast<std::size_t>(v_dim) +
                      static_cast<std::size_t>(c);
      e.p_got.push_back(result.out[at]);
      e.p_want.push_back(judged.oracle.out[at]);
    }
  }
  return e;
}

}  // namespace

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string row_name(const HostCall& call, std::size_t row) {
  const auto rows = static_cast<std::size_t>(call.tensors.q.shape[2]);
  const auto heads = static_cast<std::size_t>(call.tensors.q.shape[1]);
  return "batch " + decimal(row / rows / heads) + ", head " + decimal(row / rows % heads) +
         ", row " + decimal(row % rows);
}

Shape ProbeSequence::shape(std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim,
                           bool wide) const {
  Shape s;
  s.batch = can.batch && wide ? 2 : 1;
  // With three query heads per KV head and two KV heads, h / 3, h % 2 and h / 2 all differ.
  s.q_heads = can.gqa ? (wide ? 6 : 2) : (wide ? 3 : 1);
  s.kv_heads = can.gqa ? s.q_heads / (wide ? 3 : 2) : s.q_heads;
  if (pinned) {
    s.batch = pinned->batch;
    s.q_heads = pinned->q_heads;
    s.kv_heads = pinned->kv_heads;
    q_len = pinned->q_len;
  }
  s.q_len = rounded_up(q_len, can.length_step);
  s.kv_len = rounded_up(kv_len, can.length_step);
  if (!can.cross) s.q_len = s.kv_len = std::max(s.q_len, s.kv_len);
  s.head_dim = s.v_dim = head_dim;
  if (pinned && pinned->head_dim == head_dim) s.v_dim = pinned->v_dim;
  return s;
}

Options ProbeSequence::base() const {
  Options options;
  options.num_splits = can.splits ? 1 : 0;
  options.causal = !can.full;
  return options;
}

HostCall ProbeSequence::call(const Shape& s, const Options& options) const {
  HostCall made = blank_call(s, options);
  const bool positions = options.causal || options.window_left >= 0 || options.window_right >= 0;
  if (positions && conventions.top_left) {
    made.place(&Tensors::q_start, DType::i32, {s.batch});
    std::memset(made.tensors.q_start.data, 0, static_cast<std::size_t>(s.batch) * 4);
  }
  return made;
}

reference::Oracle ProbeSequence::oracle(const HostCall& call, bool keep_stages) const {
  Options options = call.options;
  options.num_splits = 0;
  const Result<Problem> problem = make_problem(call.tensors, options);
  return reference::compute(*problem, call.tensors, reference::all_rows(*problem, call.tensors),
                            keep_stages, 1);
}

Judged ProbeSequence::judge(const HostCall& call, const CallResult& result) const {
  Judged j;
  j.oracle = oracle(call);
  const Arithmetic arithmetic = impl.arithmetic();
  const auto v_dim = static_cast<std::size_t>(j.oracle.v_dim);
  j.ratio.resize(result.out.size());
  double error2 = 0, want2 = 0;
  const std::size_t rows_of_head = static_cast<std::size_t>(call.tensors.q.shape[2]);
  double head_error2 = 0, head_bound2 = 0;
  const auto close_head = [&] {
    if (head_error2 > 0) {
      j.head_worst = std::max(j.head_worst, std::sqrt(head_error2 / head_bound2) / 0.5);
    }
    head_error2 = head_bound2 = 0;
  };
  for (std::size_t at = 0; at < result.out.size(); ++at) {
    const std::size_t row = at / v_dim;
    if (at > 0 && at % (v_dim * rows_of_head) == 0) close_head();
    const double bound = out_bound(j.oracle, row, at % v_dim, arithmetic);
    const double error = std::fabs(result.out[at] - j.oracle.out[at]);
    double& ratio = j.ratio[at];
    if (!std::isfinite(result.out[at])) {
      ratio = kInfinity;
      ++j.non_finite;
    } else {
      ratio = error / bound;
      error2 += error * error;
      want2 += j.oracle.out[at] * j.oracle.out[at];
      head_error2 += error * error;
      head_bound2 += bound * bound;
    }
    if (!(ratio <= 1)) ++j.wrong;
    if (ratio > j.worst) {
      j.worst = ratio;
      j.worst_at = at;
    }
  }
  close_head();
  j.relative_error = want2 > 0 ? std::sqrt(error2 / want2) : std::sqrt(error2);
  const double base = conventions.lse_base_2 ? std::log(2.0) : 1.0;
  for (std::size_t row = 0; row < result.lse.size(); ++row) {
    const double want = j.oracle.lse[row], got = result.lse[row] * base;
    if (std::isinf(want)) continue;  // a row without keys: a convention, reported separately
    const double ratio = std::fabs(got - want) / lse_bound(j.oracle, row, arithmetic);
    if (!(ratio <= 1)) ++j.lse_wrong;
    if (!(ratio <= j.lse_worst)) {
      j.lse_worst = std::isnan(ratio) ? kInfinity : ratio;
      j.lse_worst_at = row;
    }
  }
  return j;
}

Finding ProbeSequence::finding(FaultStage stage, std::string detail) const {
  return {stage, std::move(detail), impl.last_call(), {}};
}

Finding ProbeSequence::finding(FaultStage stage, std::string detail, const HostCall& call,
                               const CallResult& result, const Judged& judged) const {
  return {stage, std::move(detail), describe(call), evidence_of(call, result, judged)};
}

std::optional<Finding> failure_of(const ProbeSequence& probes, const CallResult& result,
                                  FaultStage stage) {
  if (result.kind == CallResult::Kind::failed) {
    return probes.finding(stage, "the call failed: " + result.message);
  }
  if (result.misshapen()) {
    return probes.finding(
        result.kind == CallResult::Kind::lse_misshapen ? FaultStage::lse : FaultStage::layout,
        result.message);
  }
  if (result.kind == CallResult::Kind::died) {
    // The call touched unmapped memory, so the fault is out of bounds at any stage.
    const bool memory = result.message.find("SIGSEGV") != std::string::npos ||
                        result.message.find("SIGBUS") != std::string::npos;
    return probes.finding(memory ? FaultStage::bounds : stage, result.message);
  }
  return std::nullopt;
}

std::vector<double> read_probabilities(ProbeSequence& probes, const HostCall& call,
                                       const Setting& setting) {
  const Tensors& t = call.tensors;
  const std::int64_t rows = t.q.shape[0] * t.q.shape[1] * t.q.shape[2];
  const std::int64_t n = t.k.shape[2], v_dim = t.v.shape[3];
  std::vector<double> p(static_cast<std::size_t>(rows * n));
  for (std::int64_t first = 0; first < n; first += v_dim) {
    const Result<HostCall> made = with_one_hot_values(call, first);
    if (!made.ok()) return {};
    HostCall probe(*made);
    const CallResult result = probes.impl.run(probe, setting);
    if (!result.ok()) return {};
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < std::min(v_dim, n - first); ++c) {
        p[static_cast<std::size_t>(r * n + first + c)] =
            result.out[static_cast<std::size_t>(r * v_dim + c)];
      }
    }
  }
  return p;
}

}  // namespace flashcore::verify
