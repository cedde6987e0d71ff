#include "bench/bench_rows.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <new>

#include "cli/text.h"
#include "command_error.h"
#include "device_memory.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::tool {
namespace {

constexpr double kOracleWork = 2e8;
constexpr double kColdBytes = 3e8;  // several times the largest L2 of a GPU
constexpr double kMaxCopies = 1024;
constexpr std::size_t kMinSamples = 5;  // for a meaningful spread

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Copies of the tensors of a case on the device. Successive calls use them in turn.
class Rotation {
 public:
  Rotation(const verify::CaseSpec& spec, const Target& target, int copies)
      : memory_(spec),
        stride_(aligned(memory_.bytes().size())),
        block_(*target.backend, target.device, stride_ * static_cast<std::size_t>(copies)) {
    for (int i = 0; i < copies; ++i) {
      std::byte* base = block_.data() + stride_ * static_cast<std::size_t>(i);
      const Status status = target.backend->upload(base, memory_.bytes().data(),
                                                   memory_.bytes().size(), target.device.index);
      if (!status.ok()) throw CommandError(status);
      tensors_.push_back(memory_.at(base, target.device));
    }
  }

  const Tensors& tensors(int call) const {
    return tensors_[static_cast<std::size_t>(call) % tensors_.size()];
  }

 private:
  verify::CaseMemory memory_;
  std::size_t stride_;
  DeviceMemory block_;
  std::vector<Tensors> tensors_;
};

int copies_for(const BenchCase& c, const Plan& plan, const Target& target) {
  if (!c.cold_l2 || target.device.type == DeviceType::cpu) return 1;
  return static_cast<int>(
      std::clamp(std::ceil(kColdBytes / cost(plan.problem).bytes), 1.0, kMaxCopies));
}

BenchOutcome check_and_time(const BenchCase& c, const KernelInfo* kernel, const Target& target,
                            const BenchArgs& args, const Stop& stop) {
  BenchOutcome result;
  verify::CaseSpec spec = spec_of(c, args.control);
  spec.options.kernel = kernel == nullptr ? nullptr : kernel->id;
  verify::CheckRunner runner(*target.backend, target.device, target.plan_for);
  const auto checked = runner.check(spec, kOracleWork, /*oracle_threads=*/0);
  if (!checked.passed()) {
    result.check_failure = checked.failure();
    if (checked.status.ok()) result.report = verify::report(checked.comparison);
    return result;
  }
  BenchRow row;
  row.bench_case = c;
  row.plan = checked.plan;
  row.comparison = checked.comparison;
  row.roofline_us = roofline_us(checked.plan.problem, target.real);
  row.copies = copies_for(c, checked.plan, target);
  std::optional<Rotation> rotation;
  if (row.copies > 1) rotation.emplace(spec, target, row.copies);
  row.timing = value_or_throw(time_calls(
      *target.backend, target.device,
      [&](int call, Stream stream) {
        return run(row.plan, rotation ? rotation->tensors(call) : runner.tensors(),
                   runner.workspace(), stream);
      },
      row.copies, args.samples, stop));
  if (row.timing.samples.size() < std::min(kMinSamples, static_cast<std::size_t>(args.samples))) {
    result.skipped = stop.reason();
    return result;
  }
  result.row = std::move(row);
  return result;
}

}  // namespace

BenchOutcome bench_case_on(const BenchCase& c, const KernelInfo* kernel, const Target& target,
                           const BenchArgs& args, const Stop& stop) {
  BenchOutcome result;
  result.skipped = why_not(c);
  if (!result.skipped.empty()) return result;
  try {
    return check_and_time(c, kernel, target, args, stop);
  } catch (const std::bad_alloc&) {
    result.skipped = "not enough host memory";
  } catch (const CommandError& error) {
    result.skipped = error.what();
  }
  return result;
}

HostCost host_cost(const verify::CaseSpec& given, const Target& target) {
  // The launches of a batch fit the device's queue: a full queue blocks the host, which is not host
  // cost.
  constexpr int kBatches = 50, kCallsPerBatch = 200;
  constexpr int kWarmUpBatches = 200;  // half a second with a GPU: an idle core is slow at first
  verify::CaseSpec spec = given;
  if (target.device.type == DeviceType::cpu) {
    spec.batch = spec.q_heads = spec.kv_heads = spec.q_len = 1;
    spec.kv_len = std::max<std::int64_t>(spec.page_size, 1);
  }
  verify::CheckRunner runner(*target.backend, target.device, target.plan_for);
  const auto checked = runner.check(spec, kOracleWork);
  if (!checked.passed()) throw CommandError("host cost: the check failed: " + checked.failure());
  const Problem problem = checked.plan.problem;
  const DeviceInfo device = checked.plan.device;
  const auto batch_of = [&](auto call) {
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < kCallsPerBatch; ++n) {
      const Status status = call();
      if (!status.ok()) throw CommandError(status);
    }
    const std::chrono::duration<double, std::micro> elapsed =
        std::chrono::steady_clock::now() - start;
    const Status status = workspace_status(runner.workspace());  // synchronizes
    if (!status.ok()) throw CommandError(status);
    return elapsed.count() / kCallsPerBatch;
  };
  // Alternate the two, so that a change of the clock affects both.
  Timing calls, launches;
  for (int batch = -kWarmUpBatches; batch < kBatches; ++batch) {
    const double us = batch_of([&] {
      const Plan plan = value_or_throw(make_plan(problem, device));
      return run(plan, runner.tensors(), runner.workspace());
    });
    const double launch_us =
        batch_of([&] { return target.backend->launch_empty(target.device, Stream{}); });
    if (batch < 0) continue;
    calls.samples.push_back(us);
    launches.samples.push_back(launch_us);
  }
  // Other processes on the host only add time: the fastest batch is the undisturbed one.
  const auto fastest = [](const Timing& timing) {
    return *std::ranges::min_element(timing.samples);
  };
  return {fastest(calls), fastest(launches),
          formatted("{} ({})", to_string(spec.dtype), shape_text(spec))};
}

}  // namespace flashcore::tool
