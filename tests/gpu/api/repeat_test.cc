// The same call gives the same bits ten thousand times, even if the CTAs of a split decode finish
// in any order and the last one combines their results.
#include <algorithm>

#include "gpu/support.h"
#include "plan/planner.h"

namespace flashcore::gpu_test {
namespace {

constexpr int kRepeats = 10000;

class Repeats : public GpuTest {
 protected:
  /// Runs the case kRepeats times into poisoned outputs; each result is compared on the host.
  static void expect_same_bits(const verify::CaseMemory& memory, const GpuCase& gpu) {
    const TestStream stream;
    const Tensors& t = gpu.tensors();
    // A contiguous out: its bytes are one range.
    const auto bytes =
        static_cast<std::size_t>(t.out.shape[0] * t.out.strides[0] * size_of(t.out.dtype));
    std::vector<std::byte> first(bytes), now(bytes);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      require(cudaMemsetAsync(t.out.data, 0xff, bytes, stream), "cudaMemsetAsync");
      require(gpu.run(stream));
      std::vector<std::byte>& to = repeat == 0 ? first : now;
      require(cudaMemcpyAsync(to.data(), t.out.data, bytes, cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync");
      stream.synchronize();
      if (repeat == 0) {
        expect_right(memory, gpu.block(), gpu.plan());
      } else {
        ASSERT_TRUE(now == first) << gpu.plan().kernel->id << ": repeat " << repeat << ", "
                                  << gpu.plan().splits << " splits";
      }
    }
    EXPECT_TRUE(gpu.workspace().header_is_zero());
  }
};

TEST_F(Repeats, DecodeCombinedInTheKernelGivesTheSameBits) {
  for (const std::int64_t batch : {1, 5}) {
    const verify::CaseMemory memory(dense(DType::bf16, batch, 32, 8, 1, 4096, 128));
    GpuCase gpu(memory);
    gpu.load(memory);
    EXPECT_GT(gpu.plan().splits, 1);
    if (require(device_info(kGpu)).compute_capability >= 80) {
      EXPECT_NE(gpu.plan().combine, CombineMode::kernel) << gpu.plan().kernel->id;
    }
    expect_same_bits(memory, gpu);
  }
}

TEST_F(Repeats, DecodeWithTheCombineKernelGivesTheSameBits) {
  verify::CaseSpec spec = dense(DType::f32, 1, 8, 8, 1, 4096, 64);
  const verify::CaseMemory memory(spec);
  GpuCase gpu(memory);
  gpu.load(memory);
  EXPECT_GT(gpu.plan().splits, 1);
  EXPECT_EQ(gpu.plan().combine, CombineMode::kernel);
  expect_same_bits(memory, gpu);
}

TEST_F(Repeats, PrefillGivesTheSameBits) {
  verify::CaseSpec causal = dense(DType::f16, 2, 4, 2, 300, 300, 128);
  causal.options.causal = true;
  for (const verify::CaseSpec& spec : {dense(DType::f16, 1, 8, 8, 256, 256, 64), causal}) {
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    gpu.load(memory);
    expect_same_bits(memory, gpu);
  }
}

TEST_F(Repeats, DynamicSchedulingGivesTheSameBits) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    // f16 kernels have the same shapes and barriers as bf16 kernels.
    if (!is_persistent(*kernel) || kernel->dtype == DType::f16) continue;
    verify::CaseSpec spec = dense(*kernel, 7, 40, 20, 3, 300);
    spec.options.kernel = kernel->id;
    spec.options.causal = true;
    verify::fit_to_kernel(*kernel, spec);
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    gpu.load(memory);
    EXPECT_GT(gpu.plan().num_tiles, gpu.plan().device.sm_count);
    expect_same_bits(memory, gpu);
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
