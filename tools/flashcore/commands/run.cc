// flashcore run: runs attention on .npy files or random data, checks it against the oracle and
// times it.
#include "bench/timing.h"
#include "check/check.h"
#include "check/inspect.h"
#include "check/replay.h"
#include "cli/json_output.h"
#include "cli/signals.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/worker_link.h"
#include "command_error.h"
#include "commands.h"
#include "data/cases.h"
#include "data/devices.h"
#include "data/host_case.h"
#include "data/npy.h"
#include "data/problem.h"
#include "device_memory.h"

namespace flashcore::tool {
namespace {

/// The oracle computes all rows up to this many multiply-adds, and a sample of them beyond.
constexpr double kOracleWork = 2e9;
/// Default limit of --stage and --trace, which run a kernel many times and the oracle on every row.
constexpr double kInspectionLimitS = 600;

struct RunResult {
  std::string name;
  Plan plan;
  verify::Comparison comparison;
  std::size_t rows_checked = 0, rows = 0;
  Timing timing;
  std::vector<std::byte> after;  ///< the block of the case, with its outputs
};

Status calculate(const Plan& plan, const Tensors& tensors, Workspace workspace) {
  if (Status status = workspace_init(workspace); !status.ok()) return status;
  if (Status status = run(plan, tensors, workspace); !status.ok()) return status;
  return workspace_status(workspace);
}

RunResult run_one(const HostCase& host, const char* kernel, const Target& target, int samples,
                  std::uint64_t seed, const Stop& stop) {
  RunResult result;
  const Backend& backend = *target.backend;
  const DeviceMemory block(backend, target.device, host.bytes.size());
  const Tensors tensors = host.at(block.data(), target.device);
  Options options = host.options;
  options.kernel = kernel;
  const Problem problem = value_or_throw(make_problem(tensors, options));
  result.plan = value_or_throw(make_plan(problem, target.plan_for));
  const DeviceMemory space(backend, target.device, result.plan.workspace_bytes);
  const Workspace workspace{space.data(), result.plan.workspace_bytes, target.device};
  const auto require = [](const Status& status) {
    if (!status.ok()) throw CommandError(status);
  };
  require(backend.upload(block.data(), host.bytes.data(), host.bytes.size(), target.device.index));
  require(calculate(result.plan, tensors, workspace));
  result.after.resize(host.bytes.size());
  require(backend.download(result.after.data(), block.data(), result.after.size(),
                           target.device.index));

  const Tensors outputs = host.at(result.after.data(), Device{});
  auto rows = verify::rows_to_check(problem, host.tensors, kOracleWork, seed);
  result.rows_checked = rows.size();
  result.rows = reference::all_rows(problem, host.tensors).size();
  const reference::Oracle oracle = reference::compute(problem, host.tensors, std::move(rows));
  result.comparison = verify::compare(
      oracle, problem, outputs,
      verify::arithmetic_of(problem.out.dtype, result.plan.kernel->probability_dtype));
  if (!result.comparison.ok || samples == 0) return result;
  result.timing = value_or_throw(time_calls(
      backend, target.device,
      [&](int, Stream stream) { return run(result.plan, tensors, workspace, stream); }, 1, samples,
      stop));
  return result;
}

/// Visits the cases. Holds one at a time, because they may be large.
template <typename Visit>
void for_each_case(const RunArgs& args, const Stop& stop, Visit visit) {
  const bool files = !args.q.empty() || !args.k.empty() || !args.v.empty();
  const bool selected = !args.selection.cases.empty() || !args.selection.suites.empty();
  const bool sizes = gives_sizes(args.problem);
  if (files + selected + sizes != 1) {
    throw CommandError(
        "give one of --shape (random data), --case or --suite (random data), or --q, --k and --v "
        "(.npy files)");
  }
  if (files && (args.q.empty() || args.k.empty() || args.v.empty())) {
    throw CommandError("--q, --k and --v belong together; give all three files");
  }
  if (!files && !args.block_table.empty()) {
    throw CommandError("--block-table needs .npy files; use --page-size KEYS with random data");
  }
  if (files && args.control.page_size > 0) {
    throw CommandError("--page-size needs random data; use --block-table FILE with .npy files");
  }
  if (files) {
    HostCase host = file_host_case(args);
    host.options.num_splits = args.control.splits.value_or(0);
    return visit(host);
  }
  if (sizes) {
    verify::CaseSpec spec = spec_of(args.problem);
    spec.options.num_splits = args.control.splits.value_or(0);
    spec.sigma = args.control.sigma.value_or(1.0);
    spec.seed = args.control.seed;
    spec.lse = spec.lse || !args.lse_out.empty();
    put_in_pages(spec, args.control.page_size);
    value_or_throw(problem_of(spec, Device{}));  // rejects sizes too large to allocate
    return visit(random_host_case(spec));
  }
  for (const BenchCase& c :
       select_cases(load_cases(args.selection.file), args.selection.suites, args.selection.cases)) {
    if (stop.now() && !WorkerLink::here().takes_over()) return;
    if (const std::string reason = why_not(c); !reason.empty()) {
      say(formatted("case {} skipped: {}", c.label(), reason));
      continue;
    }
    verify::CaseSpec spec = spec_of(c, args.control);
    spec.lse = args.problem.lse || !args.lse_out.empty();
    HostCase host = random_host_case(spec);
    host.name = c.label();
    visit(host);
  }
}

Json to_json(const RunResult& r, const std::string& device) {
  Json json = {{"passed", r.comparison.ok}, {"device", device}};
  if (!r.name.empty()) json["case"] = r.name;
  json["plan"] = tool::to_json(r.plan);
  json["rows"] = r.rows;
  json["rows_checked"] = r.rows_checked;
  json["check"] = tool::to_json(r.comparison);
  if (!r.timing.samples.empty()) {
    json["us"] = r.timing.median;
    json["spread"] = r.timing.spread;
    json["samples"] = r.timing.samples;
  }
  return json;
}

void print_text(const RunResult& r, const std::string& device) {
  const std::string plan_text = explain(r.plan);
  print_out("{}", plan_text.substr(0, plan_text.find('\n') + 1));  // the problem
  if (!r.name.empty()) print_out("case       {}\n", r.name);
  print_out("device     {}\nkernel     {}, {} split{}\n", device, r.plan.kernel->id, r.plan.splits,
            r.plan.splits == 1 ? "" : "s");
  print_out("error      max {}, relative {}, LSE {}; worst error is {:.3g} of its bound\n",
            number(r.comparison.max_error), number(r.comparison.relative_error),
            r.plan.problem.lse.given() ? number(r.comparison.max_lse_error) : "not requested",
            r.comparison.worst_ratio);
  print_out("check      {} ({} of {} rows against the fp64 oracle)\n",
            r.comparison.ok ? green("passed") : red("FAILED"), r.rows_checked, r.rows);
  if (!r.comparison.ok) print_out("{}", verify::report(r.comparison));
  if (r.timing.samples.empty()) return;
  const Cost needed = cost(r.plan.problem);
  print_out("time       {} (spread {:.1f} %), {:.4g} GFLOP/s, {:.4g} GB/s\n",
            duration(r.timing.median), 100 * r.timing.spread, needed.flops / r.timing.median / 1e3,
            needed.bytes / r.timing.median / 1e3);
}

/// Describes one run of a kernel to the supervisor.
Task task_of(const RunArgs& args, const HostCase& host, const KernelInfo* kernel,
             const Target& target) {
  Options options = host.options;
  if (kernel != nullptr) options.kernel = kernel->id;
  Task task;
  task.kernel = kernel != nullptr ? kernel->id : "(no plan)";
  // Planning needs pointers of the device, not its memory.
  auto* base = const_cast<std::byte*>(host.bytes.data());
  const Result<Problem> problem = make_problem(host.at(base, target.device), options);
  if (problem.ok()) {
    const Result<Plan> plan = make_plan(*problem, target.plan_for);
    if (plan.ok()) {
      const std::string text = explain(*plan);  // "problem    f32  batch 1 ...\n..."
      const std::size_t begin = text.find_first_not_of(' ', text.find(' '));
      task.kernel = plan->kernel->id;
      task.problem = text.substr(begin, text.find('\n') - begin);
    }
  }
  task.key = formatted("{} {}", host.name.empty() ? "run" : host.name, task.kernel);
  task.replay = host.name.empty() ? args.command
                                  : replay_case(args.program, "run", host.name, task.kernel,
                                                args.device, args.selection.file, args.control);
  task.limit_s = task_limit_s(args.control.deadline_s, target.device,
                              inspects(args) ? kInspectionLimitS : default_limit_s(args.samples));
  return task;
}

Json hung_json(const Json& record, const std::string& device) {
  Json json = {{"passed", false}, {"device", device}};
  for (const char* name : {"kernel", "problem", "replay"}) json[name] = record[name];
  json["reason"] = record["hung"];
  json["hung"] = true;
  return json;
}

/// Writes the outputs in the layout of the inputs.
void write_outputs(const RunArgs& args, const HostCase& host, RunResult& result) {
  const Tensors outputs = host.at(result.after.data(), Device{});
  if (!args.out.empty()) {
    const bool swap = args.problem.layout == "bshd" && outputs.out.rank == 4;
    write_file(args.out, to_npy(swap ? swap_axes(outputs.out, 1, 2) : outputs.out));
  }
  if (!args.lse_out.empty()) write_file(args.lse_out, to_npy(outputs.lse));
}

}  // namespace

int run_run(const RunArgs& args) {
  WorkerLink& link = WorkerLink::here();
  const Stop stop(args.control.time_limit_s);
  const Target target = find_target(args.device);
  const std::string device = describe(target);
  Json results = Json::array();
  bool passed = true;
  std::size_t done = 0;
  const auto visit = [&](const HostCase& host) {
    const Tensors& t = host.tensors;
    const auto dim = [](const TensorView& view) {
      return view.rank > 0 ? view.shape[view.rank - 1] : 0;
    };
    const DType computes =
        is_8bit(t.q.dtype) ? value_or_throw(make_problem(t, host.options)).dtype : t.q.dtype;
    const auto chosen = kernels_for(args.selection.kernel, target, computes, is_8bit(t.k.dtype),
                                    dim(t.q), dim(t.v));
    if (chosen.empty()) {
      throw CommandError(
          formatted("--kernel \"{}\": no matching kernel supports {} with dims {}/{}",
                    args.selection.kernel, to_string(t.q.dtype), dim(t.q), dim(t.v)));
    }
    for (const KernelInfo* kernel : chosen) {
      const Task task = task_of(args, host, kernel, target);
      if (const Json* record = link.record(task.key)) {
        passed = passed && record->value("passed", false);
        results.push_back(record->contains("hung") ? hung_json(*record, device)
                                                   : (*record)["result"]);
        if (record->contains("hung") && !args.json && !link.was_shown(task.key)) {
          print_out("{}kernel     {}\ncheck      {}\n", done > 0 ? "\n" : "", task.kernel,
                    red("FAILED: " + (*record)["hung"].get<std::string>()));
          std::fflush(stdout);
          link.shown(task.key);
        }
        ++done;
        continue;
      }
      if (stop.now()) return;
      link.begin(task);
      const auto record_result = [&](bool ok, Json json) {
        std::fflush(stdout);
        link.done(task.key, {{"passed", ok}, {"result", json}});
        results.push_back(std::move(json));
        passed = passed && ok;
        ++done;
      };
      if (inspects(args)) {
        const Inspection found = inspect(args, host, kernel, target);
        if (!args.json) print_out("{}{}", done > 0 ? "\n" : "", found.text);
        record_result(found.passed, found.json);
        continue;
      }
      RunResult result = run_one(host, kernel == nullptr ? nullptr : kernel->id, target,
                                 args.samples, args.control.seed, stop);
      result.name = host.name;
      write_outputs(args, host, result);
      if (!args.json) {
        if (done > 0) print_out("\n");
        print_text(result, device);
        if (!args.out.empty()) print_out("out        written to {}\n", args.out);
        if (!args.lse_out.empty()) print_out("lse        written to {}\n", args.lse_out);
      }
      record_result(result.comparison.ok, to_json(result, device));
    }
  };
  for_each_case(args, stop, visit);
  if (args.json) {
    if (results.size() == 1) {
      results[0]["seed"] = args.control.seed;
      tool::print_json(results[0]);
    } else {
      tool::print_json({{"passed", passed}, {"seed", args.control.seed}, {"results", results}});
    }
  }
  if (const std::string reason = stop.reason(); !reason.empty()) {
    say(formatted("{}; {} result{} printed", reason, done, done == 1 ? "" : "s"));
  }
  return exit_code_after_interrupt(passed ? kOk : kFailed);
}

}  // namespace flashcore::tool
