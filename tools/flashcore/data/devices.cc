#include "data/devices.h"

#include <regex.h>

#include <algorithm>
#include <charconv>

#include "cli/text.h"
#include "command_error.h"
#include "plan/backward.h"
#include "plan/planner.h"

namespace flashcore::tool {
namespace {

/// A POSIX extended regular expression: std::regex takes longer to compile than this file.
class Pattern {
 public:
  explicit Pattern(const std::string& text) {
    if (regcomp(&expression_, text.c_str(), REG_EXTENDED | REG_NOSUB) != 0) {
      throw CommandError(formatted("--kernel is \"{}\"; wanted a regular expression", text));
    }
  }
  ~Pattern() { regfree(&expression_); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  bool finds(const char* text) const { return regexec(&expression_, text, 0, nullptr, 0) == 0; }

 private:
  regex_t expression_;
};

bool has_gpu() { return cuda_availability().device_count > 0; }

Device device_named(const std::string& name) {
  if (name == "auto") return {has_gpu() ? DeviceType::cuda : DeviceType::cpu, 0};
  if (name == "cpu") return {DeviceType::cpu, 0};
  Device device{DeviceType::cuda, 0};
  if (name == "cuda") return device;
  const std::string_view text = name;
  if (text.starts_with("cuda:")) {
    const auto [end, error] =
        std::from_chars(text.data() + 5, text.data() + text.size(), device.index);
    if (error == std::errc{} && end == text.data() + text.size() && device.index >= 0) {
      return device;
    }
  }
  throw CommandError(formatted("--device is \"{}\"; wanted auto, cpu, cuda or cuda:N", name));
}

Target target_of(Device device, const DeviceArgs& args) {
  if (device.type == DeviceType::cuda) {
    const CudaAvailability cuda = cuda_availability();
    if (cuda.device_count == 0) {
      throw CommandError(formatted("no GPU can be used: {}; use --device cpu", cuda.reason));
    }
    if (device.index >= cuda.device_count) {
      throw CommandError(formatted("--device is cuda:{}; the last GPU here is cuda:{}",
                                   device.index, cuda.device_count - 1));
    }
  }
  Target target;
  target.device = device;
  target.backend = value_or_throw(backend_for(device.type));
  target.real = value_or_throw(device_info(device));
  if (args.threads > 0) target.real.threads = args.threads;
  target.plan_for = target.real;
  if (args.plan_for.empty()) return target;

  const DeviceInfo named = value_or_throw(named_device(args.plan_for.c_str()));
  if (named.device.type != device.type) {
    throw CommandError(formatted(
        "--plan-for {} is a {} device, but the problem runs on {}; explain needs no device",
        args.plan_for, to_string(named.device.type), to_string(device.type)));
  }
  target.plan_for = named;
  target.plan_for.device = device;
  if (args.threads > 0) target.plan_for.threads = args.threads;
  return target;
}

}  // namespace

Target find_target(const DeviceArgs& args) { return target_of(device_named(args.device), args); }

std::vector<Target> find_targets(const DeviceArgs& args) {
  if (args.device != "all") return {find_target(args)};
  std::vector<Target> targets;
  if (!args.plan_for.empty()) {  // it selects the type of the device
    const DeviceInfo named = value_or_throw(named_device(args.plan_for.c_str()));
    return {target_of({named.device.type, 0}, args)};
  }
  targets.push_back(target_of({DeviceType::cpu, 0}, args));
  if (has_gpu()) targets.push_back(target_of({DeviceType::cuda, 0}, args));
  return targets;
}

DeviceInfo with_blocks(DeviceInfo device, int blocks) {
  if (blocks > 0) device.sm_count = std::min(device.sm_count, blocks);
  return device;
}

bool runnable(const KernelInfo& kernel, const DeviceInfo& device) {
  if (!kernel.compiled || kernel.device != device.device.type) return false;
  const Result<Problem> dense =
      dense_problem(kernel.dtype, 1, 1, 1, 1, 1, kernel.head_dim, kernel.v_dim, {}, device.device);
  if (!dense.ok()) return false;
  Problem problem = *dense;
  if (needs_8_bits(kernel)) problem.k.dtype = problem.v.dtype = DType::e4m3;
  if (needs_e4m3(kernel)) problem.q.dtype = DType::e4m3;
  const Reject reject = kernel.op == Operation::bwd ? supports_backward(kernel, problem, device)
                                                    : supports(kernel, problem, device);
  return reject == Reject::none;
}

std::vector<RunnableKernel> find_kernels(const std::string& pattern,
                                         const std::vector<Target>& targets, Operation op) {
  const Pattern wanted(pattern);
  std::vector<RunnableKernel> found;
  bool known = false;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != op || !wanted.finds(kernel.id)) continue;
    known = true;
    for (std::size_t t = 0; t < targets.size(); ++t) {
      // With --plan-for, the real device and the planned one must both support the kernel.
      if (runnable(kernel, targets[t].real) && runnable(kernel, targets[t].plan_for)) {
        found.push_back({&kernel, t});
      }
    }
  }
  if (!found.empty()) return found;
  throw CommandError(formatted(
      "--kernel \"{}\": {}; flashcore info --kernels lists all kernels", pattern,
      known ? "no matching kernel runs in this build and on this device" : "no kernel id matches"));
}

std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           DType dtype, bool stored_in_8_bits,
                                           std::int64_t head_dim, std::int64_t v_dim) {
  if (pattern.empty()) return {nullptr};
  std::vector<const KernelInfo*> found;
  for (const RunnableKernel& r : find_kernels(pattern, {target})) {
    if (r.kernel->dtype == dtype && head_dim <= r.kernel->head_dim && v_dim <= r.kernel->v_dim &&
        (stored_in_8_bits ? takes_8_bits(*r.kernel) : !needs_8_bits(*r.kernel))) {
      found.push_back(r.kernel);
    }
  }
  return found;
}

std::vector<const KernelInfo*> kernels_for(const std::string& pattern, const Target& target,
                                           const verify::CaseSpec& spec) {
  return kernels_for(pattern, target, spec.dtype, spec.k_storage != DType::none, spec.head_dim,
                     spec.v_dim);
}

std::string describe(const Target& target) {
  const std::string index =
      target.device.type == DeviceType::cpu ? "cpu" : formatted("cuda:{}", target.device.index);
  return formatted("{} ({})", target.real.name, index);
}

}  // namespace flashcore::tool
