// Probes coverage and determinism: every output is written, and the same call returns the same
// bits.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/inputs/lengths.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {
namespace {

HostCall constant_value_call(const ProbeSequence& probes, const Shape& shape, double value) {
  HostCall call = probes.call(shape);
  fill_random(call.tensors.q, 1, probes.seed, 31);
  fill_random(call.tensors.k, 1, probes.seed, 32);
  fill(call.tensors.v, [&](auto, auto, auto, auto) { return value; });
  return call;
}

/// Coverage at one q_len.
struct Covered {
  std::size_t unwritten = 0;     ///< elements that keep their old content
  std::size_t stale = 0;         ///< V = 0, but the output is a number other than 0
  std::size_t empty = 0;         ///< V = 1, but the output is exactly 0
  std::size_t not_a_number = 0;  ///< V = 0 gives NaN where V = 1 gives a number
  std::string where;
  bool ok() const { return unwritten + stale + empty + not_a_number == 0; }
};

std::string element_name(const HostCall& call, std::size_t at) {
  const auto v_dim = static_cast<std::size_t>(call.tensors.v.shape[3]);
  return row_name(call, at / v_dim) + ", column " + decimal(at % v_dim);
}

Covered inspect_coverage(const HostCall& call, const CallResult& ones, const CallResult& zeros) {
  Covered c;
  const auto note = [&](std::size_t& count, std::size_t at) {
    if (c.ok()) c.where = element_name(call, at);
    ++count;
  };
  const bool all_empty =
      std::all_of(ones.out.begin(), ones.out.end(), [](double x) { return x == 0; });
  for (std::size_t at = 0; at < zeros.out.size(); ++at) {
    if (zeros.is_unwritten[at] != 0 || ones.is_unwritten[at] != 0) {
      note(c.unwritten, at);
    } else if (std::isfinite(zeros.out[at]) && zeros.out[at] != 0) {
      note(c.stale, at);
    } else if (std::isnan(zeros.out[at]) && std::isfinite(ones.out[at])) {
      note(c.not_a_number, at);
    } else if (ones.out[at] == 0 && !all_empty) {
      note(c.empty, at);
    }
  }
  return c;
}

/// True if repeated calls return the same bits.
bool is_repeatable(ProbeSequence& probes, HostCall& call, int times) {
  const CallResult first = probes.impl.run(call);
  for (int i = 1; i < times; ++i) {
    if (probes.impl.run(call).bits != first.bits) return false;
  }
  return true;
}

Finding explain(ProbeSequence& probes, const Covered& c, const LengthVerdict& lengths,
                HostCall& zeros) {
  if (!is_repeatable(probes, zeros, 4)) {
    return probes.finding(FaultStage::determinism,
                          "the same call returns different bits: the set of written elements "
                          "changes from run to run");
  }
  if (c.not_a_number > 0) {
    return probes.finding(FaultStage::dequant,
                          "an all-zero V gives NaN, V = 1 does not: the code divides by a scale of "
                          "0; use a scale of 1 for an all-zero tensor");
  }
  // Stale content depends on earlier calls, so the failing lengths carry no information.
  if (c.stale > 0 && c.unwritten == 0) {
    fill(zeros.tensors.k, [](auto, auto, auto, auto) { return 0.0; });
    const CallResult result = probes.impl.run(zeros);
    if (result.ok() &&
        std::all_of(result.out.begin(), result.out.end(), [](double x) { return x == 0; })) {
      return probes.finding(FaultStage::layout, "V = 0, but " + decimal(c.stale) +
                                                    " outputs are 0 only if K is 0: K is read "
                                                    "instead of V (first at " +
                                                    c.where + ")");
    }
    return probes.finding(FaultStage::coverage,
                          "V = 0, but " + decimal(c.stale) +
                              " outputs are not 0: they contain values from before the call "
                              "(first at " +
                              c.where + ")");
  }
  std::string what;
  if (c.unwritten > 0) {
    what = decimal(c.unwritten) + " output elements are never written";
  } else {
    what = "V = 1, but " + decimal(c.empty) + " outputs are exactly 0, as if never written";
  }
  what += " (first at " + c.where + ")";
  if (lengths.depends_on_length) {
    return probes.finding(FaultStage::tail, lengths.text + ": " + what);
  }
  return probes.finding(FaultStage::coverage, what);
}

}  // namespace

Finding probe_coverage(ProbeSequence& probes, std::int64_t head_dim) {
  LengthResults results;
  std::optional<std::pair<std::int64_t, Covered>> first;
  std::optional<Finding> failure;
  int deaths = 0;
  const bool main = head_dim == probes.main_dim();
  for (const std::int64_t q_len : lengths_to_try(true, probes.can.length_step)) {
    if (q_len > 130 && probes.quick) continue;
    // The main head dim covers the tile edges; other head dims may miss columns of their own.
    if (!main && probes.quick && q_len > 4 && q_len % 16 != 1) continue;
    const Shape shape = probes.shape(q_len, 1, head_dim, q_len <= 3 || q_len == 17);
    if (results.contains(shape.q_len)) continue;
    // V = 1 runs before V = 0, so that the second call detects values of the first.
    HostCall ones = constant_value_call(probes, shape, 1),
             zeros = constant_value_call(probes, shape, 0);
    const CallResult with_ones = probes.impl.run(ones);
    // A number in the output before the call detects additions to old content.
    Setting filled = probes.impl.default_setting();
    filled.out_before = 777;
    const CallResult with_zeros = probes.impl.run(zeros, filled);
    for (const CallResult* result : {&with_ones, &with_zeros}) {
      const auto f = failure_of(probes, *result, FaultStage::coverage);
      if (!f) continue;
      results[shape.q_len] = false;
      if (!failure) failure = f;
      if (result->kind == CallResult::Kind::died) ++deaths;
    }
    if (deaths >= kMaxDeaths) break;
    if (!with_ones.ok() || !with_zeros.ok()) continue;
    const Covered covered = inspect_coverage(zeros, with_ones, with_zeros);
    results[shape.q_len] = covered.ok();
    if (!covered.ok() && !first) first = {shape.q_len, covered};
  }
  if (failure) {
    const LengthVerdict lengths = judge_lengths(results, "q_len");
    if (lengths.depends_on_length) {
      failure->stage = FaultStage::tail;
      failure->detail = lengths.text + ": " + failure->detail;
    }
    return *failure;
  }
  if (!first) return {};
  HostCall zeros = constant_value_call(probes, probes.shape(first->first, 1, head_dim, true), 0);
  return explain(probes, first->second, judge_lengths(results, "q_len"), zeros);
}

Finding probe_determinism(ProbeSequence& probes, std::int64_t head_dim) {
  const int times = probes.quick ? 8 : 20;
  for (const auto& [q_len, kv_len] : {std::pair{9, 70}, {40, 300}, {130, 130}}) {
    if (probes.quick && q_len > 100) continue;
    Options options = probes.base();
    if (probes.can.splits && kv_len == 300) options.num_splits = 4;
    HostCall call = probes.call(probes.shape(q_len, kv_len, head_dim, kv_len == 70), options);
    for (const TensorView* t : {&call.tensors.q, &call.tensors.k, &call.tensors.v}) {
      fill_random(*t, 1, probes.seed,
                  33 + static_cast<std::uint64_t>(t->data != call.tensors.q.data));
    }
    Setting setting = probes.impl.default_setting();
    setting.lse = probes.can.lse;
    const CallResult first = probes.impl.run(call, setting);
    if (auto f = failure_of(probes, first, FaultStage::determinism)) return *f;
    if (!first.ok()) continue;
    for (int i = 1; i < times; ++i) {
      const CallResult again = probes.impl.run(call, setting);
      if (auto f = failure_of(probes, again, FaultStage::determinism)) return *f;
      if (again.bits == first.bits) continue;
      std::size_t differing = 0;
      for (std::size_t at = 0; at < first.out.size(); ++at) {
        const bool both_nan = std::isnan(first.out[at]) && std::isnan(again.out[at]);
        differing += first.out[at] != again.out[at] && !both_nan ? 1 : 0;
      }
      return probes.finding(FaultStage::determinism, "run " + decimal(i + 1) +
                                                         " of the same call differs from the "
                                                         "first in " +
                                                         decimal(differing) + " of " +
                                                         decimal(first.out.size()) + " outputs");
    }
  }
  return {};
}

}  // namespace flashcore::verify
