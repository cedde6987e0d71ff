// Hopper fp8 kernels. The GEMMs and the V transpose in isolation, element by element; through the
// public API the features that only these kernels have: e4m3 P, transposed V, scales applied to
// scores and outputs.
#include <cmath>
#include <cstring>

#include "core/quant_formats.h"
#include "core/wgmma_layout.h"
#include "gpu/support.h"
#include "plan/planner.h"
#include "sm90_fixture.h"
#include "sm90_kernels.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

using verify::ScaleKind;

class HopperFp8 : public HopperTest {
 protected:
  void SetUp() override {
    HopperTest::SetUp();
    if (IsSkipped()) return;
    kernels_ = runnable_kernels();
    std::erase_if(kernels_, [](const KernelInfo* kernel) { return !needs_e4m3(*kernel); });
    ASSERT_FALSE(kernels_.empty()) << "this build has no kernel of family sm90_e4m3";
  }

  static void expect_right_on_gpu(const verify::CaseSpec& spec) {
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
    EXPECT_TRUE(gpu.workspace().header_is_zero()) << to_string(spec);
  }

  std::vector<const KernelInfo*> kernels_;
};

std::vector<std::uint8_t> random_e4m3(verify::Random& random, int count) {
  static constexpr std::uint8_t kSmallIntegers[] = {0x00, 0x38, 0x40, 0xb8, 0xc0};  // 0, ±1, ±2
  std::vector<std::uint8_t> values(static_cast<std::size_t>(count));
  for (std::uint8_t& x : values) x = random.pick(kSmallIntegers);
  return values;
}

float value_of(std::uint8_t x) { return core::float_of_e4m3(x); }

// Small integers: every value and every sum is exact.
TEST_F(HopperFp8, GemmsAndTransposedVAreExact) {
  for (const KernelInfo* kernel : kernels_) {
    SCOPED_TRACE(kernel->id);
    const int rows = kernel->tile_q, keys = kernel->tile_k, dim = kernel->head_dim;
    const auto at = [](const auto& matrix, int row, int columns, int column) {
      return matrix[static_cast<std::size_t>(row * columns + column)];
    };
    verify::Random random(5);
    const std::vector<std::uint8_t> q = random_e4m3(random, rows * dim);
    const std::vector<std::uint8_t> k = random_e4m3(random, keys * dim);
    std::vector<std::uint8_t> v = random_e4m3(random, keys * dim);
    std::vector<float> p;
    for (const std::uint8_t x : random_e4m3(random, rows * keys)) p.push_back(value_of(x));
    for (const int used : {keys, keys - 1, keys - 23, 16, 1}) {
      for (int i = used * dim; i < keys * dim; ++i) v[static_cast<std::size_t>(i)] = 0x7f;  // NaN
      const Fp8Gemms got = run_fp8_gemms(*kernel, q, k, v, p, used);
      for (int row = 0; row < dim; ++row) {
        for (int slot = 0; slot < keys; ++slot) {
          const int key = slot / 16 * 16 + core::key_at(slot);
          const std::uint8_t want = key < used ? at(v, key, dim, core::column_of_row(row)) : 0;
          ASSERT_EQ(at(got.transposed, row, keys, slot), want) << row << ", " << slot;
        }
      }
      for (int row = 0; row < rows; ++row) {
        for (int key = 0; key < keys; ++key) {
          float want = 0;
          for (int c = 0; c < dim; ++c) {
            want += value_of(at(q, row, dim, c)) * value_of(at(k, key, dim, c));
          }
          ASSERT_EQ(at(got.scores, row, keys, key), want) << row << ", " << key;
        }
        for (int column = 0; column < dim; ++column) {
          float want = 0;
          for (int key = 0; key < used; ++key) {
            want += at(p, row, keys, key) * value_of(at(v, key, dim, column));
          }
          ASSERT_EQ(at(got.output, row, dim, column), want) << row << ", " << column;
        }
      }
    }
  }
}

/// More than one tile of rows and of keys.
verify::CaseSpec spec_for(const KernelInfo& kernel, ScaleKind scales) {
  verify::CaseSpec spec = dense(kernel, 2, 4, 2, kernel.tile_q + 3, 3 * kernel.tile_k + 5);
  spec.options.kernel = kernel.id;
  spec.lse = true;
  spec.q_storage = spec.k_storage = spec.v_storage = DType::e4m3;
  spec.q_scale = spec.k_scale = spec.v_scale = scales;
  spec.options.q_scale_block = 5;
  spec.options.kv_scale_block = 2 * kernel.tile_k;
  return spec;
}

TEST_F(HopperFp8, EveryGranularityIsRight) {
  for (const KernelInfo* kernel : kernels_) {
    for (const ScaleKind scales :
         {ScaleKind::none, ScaleKind::per_tensor, ScaleKind::per_head, ScaleKind::per_block}) {
      for (const bool causal : {false, true}) {
        verify::CaseSpec spec = spec_for(*kernel, scales);
        spec.options.causal = causal;
        expect_right_on_gpu(spec);
        spec.v_scale = ScaleKind::per_head;
        spec.options.kv_scale_block = 8;
        expect_right_on_gpu(spec);
        spec.options.softcap = 7;
        spec.options.window_left = 90;
        spec.sinks = true;
        spec.alibi = 1;
        expect_right_on_gpu(spec);
      }
    }
  }
}

// Scales need not be positive.
TEST_F(HopperFp8, NegativeAndZeroScalesAreRight) {
  for (const KernelInfo* kernel : kernels_) {
    for (const double scale : {-0.25, 0.0}) {
      const verify::CaseMemory memory(spec_for(*kernel, ScaleKind::per_head));
      const TensorView& t = memory.tensors().k_scale;
      for (std::int64_t i = 0; i < t.shape[0] * t.shape[1]; i += 2) {
        verify::store(t.data, t.dtype, i, scale);
      }
      GpuCase gpu(memory);
      expect_right(memory, gpu.direct(memory, nullptr), gpu.plan());
    }
  }
}

TEST_F(HopperFp8, NonFiniteInputsMatchTheOracle) {
  for (const KernelInfo* kernel : kernels_) {
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      verify::CaseSpec spec = spec_for(*kernel, ScaleKind::per_head);
      spec.non_finite = true;
      spec.used_k = seed % 2 == 0;
      spec.seed = seed;
      expect_right_on_gpu(spec);
    }
  }
}

// Kernel error alone, e4m3 P: |out - ref| / |ref| stays below 4e-2 at any length, because each
// step adds its P V to O in f32 outside the tensor cores.
TEST_F(HopperFp8, LongSequencesStayAccurate) {
  for (const KernelInfo* kernel : kernels_) {
    for (const std::int64_t kv_len : {1024, 16384, 131072}) {
      verify::CaseSpec spec = dense(*kernel, 1, 1, 1, 4, kv_len);
      spec.options.kernel = kernel->id;
      spec.q_storage = spec.k_storage = spec.v_storage = DType::e4m3;
      spec.q_scale = spec.k_scale = spec.v_scale = ScaleKind::per_head;
      const verify::CaseMemory memory(spec);
      GpuCase gpu(memory);
      const std::vector<std::byte> block = gpu.direct(memory, nullptr);
      expect_right(memory, block, gpu.plan());
      const double error = compare_with_oracle(memory, block, gpu.plan()).relative_error;
      EXPECT_LE(error, 4e-2) << kernel->id << ", " << kv_len << " keys";
      RecordProperty(std::string(kernel->id) + "_" + std::to_string(kv_len), std::to_string(error));
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
