// The verifier: takes any attention implementation through a callback and names the first stage
// that is wrong. docs/verify.md has the method, the vocabulary and the tolerances.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "flashcore/status.h"
#include "flashcore/verify_c.h"

namespace flashcore {

/// What may be wrong. The words of to_string() are a closed vocabulary.
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
};
FLASHCORE_API const char* to_string(FaultStage stage) noexcept;

/// One rung of the ladder.
struct ProbeResult {
  enum class Status : std::int32_t { passed, failed, not_probed };
  std::string name;  ///< "mask"; `only` takes it
  std::string asks;  ///< what it asks, in a few words
  Status status = Status::not_probed;
  std::string detail;  ///< of a failure, or why it was not probed
  std::int64_t calls = 0;
  double seconds = 0;
};

/// Where the errors of the failing call sit: what the HTML report draws.
struct Evidence {
  std::string title;
  std::int64_t heads = 0, rows = 0;  ///< batch and head together; rows are queries
  std::vector<double> error;         ///< [heads, rows]: largest |error| / bound
  std::vector<double> by_column;     ///< along key position (P was read) or output column
  bool columns_are_keys = false;
  std::int64_t p_rows = 0, p_columns = 0;
  std::vector<double> p_got, p_want;  ///< [p_rows, p_columns]: output or P read back, and expected
};

struct VerifyReport {
  std::string name, dtype;
  bool ok = false;
  FaultStage stage = FaultStage::none;
  std::string detail;      ///< one sentence of evidence
  std::string call;        ///< the smallest failing call found: shape, options, seed
  std::string reproducer;  ///< how to see just this again
  std::vector<ProbeResult> probes;
  std::vector<std::string> capabilities;  ///< "gqa: yes", "window: no (message)"
  std::vector<std::string> conventions;   ///< "causal: bottom-right"
  std::vector<std::string> not_probed;
  std::int64_t calls = 0;
  double seconds = 0;
  std::uint64_t seed = 0;
  std::string fingerprint;  ///< of the verifier's own sources
  Evidence evidence;
};

/// A call of the implementation: see flashcore_verify_function. The message of a refusal or failure
/// may be put into *message.
using VerifyFunction =
    std::function<std::int32_t(const flashcore_verify_call& call, std::string* message)>;

/// Verifies; an error Status means that not even a plain call could be run.
FLASHCORE_API Result<VerifyReport> verify_attention(const flashcore_verify_options& options,
                                                    const VerifyFunction& function);

/// For people, for programs, and one self-contained page.
FLASHCORE_API std::string to_text(const VerifyReport& report);
FLASHCORE_API std::string to_json(const VerifyReport& report);
FLASHCORE_API std::string to_html(const VerifyReport& report);

}  // namespace flashcore
