// Shared by the GPU tests: skip without a GPU, RAII device memory and streams, random cases in
// device memory.
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

/// Throws std::runtime_error on an error. GoogleTest reports it as a failure.
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
  /// Fails if the test leaves a CUDA error: a caller's own error check would find it.
  void TearDown() override;
};

class DeviceBuffer {
 public:
  /// All bits are 1: NaN in every float format.
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

/// A plan's workspace: all bits 1, then workspace_init().
class TestWorkspace {
 public:
  explicit TestWorkspace(std::size_t bytes);
  Workspace get() const { return {buffer_.data(), buffer_.bytes(), kGpu}; }
  /// True if the whole header is zero. Every kernel must leave it so.
  bool header_is_zero() const;

 private:
  DeviceBuffer buffer_;
};

/// A contiguous [batch, heads, len, dim] problem with default options.
verify::CaseSpec dense(DType dtype, std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                       std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim);

/// The same with a kernel's dtype and its largest dims.
verify::CaseSpec dense(const KernelInfo& kernel, std::int64_t batch, std::int64_t q_heads,
                       std::int64_t kv_heads, std::int64_t q_len, std::int64_t kv_len);

/// A case in device memory with its plan and workspace.
class GpuCase {
 public:
  explicit GpuCase(const verify::CaseMemory& memory);

  const Plan& plan() const { return plan_; }
  const Tensors& tensors() const { return tensors_; }
  const TestWorkspace& workspace() const { return workspace_; }

  /// Uploads other data of the same shape, with poisoned outputs. Synchronizes.
  void load(const verify::CaseMemory& memory);
  Status run(Stream stream) const {
    return flashcore::run(plan_, tensors_, workspace_.get(), stream);
  }
  /// Synchronizes and downloads the memory of all tensors.
  std::vector<std::byte> block() const;
  /// load(), run(), block().
  std::vector<std::byte> direct(const verify::CaseMemory& memory, Stream stream);

 private:
  DeviceBuffer block_;
  Tensors tensors_;
  Plan plan_;
  TestWorkspace workspace_;
};

/// Compares outputs with the oracle. `block` is a copy of the case's memory after a call.
verify::Comparison compare_with_oracle(const verify::CaseMemory& memory,
                                       const std::vector<std::byte>& block, const Plan& plan);

/// Expects correct outputs and unchanged inputs; prints a report otherwise.
void expect_right(const verify::CaseMemory& memory, const std::vector<std::byte>& block,
                  const Plan& plan);

/// All CUDA kernels of this build that run on this GPU.
std::vector<const KernelInfo*> runnable_kernels(Operation op = Operation::fwd);

/// Plans the call for this machine's GPU.
Plan plan_for(const Tensors& tensors, const Options& options);

}  // namespace flashcore::gpu_test
