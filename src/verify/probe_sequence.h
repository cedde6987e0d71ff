// The probe ladder: probes in an order in which each relies only on stages already cleared, so that
// the first one to fail names the stage. docs/verify.md has the reasoning.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "verify/implementation.h"
#include "verify/inputs/probe_inputs.h"

namespace flashcore::verify {

/// What the implementation can do: declared, or found out by asking (discover.cc).
struct Capabilities {
  bool batch = true, gqa = true, cross = true, full = true, causal = true, window = true,
       scale = true, softcap = true, splits = true, lse = true, strides = true, v_dim = true;
  std::int64_t length_step = 1;  ///< lengths must be multiples of this
  std::vector<std::int64_t> head_dims;
};

struct Conventions {
  bool top_left = false;  ///< causal: query 0 stands at key 0, not at the end
  bool lse_base_2 = false;
};

/// The verdict of a probe: a stage and one sentence, or nothing.
struct Finding {
  FaultStage stage = FaultStage::none;
  std::string detail, call;
  Evidence evidence;
  bool found() const { return stage != FaultStage::none; }
};

/// An result beside the oracle's.
struct Judged {
  reference::Oracle oracle;
  std::vector<double> ratio;  ///< per element of out: |error| / bound; infinity where not finite
  std::int64_t wrong = 0, non_finite = 0, lse_wrong = 0;
  double worst = 0, lse_worst = 0, head_worst = 0;
  double relative_error = 0;
  std::size_t worst_at = 0, lse_worst_at = 0;
  bool ok() const { return wrong == 0 && head_worst <= 1; }
};

struct ProbeSequence {
  Implementation& impl;
  Capabilities can;
  Conventions conventions;
  std::uint64_t seed = 1;
  bool quick = false;
  /// Batch, heads, q_len and v_dim every shape has: to look at a failure of one shape only.
  std::optional<Shape> pinned = std::nullopt;

  /// The nearest shape the implementation takes: equal lengths where it has no cross attention, one
  /// KV head per query head where it has no groups, ...
  Shape shape(std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim,
              bool wide = true) const;
  /// Options every call has: one key range where that can be asked for, causal where the
  /// implementation knows nothing else.
  Options base() const;
  HostCall call(const Shape& shape, const Options& options) const;
  HostCall call(const Shape& shape) const { return call(shape, base()); }
  reference::Oracle oracle(const HostCall& call, bool keep_stages = false) const;
  Judged judge(const HostCall& call, const CallResult& result) const;
  std::int64_t main_dim() const { return can.head_dims.front(); }

  /// A finding about the call last run.
  Finding finding(FaultStage stage, std::string detail) const;
  Finding finding(FaultStage stage, std::string detail, const HostCall& call,
                  const CallResult& result, const Judged& judged) const;
};

/// Most probes: run, and if the call failed say so under the probe's own stage.
std::optional<Finding> failure_of(const ProbeSequence& probes, const CallResult& result,
                                  FaultStage stage);

/// P of every row of a call, read with one-hot values in as many runs as it takes:
/// [batch, q_heads, q_len, kv_len]. Empty where a run failed.
std::vector<double> read_probabilities(ProbeSequence& probes, const HostCall& call,
                                       const Setting& setting);
inline std::vector<double> read_probabilities(ProbeSequence& probes, const HostCall& call) {
  return read_probabilities(probes, call, probes.impl.default_setting());
}

/// "row 3 of batch 0, head 1", for an index into [batch, heads, q_len].
std::string row_name(const HostCall& call, std::size_t row);
std::string number(double value);

// The rungs. Each takes a head dim; nothing found is an empty Finding.
Finding probe_coverage(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_determinism(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_encodings(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_layout(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_uniform(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_key_layout(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_scores(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_rescale(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_max(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_mask(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_window(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_softcap(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_combine(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_bounds(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_scales(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_lse(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_random(ProbeSequence& probes, std::int64_t head_dim);

/// Fills in what was not declared.
struct Discovery {
  std::vector<std::string> capabilities, conventions;
  Status status;  ///< not ok: not even a plain call works
  Finding fault;  ///< of a plain call that works, but not as it should
};
Discovery discover(ProbeSequence& probes, const flashcore_verify_options& options);

Result<VerifyReport> run_probes(const flashcore_verify_options& options, CallTarget& target);

}  // namespace flashcore::verify
