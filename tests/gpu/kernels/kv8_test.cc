// 8-bit q, k and v on the tensor-core kernels that dequantize to 16-bit operands: every format,
// every scale granularity, dense and paged KV, and the accuracy of long sequences.
#include <cmath>

#include "gpu/support.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

using verify::ScaleKind;

constexpr DType kFormats[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};

class Kv8 : public GpuTest {
 protected:
  static std::vector<const KernelInfo*> kv8_kernels() {
    std::vector<const KernelInfo*> found = runnable_kernels();
    std::erase_if(found, [](const KernelInfo* kernel) {
      return !needs_8_bits(*kernel) || needs_e4m3(*kernel);
    });
    return found;
  }

  static void expect_right_on_gpu(const verify::CaseSpec& spec) {
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
    EXPECT_TRUE(gpu.workspace().header_is_zero()) << to_string(spec);
  }
};

/// More than one tile of rows and keys. head_dim is the kernel's own, which selects the fast path.
verify::CaseSpec spec_for(const KernelInfo& kernel, DType k, DType v, bool eight_bit_q,
                          ScaleKind scales) {
  verify::CaseSpec spec = dense(kernel, 2, 2, 1, kernel.tile_q / 2 + 3, 2 * kernel.tile_k + 5);
  spec.options.kernel = kernel.id;
  spec.lse = true;
  spec.k_storage = k;
  spec.v_storage = v;
  spec.q_storage = eight_bit_q ? k : DType::none;
  spec.k_scale = spec.v_scale = scales;
  spec.q_scale = eight_bit_q ? scales : ScaleKind::none;
  spec.options.q_scale_block = 5;
  spec.options.kv_scale_block = 48;
  return spec;
}

TEST_F(Kv8, EveryFormatAndGranularityIsRight) {
  for (const KernelInfo* kernel : kv8_kernels()) {
    for (const DType format : kFormats) {
      for (const bool eight_bit_q : {false, true}) {
        for (const ScaleKind scales :
             {ScaleKind::none, ScaleKind::per_tensor, ScaleKind::per_head, ScaleKind::per_block}) {
          expect_right_on_gpu(spec_for(*kernel, format, format, eight_bit_q, scales));
        }
      }
    }
  }
}

TEST_F(Kv8, DifferentFormatsOfKAndVAreRight) {
  for (const KernelInfo* kernel : kv8_kernels()) {
    for (const DType k : kFormats) {
      for (const DType v : kFormats) {
        verify::CaseSpec spec = spec_for(*kernel, k, v, false, ScaleKind::per_block);
        spec.options.causal = true;
        expect_right_on_gpu(spec);
      }
    }
  }
}

TEST_F(Kv8, PagedKvAndScoreOptionsAreRight) {
  for (const KernelInfo* kernel : kv8_kernels()) {
    for (const DType format : kFormats) {
      for (const std::int64_t page : {16, 100}) {
        verify::CaseSpec spec = spec_for(*kernel, format, format, true, ScaleKind::per_block);
        spec.page_size = page;
        spec.used_k = true;
        expect_right_on_gpu(spec);
        spec.head_dim -= 3;  // not a multiple of 16 bytes: the kernel gathers elements
        spec.v_dim -= 5;
        spec.options.softcap = 7;
        spec.options.window_left = 90;
        spec.sinks = true;
        spec.alibi = 1;
        expect_right_on_gpu(spec);
      }
    }
  }
}

// 16-bit queries of any magnitude: the kernel scales each bf16 row into the range of f16.
TEST_F(Kv8, LargeAndSmallQueriesAreRight) {
  for (const KernelInfo* kernel : kv8_kernels()) {
    for (const int power : {-100, -30, 30, 100}) {
      if (kernel->dtype == DType::f16 && std::abs(power) > 10) continue;
      verify::CaseSpec spec =
          spec_for(*kernel, DType::e4m3, DType::e4m3, false, ScaleKind::per_head);
      spec.options.scale = std::ldexp(0.125, -power);
      const verify::CaseMemory memory(spec);
      const TensorView& q = memory.tensors().q;
      verify::Random random(3);
      for (std::int64_t i = 0; i < q.shape[0] * q.strides[0]; ++i) {
        verify::store(q.data, q.dtype, i, std::ldexp(random.normal(), power));
      }
      GpuCase gpu(memory);
      expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
    }
  }
}

// NaN and, in e5m2, infinities in the inputs.
TEST_F(Kv8, NonFiniteInputsMatchTheOracle) {
  for (const KernelInfo* kernel : kv8_kernels()) {
    for (const DType format : {DType::e4m3, DType::e5m2}) {
      for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        verify::CaseSpec spec = spec_for(*kernel, format, format, true, ScaleKind::per_head);
        spec.non_finite = true;
        spec.seed = seed;
        expect_right_on_gpu(spec);
      }
    }
  }
}

// Kernel error alone, 16-bit P: |out - ref| / |ref| stays below 1e-2 at any length.
TEST_F(Kv8, LongSequencesStayAccurate) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool eight_bit_q : {false, true}) {
      for (const std::int64_t kv_len : {1024, 8192, 32768, 131072}) {
        verify::CaseSpec spec = dense(dtype, 1, 4, 1, 1, kv_len, 128);
        spec.k_storage = spec.v_storage = DType::e4m3;
        spec.k_scale = spec.v_scale = ScaleKind::per_head;
        if (eight_bit_q) {
          spec.q_storage = DType::e4m3;
          spec.q_scale = ScaleKind::per_head;
        }
        const verify::CaseMemory memory(spec);
        GpuCase gpu(memory);
        const std::vector<std::byte> block = gpu.direct(memory, nullptr);
        expect_right(memory, block, gpu.plan());
        const double error = compare_with_oracle(memory, block, gpu.plan()).relative_error;
        EXPECT_LE(error, 1e-2) << gpu.plan().kernel->id << ", " << kv_len << " keys";
        RecordProperty(
            std::string(to_string(dtype)) + (eight_bit_q ? "_q8_" : "_") + std::to_string(kv_len),
            std::to_string(error));
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
