// flashcore explain: prints the plan of a problem, for this machine, any named device, or any
// number of ranks.
#include "bench/timing.h"
#include "cli/json_output.h"
#include "cli/text.h"
#include "command_error.h"
#include "commands.h"
#include "data/cases.h"
#include "data/devices.h"
#include "data/problem.h"

namespace flashcore::tool {
namespace {

/// The device of --plan-for, else of --device. Measures this machine's CPU for the roofline bounds.
DeviceInfo planned_device(const DeviceArgs& args) {
  DeviceInfo info;
  if (args.plan_for.empty()) {
    info = find_target(args).real;
  } else {
    info = value_or_throw(named_device(args.plan_for.c_str()));
    if (args.threads > 0) info.threads = args.threads;
  }
  const bool this_machine = args.plan_for.empty() || args.plan_for == "cpu";
  if (this_machine) {
    if (const Status status = measure_rates(info); !status.ok()) throw CommandError(status);
  }
  return info;
}

struct Named {
  std::string name;
  verify::CaseSpec spec;
};

std::vector<Named> wanted_problems(const ExplainArgs& args) {
  const SelectionArgs& s = args.selection;
  if (s.cases.empty() && s.suites.empty()) {
    if (!gives_sizes(args.problem)) {
      throw CommandError("give a problem to explain: --shape 1,8,512,64 or --case NAME");
    }
    Named one{"", spec_of(args.problem)};
    one.spec.options.num_splits = args.splits.value_or(0);
    put_in_pages(one.spec, args.page_size);
    return {one};
  }
  if (gives_sizes(args.problem)) throw CommandError("give either sizes, or --case and --suite");
  std::vector<Named> problems;
  for (const BenchCase& c : select_cases(load_cases(s.file), s.suites, s.cases)) {
    const std::string reason = why_not(c);
    if (!reason.empty()) throw CommandError(formatted("case {}: {}", c.label(), reason));
    RunControlArgs control;
    control.splits = args.splits;
    control.page_size = args.page_size;
    problems.push_back({c.label(), spec_of(c, control)});
  }
  return problems;
}

}  // namespace

int run_explain(const ExplainArgs& args) {
  if (args.ranks.ranks > 0) return explain_ranks(args);
  const DeviceInfo device = planned_device(args.device);
  Json plans = Json::array();
  bool first = true;
  for (Named& wanted : wanted_problems(args)) {
    if (!args.selection.kernel.empty()) wanted.spec.options.kernel = args.selection.kernel.c_str();
    const Problem problem = value_or_throw(problem_of(wanted.spec, device.device));
    const Plan plan = value_or_throw(make_plan(problem, device));
    if (args.json) {
      Json json = to_json(plan);
      if (!wanted.name.empty()) json["case"] = wanted.name;
      json["shape"] = shape_text(wanted.spec);
      json["dtype"] = to_string(wanted.spec.dtype);
      json["floor_us"] = roofline_us(problem, device);
      json["text"] = explain(plan);
      plans.push_back(std::move(json));
      continue;
    }
    if (!first) print_out("\n");
    first = false;
    if (!wanted.name.empty()) print_out("case       {}\n", wanted.name);
    print_out("{}", explain(plan));
  }
  if (args.json) tool::print_json(plans.size() == 1 ? plans[0] : Json{{"plans", plans}});
  return kOk;
}

}  // namespace flashcore::tool
