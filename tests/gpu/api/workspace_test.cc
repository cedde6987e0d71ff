// The workspace: independence of its previous content and users, and its state after a call.
#include <algorithm>

#include "gpu/support.h"
#include "plan/planner.h"

namespace flashcore::gpu_test {
namespace {

class WorkspaceUse : public GpuTest {};

TEST_F(WorkspaceUse, EveryKernelIsRightAndLeavesTheHeaderZero) {
  const std::vector<const KernelInfo*> found = runnable_kernels();
  ASSERT_FALSE(found.empty());
  for (const KernelInfo* kernel : found) {
    for (const int splits : {1, 3}) {
      for (const bool checked : {false, true}) {
        verify::CaseSpec spec = dense(*kernel, 2, 2, 1, kernel->tile_q + 3, 5 * kernel->tile_k + 1);
        spec.options.kernel = kernel->id;
        spec.options.num_splits = splits;
        spec.options.checked = checked;
        spec.lse = spec.used_k = true;
        if (splits > 1 && !any(kernel->features & Features::num_splits)) continue;  // no split-KV
        verify::fit_to_kernel(*kernel, spec);
        const verify::CaseMemory memory(spec);
        GpuCase gpu(memory);  // all bits of its workspace were 1 before workspace_init()
        EXPECT_EQ(gpu.plan().splits, splits);
        const std::vector<std::byte> block = gpu.direct(memory, nullptr);
        expect_right(memory, block, gpu.plan());
        EXPECT_TRUE(gpu.workspace().header_is_zero()) << kernel->id << " splits " << splits;
        EXPECT_TRUE(workspace_status(gpu.workspace().get()).ok());
      }
    }
  }
}

// uses_header() is correct: a plan that does not use the header ignores and keeps its content.
TEST_F(WorkspaceUse, UnusedHeaderIsUntouched) {
  std::size_t tested = 0;
  for (const KernelInfo* kernel : runnable_kernels()) {
    for (const int splits : {1, 3}) {
      verify::CaseSpec spec = dense(*kernel, 2, 2, 1, kernel->tile_q + 3, 5 * kernel->tile_k + 1);
      spec.options.kernel = kernel->id;
      spec.options.num_splits = splits;
      spec.lse = spec.used_k = true;
      if (splits > 1 && !any(kernel->features & Features::num_splits)) continue;  // no split-KV
      verify::fit_to_kernel(*kernel, spec);
      const verify::CaseMemory memory(spec);
      GpuCase gpu(memory);
      if (uses_header(gpu.plan())) continue;
      ++tested;
      const Workspace workspace = gpu.workspace().get();
      require(cudaMemset(workspace.data, 0xff, workspace.bytes), "cudaMemset");
      expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
      std::vector<std::byte> header(kWorkspaceHeaderBytes);
      require(cudaMemcpy(header.data(), workspace.data, header.size(), cudaMemcpyDeviceToHost),
              "cudaMemcpy");
      EXPECT_TRUE(std::all_of(header.begin(), header.end(),
                              [](std::byte b) { return b == std::byte{0xff}; }))
          << kernel->id << " splits " << splits;
    }
  }
  EXPECT_GT(tested, runnable_kernels().size() / 2);
}

// A checked call detects an uninitialized header.
TEST_F(WorkspaceUse, UninitializedHeaderIsDetected) {
  verify::CaseSpec spec = dense(DType::f16, 1, 2, 2, 40, 100, 64);
  spec.options.checked = true;
  const verify::CaseMemory memory(spec);
  GpuCase gpu(memory);
  const Workspace workspace = gpu.workspace().get();
  require(cudaMemset(workspace.data, 0xff, kWorkspaceHeaderBytes), "cudaMemset");
  require(gpu.run(nullptr));
  const Status status = workspace_status(workspace);
  EXPECT_EQ(status.code(), StatusCode::internal);
  EXPECT_NE(status.message().find("workspace_init"), std::string::npos) << status.message();
}

// More tiles than CTAs: the kernel schedules them by the header's tile_counter, which must be 0
// after every call, even if some tiles are empty.
TEST_F(WorkspaceUse, TileCounterIsReset) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (!is_persistent(*kernel)) continue;
    for (const bool varlen : {false, true}) {
      verify::CaseSpec spec = dense(*kernel, 5, 40, 20, kernel->tile_q + 1, 70);
      spec.options.kernel = kernel->id;
      spec.options.causal = spec.lse = true;
      spec.q_varlen = spec.kv_varlen = varlen;
      verify::fit_to_kernel(*kernel, spec);
      const verify::CaseMemory memory(spec);
      GpuCase gpu(memory);
      EXPECT_GT(gpu.plan().num_tiles, gpu.plan().device.sm_count);
      std::vector<std::byte> first;
      for (int call = 0; call < 3; ++call) {
        const std::vector<std::byte> block = gpu.direct(memory, nullptr);
        expect_right(memory, block, gpu.plan());
        EXPECT_TRUE(gpu.workspace().header_is_zero()) << kernel->id << " call " << call;
        if (call == 0) first = block;
        EXPECT_EQ(block, first) << kernel->id << " call " << call;
      }
    }
  }
}

TEST_F(WorkspaceUse, PlansMayShareAWorkspace) {
  std::vector<verify::CaseSpec> specs = {dense(DType::f32, 1, 2, 2, 40, 900, 128),
                                         dense(DType::f16, 2, 4, 2, 100, 70, 64),
                                         dense(DType::bf16, 1, 8, 1, 1, 5000, 64)};
  specs[0].options.num_splits = 6;
  specs[2].options.num_splits = 20;
  specs[2].lse = true;
  std::size_t bytes = 0;
  for (const verify::CaseSpec& spec : specs) {
    bytes = std::max(bytes, GpuCase(verify::CaseMemory(spec)).plan().workspace_bytes);
  }
  const TestWorkspace shared(bytes);
  const TestStream stream;
  for (const int index : {0, 1, 0, 2, 1, 2, 0}) {
    const verify::CaseSpec& spec = specs[static_cast<std::size_t>(index)];
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    const std::vector<std::byte> want = gpu.direct(memory, stream);  // with its own workspace
    expect_right(memory, want, gpu.plan());
    gpu.load(memory);
    require(run(gpu.plan(), gpu.tensors(), shared.get(), stream));
    EXPECT_EQ(gpu.block(), want) << to_string(spec);
    EXPECT_TRUE(shared.header_is_zero());
  }
}

// Rows and splits that see no key do not write their partials; the combine must not read them.
TEST_F(WorkspaceUse, EmptySplitsReadNothing) {
  verify::CaseSpec spec = dense(DType::f32, 2, 2, 2, 70, 400, 64);
  spec.options.num_splits = 6;
  spec.options.causal = true;
  spec.options.window_left = 10;
  spec.lse = spec.q_start = true;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    spec.seed = seed;
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
  }
}

TEST_F(WorkspaceUse, TooSmallIsRefusedAndOutputsAreUntouched) {
  verify::CaseSpec spec = dense(DType::f32, 1, 2, 2, 20, 400, 64);
  spec.options.num_splits = 3;
  const verify::CaseMemory memory(spec);
  const GpuCase gpu(memory);
  Workspace workspace = gpu.workspace().get();
  workspace.bytes = gpu.plan().workspace_bytes - 1;
  const Status status = run(gpu.plan(), gpu.tensors(), workspace);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("workspace: has"), std::string::npos) << status.message();
  EXPECT_EQ(gpu.block(), memory.bytes());
}

TEST_F(WorkspaceUse, OnAnotherDeviceIsRefused) {
  const verify::CaseMemory memory(dense(DType::f32, 1, 1, 1, 8, 8, 64));
  const GpuCase gpu(memory);
  Workspace workspace = gpu.workspace().get();
  workspace.device = Device{};
  const Status status = run(gpu.plan(), gpu.tensors(), workspace);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("workspace: is on cpu:0"), std::string::npos) << status.message();
  EXPECT_EQ(gpu.block(), memory.bytes());
}

}  // namespace
}  // namespace flashcore::gpu_test
