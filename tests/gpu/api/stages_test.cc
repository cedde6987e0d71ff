// Every stage of every CUDA kernel, read through the probes, over the whole tensor.
#include "check/stages.h"

#include "check/trace.h"
#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

using verify::HostCall;
using verify::Stage;

class GpuStages : public GpuTest {
 protected:
  /// Called by the tests only, because it needs a GPU.
  static verify::CallRunner runner_for(const KernelInfo& kernel) {
    return {**backend_for(DeviceType::cuda), kGpu, require(device_info(kGpu)), kernel.id};
  }
};

/// Several tiles of keys and rows, v_dim below the kernel's head_dim.
verify::CaseSpec several_tiles(const KernelInfo& kernel) {
  verify::CaseSpec spec = dense(kernel, 2, 4, 2, kernel.tile_q + 3, 4 * kernel.tile_k + 5);
  spec.v_dim = kernel.head_dim - 8;
  verify::fit_to_kernel(kernel, spec);
  return spec;
}

std::vector<verify::CaseSpec> specs(const KernelInfo& kernel) {
  std::vector<verify::CaseSpec> all(3, several_tiles(kernel));
  all[1].options.causal = true;
  all[1].kv_len = 2 * kernel.tile_k - 1;  // with large query tiles, some rows see no key
  all[1].sinks = true;
  all[1].sigma = 10;
  all[2].bias = all[2].mask = {true, true, true, true};
  all[2].alibi = 1;
  all[2].options.softcap = 3;
  all[2].options.window_left = 70;
  all[2].used_k = all[2].q_varlen = all[2].kv_varlen = true;
  return all;
}

/// The probes need masks, biases, f32 outputs and single splits. Hopper kernels do not split keys.
std::vector<const KernelInfo*> kernels_with_stages() {
  std::vector<const KernelInfo*> found = runnable_kernels();
  std::erase_if(found, [](const KernelInfo* kernel) {
    return !any(kernel->features & Features::num_splits);
  });
  return found;
}

TEST_F(GpuStages, EveryStageIsRight) {
  const std::vector<const KernelInfo*> found = kernels_with_stages();
  ASSERT_FALSE(found.empty());
  for (const KernelInfo* kernel : found) {
    for (const verify::CaseSpec& spec : specs(*kernel)) {
      const HostCall call = verify::random_call(spec);
      verify::CallRunner runner = runner_for(*kernel);
      for (const Stage stage : verify::kStages) {
        SCOPED_TRACE(std::string(kernel->id) + ", " + verify::to_string(stage) + ", " +
                     to_string(spec));
        const verify::StageReport r = require(verify::check_stage(stage, runner, call));
        EXPECT_TRUE(r.ok()) << r.reason << ", " << verify::to_string(r.worst) << ", " << r.probe
                            << ", " << r.wrong << " of " << r.elements;
        EXPECT_EQ(r.skipped, "");
        EXPECT_GT(r.elements, 0);
        EXPECT_EQ(r.unmeasured, 0);
      }
    }
  }
}

TEST_F(GpuStages, EveryTraceIsRight) {
  for (const KernelInfo* kernel : kernels_with_stages()) {
    for (const int splits : {1, 3}) {
      verify::CaseSpec spec = several_tiles(*kernel);
      spec.options.num_splits = splits;
      spec.options.causal = true;
      verify::CallRunner runner = runner_for(*kernel);
      const verify::Trace trace =
          require(verify::trace_row(runner, verify::random_call(spec), {1, 3, 1}));
      EXPECT_TRUE(trace.ok()) << kernel->id << ", splits " << splits;
      EXPECT_EQ(trace.plan.splits, splits);
      EXPECT_GT(trace.tiles.size(), 3u);
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
