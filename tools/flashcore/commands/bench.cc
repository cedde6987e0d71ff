// flashcore bench: checks and times the cases of bench/cases.json, and compares results.
#include <algorithm>
#include <ctime>

#include "bench/bench_compare.h"
#include "bench/bench_rows.h"
#include "check/replay.h"
#include "cli/json_output.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "commands.h"
#include "data/npy.h"
#include "data/problem.h"

namespace flashcore::tool {
namespace {

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

/// The suites of --suite, or the default suites of the device.
std::vector<std::string> suites_of(const BenchArgs& args, const Target& target) {
  if (!args.selection.suites.empty() || !args.selection.cases.empty()) return args.selection.suites;
  if (target.device.type == DeviceType::cpu) return {"cpu"};
  return {"anchors", "simt"};
}

Json row_json(const BenchRow& row) {
  const Cost needed = cost(row.plan.problem);
  Json json = *row.bench_case.fields;
  json["kernel"] = row.plan.kernel->id;
  json["kernel_fingerprint"] = source_fingerprint(row.plan.kernel->family_name());
  json["splits"] = row.plan.splits;
  if (row.plan.problem.page_size > 0) json["page_size"] = row.plan.problem.page_size;
  json["us"] = row.timing.median;
  json["spread"] = row.timing.spread;
  json["samples"] = row.timing.samples;
  json["calls_per_sample"] = row.timing.calls;
  json["input_copies"] = row.copies;
  json["error"] = row.comparison.relative_error;
  json["worst_ratio"] = row.comparison.worst_ratio;
  json["tflops"] = needed.flops / row.timing.median / 1e6;
  json["gbs"] = needed.bytes / row.timing.median / 1e3;
  if (row.roofline_us > 0) json["floor_us"] = row.roofline_us;
  json["peers_us"] = Json::object();
  return json;
}

class Bench {
 public:
  explicit Bench(const BenchArgs& args)
      : args_(args),
        stop_(args.control.time_limit_s),
        target_(find_target(args.device)),
        cases_(select_cases(load_cases(args.selection.file), suites_of(args, target_),
                            args.selection.cases)) {
    if (!args.selection.kernel.empty()) find_kernels(args.selection.kernel, {target_});  // exists
    const Status status = measure_rates(target_.real);
    if (!status.ok()) throw CommandError(status);
    result_ = {{"fingerprint", source_fingerprint()},
               {"device", target_.real.name},
               {target_.device.type == DeviceType::cpu ? "cpu" : "gpu", target_.real.name},
               {"device_info", to_json(target_.real)},
               {"versions", versions()},
               {"date", now_utc()},
               {"command", args.command},
               {"seed", args.control.seed},
               {"complete", false},
               {"rows", Json::array()},
               {"skipped", Json::array()},
               {"failed", Json::array()}};
  }

  /// Returns true if every check passed.
  bool run() {
    if (!args_.json && !link_.takes_over()) print_heading();
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      if (args_.json && !args_.quiet && !stop_.now()) {
        say(formatted("case {} of {}: {} {}", i + 1, cases_.size(), cases_[i].label(),
                      cases_[i].shape()));
      }
      run_case(cases_[i]);
      save();
    }
    if (const Json* record = link_.record(kHostCost)) restore(kHostCost, *record, nullptr);
    if (result_["failed"].empty() && !stop_.now()) measure_host_cost();
    const std::string reason = stop_.reason();
    result_["complete"] = reason.empty();
    if (!reason.empty()) {
      result_["stopped"] = reason;
      say(formatted("{}; {} row{} so far", reason, result_["rows"].size(),
                    result_["rows"].size() == 1 ? "" : "s"));
    }
    save();
    return result_["failed"].empty();
  }

  const Json& result() const { return result_; }

 private:
  void print_heading() const {
    const DeviceInfo& d = target_.real;
    print_out("{}, {:.4g} TFLOP/s f32, {:.4g} GB/s; {} samples per row, seed {}\n\n",
              describe(target_), d.f32_tflops, d.memory_gbs, args_.samples, args_.control.seed);
    print_line("case", "shape", "dtype",
               formatted("{:22} {:>9} {:>6} {:>7} {:>6} {:>8}", "kernel", "us", "spread", "TFLOP/s",
                         "GB/s", "roofline"));
    std::fflush(stdout);  // a worker may be killed later
  }

  void measure_host_cost() {
    const BenchCase* smallest = nullptr;
    const auto work = [&](const BenchCase& c) { return work_of(spec_of(c, args_.control)); };
    for (const BenchCase& c : cases_) {
      if (!why_not(c).empty()) continue;
      if (smallest == nullptr || work(c) < work(*smallest)) smallest = &c;
    }
    if (smallest == nullptr) return;
    begin(kHostCost, *smallest, nullptr);
    const HostCost measured = host_cost(spec_of(*smallest, args_.control), target_);
    result_["host_us"] = measured.us;
    result_["launch_us"] = measured.launch_us;
    result_["host_problem"] = measured.problem;
    link_.done(kHostCost, Json::object());
  }

  void run_case(const BenchCase& c) {
    std::vector<const KernelInfo*> chosen{nullptr};
    if (why_not(c).empty()) {
      chosen = kernels_for(args_.selection.kernel, target_, spec_of(c, args_.control));
    }
    if (chosen.empty() && link_.record(c.label()) != nullptr) {
      restore(c.label(), *link_.record(c.label()), &c);
    } else if (chosen.empty() && !stop_.now()) {
      record_entry(c.label(), skip(c, "no matching kernel supports this case"));
    }
    for (const KernelInfo* kernel : chosen) {
      const std::string key =
          kernel == nullptr ? c.label() : formatted("{} {}", c.label(), kernel->id);
      if (const Json* record = link_.record(key)) {
        restore(key, *record, &c);
        continue;
      }
      if (stop_.now()) return;
      begin(key, c, kernel);
      const BenchOutcome outcome = bench_case_on(c, kernel, target_, args_, stop_);
      if (outcome.row) {
        if (!args_.json) print_row(*outcome.row);
        record_entry(key, {{"list", "rows"}, {"entry", row_json(*outcome.row)}});
      } else if (!outcome.check_failure.empty()) {
        record_entry(key, fail(c, kernel == nullptr ? "" : kernel->id, outcome));
      } else {
        record_entry(key, skip(c, outcome.skipped));
      }
    }
  }

  void begin(const std::string& key, const BenchCase& c, const KernelInfo* kernel) {
    verify::CaseSpec spec = spec_of(c, args_.control);
    if (kernel != nullptr) spec.options.kernel = kernel->id;
    const std::string name = kernel_of(spec, target_.plan_for);
    link_.begin(
        {key, name, verify::to_string(spec),
         replay_case(args_.program, "bench", c.label(), name, args_.device, args_.selection.file,
                     args_.control),
         task_limit_s(args_.control.deadline_s, target_.device, default_limit_s(args_.samples))});
  }

  /// Adds an entry to the result, and records it for a worker that may take over.
  void record_entry(const std::string& key, const Json& record) {
    result_[record["list"].get<std::string>()].push_back(record["entry"]);
    std::fflush(stdout);
    link_.done(key, record);
  }

  /// Adds the record of an earlier worker of this run. A row that did not end counts as failed.
  void restore(const std::string& key, const Json& record, const BenchCase* c) {
    if (record.contains("list")) {
      result_[record["list"].get<std::string>()].push_back(record["entry"]);
    }
    if (!record.contains("hung")) return;
    const std::string reason = record["hung"];
    Json json = c == nullptr ? Json{{"name", key}} : *c->fields;
    for (const char* name : {"kernel", "problem", "replay"}) json[name] = record[name];
    json["reason"] = reason;
    json["hung"] = true;
    result_["failed"].push_back(std::move(json));
    if (args_.json || link_.was_shown(key)) return;
    if (c != nullptr) print_line(*c, red("NOT TIMED: " + reason));
    if (c == nullptr) print_out("{}: {}\n", key, red(reason));
    std::fflush(stdout);
    link_.shown(key);
  }

  /// Prints a row as soon as it is done, so the widths do not depend on the rows.
  void print_line(const std::string& name, const std::string& shape, const std::string& dtype,
                  const std::string& rest) const {
    std::size_t width = 4;
    for (const BenchCase& c : cases_) width = std::max(width, c.name.size());
    print_out("{:{}} {:22} {:5} {}\n", name, width, shape, dtype, rest);
  }
  void print_line(const BenchCase& c, const std::string& rest) const {
    print_line(c.name, c.shape() + (c.causal ? " causal" : ""), c.dtype, rest);
  }

  void print_row(const BenchRow& row) const {
    const Cost needed = cost(row.plan.problem);
    const double us = row.timing.median;
    print_line(
        row.bench_case,
        formatted("{:22} {:>9} {:>5.1f}% {:7.3g} {:6.4g} {:>8}", row.plan.kernel->id,
                  microseconds(us), 100 * row.timing.spread, needed.flops / us / 1e6,
                  needed.bytes / us / 1e3,
                  row.roofline_us > 0 ? formatted("{:.1f}%", 100 * row.roofline_us / us) : "-"));
  }

  Json skip(const BenchCase& c, const std::string& reason) const {
    Json json = *c.fields;
    json["reason"] = reason;
    if (!args_.json) print_line(c, yellow("skipped: " + reason));
    return {{"list", "skipped"}, {"entry", std::move(json)}};
  }

  Json fail(const BenchCase& c, const std::string& kernel, const BenchOutcome& outcome) const {
    Json json = *c.fields;
    json["kernel"] = kernel;
    json["reason"] = outcome.check_failure;
    if (!args_.json) {
      print_line(c, red("NOT TIMED, check failed: " + outcome.check_failure));
      print_out("{}", outcome.report);
    }
    return {{"list", "failed"}, {"entry", std::move(json)}};
  }

  void save() const {
    if (args_.output.empty()) return;
    const std::string text = result_.dump(1) + "\n";
    write_file(args_.output, std::as_bytes(std::span(text.data(), text.size())));
  }

  static constexpr const char* kHostCost = "host cost";

  const BenchArgs& args_;
  WorkerLink& link_ = WorkerLink::here();
  Stop stop_;
  Target target_;
  std::vector<BenchCase> cases_;
  Json result_;
};

/// The cases of all suites, or the selected ones, and why this program does not time some of them.
void print_cases(const BenchArgs& args) {
  const SelectionArgs& selected = args.selection;
  Table table({"suite", "case", "shape", "dtype", "not timed here"});
  for (const BenchCase& c :
       select_cases(load_cases(selected.file), selected.suites, selected.cases)) {
    table.add({c.suite, c.label(), c.shape() + (c.causal ? " causal" : ""), c.dtype, why_not(c)});
  }
  print_out("{}", table.text());
}

void print_host_cost(const Json& result) {
  const double launch_us = result["launch_us"];
  print_out("\nhost cost of make_plan + run: {:.2f} us per call{}, {}\n",
            result["host_us"].get<double>(),
            launch_us > 0.01 ? formatted(" ({:.2f} us of it for an empty launch)", launch_us) : "",
            result["host_problem"].get<std::string>());
}

}  // namespace

int run_bench(const BenchArgs& args) {
  if (args.list) {
    print_cases(args);
    return kOk;
  }
  const Json old = args.compare.empty() ? Json() : load_result(args.compare);
  Json result;
  bool passed = true;
  if (args.results.empty()) {
    Bench bench(args);
    passed = bench.run();
    result = bench.result();
    if (!args.json && result.contains("host_us")) {
      print_host_cost(result);
    }
  } else {
    result = load_result(args.results);
  }
  bool slower = false;
  if (!args.compare.empty()) {
    const BenchChanges changes = compare_results(old, result);
    slower = std::any_of(changes.rows.begin(), changes.rows.end(),
                         [](const RowChange& r) { return r.verdict == Verdict::slower; });
    result["comparison"] = to_json(changes);
    if (!args.json) print_out("\n{}", to_text(changes));
  }
  if (args.json) tool::print_json(result);
  const bool ok = passed && !(slower && args.fail_on_slower);
  return exit_code_after_interrupt(ok ? kOk : kFailed);
}

}  // namespace flashcore::tool
