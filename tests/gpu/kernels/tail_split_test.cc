// Tail split of the Hopper kernels: any number of tail tiles and of splits on random problems. The
// planner splits the tail only where that is faster, which small problems rarely show.
#include <algorithm>

#include "gpu/support.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

class TailSplit : public GpuTest {};

/// A random problem of the kernel, usable if the kernel can split its tail.
class TailSplitCase {
 public:
  TailSplitCase(const KernelInfo& kernel, std::uint64_t index, const DeviceInfo& device)
      : memory_(spec_of(kernel, index)), block_(memory_.bytes().size()) {
    const Problem problem =
        require(make_problem(memory_.at(block_.data(), kGpu), memory_.spec().options));
    const Result<Plan> plan = make_plan(problem, device);
    if (!plan.ok() || !can_split_tail(kernel, problem) || plan->num_tiles == 0) return;
    plan_ = *plan;
    usable_ = true;
  }

  bool usable() const { return usable_; }
  std::int64_t tiles() const { return plan_.num_tiles; }

  /// Splits the last `tiles` tiles and runs on `sms` SMs. Returns true if a tile was split.
  bool run_split(std::int64_t tiles, std::int64_t splits, std::int32_t sms) {
    Plan plan = plan_;
    plan.device.sm_count = sms;
    require(apply_tail_split(plan, tiles, splits));
    block_.upload(memory_.bytes().data(), memory_.bytes().size());
    const TestWorkspace workspace(plan.workspace_bytes);
    for (int repeat = 0; repeat < 2; ++repeat) {  // the first run must reset the counters
      require(run(plan, memory_.at(block_.data(), kGpu), workspace.get()));
      expect_right(memory_, block_.download(), plan);
      EXPECT_TRUE(workspace.header_is_zero()) << plan.kernel->id;
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "the last " << plan.tail_tiles << " of " << plan.num_tiles << " tiles in "
                    << plan.tail_splits << " splits each, " << sms << " SMs";
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

TEST_F(TailSplit, RandomSplitsAreRight) {
  constexpr int kProblems = 25;  // per kernel
  const DeviceInfo device = require(device_info(kGpu));
  verify::Random random(5);
  for (const KernelInfo* kernel : runnable_kernels()) {
    const Result<Problem> dense =
        dense_problem(kernel->dtype, 1, 1, 1, 64, 64, kernel->head_dim, kernel->head_dim, {}, kGpu);
    if (!can_split_tail(*kernel, require(dense))) continue;
    int split = 0;
    for (std::uint64_t index = 0; split < kProblems; ++index) {
      ASSERT_LT(index, 40U * kProblems) << kernel->id << " split only " << split << " problems";
      TailSplitCase problem(*kernel, index, device);
      if (!problem.usable()) continue;
      const auto sms = static_cast<std::int32_t>(random.between(1, 2 * problem.tiles()));
      const bool was_split = problem.run_split(
          random.between(1, problem.tiles()), random.between(2, 9), std::min(sms, device.sm_count));
      split += was_split ? 1 : 0;
      if (HasFailure()) return;
    }
  }
}

// The planner splits the tail if there are a few more tiles than a wave.
TEST_F(TailSplit, PlannerSplitsAPartialWave) {
  const DeviceInfo device = require(device_info(kGpu));
  if (device.compute_capability != 90) GTEST_SKIP() << "tail split needs sm_90";
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
