// Every number of KV splits on every 16-bit kernel, at three input scales: the regression shapes of
// split-KV, and one query with as many KV tiles as splits, up to 64.
#include <algorithm>
#include <iterator>
#include <set>

#include "gpu/support.h"
#include "plan/planner.h"
#include "reference/oracle.h"

namespace flashcore::gpu_test {
namespace {

constexpr int kMaxSplits = 64;
constexpr double kSigmas[] = {0.01, 1.0, 10.0};

/// A case with its oracle. Several kernels run it.
class SplitCase {
 public:
  explicit SplitCase(const verify::CaseSpec& spec)
      : memory_(spec),
        block_(memory_.bytes().size()),
        problem_(require(make_problem(memory_.tensors(), spec.options))),
        oracle_(reference::compute(problem_, memory_.tensors(),
                                   reference::all_rows(problem_, memory_.tensors()))) {}

  /// Plans the kernel with that many KV splits, or one per KV tile if there are fewer tiles.
  Plan plan(const KernelInfo& kernel, int splits, const DeviceInfo& device) const {
    Options options = memory_.spec().options;
    options.kernel = kernel.id;
    options.num_splits = splits;
    return require(make_plan(require(make_problem(on_device(), options)), device));
  }

  void run_and_compare(const Plan& plan) {
    block_.upload(memory_.bytes().data(), memory_.bytes().size());
    const TestWorkspace workspace(plan.workspace_bytes);
    require(run(plan, on_device(), workspace.get()));
    std::vector<std::byte> after = block_.download();
    EXPECT_TRUE(memory_.only_outputs_changed(after));
    const verify::Comparison comparison = verify::compare(
        oracle_, plan.problem, memory_.at(after.data(), Device{}),
        verify::arithmetic_of(plan.problem.out.dtype, plan.kernel->probability_dtype));
    EXPECT_TRUE(comparison.ok) << plan.kernel->id << ", " << plan.splits << " splits, "
                               << to_string(memory_.spec()) << '\n'
                               << verify::report(comparison);
    EXPECT_TRUE(workspace.header_is_zero()) << plan.kernel->id << ", " << plan.splits << " splits";
  }

 private:
  Tensors on_device() const { return memory_.at(block_.data(), kGpu); }

  verify::CaseMemory memory_;
  DeviceBuffer block_;
  Problem problem_;
  reference::Oracle oracle_;
};

class Splits : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) device_ = require(device_info(kGpu));
  }

  /// Kernels of the type that support split-KV of 16-bit or f32 keys and run on this GPU.
  std::vector<const KernelInfo*> kernels_of(DType dtype) const {
    std::vector<const KernelInfo*> found;
    for (const KernelInfo& kernel : kernels()) {
      if (kernel.device == DeviceType::cuda && kernel.compiled && kernel.dtype == dtype &&
          any(kernel.features & Features::num_splits) && !needs_8_bits(kernel) &&
          kernel.min_compute_capability <= device_.compute_capability &&
          kernel.max_compute_capability >= device_.compute_capability &&
          kernel.smem_bytes <= device_.smem_per_block_bytes) {
        found.push_back(&kernel);
      }
    }
    EXPECT_FALSE(found.empty());
    return found;
  }

  DeviceInfo device_;
};

TEST_F(Splits, RegressionShapesAreRight) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const double sigma : kSigmas) {
      for (const std::int64_t length : {4, 64, 65, 128, 192, 256, 512}) {
        verify::CaseSpec spec = dense(dtype, 1, 1, 1, length, length, length == 4 ? 4 : 64);
        spec.options.causal = spec.lse = true;
        spec.sigma = sigma;
        SplitCase split_case(spec);
        for (const KernelInfo* kernel : kernels_of(dtype)) {
          std::set<std::int32_t> tried;
          for (int splits = 1; splits <= kMaxSplits; ++splits) {
            const Plan plan = split_case.plan(*kernel, splits, device_);
            if (!tried.insert(plan.splits).second) continue;  // no more KV tiles
            split_case.run_and_compare(plan);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// More clusters than fit at once, and results of 1 to 16 rows exchanged between their CTAs.
TEST_F(Splits, ManyConcurrentClustersAreRight) {
  if (device_.compute_capability < 90) GTEST_SKIP() << "clusters need compute capability 9.0";
  int oversubscribed = 0;
  for (const auto& [heads, kv_heads] : {std::pair{32, 32}, {64, 32}, {160, 32}, {512, 32}}) {
    for (const std::int64_t dim : {64, 80, 128, 256}) {
      verify::CaseSpec spec = dense(DType::bf16, 1, heads, kv_heads, 1, 1500, dim);
      spec.lse = true;
      SplitCase split_case(spec);
      for (const KernelInfo* kernel : kernels_of(DType::bf16)) {
        if (kernel->tile_q > 16 || kernel->head_dim < dim) continue;
        for (const int splits : {4, 6, 7}) {
          const Plan plan = split_case.plan(*kernel, splits, device_);
          oversubscribed +=
              plan.combine == CombineMode::cluster && plan.num_tiles > device_.sm_count;
          split_case.run_and_compare(plan);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(oversubscribed, 0);
}

// One KV tile per split, the last one partial: the plan has exactly the requested number of splits.
// Every split count runs at all three scales, but each kernel at only one of them per count, to
// stay far below the 120 s limit.
TEST_F(Splits, EveryCountUpTo64IsRight) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const std::vector<const KernelInfo*> all = kernels_of(dtype);
    std::set<std::int32_t> tiles;
    for (const KernelInfo* kernel : all) tiles.insert(kernel->tile_k);
    ASSERT_GE(tiles.size(), std::size(kSigmas));
    int offset = 0;
    for (const std::int32_t tile_k : tiles) {
      ++offset;
      for (int splits = 1; splits <= kMaxSplits; ++splits) {
        verify::CaseSpec spec = dense(dtype, 1, 2, 1, 1, splits * tile_k - splits % 3, 64);
        spec.lse = true;
        spec.sigma = kSigmas[(splits + offset) % std::size(kSigmas)];
        spec.seed = static_cast<std::uint64_t>(splits);
        SplitCase split_case(spec);
        for (const KernelInfo* kernel : all) {
          if (kernel->tile_k != tile_k) continue;
          const Plan plan = split_case.plan(*kernel, splits, device_);
          ASSERT_EQ(plan.splits, splits) << kernel->id;
          split_case.run_and_compare(plan);
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
