// Query rows that see no key: their output is 0 and their LSE is -inf or the sink, for any content
// of V. Persistent kernels terminate for any distribution of such rows over the work tiles of a
// CTA.
#include <algorithm>
#include <cmath>
#include <limits>

#include "gpu/support.h"
#include "plan/planner.h"

namespace flashcore::gpu_test {
namespace {

class NoKeys : public GpuTest {};

constexpr std::int64_t kUnlimited = -1;

/// A problem in which some query rows see no key.
struct NoKeysCase {
  const char* name;
  std::int64_t q_len, kv_len;
  bool causal;
  std::int64_t left, right;
  bool used_lengths;      // 0 keys in one sequence, 1 in another
  bool q_varlen = false;  // some sequences have few or no queries
  bool kv_varlen = false;
};

constexpr NoKeysCase kCases[] = {
    {"more queries than keys", 600, 63, true, kUnlimited, kUnlimited, false},
    {"rows beyond a window on both sides", 700, 64, false, 20, 20, false},
    {"rows left and right of a window", 500, 300, false, 0, 30, false},
    {"short sequences in a padded batch", 400, 400, true, kUnlimited, kUnlimited, true},
    {"short sequences and a window", 400, 400, false, 100, 0, true},
    {"empty varlen sequences", 500, 90, true, kUnlimited, kUnlimited, false, true, true},
};

verify::CaseSpec spec_of(const KernelInfo& kernel, const NoKeysCase& one) {
  verify::CaseSpec spec = dense(kernel, 5, 4, 2, one.q_len, one.kv_len);
  spec.options.kernel = kernel.id;
  spec.options.causal = one.causal;
  spec.options.window_left = one.left;
  spec.options.window_right = one.right;
  spec.lse = true;
  spec.used_k = one.used_lengths;
  spec.q_varlen = one.q_varlen;
  spec.kv_varlen = one.kv_varlen;
  fit_to_kernel(kernel, spec);
  return spec;
}

/// Shortens one sequence to 0 keys and one to at most 1.
void shorten(const verify::CaseMemory& memory) {
  if (!memory.spec().used_k) return;
  auto* used = static_cast<std::int32_t*>(memory.tensors().seqused_k.data);
  used[1] = 0;
  used[3] = std::min(used[3], 1);
}

TEST_F(NoKeys, PersistentKernelsEndWithRightResults) {
  const DeviceInfo device = require(device_info(kGpu));
  int kernels = 0;
  for (const KernelInfo* kernel : runnable_kernels()) {
    if (!is_persistent(*kernel)) continue;
    ++kernels;
    for (const NoKeysCase& one : kCases) {
      SCOPED_TRACE(std::string(kernel->id) + ", " + one.name);
      const verify::CaseMemory memory(spec_of(*kernel, one));
      shorten(memory);
      GpuCase on_gpu(memory);
      std::vector<std::byte> first;
      for (const std::int32_t ctas : {1, 2, 3, device.sm_count}) {
        Plan plan = on_gpu.plan();
        plan.device.sm_count = ctas;
        on_gpu.load(memory);
        require(run(plan, on_gpu.tensors(), on_gpu.workspace().get()));
        const std::vector<std::byte> block = on_gpu.block();
        EXPECT_TRUE(on_gpu.workspace().header_is_zero()) << ctas << " CTAs";
        if (first.empty()) {
          expect_right(memory, block, plan);
          first = block;
        }
        // The bits of a work tile do not depend on the CTA that computes it.
        EXPECT_TRUE(block == first) << ctas << " CTAs";
      }
      if (HasFailure()) return;
    }
  }
  if (device.compute_capability == 90) {
    EXPECT_GE(kernels, 15);
  }
}

/// True if query i of sequence b sees a key. Dense problems only.
bool sees_key(const verify::CaseMemory& memory, std::int64_t b, std::int64_t i) {
  const verify::CaseSpec& s = memory.spec();
  const std::int64_t keys =
      s.used_k ? static_cast<const std::int32_t*>(memory.tensors().seqused_k.data)[b] : s.kv_len;
  const std::int64_t position = i + keys - s.q_len;
  const std::int64_t right = s.options.causal ? 0 : s.options.window_right;
  const std::int64_t begin =
      s.options.window_left < 0 ? 0 : std::max<std::int64_t>(position - s.options.window_left, 0);
  const std::int64_t end = right < 0 ? keys : std::min(position + right + 1, keys);
  return begin < end;
}

TEST_F(NoKeys, OutputIsZeroForAnyV) {
  for (const KernelInfo* kernel : runnable_kernels()) {
    for (const NoKeysCase& one : kCases) {
      if (one.q_varlen) continue;
      for (const bool sinks : {false, true}) {
        SCOPED_TRACE(std::string(kernel->id) + ", " + one.name);
        verify::CaseSpec spec = spec_of(*kernel, one);
        spec.sinks = sinks;
        const verify::CaseMemory memory(spec);
        shorten(memory);
        const Tensors& t = memory.tensors();
        verify::for_each_element(t.v, [&](std::int64_t at) {
          verify::store(t.v.data, t.v.dtype, at, std::numeric_limits<double>::quiet_NaN());
        });
        GpuCase on_gpu(memory);
        const std::vector<std::byte> block = on_gpu.direct(memory, nullptr);
        const Tensors result = memory.at(const_cast<std::byte*>(block.data()), Device{});
        const auto* out = static_cast<const std::byte*>(result.out.data);
        const auto* lse = static_cast<const float*>(result.lse.data);
        const auto* sink = static_cast<const float*>(t.sinks.data);
        const auto bytes = static_cast<std::int64_t>(size_of(result.out.dtype));
        int rows = 0;
        for (std::int64_t b = 0; b < spec.batch; ++b) {
          for (std::int64_t h = 0; h < spec.q_heads; ++h) {
            for (std::int64_t i = 0; i < spec.q_len; ++i) {
              if (sees_key(memory, b, i)) continue;
              ++rows;
              const auto* strides = result.out.strides;
              const std::int64_t row = b * strides[0] + h * strides[1] + i * strides[2];
              bool zero = true;
              for (std::int64_t byte = 0; byte < spec.v_dim * bytes; ++byte) {
                zero = zero && out[row * bytes + byte] == std::byte{0};
              }
              const float got = lse[b * result.lse.strides[0] + h * result.lse.strides[1] +
                                    i * result.lse.strides[2]];
              const float wanted = sinks ? sink[h] : -std::numeric_limits<float>::infinity();
              const bool same = got == wanted || std::abs(got - wanted) < 1e-5f;
              ASSERT_TRUE(zero && same) << "batch " << b << " head " << h << " query " << i
                                        << ": LSE " << got << ", wanted " << wanted;
            }
          }
        }
        EXPECT_GT(rows, 0);
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
