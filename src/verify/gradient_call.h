// Shared by the probes of the backward pass: calls, the oracle's gradients, comparison, findings.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "reference/oracle_bwd.h"
#include "verify/probe_sequence.h"

namespace flashcore::verify {

/// A backward call of the shape with all tensors zero.
GradientCall gradient_call(const ProbeSequence& probes, const Shape& shape, const Options& options);

/// Lengths of a sweep of gradients: fewer than of the forward pass, because the oracle visits every
/// pair of a query and a key.
std::vector<std::int64_t> gradient_lengths(const ProbeSequence& probes);

/// Fills q, k, v and dout with independent normal numbers.
void fill_random(GradientCall& call, double sigma, std::uint64_t seed);
void fill_random(std::vector<double>& values, double sigma, std::uint64_t seed,
                 std::uint64_t stream);

/// Sets the first column of q and k, so that all scores of a call with the default scale are
/// shifted by `shift`.
void shift_scores(GradientCall& call, double shift);

/// The correct results of a call.
struct ExpectedGradients {
  reference::Oracle forward;            ///< with stages
  reference::GradientOracle gradients;  ///< with stages
  const reference::Gradient& of(int gradient) const {
    return gradient == kDq ? gradients.dq : gradient == kDk ? gradients.dk : gradients.dv;
  }
};

/// One gradient compared with the oracle.
struct JudgedGradient {
  std::vector<double> bound, ratio;  ///< per element: bound, |error| / bound
  std::int64_t wrong = 0, non_finite = 0;
  double worst = 0, relative_error = 0;
  double rms = 0;  ///< largest over heads of the RMS error, relative to half of the bounds
  std::size_t worst_at = 0;
  bool ok() const { return wrong == 0 && rms <= 1; }
};

struct RanGradients {
  GradientResult result;
  ExpectedGradients expected;
  JudgedGradient judged[kGradients];
  bool ok() const {
    return result.ok() && judged[kDq].ok() && judged[kDk].ok() && judged[kDv].ok();
  }
  /// The gradient with the largest error relative to its bound.
  int worst() const;
};

/// Rounds the inputs of the call to their formats and computes the forward pass of the oracle,
/// whose results become inputs.
reference::Oracle prepare(const ProbeSequence& probes, GradientCall& call);

/// Prepares the call and runs it without a comparison.
GradientResult run_only(ProbeSequence& probes, GradientCall& call, const Setting& setting);

/// Runs the call and compares all gradients.
RanGradients run_gradients(ProbeSequence& probes, GradientCall& call, const Setting& setting);
inline RanGradients run_gradients(ProbeSequence& probes, GradientCall& call) {
  return run_gradients(probes, call, probes.impl.default_setting());
}

/// True if the errors of a wrong gradient are those of a narrow format: small, and not a few large
/// ones among correct elements.
bool is_imprecise(const JudgedGradient& judged);
/// The same for errors relative to their bounds.
bool are_few_large_errors(std::vector<double> ratio);

/// "dk of batch 0, head 1, row 3, column 2" for an element of a gradient.
std::string element_name(const GradientCall& call, int gradient, std::size_t at);

/// "dk of batch 0, head 1, row 3, column 2 is 0.5 instead of 0.25, 812 times its bound away".
std::string worst_element(const GradientCall& call, const RanGradients& ran, int gradient);

/// "12 of 64 elements of dq are never written", or nothing.
std::string unwritten_elements(const GradientResult& result);
/// True for the stages that remain the finding of a call with unwritten elements.
bool outranks_coverage(FaultStage stage);

/// The finding about one gradient of a call, with its errors as evidence. The stage is `coverage`
/// if elements were never written, unless it outranks that.
Finding gradient_finding(const ProbeSequence& probes, FaultStage stage, std::string detail,
                         const GradientCall& call, const RanGradients& ran, int gradient);

/// The finding for a call that failed, like failure_of().
std::optional<Finding> failure_of(const ProbeSequence& probes, const GradientResult& result,
                                  FaultStage stage);

/// The finding about a write outside the outputs in any call so far.
std::optional<Finding> stray_write(const ProbeSequence& probes);

/// The probes of the backward pass, in order.
Finding probe_grad_coverage(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_determinism(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_tail(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_layout(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_dv(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_dp(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_delta(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_ds(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_lse(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_max(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_accumulate(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_mask(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_window(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_scale(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_softcap(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_dlse(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_bounds(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_sizes(ProbeSequence& probes, std::int64_t head_dim);
Finding probe_grad_random(ProbeSequence& probes, std::int64_t head_dim);

/// Restricts the capabilities to those of the backward pass. Returns lines about what it lacks. An
/// error status: every call was refused.
Discovery discover_backward(ProbeSequence& probes, const flashcore_verify_options& options);

}  // namespace flashcore::verify
