#include "verify/probe_sequence.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/error.h"
#include "verify/inputs/decimal.h"

namespace flashcore {

const char* to_string(FaultStage stage) noexcept {
  static constexpr const char* kNames[] = {
      "",     "determinism", "coverage", "layout",    "sum",     "pv",
      "tail", "scale",       "scores",   "precision", "rescale", "max",
      "mask", "combine",     "bounds",   "dequant",   "lse",     "unlocalised"};
  return kNames[static_cast<int>(stage)];
}

namespace verify {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Probe {
  const char* name;
  const char* asks;
  Finding (*probe)(ProbeSequence&, std::int64_t head_dim);
  /// Why it cannot be asked of this implementation; empty where it can.
  std::string (*why_not)(const ProbeSequence&);
  enum class Dims { first, two_if_quick, all } dims;  ///< head dims it is run at
};

std::string always(const ProbeSequence&) { return ""; }
std::string if_8bit(const ProbeSequence& l) {
  return is_8bit(l.impl.formats().dtype) ? "" : "the inputs are not 8-bit";
}
std::string if_causal(const ProbeSequence& l) {
  return l.can.causal ? "" : "it has no causal mask";
}
std::string if_window(const ProbeSequence& l) { return l.can.window ? "" : "it has no window"; }
std::string if_softcap(const ProbeSequence& l) { return l.can.softcap ? "" : "it has no softcap"; }
std::string if_splits(const ProbeSequence& l) {
  return l.can.splits ? "" : "it has no parameter for the number of splits";
}
std::string if_lse(const ProbeSequence& l) { return l.can.lse ? "" : "it returns no LSE"; }

using Dims = Probe::Dims;

/// In this order: a rung relies on those above it.
const Probe kProbes[] = {
    {"codes", "is every 8-bit code its value?", probe_encodings, if_8bit, Dims::first},
    {"coverage", "is every output written, from a clean start?", probe_coverage, always,
     Dims::two_if_quick},
    {"determinism", "does the same call give the same bits?", probe_determinism, always,
     Dims::first},
    {"layout", "one key: is V read, and out written, at the right place?", probe_layout, always,
     Dims::all},
    {"uniform", "Q = 0: do all keys weigh 1/n, at every length?", probe_uniform, always,
     Dims::two_if_quick},
    {"key_layout", "Q = 0: are all keys read from their own head?", probe_key_layout, always,
     Dims::two_if_quick},
    {"scores", "are the scores read back from P the right ones?", probe_scores, always, Dims::all},
    {"softcap", "are they with a softcap?", probe_softcap, if_softcap, Dims::first},
    {"rescale", "ascending scores: is what came before rescaled?", probe_rescale, always,
     Dims::two_if_quick},
    {"max", "large scores: does exp() stay in range?", probe_max, always, Dims::first},
    {"mask", "causal: does every query see its keys, and no others?", probe_mask, if_causal,
     Dims::two_if_quick},
    {"window", "does every query see its window?", probe_window, if_window, Dims::first},
    {"combine", "are partial results of key ranges joined rightly?", probe_combine, if_splits,
     Dims::first},
    {"bounds", "does anything outside the tensors matter?", probe_bounds, always,
     Dims::two_if_quick},
    {"scales", "is each head's 8-bit scale its own?", probe_scales, if_8bit, Dims::first},
    {"lse", "is the LSE that of the scores?", probe_lse, if_lse, Dims::two_if_quick},
    {"random", "many shapes and three input scales: anything else?", probe_random, always,
     Dims::first},
};

Result<Format> format_of(const char* what, const char* name, Format otherwise) {
  if (name == nullptr) return otherwise;
  const std::optional<Format> format = format_named(name);
  if (format) return *format;
  return invalid_argument("%s is \"%s\"; wanted f64, f32, f16, bf16, e4m3, e5m2, int8 or byte",
                          what, name);
}

Result<ImplementationFormats> formats_of(const flashcore_verify_options& o) {
  ImplementationFormats f;
  const Result<Format> dtype = format_of("dtype", o.dtype, Format::f32);
  if (!dtype.ok()) return dtype.status();
  f.dtype = *dtype;
  const Result<Format> out =
      format_of("out_dtype", o.out_dtype, is_8bit(f.dtype) ? Format::f32 : f.dtype);
  if (!out.ok()) return out.status();
  f.out = *out;
  if (is_8bit(f.out)) return invalid_argument("out_dtype: an 8-bit output cannot be judged");
  const Result<Format> arithmetic = format_of("arithmetic", o.arithmetic, f.dtype);
  if (!arithmetic.ok()) return arithmetic.status();
  f.arithmetic = *arithmetic;
  return f;
}

/// Runs one rung at every head dim it is for.
Finding run_probe(ProbeSequence& probes, const Probe& probe) {
  const std::size_t most = probe.dims == Dims::first                          ? 1
                           : probe.dims == Dims::two_if_quick && probes.quick ? 2
                                                                              : SIZE_MAX;
  for (std::size_t i = 0; i < std::min(most, probes.can.head_dims.size()); ++i) {
    const std::int64_t d = probes.can.head_dims[i];
    if (Finding f = probe.probe(probes, d); f.found()) return f;
  }
  return {};
}

/// A fault that comes and goes is one of determinism, whatever it looks like when it is there: a
/// rung that failed is climbed again. Not those that themselves compare calls, nor one that ends
/// processes: that costs up to a call's limit each time.
Finding run_and_confirm(ProbeSequence& probes, const Probe& probe) {
  const std::int64_t deaths = probes.impl.deaths();
  const Finding first = run_probe(probes, probe);
  const bool compares_calls = probe.probe == probe_coverage || probe.probe == probe_determinism ||
                              probe.probe == probe_random;
  if (!first.found() || compares_calls || probes.impl.deaths() > deaths) return first;
  const Finding again = run_probe(probes, probe);
  if (again.stage == first.stage && again.detail == first.detail) return first;
  Finding f = first;
  f.stage = FaultStage::determinism;
  f.detail = "asked again it is " + (again.found() ? "\"" + again.detail + "\"" : "right") +
             " instead of \"" + first.detail + "\"";
  return f;
}

void note_not_probed(const ProbeSequence& probes, VerifyReport& report) {
  const struct {
    bool can;
    const char* what;
  } all[] = {{probes.can.batch, "batches of more than one"},
             {probes.can.gqa, "grouped heads"},
             {probes.can.cross, "q_len other than kv_len"},
             {probes.can.full, "attention without a causal mask"},
             {probes.can.scale, "a scale other than the default"},
             {probes.can.strides, "strides other than compact"},
             {probes.can.v_dim, "v_dim other than head_dim"}};
  for (const auto& one : all) {
    if (!one.can) report.not_probed.emplace_back(one.what);
  }
  for (const ProbeResult& probe : report.probes) {
    if (probe.status == ProbeResult::Status::not_probed) {
      report.not_probed.push_back(probe.name + ": " + probe.detail);
    }
  }
  if (probes.impl.refused() > 0) {
    report.not_probed.push_back(decimal(probes.impl.refused()) +
                                " calls were refused, the first: " + probes.impl.first_refusal());
  }
  report.not_probed.emplace_back("the backward pass");
}

}  // namespace

Result<VerifyReport> run_probes(const flashcore_verify_options& o, CallTarget& target) {
  const Clock::time_point start = Clock::now();
  const Result<ImplementationFormats> formats = formats_of(o);
  if (!formats.ok()) return formats.status();
  const std::string layout = o.layout != nullptr ? o.layout : "bhsd";
  if (layout != "bhsd" && layout != "bshd") {
    return invalid_argument("layout is \"%s\"; wanted bhsd or bshd", layout.c_str());
  }
  const std::string only = o.only != nullptr ? o.only : "";
  if (!only.empty() && std::none_of(std::begin(kProbes), std::end(kProbes),
                                    [&](const Probe& r) { return only == r.name; })) {
    std::string names;
    for (const Probe& r : kProbes) names += std::string(names.empty() ? "" : ", ") + r.name;
    return invalid_argument("only is \"%s\"; wanted one of %s", only.c_str(), names.c_str());
  }
  Implementation impl(target, *formats,
                      layout == "bshd" ? MemoryLayout::rows_first : MemoryLayout::heads_first);
  ProbeSequence probes{impl, {}, {}, o.seed, o.quick != 0};
  Discovery found = discover(probes, o);
  if (!found.status.ok()) return found.status;
  impl.forget_refusals();

  VerifyReport report;
  report.name = o.name != nullptr ? o.name : "attention";
  report.dtype = to_string(formats->dtype);
  report.seed = o.seed;
  report.capabilities = std::move(found.capabilities);
  report.conventions = std::move(found.conventions);
  report.ok = true;
  const auto fail = [&](const Finding& finding) {
    report.ok = false;
    report.stage = finding.stage;
    report.detail = finding.detail;
    report.call = finding.call;
    report.evidence = finding.evidence;
  };
  if (found.fault.found()) fail(found.fault);
  std::int32_t number = 0;
  for (const Probe& probe : kProbes) {
    ++number;
    ProbeResult result{probe.name, probe.asks, ProbeResult::Status::not_probed, "", 0, 0};
    result.detail = probe.why_not(probes);
    if (!report.ok) {
      result.detail =
          found.fault.found() ? "not even a plain call is right" : "it relies on what failed above";
    }
    if (!only.empty() && only != probe.name) result.detail = "only " + only + " was asked for";
    if (result.detail.empty()) {
      if (o.progress != nullptr) {
        o.progress(probe.name, number, static_cast<std::int32_t>(std::size(kProbes)),
                   o.progress_user);
      }
      const Clock::time_point begun = Clock::now();
      const std::int64_t calls = impl.calls();
      const Finding finding = run_and_confirm(probes, probe);
      result.calls = impl.calls() - calls;
      result.seconds = seconds_since(begun);
      result.status = finding.found() ? ProbeResult::Status::failed : ProbeResult::Status::passed;
      if (finding.found()) {
        result.detail = finding.detail;
        fail(finding);
        report.reproducer = "only = \"" + std::string(probe.name) +
                            "\", seed = " + decimal(o.seed) + ": " + finding.call;
      }
    }
    report.probes.push_back(std::move(result));
  }
  note_not_probed(probes, report);
  report.calls = impl.calls();
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace verify
}  // namespace flashcore
