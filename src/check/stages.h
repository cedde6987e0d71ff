// Finds the faulty stage of a fused kernel. Probe inputs make the output equal one stage of the
// kernel, over the whole tensor. The stage is compared with the oracle's, within the bounds of
// verify/inputs/compare.h.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/call_runner.h"
#include "verify/inputs/compare.h"

namespace flashcore::verify {

/// In the order of a kernel, except dequant. The first three use plans with one split, so that a
/// fault in the combine step does not affect them.
enum class Stage {
  scores,         ///< log(P) + LSE, with V one-hot: scale, softcap, ALiBi, bias, mask; and the LSE
  probabilities,  ///< P, with V one-hot: the online softmax
  pv,             ///< out with a known P: uniform, then one key per query
  partials,       ///< out and LSE of each KV split, from the workspace
  combine,        ///< combined partial results: the oracle's, then the kernel's own
  dequant,        ///< values of 8-bit q, k and v, with inputs that isolate each of them
};
/// The stages of every call. A call with 8-bit tensors has dequant before them.
inline constexpr std::array kStages = {Stage::scores, Stage::probabilities, Stage::pv,
                                       Stage::partials, Stage::combine};

/// kStages, preceded by dequant if q, k or v is 8-bit.
std::vector<Stage> stages_of(const Tensors& tensors);

const char* to_string(Stage stage);
std::optional<Stage> stage_named(std::string_view name);

/// One value of a stage and its coordinates.
struct StageElement {
  reference::RowId row{};
  std::int64_t split = -1;   ///< -1: result over all keys
  std::int64_t key = -1;     ///< set if the stage has a value per key
  std::int64_t column = -1;  ///< set if it has a value per column of V; neither set: the LSE
  double got = 0, want = 0, bound = 0;
};

/// "batch 0, head 1, row 3, key 17"
std::string to_string(const StageElement& element);

struct StageReport {
  Stage stage{};
  std::string skipped;          ///< reason why the stage cannot be read; empty if it was read
  std::string probe;            ///< inputs of the worst element
  std::string reason;           ///< first rule that is broken; empty if the stage is correct
  std::string note;             ///< a further conclusion from the errors
  std::int64_t elements = 0;    ///< compared elements
  std::int64_t wrong = 0;       ///< over the bound, never written, or finite on one side only
  std::int64_t unmeasured = 0;  ///< P too small to read a score from it
  double worst_ratio = 0;       ///< largest |error| / bound
  StageElement worst;

  bool ok() const { return reason.empty(); }
};

/// Needs finite inputs. Fails if the call cannot run or has too many scores (2^27).
Result<StageReport> check_stage(Stage stage, CallRunner& runner, const HostCall& call);

/// Fails unless every output of the oracle is finite and every LSE is finite or -inf. Otherwise
/// stages cannot be read.
Status require_finite(const reference::Oracle& oracle);

/// P and LSE that were read with one-hot V.
struct ReadProbabilities {
  std::vector<std::vector<double>> p;  ///< [rows][kv_len of the row]
  std::vector<double> lse;             ///< [rows]
};

/// Runs the call, which has wide outputs, once per v_dim keys. Returns P and the LSE of `rows`.
/// Calls `each`, if given, after every run.
Result<ReadProbabilities> read_probabilities(
    CallRunner& runner, const HostCall& call, const std::vector<reference::RowId>& rows,
    const std::function<void(std::int64_t first_key, const RanCall&)>& each = {});

}  // namespace flashcore::verify
