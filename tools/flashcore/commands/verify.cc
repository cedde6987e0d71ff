// flashcore verify: finds the first wrong stage of an attention implementation.
#include <algorithm>
#include <fstream>

#include "cli/json_output.h"
#include "cli/signals.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "commands.h"
#include "plan/planner.h"
#include "verify/probe_sequence.h"
#include "verify_target.h"

namespace flashcore::tool {
namespace {

constexpr double kDefaultLimitS = 20;  // per call

class Verification {
 public:
  explicit Verification(const VerifyArgs& args) : args_(args) {}

  int run() {
    if (args_.library.empty() != args_.symbol.empty()) {
      throw CommandError("--lib and --symbol belong together");
    }
    if (!args_.library.empty() && backward()) {
      throw CommandError(
          "--op selects our kernels; with --lib the gradients of NAME_backward are "
          "probed after the forward pass");
    }
    args_.library.empty() ? verify_kernels() : verify_library();
    return finish();
  }

 private:
  bool backward() const { return args_.op == "backward"; }

  void verify_library() {
    const std::string device = args_.device.device == "auto" ? "cpu" : args_.device.device;
    for (const std::string& dtype :
         args_.dtypes.empty() ? std::vector<std::string>{"f32"} : args_.dtypes) {
      if (noted_signal() != 0) return;
      const auto target = library_target(args_.library, args_.symbol, device,
                                         args_.deadline_s.value_or(kDefaultLimitS));
      verify_one(args_.symbol, dtype, *target, args_.out_dtype, args_.arithmetic);
    }
  }

  void verify_kernels() {
    const std::vector<Target> targets{find_target(args_.device)};
    const double limit_s = task_limit_s(args_.deadline_s, targets[0].device, kDefaultLimitS);
    const std::unique_ptr<KernelTarget> calls =
        limit_s > 0 ? kernel_child(args_.device, limit_s) : kernels_here(targets[0]);
    const Operation op = backward() ? Operation::bwd : Operation::fwd;
    for (const RunnableKernel& runnable : find_kernels(args_.kernel, targets, op)) {
      const KernelInfo& kernel = *runnable.kernel;
      for (const DType one : dtypes_of(kernel)) {
        const std::string dtype = to_string(one);
        const auto& wanted = args_.dtypes;
        if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), dtype) == wanted.end()) {
          continue;
        }
        if (noted_signal() != 0) return;
        calls->choose(kernel);
        verify_one(kernel.id, dtype, *calls, out_dtype_of(kernel), arithmetic_of(kernel, one));
      }
    }
    if (reports_.empty() && noted_signal() == 0)
      throw CommandError("--dtype: no matching kernel supports it");
  }

  /// Input dtypes of a kernel. 8-bit inputs with an f32 output belong to the f16 kernels.
  static std::vector<DType> dtypes_of(const KernelInfo& kernel) {
    std::vector<DType> dtypes;
    if (kernel.op == Operation::bwd) return {kernel.dtype};
    if (needs_e4m3(kernel)) return {DType::e4m3};
    if (!needs_8_bits(kernel)) dtypes = {kernel.dtype};
    if (needs_8_bits(kernel) || (kernel.dtype == DType::f16 && takes_8_bits(kernel))) {
      dtypes.insert(dtypes.end(), {DType::e4m3, DType::e5m2, DType::int8, DType::u8});
    }
    return dtypes;
  }

  /// With an 8-bit q, only a bf16 output selects a bf16 kernel. Kernels that need e4m3 write no
  /// f32.
  std::string out_dtype_of(const KernelInfo& kernel) const {
    const bool needs_own =
        needs_8_bits(kernel) && (kernel.dtype == DType::bf16 || needs_e4m3(kernel));
    return args_.out_dtype.empty() && needs_own ? to_string(kernel.dtype) : args_.out_dtype;
  }

  /// All our kernels represent 8-bit values exactly; they round P only.
  std::string arithmetic_of(const KernelInfo& kernel, DType dtype) const {
    if (!args_.arithmetic.empty() || !is_8bit(dtype)) return args_.arithmetic;
    return to_string(kernel.probability_dtype);
  }

  void verify_one(const std::string& name, const std::string& dtype, verify::CallTarget& target,
                  const std::string& out_dtype, const std::string& arithmetic) {
    flashcore_verify_options options;
    flashcore_verify_options_init(&options, sizeof options);
    const auto text = [](const std::string& s) { return s.empty() ? nullptr : s.c_str(); };
    options.name = name.c_str();
    options.dtype = dtype.c_str();
    options.out_dtype = text(out_dtype);
    options.arithmetic = text(arithmetic);
    options.layout = args_.layout.c_str();
    options.only = text(args_.only);
    options.causal_alignment = text(args_.causal_alignment);
    options.lse_base = args_.lse_base.c_str();
    options.seed = args_.seed;
    options.quick = args_.quick ? 1 : 0;
    if (backward()) options.deterministic = 1;  // our kernels promise it
    if (args_.compact) options.strides = 0;
    for (std::size_t i = 0; i < std::min<std::size_t>(args_.head_dims.size(), 8); ++i) {
      options.head_dims[i] = args_.head_dims[i];
    }
    Progress progress(name, 0, args_.quiet || args_.json);
    options.progress_user = &progress;
    options.progress = [](const char*, std::int32_t number, std::int32_t count, void* user) {
      auto& bar = *static_cast<Progress*>(user);
      bar.set_total(count);
      bar.update(number - 1, 0, 0.1 * number);
    };
    Result<VerifyReport> result = verify::run_probes(
        options, target, backward() ? verify::ProbeSet::gradients : verify::ProbeSet::all);
    progress.clear();
    if (noted_signal() != 0) return;  // the last calls may not have run
    if (!result.ok()) throw CommandError(formatted("{}: {}", name, result.status().message()));
    VerifyReport report = *result;
    report.fingerprint = source_fingerprint();
    if (!report.ok) report.reproducer = command_of(report);
    if (!args_.json && args_.library.empty() && report.ok) {
      print_out("{:<28} {:<5} {}  {} calls, {:.1f} s\n", report.name, report.dtype,
                green("correct"), report.calls, report.seconds);
    } else if (!args_.json) {
      print_out("{}\n", to_text(report));
    }
    reports_.push_back(std::move(report));
  }

  /// The command that reproduces the failure.
  std::string command_of(const VerifyReport& report) const {
    std::string probe;
    for (const ProbeResult& p : report.probes) {
      if (p.status == ProbeResult::Status::failed) probe = p.name;
    }
    const std::string what =
        args_.library.empty()
            ? formatted("{}--kernel '^{}$' --device {}", backward() ? "--op backward " : "",
                        report.name, args_.device.device)
            : formatted("--lib {} --symbol {} --dtype {} --device {}", args_.library, args_.symbol,
                        report.dtype, args_.device.device);
    const std::string deadline =
        args_.deadline_s ? formatted(" --deadline {}", *args_.deadline_s) : "";
    return formatted("flashcore verify {} --only {} --seed {}{}{}", what, probe, report.seed,
                     deadline, args_.quick ? " --quick" : "");
  }

  int finish() {
    const auto wrong = std::count_if(reports_.begin(), reports_.end(),
                                     [](const VerifyReport& r) { return !r.ok; });
    if (noted_signal() != 0) {
      say(formatted("interrupted; {} report{} so far", reports_.size(),
                    reports_.size() == 1 ? "" : "s"));
    }
    if (!args_.html.empty() && !reports_.empty()) {
      // The first wrong report, else the last one.
      const auto first = std::find_if(reports_.begin(), reports_.end(),
                                      [](const VerifyReport& r) { return !r.ok; });
      std::ofstream file(args_.html);
      file << to_html(first != reports_.end() ? *first : reports_.back());
      if (!file.flush()) throw CommandError(formatted("--html: {} cannot be written", args_.html));
    }
    if (args_.json) {
      std::string text;
      for (const VerifyReport& r : reports_) text += (text.empty() ? "" : ",\n") + to_json(r);
      print_out("{{\"ok\": {}, \"reports\": [\n{}]}}\n", wrong == 0 ? "true" : "false", text);
    } else if (reports_.size() > 1) {
      print_out("\n{}: {} of {} correct\n", wrong == 0 ? green("passed") : red("FAILED"),
                static_cast<std::int64_t>(reports_.size()) - wrong, reports_.size());
    }
    return exit_code_after_interrupt(wrong == 0 ? kOk : kFailed);
  }

  const VerifyArgs& args_;
  std::vector<VerifyReport> reports_;
};

}  // namespace

int run_verify(const VerifyArgs& args) {
  if (args.serve) return serve_verify(args.library, args.symbol, args.device);
  return Verification(args).run();
}

}  // namespace flashcore::tool
