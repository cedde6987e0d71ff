// Errors outside the kernels: missing devices, unusable streams, host pointers. Each returns a
// Status, and later calls work.
#include <cstdlib>

#include "gpu/support.h"

namespace flashcore::gpu_test {
namespace {

class Errors : public GpuTest {
 protected:
  static int device_count() {
    int count = 0;
    require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  }
  /// Expects that a call still works.
  static void expect_usable() {
    const verify::CaseMemory memory(dense(DType::f16, 1, 2, 2, 40, 100, 64));
    GpuCase gpu(memory);
    expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
  }
};

TEST_F(Errors, UnknownDeviceIsNamed) {
  for (const int index : {-1, device_count(), 63, 64, 1000}) {
    const Result<DeviceInfo> info = device_info({DeviceType::cuda, index});
    ASSERT_FALSE(info.ok()) << index;
    EXPECT_FALSE(info.status().message().empty());
    EXPECT_TRUE(info.status().code() == StatusCode::cuda ||
                info.status().code() == StatusCode::invalid_argument)
        << info.status().message();
  }
  expect_usable();
}

TEST_F(Errors, TensorsOnAMissingDeviceAreRefused) {
  const verify::CaseMemory memory(dense(DType::f16, 1, 1, 1, 16, 16, 64));
  GpuCase gpu(memory);
  const Device missing{DeviceType::cuda, device_count()};
  Tensors elsewhere = gpu.tensors();
  for (TensorView* t : {&elsewhere.q, &elsewhere.k, &elsewhere.v, &elsewhere.out}) {
    t->device = missing;
  }
  const Problem problem = require(make_problem(elsewhere, {}));
  DeviceInfo info = require(device_info(kGpu));
  info.device = missing;
  const Plan plan = require(make_plan(problem, info));
  Workspace workspace = gpu.workspace().get();
  workspace.device = missing;
  const Status status = run(plan, elsewhere, workspace);
  EXPECT_EQ(status.code(), StatusCode::cuda);
  EXPECT_NE(status.message().find("invalid device ordinal"), std::string::npos) << status.message();
  EXPECT_EQ(workspace_init(workspace).code(), StatusCode::cuda);
  int current = -1;
  require(cudaGetDevice(&current), "cudaGetDevice");
  EXPECT_EQ(current, kGpu.index) << "the caller's device must stay current";
  EXPECT_EQ(gpu.block(), memory.bytes()) << "outputs must stay untouched";
  expect_usable();
}

TEST_F(Errors, TensorsOnTwoDevicesAreRefused) {
  const verify::CaseMemory memory(dense(DType::f16, 1, 1, 1, 16, 16, 64));
  const GpuCase gpu(memory);
  Tensors mixed = gpu.tensors();
  mixed.v.device = Device{};
  const Result<Problem> problem = make_problem(mixed, {});
  ASSERT_FALSE(problem.ok());
  EXPECT_EQ(problem.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(problem.status().message().find("v: is on cpu:0, q is on cuda:0"), std::string::npos)
      << problem.status().message();
}

TEST_F(Errors, DoublePrecisionIsRefused) {
  DeviceBuffer buffer(1 << 16);
  Tensors t;
  t.q = t.k = t.v = view(buffer.data(), DType::f64, {1, 1, 4, 8}, kGpu);
  t.out = view(buffer.data() + 4096, DType::f64, {1, 1, 4, 8}, kGpu);
  const Result<Problem> problem = make_problem(t, {});
  ASSERT_FALSE(problem.ok());
  EXPECT_EQ(problem.status().code(), StatusCode::unsupported);
}

TEST_F(Errors, PlanForAnotherDeviceTypeIsRefused) {
  const verify::CaseMemory memory(dense(DType::f16, 1, 1, 1, 16, 16, 64));
  const GpuCase gpu(memory);
  const Result<Plan> plan = make_plan(gpu.plan().problem, require(device_info(Device{})));
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), StatusCode::invalid_argument);
}

// Synchronization is not allowed during stream capture and invalidates the capture. Both calls
// return an error; the stream and the GPU stay usable.
TEST_F(Errors, SynchronizationDuringCaptureIsRefused) {
  const verify::CaseMemory memory(dense(DType::f16, 1, 2, 2, 40, 100, 64));
  GpuCase gpu(memory);
  const TestStream stream;
  const std::vector<std::byte> want = gpu.direct(memory, stream);
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  EXPECT_TRUE(gpu.run(stream).ok());
  const Status status = workspace_status(gpu.workspace().get(), stream);
  EXPECT_EQ(status.code(), StatusCode::cuda) << status.message();
  EXPECT_NE(status.message().find("captur"), std::string::npos) << status.message();
  const Status invalidated = gpu.run(stream);
  EXPECT_EQ(invalidated.code(), StatusCode::cuda) << invalidated.message();
  EXPECT_NE(invalidated.message().find("captur"), std::string::npos) << invalidated.message();
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGetLastError();  // clears the expected error of the line above
  EXPECT_EQ(gpu.direct(memory, stream), want);
}

/// Passes pageable host memory as device memory. A GPU without access to it faults and loses its
/// context: the call must return the fault as a Status. On a GPU with access, the result must be
/// correct. Exit code 0 means one of the two.
[[noreturn]] void call_with_host_memory() {
  const verify::CaseMemory memory(dense(DType::f16, 1, 2, 2, 40, 100, 64));
  GpuCase gpu(memory);
  std::vector<std::byte> host = memory.bytes();
  const Tensors tensors = memory.at(host.data(), kGpu);
  const Status launched = run(plan_for(tensors, {}), tensors, gpu.workspace().get());
  const Status status = launched.ok() ? workspace_status(gpu.workspace().get()) : launched;
  if (status.ok()) {
    std::_Exit(compare_with_oracle(memory, host, gpu.plan()).ok ? 0 : 1);
  }
  std::_Exit(status.code() == StatusCode::cuda && !status.message().empty() ? 0 : 2);
}

TEST_F(Errors, HostMemoryGivesAStatusOrARightResult) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process: CUDA does not survive fork
  EXPECT_EXIT(call_with_host_memory(), ::testing::ExitedWithCode(0), "");
  expect_usable();
}

}  // namespace
}  // namespace flashcore::gpu_test
