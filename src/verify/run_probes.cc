#include "verify/probe_sequence.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/error.h"
#include "verify/gradient_call.h"
#include "verify/inputs/decimal.h"
#include "verify/probe_list.h"

namespace flashcore {

const char* to_string(FaultStage stage) noexcept {
  static constexpr const char* kNames[] = {
      "",       "determinism", "coverage",  "layout",      "sum", "pv",   "tail",
      "scale",  "scores",      "precision", "rescale",     "max", "mask", "combine",
      "bounds", "dequant",     "lse",       "unlocalised", "dv",  "dp",   "delta",
      "ds",     "dq",          "dk",        "accumulate",  "dlse"};
  return kNames[static_cast<int>(stage)];
}

namespace verify {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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
  if (is_8bit(f.out))
    return invalid_argument(
        "out_dtype is 8-bit; wanted f64, f32, f16 or bf16: an 8-bit output cannot be judged");
  const Result<Format> arithmetic = format_of("arithmetic", o.arithmetic, f.dtype);
  if (!arithmetic.ok()) return arithmetic.status();
  f.arithmetic = *arithmetic;
  return f;
}

using Dims = Probe::Dims;

/// Runs one probe at each of its head dims.
Finding run_probe(ProbeSequence& probes, const Probe& probe) {
  const std::size_t max_dims = probe.dims == Dims::first                          ? 1
                               : probe.dims == Dims::two_if_quick && probes.quick ? 2
                                                                                  : SIZE_MAX;
  for (std::size_t i = 0; i < std::min(max_dims, probes.can.head_dims.size()); ++i) {
    const std::int64_t d = probes.can.head_dims[i];
    if (Finding f = probe.run(probes, d); f.found()) return f;
  }
  return {};
}

/// Repeats a probe that failed: an intermittent fault belongs to stage determinism. Does not repeat
/// a probe that compares repeated calls itself. Does not repeat one that ended a process, which may
/// take until the deadline each time.
Finding run_and_confirm(ProbeSequence& probes, const Probe& probe) {
  const std::int64_t deaths = probes.impl.deaths();
  const Finding first = run_probe(probes, probe);
  if (!first.found() || probe.compares_calls || probes.impl.deaths() > deaths) return first;
  const Finding again = run_probe(probes, probe);
  if (again.stage == first.stage && again.detail == first.detail) return first;
  Finding f = first;
  f.stage = FaultStage::determinism;
  f.is_weak = false;
  f.detail = "repeating the probe gives " +
             (again.found() ? "\"" + again.detail + "\"" : "no fault") + " instead of \"" +
             first.detail + "\"";
  return f;
}

void note_not_probed(const ProbeSequence& probes, VerifyReport& report) {
  const struct {
    bool can;
    const char* name;
  } all[] = {{probes.can.batch, "batch > 1"},
             {probes.can.gqa, "GQA"},
             {probes.can.cross, "q_len != kv_len"},
             {probes.can.full, "attention without a causal mask"},
             {probes.can.scale, "scales other than the default"},
             {probes.can.strides, "non-compact strides"},
             {probes.can.v_dim, "v_dim != head_dim"}};
  for (const auto& one : all) {
    if (!one.can) report.not_probed.emplace_back(one.name);
  }
  for (const ProbeResult& probe : report.probes) {
    if (probe.status == ProbeResult::Status::not_probed) {
      report.not_probed.push_back(probe.name + ": " + probe.detail);
    }
  }
  if (probes.impl.refused() > 0) {
    report.not_probed.push_back(decimal(probes.impl.refused()) +
                                " calls were refused; the first: " + probes.impl.first_refusal());
  }
  if (!probes.impl.has_backward()) report.not_probed.emplace_back("the backward pass");
}

/// Fails if `only` names no probe.
Status check_probe_name(const std::string& only) {
  std::string names;
  for (const auto& list : {forward_probes(), gradient_probes()}) {
    for (const Probe& probe : list) {
      if (only.empty() || only == probe.name) return {};
      names += std::string(names.empty() ? "" : ", ") + probe.name;
    }
  }
  return invalid_argument("only is \"%s\"; wanted one of %s", only.c_str(), names.c_str());
}

void note_finding(const Finding& finding, const char* probe, VerifyReport& report) {
  report.ok = false;
  report.stage = finding.stage;
  report.detail = finding.detail;
  report.call = finding.call;
  report.evidence = finding.evidence;
  if (probe == nullptr) return;
  report.reproducer =
      "only = \"" + std::string(probe) + "\", seed = " + decimal(report.seed) + ": " + finding.call;
}

/// Runs a probe and adds its time, calls and finding to the report.
/// Returns the finding, if it is weak.
Finding run_into(ProbeSequence& probes, const Probe& probe, ProbeResult& result,
                 VerifyReport& report) {
  const Clock::time_point start = Clock::now();
  const std::int64_t calls = probes.impl.calls();
  const Finding finding = run_and_confirm(probes, probe);
  result.calls = probes.impl.calls() - calls;
  result.seconds = seconds_since(start);
  result.status = finding.found() ? ProbeResult::Status::failed : ProbeResult::Status::passed;
  if (!finding.found()) return {};
  result.detail = finding.detail;
  if (finding.is_weak) return finding;
  note_finding(finding, probe.name, report);
  return {};
}

/// One run of the verifier: which probes, and the report they fill.
struct Run {
  const flashcore_verify_options& options;
  std::string only;
  VerifyReport& report;
  std::int32_t number = 0, count = 0;  ///< of probes, for progress
  Finding weak_finding{};              ///< the first, reported if there is no other
  const char* weak_probe = nullptr;

  /// Runs the probes of a list in order, until one fails. `before` is the reason not to run any.
  void run_list(ProbeSequence& probes, std::span<const Probe> list, const std::string& before) {
    for (const Probe& probe : list) {
      ++number;
      ProbeResult result{probe.name, probe.question, ProbeResult::Status::not_probed, "", 0, 0};
      result.detail = probe.why_not(probes);
      if (!report.ok) result.detail = "relies on the stage that failed";
      if (!before.empty()) result.detail = before;
      if (!only.empty() && only != probe.name) result.detail = "only " + only + " was requested";
      if (result.detail.empty()) {
        if (options.progress != nullptr) {
          options.progress(probe.name, number, count, options.progress_user);
        }
        Finding weak = run_into(probes, probe, result, report);
        if (weak.found() && !weak_finding.found()) {
          weak_finding = std::move(weak);
          weak_probe = probe.name;
        }
      }
      report.probes.push_back(std::move(result));
    }
    if (report.ok && weak_finding.found()) note_finding(weak_finding, weak_probe, report);
  }

  /// The backward pass, after the forward pass has passed.
  void run_backward(ProbeSequence probes) {
    const bool wanted = only.empty() || only.starts_with("grad_");
    std::string why_not;
    if (is_8bit(probes.impl.formats().dtype)) {
      why_not = "8-bit inputs have no gradients";
    } else if (report.ok && wanted) {
      Discovery found = discover_backward(probes, options);
      probes.impl.forget_refusals();
      report.capabilities.insert(report.capabilities.end(), found.capabilities.begin(),
                                 found.capabilities.end());
      if (!found.status.ok()) why_not = "every call was refused: " + found.status.message();
    }
    run_list(probes, gradient_probes(), why_not);
    if (probes.conventions.gradients_vary && report.ok) {
      report.conventions.emplace_back("gradients: bits differ from call to call, within rounding");
    }
  }
};

}  // namespace

Result<VerifyReport> run_probes(const flashcore_verify_options& o, CallTarget& target,
                                ProbeSet set) {
  const Clock::time_point start = Clock::now();
  const Result<ImplementationFormats> formats = formats_of(o);
  if (!formats.ok()) return formats.status();
  const std::string layout = o.layout != nullptr ? o.layout : "bhsd";
  if (layout != "bhsd" && layout != "bshd") {
    return invalid_argument("layout is \"%s\"; wanted bhsd or bshd", layout.c_str());
  }
  const std::string only = o.only != nullptr ? o.only : "";
  if (Status status = check_probe_name(only); !status.ok()) return status;
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
  if (found.fault.found()) note_finding(found.fault, nullptr, report);
  Run run{o, only, report};
  const bool forward = set == ProbeSet::all;
  run.count = static_cast<std::int32_t>((forward ? forward_probes().size() : 0) +
                                        (impl.has_backward() ? gradient_probes().size() : 0));
  if (forward) {
    run.run_list(probes, forward_probes(),
                 found.fault.found() ? "the first call is already wrong" : "");
  }
  if (impl.has_backward()) run.run_backward(probes);
  note_not_probed(probes, report);
  report.calls = impl.calls();
  report.seconds = seconds_since(start);
  return report;
}

}  // namespace verify
}  // namespace flashcore
