#include "check/check_suites.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include "cli/text.h"
#include "command_error.h"
#include "data/problem.h"
#include "plan/model/model.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::tool {
namespace {

/// The command that repeats one problem of a suite.
std::string replay_command(const CheckArgs& args, const std::string& suite,
                           const std::string& kernel_pattern, std::uint64_t index) {
  std::string text = quoted(args.program) + " check";
  const auto option = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += formatted(" --{} {}", name, quoted(value));
  };
  if (args.op != "forward") option("op", args.op);
  if (suite != "random" && suite != kNamedCases) option("suite", suite);
  option("cases", args.selection.file);
  for (const std::string& name : args.selection.cases) option("case", name);
  if (args.device.device != "all") option("device", args.device.device);
  option("plan-for", args.device.plan_for);
  if (args.device.threads > 0) option("threads", std::to_string(args.device.threads));
  option("kernel", kernel_pattern);
  option("seed", std::to_string(args.control.seed));
  if (args.control.sigma) option("sigma", formatted("{}", *args.control.sigma));
  if (args.control.splits) option("splits", std::to_string(*args.control.splits));
  if (args.work != CheckArgs{}.work) option("work", formatted("{}", args.work));
  std::string blocks;
  for (const int limit : args.blocks) {
    blocks += (blocks.empty() ? "" : ",") + std::to_string(limit);
  }
  option("blocks", blocks);
  if (args.control.deadline_s) option("deadline", formatted("{}", *args.control.deadline_s));
  option("index", std::to_string(index));
  return text;
}

}  // namespace

CheckSuite list_suite(const CheckArgs& args, const std::string& name,
                      const std::shared_ptr<const std::vector<CheckProblem>>& problems) {
  CheckSuite suite;
  suite.name = name;
  suite.count = problems->size();
  suite.problem = [&args, problems](std::uint64_t index) {
    CheckProblem problem = (*problems)[index];
    problem.blocks = blocks_of(args, index, false);
    return problem;
  };
  suite.replay = [&args, name](std::uint64_t index, const CheckProblem&) {
    return replay_command(args, name, args.selection.kernel, index);
  };
  return suite;
}

namespace {

struct SizeClass {
  std::int64_t smallest, largest, tile_k;
};

/// Head dims that the tuning distinguishes: the rows of the table on a CPU, the head dims of all
/// kernels on a GPU, where a kernel can be forced onto smaller dims.
std::vector<SizeClass> size_classes(const KernelInfo& kernel) {
  std::vector<SizeClass> classes;
  std::int64_t smallest = 1;
  const auto add = [&](std::int64_t largest, std::int64_t tile_k) {
    classes.push_back({smallest, largest, tile_k});
    smallest = largest + 1;
  };
  if (kernel.device == DeviceType::cpu) {
    for (const CpuTuningRow& row : cpu_tuning(kernel.isa)) add(row.max_dim, row.tile_k);
    return classes;
  }
  std::set<std::int64_t> sizes;
  for (const KernelInfo& other : kernels()) {
    if (other.op == kernel.op && other.device == kernel.device &&
        other.head_dim <= kernel.head_dim) {
      sizes.insert(other.head_dim);
    }
  }
  for (const std::int64_t size : sizes) add(size, kernel.tile_k);
  return classes;
}

CheckProblem tuning_problem(const CheckArgs& args, const RunnableKernel& r, const SizeClass& size,
                            std::int64_t dim, int splits, bool causal) {
  CheckProblem problem;
  problem.target = r.target;
  verify::CaseSpec& s = problem.spec;
  s.dtype = r.kernel->dtype;
  s.head_dim = dim;
  s.v_dim = std::min<std::int64_t>(dim, r.kernel->v_dim);
  s.kv_heads = 1;
  s.q_heads = causal ? 2 : 1;
  s.q_len = causal ? r.kernel->tile_q - 1 : r.kernel->tile_q + 1;
  s.kv_len = 2 * std::max(splits, 1) * size.tile_k - (causal ? 1 : 0);
  s.lse = true;
  s.sigma = args.control.sigma.value_or(1.0);
  s.seed = args.control.seed;
  s.options.causal = causal;
  s.options.num_splits = splits;
  s.options.kernel = r.kernel->id;
  verify::fit_to_kernel(*r.kernel, s);
  return problem;
}

/// Split counts of a case; 0: the planner chooses.
std::vector<int> splits_of(const CheckArgs& args, const BenchCase& c, const verify::CaseSpec& spec,
                           const Target& target) {
  if (args.control.splits) return {*args.control.splits};
  if (c.part != "Split-K") return {0};
  const Result<Problem> problem = problem_of(spec, target.device);
  if (!problem.ok()) return {0};
  const Result<Plan> plan = make_plan(*problem, target.plan_for);
  if (!plan.ok()) return {0};
  std::vector<int> splits;
  for (int n = 1; n <= (c.kv_len + plan->tile_k - 1) / plan->tile_k; ++n) splits.push_back(n);
  return splits;
}

}  // namespace

int blocks_of(const CheckArgs& args, std::uint64_t index, bool persistent) {
  static const std::vector<int> few_ctas{0, 1, 1, 2, 3, 7};
  const std::vector<int>& limits = args.blocks.empty() && persistent ? few_ctas : args.blocks;
  if (limits.empty()) return 0;
  // Hashed, not round robin: the kernels are round robin, so each could get the same entry always.
  return limits[verify::mix(args.control.seed ^ verify::mix(index)) % limits.size()];
}

CheckSuite random_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels) {
  CheckSuite suite;
  suite.name = "random";
  suite.count = static_cast<std::uint64_t>(args.problems);
  suite.problem = [&args, kernels](std::uint64_t index) {
    const RunnableKernel& r = kernels[index % kernels.size()];
    verify::CaseLimits limits;
    limits.target_work = args.work;
    limits.sigma = args.control.sigma;
    limits.splits = args.control.splits;
    return CheckProblem{verify::random_case(*r.kernel, args.control.seed, index, limits), r.target,
                        blocks_of(args, index, is_persistent(*r.kernel))};
  };
  suite.replay = [&args](std::uint64_t index, const CheckProblem& problem) {
    return replay_command(args, "random", formatted("^{}$", problem.spec.options.kernel), index);
  };
  return suite;
}

CheckSuite tuning_suite(const CheckArgs& args, const std::vector<RunnableKernel>& kernels) {
  auto problems = std::make_shared<std::vector<CheckProblem>>();
  const std::vector<int> splits = args.control.splits ? std::vector<int>{*args.control.splits}
                                                      : std::vector<int>{0, 1, 2, 3, 5};
  std::size_t rows = 0;
  for (const RunnableKernel& r : kernels) {
    rows += size_classes(*r.kernel).size();
    for (const SizeClass& size : size_classes(*r.kernel)) {
      for (const std::int64_t dim : {size.smallest, size.largest}) {
        for (const int n : splits) {
          for (const bool causal : {false, true}) {
            problems->push_back(tuning_problem(args, r, size, dim, n, causal));
          }
        }
      }
    }
  }
  CheckSuite suite = list_suite(args, "tuning", problems);
  suite.summary = formatted(
      "{} rows (kernel, size class), {} problems each: both ends of the class, {} split counts, "
      "full and\ncausal, even if the planner would choose another row",
      rows, rows == 0 ? 0 : problems->size() / rows, splits.size());
  return suite;
}

std::unique_ptr<CaseSuite> case_suite(const CheckArgs& args, const std::vector<Target>& targets,
                                      const std::vector<BenchCase>& cases,
                                      const std::string& name) {
  auto made = std::make_unique<CaseSuite>();
  auto problems = std::make_shared<std::vector<CheckProblem>>();
  std::vector<std::size_t> row_of_problem;
  std::vector<std::string> dtype_of_problem;  // as in the case
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (const BenchCase& c : cases) {
      CaseRow row;
      row.bench_case = c;
      row.device = to_string(targets[t].device.type);
      row.skipped = why_not(c);
      row.dtypes = c.suite == kRegressionSuite ? std::vector<std::string>{"f16", "bf16", "f32"}
                                               : std::vector<std::string>{c.dtype};
      for (const std::string& dtype :
           row.skipped.empty() ? row.dtypes : std::vector<std::string>{}) {
        verify::CaseSpec spec = spec_of(c, args.control);
        set_dtype(dtype, spec);
        spec.lse = true;
        for (const KernelInfo* kernel : kernels_for(args.selection.kernel, targets[t], spec)) {
          spec.options.kernel = kernel == nullptr ? nullptr : kernel->id;
          for (const int splits : splits_of(args, c, spec, targets[t])) {
            spec.options.num_splits = splits;
            problems->push_back({spec, t, 0});
            row_of_problem.push_back(made->rows.size());
            dtype_of_problem.push_back(dtype);
          }
        }
      }
      made->rows.push_back(std::move(row));
    }
  }
  made->suite = list_suite(args, name, problems);
  made->suite.large = true;
  made->suite.oracle_work = kCaseOracleWork;
  made->suite.observe = [rows = &made->rows, row_of_problem, dtype_of_problem](
                            std::uint64_t index, const CheckProblem&, const Outcome& outcome) {
    CaseRow& row = (*rows)[row_of_problem[index]];
    ++row.problems;
    if (!outcome.passed()) ++row.failures;
    const bool finite = outcome.status.ok() && outcome.comparison.non_finite == 0 &&
                        outcome.comparison.unwritten == 0;
    const double error =
        finite ? outcome.comparison.max_error : std::numeric_limits<double>::quiet_NaN();
    const auto [found, fresh] = row.errors.emplace(dtype_of_problem[index], error);
    const bool larger = !std::isnan(found->second) && !(error <= found->second);  // keeps NaN
    if (!fresh && larger) found->second = error;
    row.worst_ratio = std::max(row.worst_ratio, outcome.comparison.worst_ratio);
    row.most_splits = std::max(row.most_splits, outcome.plan.splits);
  };
  return made;
}

}  // namespace flashcore::tool
