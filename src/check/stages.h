// Finds the faulty stage of a fused kernel. Probe inputs make a stage visible in the outputs, over
// the whole tensor; it is compared with the reference of that stage, within the bounds of
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

/// In the order in which a kernel goes through them. The first three are read from plans with one
/// key range, so that a fault in joining does not show in them.
enum class Stage {
  scores,         ///< log(P) + LSE, with V one-hot: scale, softcap, ALiBi, bias, mask; and the LSE
  probabilities,  ///< P, with V one-hot: the online softmax
  pv,             ///< out, where P is known: uniform, and one key per query
  partials,       ///< out and LSE of each key range, from the workspace
  combine,        ///< joining partial results: the oracle's, and those the kernel left
  dequant,        ///< values of 8-bit q, k and v, each where nothing else can matter
};
/// Of any call; one with 8-bit tensors has dequant before them.
inline constexpr std::array kStages = {Stage::scores, Stage::probabilities, Stage::pv,
                                       Stage::partials, Stage::combine};

/// kStages, and dequant first where q, k or v is 8-bit.
std::vector<Stage> stages_of(const Tensors& tensors);

const char* to_string(Stage stage);
std::optional<Stage> stage_named(std::string_view name);

/// One value of a stage and its place.
struct StageElement {
  reference::RowId row{};
  std::int64_t split = -1;   ///< -1: of the whole
  std::int64_t key = -1;     ///< where the stage has a value per key,
  std::int64_t column = -1;  ///< or per column of V; neither: the LSE
  double got = 0, want = 0, bound = 0;
};

/// "row [b=0, h=1, i=3], key 17"
std::string to_string(const StageElement& element);

struct StageReport {
  Stage stage{};
  std::string skipped;          ///< why this stage cannot be read here; empty: it was
  std::string probe;            ///< of the worst element: under which inputs
  std::string reason;           ///< the first rule broken; empty: none
  std::string note;             ///< what else the errors show
  std::int64_t elements = 0;    ///< compared
  std::int64_t wrong = 0;       ///< over their bound, never written, or wrongly (not) finite
  std::int64_t unmeasured = 0;  ///< too small to be read
  double worst_ratio = 0;       ///< largest |error| over bound
  StageElement worst;

  bool ok() const { return reason.empty(); }
};

/// Needs finite inputs. Fails where the call cannot be run or its stages would not fit memory.
Result<StageReport> check_stage(Stage stage, CallRunner& runner, const HostCall& call);

/// Whether stages can be read: every score finite or -inf, every reference output finite.
Status require_finite(const reference::Oracle& oracle);

/// Where a probe's P was read back.
struct ReadProbabilities {
  std::vector<std::vector<double>> p;  ///< [rows][kv_len of the row]
  std::vector<double> lse;             ///< [rows]
};

/// Runs the call (with wide outputs) once per block of v_dim keys and reads P and the LSE of
/// `rows`. `each`, where given, sees every run.
Result<ReadProbabilities> read_probabilities(
    CallRunner& runner, const HostCall& call, const std::vector<reference::RowId>& rows,
    const std::function<void(std::int64_t first_key, const RanCall&)>& each = {});

}  // namespace flashcore::verify
