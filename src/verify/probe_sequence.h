// The probe sequence. Each probe relies only on stages that earlier probes have found correct, so
// the first probe that fails names the faulty stage. docs/verify.md explains the order.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "verify/implementation.h"
#include "verify/inputs/probe_inputs.h"

namespace flashcore::verify {

/// Features of the implementation, declared or discovered (discover.cc).
struct Capabilities {
  bool batch = true, gqa = true, cross = true, full = true, causal = true, window = true,
       scale = true, softcap = true, splits = true, lse = true, strides = true, v_dim = true,
       dlse = true;
  bool wide_values = false;  ///< gradients with v_dim > head_dim
  // The verifier does not require these of a forward pass. If the forward pass is correct with one,
  // the gradients are probed with it.
  bool strided_columns = false, strided_rows = false;  ///< rows: of the LSE
  bool zero_scale = false, negative_scale = false;
  std::int64_t length_step = 1;  ///< all lengths are multiples of this
  std::vector<std::int64_t> head_dims;
  /// Head dims of the backward pass with few probes, and v_dims at the first head dim.
  std::vector<std::int64_t> other_dims, other_v_dims;
};

struct Conventions {
  double empty_lse = -std::numeric_limits<double>::infinity();  ///< of a row that sees no key
  bool gradients_vary = false;  ///< bits of gradients differ from call to call, within rounding
  bool top_left = false;        ///< causal alignment: query 0 at key 0
  bool lse_base_2 = false;
};

/// The fault that a probe found: its stage and one sentence. Stage none: no fault.
struct Finding {
  FaultStage stage = FaultStage::none;
  std::string detail, call;
  Evidence evidence;
  bool is_weak = false;  ///< a later finding is clearer, if there is one
  bool found() const { return stage != FaultStage::none; }
};

/// A result compared with the oracle.
struct Judged {
  reference::Oracle oracle;
  std::vector<double> ratio;  ///< per element of out: |error| / bound; infinity if not finite
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
  bool deterministic = false;  ///< gradients promise the same bits in every call
  /// If set, every shape has this batch, heads, q_len and v_dim: reproduces the failure of one
  /// shape.
  std::optional<Shape> pinned = std::nullopt;

  /// The nearest shape the implementation accepts: equal lengths without cross attention, one KV
  /// head per query head without GQA. `wide` adds batch and heads.
  Shape shape(std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim,
              bool wide = true) const;
  /// Options of every call: one KV split if the implementation supports splits, causal if it
  /// supports nothing else.
  Options base() const;
  HostCall call(const Shape& shape, const Options& options) const;
  HostCall call(const Shape& shape) const { return call(shape, base()); }
  reference::Oracle oracle(const HostCall& call, bool keep_stages = false) const;
  Judged judge(const HostCall& call, const CallResult& result) const;
  std::int64_t main_dim() const { return can.head_dims.front(); }

  /// A finding about the last call.
  Finding finding(FaultStage stage, std::string detail) const;
  Finding finding(FaultStage stage, std::string detail, const HostCall& call,
                  const CallResult& result, const Judged& judged) const;
};

/// The finding for a call that failed, under the stage of the probe; empty for a refusal.
std::optional<Finding> failure_of(const ProbeSequence& probes, const CallResult& result,
                                  FaultStage stage);

/// Reads P of a call with one-hot V, in one run per v_dim keys: [batch, q_heads, q_len, kv_len].
/// Empty if a run failed.
std::vector<double> read_probabilities(ProbeSequence& probes, const HostCall& call,
                                       const Setting& setting);
inline std::vector<double> read_probabilities(ProbeSequence& probes, const HostCall& call) {
  return read_probabilities(probes, call, probes.impl.default_setting());
}

/// "batch 0, head 1, row 3", for an index into [batch, heads, q_len].
std::string row_name(const HostCall& call, std::size_t row);
std::string number(double value);

// The probes. Each runs at one head dim and returns an empty Finding if it passes.
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

/// Result of discover().
struct Discovery {
  std::vector<std::string> capabilities, conventions;
  Status status;  ///< not ok: no call works
  Finding fault;  ///< fault of the first call that does not fail
};
Discovery discover(ProbeSequence& probes, const flashcore_verify_options& options);

/// Which probes run. `gradients`: those of the backward pass alone; the forward pass is known to be
/// correct.
enum class ProbeSet { all, gradients };
Result<VerifyReport> run_probes(const flashcore_verify_options& options, CallTarget& target,
                                ProbeSet set = ProbeSet::all);

}  // namespace flashcore::verify
