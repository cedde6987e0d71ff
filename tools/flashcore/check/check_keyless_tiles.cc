// Suite keyless-tiles: large problems in which many query tiles see no key.
#include <memory>
#include <utility>

#include "check/check_suites.h"
#include "command_error.h"
#include "data/cases.h"
#include "data/problem.h"

namespace flashcore::tool {
namespace {

constexpr const char* kTypes[] = {"f16", "bf16", "e4m3", "e4m3 bf16"};

verify::CaseSpec spec_of(const char* shape, const char* window) {
  ProblemArgs args;
  args.shape = shape;
  args.window = window;
  args.options.causal = args.window.empty();
  args.lse = true;
  return spec_of(args);
}

verify::CaseSpec with_used(verify::CaseSpec spec, std::vector<std::int64_t> used) {
  spec.used_k = true;
  spec.used_lengths = std::move(used);
  return spec;
}

/// Most query tiles see no key, and a CTA of a persistent kernel has several tiles. A tile with
/// keys followed by three without can deadlock the tile queue.
std::vector<verify::CaseSpec> problems_without_keys() {
  const std::vector<std::int64_t> used{1024, 40, 1024, 64, 0, 500, 129};
  return {
      spec_of("7,7/1,1025/63,64", ""),
      spec_of("7,7/1,1025/63,128", ""),
      spec_of("7,7/1,1025/63,256", ""),
      spec_of("7,8/4,1025/63,64", ""),
      spec_of("4,8/8,4096/1000,128", ""),
      spec_of("9,32/8,2048/64,128", "64,64"),
      with_used(spec_of("7,8/2,1024/1024,128", ""), used),
      with_used(spec_of("7,8/2,1024/1024,128", "100,0"), used),
      with_used(spec_of("1,32/8,2048/3577,128", "1024,0"), {3000}),
      with_used(spec_of("1,32/8,2048/3577,128", "1024,0"), {40}),
      with_used(spec_of("3,32/8,2048/3577,128", "1024,0"), {3577, 40, 0}),
  };
}

/// "e4m3 bf16": 8-bit inputs and a bf16 result.
void set_type(const std::string& type, verify::CaseSpec& spec) {
  const std::size_t space = type.find(' ');
  set_dtype(type.substr(0, space), spec);
  if (space != std::string::npos) spec.dtype = dtype_named(type.substr(space + 1));
}

/// The kernels that support the problem; null: the planner's choice.
std::vector<const KernelInfo*> kernels_taking(const CheckArgs& args, const Target& target,
                                              const verify::CaseSpec& spec) {
  const bool every = target.device.type == DeviceType::cuda && args.selection.kernel.empty();
  std::vector<const KernelInfo*> found =
      kernels_for(every ? "." : args.selection.kernel, target, spec);
  std::erase_if(found, [&](const KernelInfo* kernel) {
    verify::CaseSpec forced = spec;
    forced.options.kernel = kernel == nullptr ? nullptr : kernel->id;
    const Result<Problem> problem = problem_of(forced, target.device);
    return !problem.ok() || !make_plan(*problem, target.plan_for).ok();
  });
  return found;
}

}  // namespace

CheckSuite keyless_tiles_suite(const CheckArgs& args, const std::vector<Target>& targets) {
  auto problems = std::make_shared<std::vector<CheckProblem>>();
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (verify::CaseSpec spec : problems_without_keys()) {
      spec.seed = args.control.seed;
      spec.sigma = args.control.sigma.value_or(1.0);
      spec.options.num_splits = args.control.splits.value_or(0);
      for (const char* type : kTypes) {
        verify::CaseSpec typed = spec;
        set_type(type, typed);
        for (const KernelInfo* kernel : kernels_taking(args, targets[t], typed)) {
          typed.options.kernel = kernel == nullptr ? nullptr : kernel->id;
          problems->push_back({typed, t, 0});
        }
      }
    }
  }
  if (problems->empty()) throw CommandError("suite keyless-tiles: no problem can be checked here");
  CheckSuite suite = list_suite(args, kKeylessTiles, problems);
  suite.large = true;
  suite.oracle_work = kCaseOracleWork;
  suite.summary =
      "query tiles with and without visible keys, several per CTA of a persistent kernel";
  return suite;
}

}  // namespace flashcore::tool
