// Hopper kernels whose last items are cut into parts: any number of items, and of parts, on random
// problems; the planner cuts where it pays, which small problems do not tell.
#include <algorithm>

#include "gpu/support.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

class Parts : public GpuTest {};

/// The kernel's random problems that it can cut.
class CutCase {
 public:
  CutCase(const KernelInfo& kernel, std::uint64_t index, const DeviceInfo& device)
      : memory_(spec_of(kernel, index)), block_(memory_.bytes().size()) {
    const Problem problem =
        require(make_problem(memory_.at(block_.data(), kGpu), memory_.spec().options));
    const Result<Plan> plan = make_plan(problem, device);
    if (!plan.ok() || !can_split_tail(kernel, problem) || plan->num_tiles == 0) return;
    plan_ = *plan;
    usable_ = true;
  }

  bool usable() const { return usable_; }
  std::int64_t items() const { return plan_.num_tiles; }

  /// Cut into parts, on so many SMs; true if there were any parts.
  bool run_cut(std::int64_t items, std::int64_t parts, std::int32_t sms) {
    Plan plan = plan_;
    plan.device.sm_count = sms;
    require(apply_tail_split(plan, items, parts));
    block_.upload(memory_.bytes().data(), memory_.bytes().size());
    const TestWorkspace workspace(plan.workspace_bytes);
    for (int repeat = 0; repeat < 2; ++repeat) {  // counters are 0 again
      require(run(plan, memory_.at(block_.data(), kGpu), workspace.get()));
      expect_right(memory_, block_.download(), plan);
      EXPECT_TRUE(workspace.header_is_zero()) << plan.kernel->id;
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "the last " << plan.tail_tiles << " of " << plan.num_tiles << " items in "
                    << plan.tail_splits << " parts, " << sms << " SMs";
    }
    return plan.tail_splits > 1;
  }

 private:
  static verify::CaseSpec spec_of(const KernelInfo& kernel, std::uint64_t index) {
    verify::CaseLimits limits;
    limits.target_work = 4e6;
    verify::CaseSpec spec = verify::random_case(kernel, 11, index, limits);
    spec.options.kernel = kernel.id;
    spec.options.causal = false;
    spec.options.window_left = spec.options.window_right = -1;
    return spec;
  }

  verify::CaseMemory memory_;
  DeviceBuffer block_;
  Plan plan_;
  bool usable_ = false;
};

TEST_F(Parts, OfRandomProblems) {
  constexpr int kProblems = 25;  // of each kernel
  const DeviceInfo device = require(device_info(kGpu));
  verify::Random random(5);
  for (const KernelInfo* kernel : runnable_kernels()) {
    const Result<Problem> dense =
        dense_problem(kernel->dtype, 1, 1, 1, 64, 64, kernel->head_dim, kernel->head_dim, {}, kGpu);
    if (!can_split_tail(*kernel, require(dense))) continue;
    int cut = 0;
    for (std::uint64_t index = 0; cut < kProblems; ++index) {
      ASSERT_LT(index, 40U * kProblems) << kernel->id << " cut " << cut << " problems only";
      CutCase problem(*kernel, index, device);
      if (!problem.usable()) continue;
      const auto sms = static_cast<std::int32_t>(random.between(1, 2 * problem.items()));
      const bool had_parts = problem.run_cut(random.between(1, problem.items()),
                                             random.between(2, 9), std::min(sms, device.sm_count));
      cut += had_parts ? 1 : 0;
      if (HasFailure()) return;
    }
  }
}

// What the planner cuts by itself: a few items more than a round.
TEST_F(Parts, OfTheLastItems) {
  const DeviceInfo device = require(device_info(kGpu));
  if (device.compute_capability != 90) GTEST_SKIP() << "the kernels are Hopper's";
  const std::int64_t heads = (device.sm_count + 7) / 8;
  const verify::CaseMemory memory(dense(DType::bf16, 1, heads, heads, 1024, 2000, 128));
  GpuCase gpu(memory);
  EXPECT_GT(gpu.plan().tail_tiles, 0) << gpu.plan().kernel->id;
  TestStream stream;
  const std::vector<std::byte> first = gpu.direct(memory, static_cast<cudaStream_t>(stream));
  expect_right(memory, first, gpu.plan());
  for (int repeat = 0; repeat < 100; ++repeat) {
    ASSERT_EQ(gpu.direct(memory, static_cast<cudaStream_t>(stream)), first);
  }
  EXPECT_TRUE(gpu.workspace().header_is_zero());
}

}  // namespace
}  // namespace flashcore::gpu_test
