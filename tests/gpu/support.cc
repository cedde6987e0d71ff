#include "support.h"

#include <algorithm>
#include <stdexcept>

#include "reference/oracle.h"

namespace flashcore::gpu_test {

void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

void require(const Status& status) {
  if (status.ok()) return;
  throw std::runtime_error(std::string(to_string(status.code())) + ": " + status.message());
}

void GpuTest::SetUp() {
  const CudaAvailability available = cuda_availability();
  if (available.device_count == 0) GTEST_SKIP() << "no GPU: " << available.reason;
  require(cudaSetDevice(kGpu.index), "cudaSetDevice");
}

void GpuTest::TearDown() {
  if (IsSkipped()) return;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the test left a CUDA error";
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  require(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(bytes, 1)),
          "cudaMalloc");
  require(cudaMemset(data_, 0xff, bytes), "cudaMemset");
  // cudaMemset may return before it ends, and a non-blocking stream does not wait for it.
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

DeviceBuffer::DeviceBuffer(const std::vector<std::byte>& host) : DeviceBuffer(host.size()) {
  upload(host.data(), host.size());
}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

void DeviceBuffer::upload(const void* host, std::size_t bytes, std::size_t offset) {
  require(cudaMemcpy(data_ + offset, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

std::vector<std::byte> DeviceBuffer::download(std::size_t bytes, std::size_t offset) const {
  std::vector<std::byte> host(bytes);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  require(cudaMemcpy(host.data(), data_ + offset, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

TestStream::TestStream(int priority) {
  require(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
          "cudaStreamCreateWithPriority");
}

TestStream::~TestStream() { cudaStreamDestroy(stream_); }

void TestStream::synchronize() const {
  require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

TestWorkspace::TestWorkspace(std::size_t bytes) : buffer_(bytes) {
  require(workspace_init(get()));
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

bool TestWorkspace::header_is_zero() const {
  const std::vector<std::byte> header = buffer_.download(kWorkspaceHeaderBytes);
  return std::all_of(header.begin(), header.end(), [](std::byte b) { return b == std::byte{0}; });
}

verify::CaseSpec dense(DType dtype, std::int64_t batch, std::int64_t q_heads, std::int64_t kv_heads,
                       std::int64_t q_len, std::int64_t kv_len, std::int64_t head_dim) {
  verify::CaseSpec spec;
  spec.dtype = dtype;
  spec.batch = batch;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.q_len = q_len;
  spec.kv_len = kv_len;
  spec.head_dim = spec.v_dim = head_dim;
  return spec;
}

verify::CaseSpec dense(const KernelInfo& kernel, std::int64_t batch, std::int64_t q_heads,
                       std::int64_t kv_heads, std::int64_t q_len, std::int64_t kv_len) {
  verify::CaseSpec spec =
      dense(kernel.dtype, batch, q_heads, kv_heads, q_len, kv_len, kernel.head_dim);
  spec.v_dim = kernel.v_dim;
  return spec;
}

Plan plan_for(const Tensors& tensors, const Options& options) {
  const Problem problem = require(make_problem(tensors, options));
  return require(make_plan(problem, require(device_info(kGpu))));
}

GpuCase::GpuCase(const verify::CaseMemory& memory)
    : block_(memory.bytes()),
      tensors_(memory.at(block_.data(), kGpu)),
      plan_(plan_for(tensors_, memory.spec().options)),
      workspace_(plan_.workspace_bytes) {}

void GpuCase::load(const verify::CaseMemory& memory) {
  if (memory.bytes().size() != block_.bytes()) throw std::runtime_error("the shapes differ");
  block_.upload(memory.bytes().data(), memory.bytes().size());
}

std::vector<std::byte> GpuCase::block() const { return block_.download(); }

std::vector<std::byte> GpuCase::direct(const verify::CaseMemory& memory, Stream stream) {
  load(memory);
  require(run(stream));
  return block();
}

verify::Comparison compare_with_oracle(const verify::CaseMemory& memory,
                                       const std::vector<std::byte>& block, const Plan& plan) {
  const Tensors result = memory.at(const_cast<std::byte*>(block.data()), Device{});
  const reference::Oracle oracle = reference::compute(
      plan.problem, memory.tensors(), reference::all_rows(plan.problem, memory.tensors()));
  return verify::compare(
      oracle, plan.problem, result,
      verify::arithmetic_of(plan.problem.out.dtype, plan.kernel->probability_dtype));
}

void expect_right(const verify::CaseMemory& memory, const std::vector<std::byte>& block,
                  const Plan& plan) {
  EXPECT_TRUE(memory.only_outputs_changed(block)) << to_string(memory.spec());
  const verify::Comparison comparison = compare_with_oracle(memory, block, plan);
  EXPECT_TRUE(comparison.ok) << plan.kernel->id << ' ' << to_string(memory.spec()) << '\n'
                             << verify::report(comparison);
}

std::vector<const KernelInfo*> runnable_kernels(Operation op) {
  const DeviceInfo gpu = require(device_info(kGpu));
  std::vector<const KernelInfo*> found;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == op && kernel.device == DeviceType::cuda && kernel.compiled &&
        kernel.min_compute_capability <= gpu.compute_capability &&
        kernel.max_compute_capability >= gpu.compute_capability &&
        kernel.smem_bytes <= gpu.smem_per_block_bytes) {
      found.push_back(&kernel);
    }
  }
  return found;
}

}  // namespace flashcore::gpu_test
