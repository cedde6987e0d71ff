// The verifier calls any attention implementation through a callback and names its first faulty
// stage. docs/verify.md has the method, the stages and the tolerances.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashcore/status.h"
#include "flashcore/verify_c.h"

namespace flashcore {

/// A faulty stage. The set of names that to_string() returns is fixed.
enum class FaultStage : std::int32_t {
  none = 0,
  determinism,
  coverage,
  layout,
  sum,
  pv,
  tail,
  scale,
  scores,
  precision,
  rescale,
  max,
  mask,
  combine,
  bounds,
  dequant,
  lse,
  unlocalised,
  // Stages of the backward pass.
  dv,
  dp,
  delta,
  ds,
  dq,
  dk,
  accumulate,
  dlse,
};
FLASHCORE_API const char* to_string(FaultStage stage) noexcept;

/// One probe of the sequence.
struct ProbeResult {
  enum class Status : std::int32_t { passed, failed, not_probed };
  std::string name;  ///< "mask"; a value of flashcore_verify_options::only
  std::string asks;  ///< the question that the probe answers, in a few words
  Status status = Status::not_probed;
  std::string detail;  ///< the failure, or the reason why it did not run
  std::int64_t calls = 0;
  double seconds = 0;
};

/// The errors of the failing call by position, for the HTML report.
struct Evidence {
  std::string title;
  std::int64_t heads = 0, rows = 0;  ///< heads of all batches; query rows
  std::vector<double> error;         ///< [heads, rows]: largest |error| / bound
  std::vector<double> by_column;     ///< per key if columns_are_keys, else per output column
  bool columns_are_keys = false;
  std::int64_t p_rows = 0, p_columns = 0;
  std::vector<double> p_got,
      p_want;  ///< [p_rows, p_columns]: measured output, P or dS, and expected
};

struct VerifyReport {
  std::string name, dtype;
  bool ok = false;
  FaultStage stage = FaultStage::none;
  std::string detail;      ///< one sentence of evidence
  std::string call;        ///< the smallest failing call found: shape, options, seed
  std::string reproducer;  ///< a command that repeats this call
  std::vector<ProbeResult> probes;
  std::vector<std::string> capabilities;  ///< "gqa: yes", "window: no (message)"
  std::vector<std::string> conventions;   ///< "causal: bottom-right"
  std::vector<std::string> not_probed;
  std::int64_t calls = 0;
  double seconds = 0;
  std::uint64_t seed = 0;
  std::string fingerprint;  ///< hash of the verifier's sources
  Evidence evidence;
};

/// Runs one call of the implementation, like flashcore_verify_function. May write the reason of a
/// failure to *message.
using VerifyFunction =
    std::function<std::int32_t(const flashcore_verify_call& call, std::string* message)>;

/// One call of its backward, like flashcore_verify_backward_function.
using VerifyBackwardFunction =
    std::function<std::int32_t(const flashcore_verify_backward_call& call, std::string* message)>;

/// Runs the probes. Returns an error Status if not even a call without options can run. Without
/// `backward`, options.backward is probed, unless it is null.
FLASHCORE_API Result<VerifyReport> verify_attention(const flashcore_verify_options& options,
                                                    const VerifyFunction& function,
                                                    const VerifyBackwardFunction& backward = {});

/// The report as text, JSON, and one self-contained HTML page.
FLASHCORE_API std::string to_text(const VerifyReport& report);
FLASHCORE_API std::string to_json(const VerifyReport& report);
FLASHCORE_API std::string to_html(const VerifyReport& report);

}  // namespace flashcore
