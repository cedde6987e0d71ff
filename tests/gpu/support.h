// What the GPU tests share: skipping without a GPU, memory and streams that give themselves back,
// and a random case laid out on the device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "flashcore/attention.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/compare.h"

namespace flashcore::gpu_test {

inline constexpr Device kGpu{DeviceType::cuda, 0};

/// Throws std::runtime_error, which GoogleTest reports as a failure, unless all is well.
void require(cudaError_t code, const char* what);
void require(const Status& status);
template <typename T>
T require(Result<T> result) {
  require(result.status());
  return std::move(result).value();
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override;
  /// No test may leave an error for the next one, or for the caller's own error check.
  void TearDown() override;
};

class DeviceBuffer {
 public:
  /// Full of ones: NaN in every float format.
  explicit DeviceBuffer(std::size_t bytes);
  explicit DeviceBuffer(const std::vector<std::byte>& host);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void upload(const void* host, std::size_t bytes, std::size_t offset = 0);
  std::vector<std::byte> download(std::size_t bytes, std::size_t offset = 0) const;
  std::vector<std::byte> download() const { return download(bytes_); }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class TestStream {
 public:
  explicit TestStream(int priority = 0);
  ~TestStream();
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: implicit on purpose
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A workspace for a plan, full of ones and then initialised.
class TestWorkspace {
 public:
  explicit TestWorkspace(std::size_t bytes);
  Workspace get() const { return {buffer_.data(), buffer_.bytes(), kGpu}; }
  /// Whether the whole header is zero, as every kernel must leave it.
  bool header_is_zero() const;

 private:
  DeviceBuffer buffer_;
};

/// A compact [batch, heads, len, dim] problem without options.
verify::CaseSpec dense(DType dtype, std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                       std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim);

/// A case on the GPU with its plan and workspace.
class GpuCase {
 public:
  explicit GpuCase(const verify::CaseMemory& memory);

  const Plan& plan() const { return plan_; }
  const Tensors& tensors() const { return tensors_; }
  const TestWorkspace& workspace() const { return workspace_; }

  /// Another draw of the same shape; outputs are poisoned again. Waits until it is there.
  void load(const verify::CaseMemory& memory);
  Status run(Stream stream) const {
    return flashcore::run(plan_, tensors_, workspace_.get(), stream);
  }
  /// All tensors as they are now, once the device is idle.
  std::vector<std::byte> block() const;
  /// load(), run(), block().
  std::vector<std::byte> direct(const verify::CaseMemory& memory, Stream stream);

 private:
  DeviceBuffer block_;
  Tensors tensors_;
  Plan plan_;
  TestWorkspace workspace_;
};

/// The outputs in `block`, a copy of the case's memory after a call, against the oracle.
verify::Comparison compare_with_oracle(const verify::CaseMemory& memory,
                                       const std::vector<std::byte>& block, const Plan& plan);

/// EXPECT_TRUE with a report.
void expect_right(const verify::CaseMemory& memory, const std::vector<std::byte>& block,
                  const Plan& plan);

/// Every CUDA kernel of this build that this GPU can run.
std::vector<const KernelInfo*> runnable_kernels();

/// The plan of this machine's GPU for these tensors.
Plan plan_for(const Tensors& tensors, const Options& options);

}  // namespace flashcore::gpu_test
