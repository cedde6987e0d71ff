// flashcore check: checks every kernel against the oracle, reports coverage and replay commands.
#include <algorithm>

#include "check/check_report.h"
#include "check/check_suites.h"
#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "commands.h"

namespace flashcore::tool {
namespace {

std::vector<const KernelInfo*> infos(const std::vector<RunnableKernel>& kernels) {
  std::vector<const KernelInfo*> list;
  for (const RunnableKernel& r : kernels) list.push_back(r.kernel);
  return list;
}

/// Selects the suites, checks them and prints the results.
class Check {
 public:
  explicit Check(const CheckArgs& args)
      : args_(args),
        stop_(args.control.time_limit_s),
        targets_(find_targets(args.device)),
        kernels_(find_kernels(args.selection.kernel, targets_,
                              args.op == "backward" ? Operation::bwd : Operation::fwd)),
        coverage_(infos(kernels_)),
        engine_(args, targets_, coverage_, stop_) {
    const bool gpu = std::any_of(targets_.begin(), targets_.end(), [](const Target& target) {
      return target.device.type == DeviceType::cuda;
    });
    if (!args.blocks.empty() && !gpu) {
      throw CommandError(
          "--blocks limits the CTAs of GPU kernels, but only the CPU is checked; use --threads for "
          "a CPU, or --device cuda");
    }
  }

  int run() {
    std::string suite = current_suite(args_.suite);
    if (suite.empty()) suite = args_.selection.cases.empty() ? "random" : kNamedCases;
    if (suite == "regressions") suite = kKeylessTiles;
    const bool all = suite == "all";
    if (args_.op == "backward" && suite != "random") {
      throw CommandError("--op backward checks random problems only; leave out --suite and --case");
    }
    if (args_.index && all) throw CommandError("--index needs one suite; use --suite random");
    covers_options_ = all || suite == "random";
    if (covers_options_) suites_.push_back(random_suite(args_, kernels_));
    if (all || suite == "tuning") suites_.push_back(tuning_suite(args_, kernels_));
    if (all || suite == kKeylessTiles) suites_.push_back(keyless_tiles_suite(args_, targets_));
    if (all || suites_.empty()) suites_.push_back(select(all ? kRegressionSuite : suite));

    if (!args_.json && !WorkerLink::here().takes_over()) print_heading();
    for (const CheckSuite& chosen : suites_) {
      if (stop_.now() && !engine_.has_records(chosen)) break;
      engine_.check(chosen, [&](const Failure& failure) {
        if (!args_.json) print_failure(failure);
      });
      ++suites_done_;
    }
    return finish();
  }

 private:
  void print_heading() const {
    std::string devices;
    for (const Target& target : targets_) {
      devices += (devices.empty() ? "" : ", ") + describe(target);
    }
    print_out("{} kernel{} on {}, seed {}\n\n", kernels_.size(), kernels_.size() == 1 ? "" : "s",
              devices, args_.control.seed);
    std::fflush(stdout);  // a worker may be killed later
  }

  /// Selects cases of the cases file.
  CheckSuite select(const std::string& suite) {
    const std::vector<BenchCase> known = load_cases(args_.selection.file);
    const std::vector<std::string> suites =
        suite == kNamedCases ? std::vector<std::string>{} : std::vector<std::string>{suite};
    cases_ = case_suite(args_, targets_, select_cases(known, suites, args_.selection.cases), suite);
    if (cases_->suite.count == 0) {
      throw CommandError(formatted("suite {}: no case can be checked here", suite));
    }
    return cases_->suite;
  }

  int finish() {
    const CheckTotals& totals = engine_.totals();
    const std::string ended_by = stop_.reason();
    const std::string missing =
        args_.require_coverage ? missing_coverage(coverage_, *args_.require_coverage) : "";
    const bool passed = totals.failures == 0 && totals.problems > 0 && missing.empty();
    const bool complete = totals.problems == totals.planned && suites_done_ == suites_.size();
    if (args_.json) {
      print_json(passed, complete, ended_by, missing);
    } else {
      print_text(passed, complete, ended_by, missing);
    }
    return exit_code_after_interrupt(passed ? kOk : kFailed);
  }

  void print_text(bool passed, bool complete, const std::string& ended_by,
                  const std::string& missing) const {
    const CheckTotals& totals = engine_.totals();
    if (cases_ != nullptr) {
      const bool regression = cases_->suite.name == kRegressionSuite;
      regression ? print_regression(cases_->rows) : print_cases(cases_->rows);
      print_out("\n");
    }
    print_out("{}", kernel_table(totals));
    for (const CheckSuite& suite : suites_) {
      if (!suite.summary.empty()) print_out("\n{}: {}\n", suite.name, suite.summary);
    }
    if (covers_options_) print_coverage(coverage_);
    if (!missing.empty()) print_out("{}\n", red("coverage    " + missing));
    const std::size_t more =
        static_cast<std::size_t>(totals.failures) -
        std::min<std::size_t>(static_cast<std::size_t>(totals.failures), totals.reports.size());
    if (more > 0) print_out("\n{} more failures are not shown\n", more);
    print_out("\n{}: {} problem{} in {:.1f} s, {} failure{}{}\n",
              passed ? green("passed") : red("FAILED"), totals.problems,
              totals.problems == 1 ? "" : "s", stop_.elapsed_s(), totals.failures,
              totals.failures == 1 ? "" : "s",
              complete ? ""
                       : formatted("; {} of {} done, {}", totals.problems, totals.planned,
                                   ended_by.empty() ? "--max-failures reached" : ended_by));
  }

  void print_json(bool passed, bool complete, const std::string& ended_by,
                  const std::string& missing) const {
    const CheckTotals& totals = engine_.totals();
    Json kernels = Json::object();
    for (const auto& [id, t] : totals.kernels) {
      kernels[id] = {{"problems", t.problems},
                     {"failures", t.failures},
                     {"worst_ratio", tool::to_json(t.worst_ratio)},
                     {"worst_index", t.worst_index}};
    }
    Json json = {{"passed", passed},
                 {"complete", complete},
                 {"problems", totals.problems},
                 {"planned", totals.planned},
                 {"failures", totals.failures},
                 {"seconds", stop_.elapsed_s()},
                 {"seed", args_.control.seed},
                 {"fingerprint", source_fingerprint()},
                 {"kernels", kernels},
                 {"coverage", to_json(coverage_)}};
    json["devices"] = Json::array();
    for (const Target& target : targets_) json["devices"].push_back(tool::to_json(target.real));
    if (!args_.blocks.empty()) json["blocks"] = args_.blocks;
    if (!ended_by.empty()) json["stopped"] = ended_by;
    if (!missing.empty()) json["coverage"]["lacking"] = missing;
    if (totals.first_failure) {
      json["first_failure"] = {{"suite", totals.first_failure->first},
                               {"index", totals.first_failure->second}};
    }
    json["reports"] = Json::array();
    for (const Failure& failure : totals.reports) json["reports"].push_back(to_json(failure));
    if (cases_ != nullptr) {
      json["cases"] = Json::array();
      for (const CaseRow& row : cases_->rows) json["cases"].push_back(to_json(row));
    }
    tool::print_json(json);
  }

  const CheckArgs& args_;
  Stop stop_;
  std::vector<Target> targets_;
  std::vector<RunnableKernel> kernels_;
  verify::Coverage coverage_;
  CheckEngine engine_;
  std::unique_ptr<CaseSuite> cases_;
  std::vector<CheckSuite> suites_;
  std::size_t suites_done_ = 0;
  bool covers_options_ = false;
};

}  // namespace

int run_check(const CheckArgs& args) { return Check(args).run(); }

}  // namespace flashcore::tool
