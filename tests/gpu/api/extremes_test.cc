// Extreme biases, sinks, softcaps and slopes on every kernel that supports them.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/softcap.h"
#include "gpu/support.h"
#include "plan/planner.h"

namespace flashcore::gpu_test {
namespace {

class Extremes : public GpuTest {};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargest = std::numeric_limits<float>::max();
constexpr double kLargestBf16 = 0x1.fep127;

verify::CaseSpec spec_of(const KernelInfo& kernel, bool bias, bool sinks) {
  verify::CaseSpec spec = dense(kernel, 2, 4, 2, 70, 300);
  spec.options.kernel = kernel.id;
  spec.lse = true;
  spec.bias.given = bias;
  spec.bias_f32 = true;
  spec.sinks = sinks;
  fit_to_kernel(kernel, spec);
  return spec;
}

/// The bytes of out and the values of lse after a call.
struct Written {
  std::vector<std::byte> out;
  std::vector<float> lse;
  bool operator==(const Written&) const = default;
};

Written run_with(const verify::CaseMemory& memory) {
  GpuCase on_gpu(memory);
  const std::vector<std::byte> block = on_gpu.direct(memory, nullptr);
  const Tensors result = memory.at(const_cast<std::byte*>(block.data()), Device{});
  Written written;
  const auto bytes = static_cast<std::int64_t>(size_of(result.out.dtype));
  const auto* out = static_cast<const std::byte*>(result.out.data);
  verify::for_each_element(result.out, [&](std::int64_t at) {
    written.out.insert(written.out.end(), out + at * bytes, out + (at + 1) * bytes);
  });
  const auto* lse = static_cast<const float*>(result.lse.data);
  verify::for_each_element(result.lse, [&](std::int64_t at) { written.lse.push_back(lse[at]); });
  return written;
}

Written run_with_bias(const verify::CaseSpec& spec, const auto& value) {
  const verify::CaseMemory memory(spec);
  const TensorView& bias = memory.tensors().bias;
  for (std::int64_t key = 0; key < spec.kv_len; ++key) {
    verify::store(bias.data, bias.dtype, key * bias.strides[3], value(key));
  }
  return run_with(memory);
}

Written run_with_sinks(const verify::CaseSpec& spec, double value) {
  const verify::CaseMemory memory(spec);
  const TensorView& sinks = memory.tensors().sinks;
  verify::for_each_element(
      sinks, [&](std::int64_t at) { verify::store(sinks.data, sinks.dtype, at, value); });
  return run_with(memory);
}

/// `largest`: of the bias's type.
void check_biases(const verify::CaseSpec& spec, double largest) {
  const Written lowest = run_with_bias(spec, [&](std::int64_t) { return -largest; });
  for (const float lse : lowest.lse) ASSERT_EQ(lse, static_cast<float>(-largest));
  if (spec.options.num_splits == 1) {  // such an LSE loses log(keys) of a split to rounding
    verify::CaseSpec mean = spec;
    mean.options.scale = 0.0;
    const Written uniform = run_with_bias(mean, [](std::int64_t) { return 0.0; });
    EXPECT_TRUE(lowest.out == uniform.out)
        << "with the lowest bias on all keys, out is the mean of V";
  }

  const auto every_third = [](double value) {
    return [value](std::int64_t key) { return key % 3 == 1 ? value : 0.5; };
  };
  EXPECT_TRUE(run_with_bias(spec, every_third(-largest)) ==
              run_with_bias(spec, every_third(-kInfinity)))
      << "the lowest bias hides a key";

  const auto one_key = [](double its, double others) {
    return [=](std::int64_t key) { return key == 5 ? its : others; };
  };
  EXPECT_TRUE(run_with_bias(spec, one_key(largest, 0)).out ==
              run_with_bias(spec, one_key(0, -kInfinity)).out)
      << "the largest bias hides all other keys";
}

TEST_F(Extremes, LowestAndLargestBiasesAreRight) {
  int kernels = 0;
  for (const KernelInfo* kernel : runnable_kernels()) {
    verify::CaseSpec spec = spec_of(*kernel, true, false);
    if (!spec.bias.given) continue;  // the kernel has no bias
    SCOPED_TRACE(kernel->id);
    ++kernels;
    for (const std::int32_t splits : {1, 3}) {
      if (splits > 1 && !any(kernel->features & Features::num_splits)) continue;
      spec.options.num_splits = splits;
      check_biases(spec, kLargest);
    }
    if (kernel->dtype == DType::bf16) {
      SCOPED_TRACE("aligned bf16 bias");
      spec.options.num_splits = 1;
      spec.kv_len = 304;
      spec.bias_f32 = false;
      check_biases(spec, kLargestBf16);
    }
  }
  EXPECT_GT(kernels, 0);
}

TEST_F(Extremes, LargestSinksTakeAllOrNothing) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    SCOPED_TRACE(kernel->id);
    const verify::CaseSpec with = spec_of(*kernel, false, true);
    const Written all_sink = run_with_sinks(with, kLargest);
    for (const std::byte byte : all_sink.out) ASSERT_EQ(byte & std::byte{0x7f}, std::byte{0});
    for (const float lse : all_sink.lse) ASSERT_EQ(lse, kLargest);
    const verify::CaseMemory without(spec_of(*kernel, false, false));
    EXPECT_TRUE(run_with_sinks(with, -kLargest) == run_with(without));
  }
}

TEST_F(Extremes, EverySoftcapIsRight) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    for (const double cap : {0.01, 255.0, 257.0, 1e6, 1e30, 1e300}) {
      verify::CaseSpec spec = spec_of(*kernel, false, false);
      spec.options.softcap = cap;
      spec.sigma = 10;
      if (cap > core::kLargestShortCap) spec.options.kernel = nullptr;  // the planner's choice
      SCOPED_TRACE(std::string(kernel->id) + ", softcap " + std::to_string(cap));
      const verify::CaseMemory memory(spec);
      GpuCase on_gpu(memory);
      expect_right(memory, on_gpu.direct(memory, nullptr), on_gpu.plan());
    }
  }
}

/// Keys past used_k are NaN. A step must choose its softcap by the scores that it keeps.
TEST_F(Extremes, HiddenNansDoNotChangeTheSoftcap) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    for (const double cap : {0.3, 3.0, 30.0}) {
      verify::CaseSpec spec = spec_of(*kernel, false, false);
      spec.options.softcap = cap;
      spec.used_k = true;
      spec.used_lengths = {1, 190};
      verify::fit_to_kernel(*kernel, spec);
      SCOPED_TRACE(std::string(kernel->id) + ", softcap " + std::to_string(cap));
      const verify::CaseMemory memory(spec);
      GpuCase on_gpu(memory);
      expect_right(memory, on_gpu.direct(memory, nullptr), on_gpu.plan());
    }
  }
}

void check_slopes(verify::CaseSpec spec, const double (&values)[4]) {
  for (const bool causal : {true, false}) {
    spec.options.causal = causal;
    SCOPED_TRACE(causal ? "causal" : "all keys");
    const verify::CaseMemory memory(spec);
    const TensorView& slopes = memory.tensors().alibi_slopes;
    for (std::int64_t head = 0; head < 4; ++head) {
      verify::store(slopes.data, slopes.dtype, head, values[head]);
    }
    GpuCase on_gpu(memory);
    expect_right(memory, on_gpu.direct(memory, nullptr), on_gpu.plan());
  }
}

TEST_F(Extremes, EverySlopeIsRight) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    for (const double scale : {0.125, -0.125, 0.0}) {
      verify::CaseSpec spec = spec_of(*kernel, false, false);
      spec.alibi = 1;
      spec.options.scale = scale;
      SCOPED_TRACE(std::string(kernel->id) + ", scale " + std::to_string(scale));
      check_slopes(spec, {0, -0.3, 1e-9, 1e9});
      check_slopes(spec, {1, 0.0625, 3.9, 1000});
      check_slopes(spec, {-1e-3, 0.7, 0.25, -2});
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
