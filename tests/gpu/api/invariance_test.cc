// Batch-invariant plans on the GPU: the bits of a row depend only on its own data. The planner's
// kernel and every other 16-bit kernel read the same memory through many views: alone, in another
// batch, permuted, varlen, padded, in chunks. Kernels for 8-bit keys get e4m3.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "gpu/support.h"
#include "plan/kernel_traits.h"
#include "plan/planner.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr std::int64_t kBatch = 3, kQHeads = 4, kKvHeads = 2, kQLen = 150, kKvLen = 333;
constexpr std::int64_t kSlack = 40;  // NaN keys past the used ones

using Bits = std::vector<std::uint16_t>;  // of out, [batch, q_heads, q_len, dim]

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

TensorView narrow(TensorView t, int axis, std::int64_t first, std::int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + first * t.strides[axis] * size_of(t.dtype);
  t.shape[axis] = count;
  return t;
}

TensorView keys(const TensorView& t) { return narrow(t, 2, 0, kKvLen); }

/// One problem for one kernel, and its result as a single call.
class KernelCase {
 public:
  /// kernel: null for the planner's choice.
  explicit KernelCase(const KernelInfo* kernel)
      : dtype_(kernel == nullptr ? DType::bf16 : kernel->dtype),
        q_dtype_(kernel != nullptr && needs_e4m3(*kernel) ? DType::e4m3 : dtype_),
        kv_dtype_(kernel != nullptr && needs_8_bits(*kernel) ? DType::e4m3 : dtype_),
        dim_(kernel == nullptr ? 64 : kernel->head_dim),
        q_rows_(random_rows(q_dtype_, kQLen, kQLen, kQHeads, 1)),
        k_rows_(random_rows(kv_dtype_, kKvLen + kSlack, kKvLen, kKvHeads, 2)),
        v_rows_(random_rows(kv_dtype_, kKvLen + kSlack, kKvLen, kKvHeads, 3)),
        q_memory_(q_rows_),
        k_memory_(k_rows_),
        v_memory_(v_rows_),
        q(heads_second(q_memory_, q_dtype_, kBatch, kQLen, kQHeads)),
        k(heads_second(k_memory_, kv_dtype_, kBatch, kKvLen + kSlack, kKvHeads)),
        v(heads_second(v_memory_, kv_dtype_, kBatch, kKvLen + kSlack, kKvHeads)) {
    options.causal = true;
    options.window_left = 200;
    options.reproducibility = Reproducibility::batch_invariant;
    options.kernel = kernel == nullptr ? nullptr : kernel->id;
    whole = run_rows({.q = q, .k = keys(k), .v = keys(v)});
  }

 private:
  using Bytes = std::vector<std::byte>;

  /// [batch, len, heads, dim]; rows past `used` of each sequence are NaN.
  Bytes random_rows(DType dtype, std::int64_t len, std::int64_t used, std::int64_t heads,
                    std::uint64_t seed) const {
    verify::Random random(seed);
    const std::int64_t elements = kBatch * len * heads * dim_;
    Bytes values(static_cast<std::size_t>(elements * size_of(dtype)));
    for (std::int64_t at = 0; at < elements; ++at) {
      const double x = random.normal();
      const bool in_use = at / (heads * dim_) % len < used;
      verify::store(values.data(), dtype, at, in_use ? x : NAN);
    }
    return values;
  }

  TensorView heads_second(const DeviceBuffer& memory, DType dtype, std::int64_t batch,
                          std::int64_t len, std::int64_t heads) const {
    return swap_axes(view(memory.data(), dtype, {batch, len, heads, dim_}, kGpu), 1, 2);
  }

  DType dtype_, q_dtype_, kv_dtype_;
  std::int64_t dim_;
  Bytes q_rows_, k_rows_, v_rows_;
  DeviceBuffer q_memory_, k_memory_, v_memory_;

 public:
  const TensorView q, k, v;  // [batch, heads, len, dim]; k and v with their slack
  Options options;
  Bits whole;

  TensorView varlen_q() const {
    return view(q_memory_.data(), q_dtype_, {kBatch * kQLen, kQHeads, dim_}, kGpu);
  }

  /// Runs the views with a contiguous out and returns its bits.
  Bits run_rows(Tensors t) const {
    std::int64_t elements = 1;
    for (int i = 0; i < t.q.rank; ++i) elements *= t.q.shape[i];
    const DeviceBuffer out(static_cast<std::size_t>(elements) * 2);
    t.out = t.q.rank == 3
                ? view(out.data(), dtype_, {t.q.shape[0], t.q.shape[1], t.q.shape[2]}, kGpu)
                : view(out.data(), dtype_, {t.q.shape[0], t.q.shape[1], t.q.shape[2], t.q.shape[3]},
                       kGpu);
    const Plan plan = plan_for(t, options);
    const TestWorkspace workspace(plan.workspace_bytes);
    require(run(plan, t, workspace.get()));
    const std::vector<std::byte> bytes = out.download();
    Bits bits(static_cast<std::size_t>(elements));
    std::memcpy(bits.data(), bytes.data(), bytes.size());
    return bits;
  }

  /// Runs a batch of the sequences `order`, copied to contiguous memory.
  Bits run_batch(const std::vector<std::int64_t>& order) const {
    const auto gathered = [&](const Bytes& rows) {
      const std::size_t sequence = rows.size() / kBatch;
      Bytes all;
      for (const std::int64_t b : order) {
        const auto begin = rows.begin() + b * static_cast<std::int64_t>(sequence);
        all.insert(all.end(), begin, begin + static_cast<std::int64_t>(sequence));
      }
      return all;
    };
    const DeviceBuffer q_memory(gathered(q_rows_)), k_memory(gathered(k_rows_)),
        v_memory(gathered(v_rows_));
    const auto batch = static_cast<std::int64_t>(order.size());
    return run_rows(
        {.q = heads_second(q_memory, q_dtype_, batch, kQLen, kQHeads),
         .k = keys(heads_second(k_memory, kv_dtype_, batch, kKvLen + kSlack, kKvHeads)),
         .v = keys(heads_second(v_memory, kv_dtype_, batch, kKvLen + kSlack, kKvHeads))});
  }

  /// Rows [first, first + count) of batch b, head h in the whole result.
  Bits expected(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) const {
    return slice(whole, (b * kQHeads + h) * kQLen + first, count);
  }

  Bits slice(const Bits& rows, std::int64_t first, std::int64_t count) const {
    const auto begin = rows.begin() + first * dim_;
    return {begin, begin + count * dim_};
  }
};

class BatchInvariance : public GpuTest {
 protected:
  /// body(kernel_case) for the planner's choice and for every 16-bit or 8-bit kernel this GPU can
  /// run.
  template <typename Body>
  static void for_each_kernel(Body body) {
    std::vector<const KernelInfo*> all{nullptr};
    const DeviceInfo device = require(device_info(kGpu));
    for (const KernelInfo& kernel : kernels()) {
      if (kernel.op == Operation::fwd && kernel.device == DeviceType::cuda && kernel.compiled &&
          kernel.dtype != DType::f32 &&
          kernel.min_compute_capability <= device.compute_capability &&
          kernel.max_compute_capability >= device.compute_capability &&
          kernel.smem_bytes <= device.smem_per_block_bytes) {
        all.push_back(&kernel);
      }
    }
    ASSERT_GT(all.size(), 1u);
    for (const KernelInfo* kernel : all) {
      SCOPED_TRACE(kernel == nullptr ? "the planner's choice" : kernel->id);
      KernelCase kernel_case(kernel);
      body(kernel_case);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(BatchInvariance, KernelsThatRoundAlikeGiveTheSameBits) {
  int compared = 0;
  for (const KernelInfo& kernel : kernels()) {
    for (const KernelInfo& other : kernels()) {
      if (&kernel >= &other || !kernel.compiled || !round_alike(kernel, other)) continue;
      if (require(device_info(kGpu)).compute_capability != 90) continue;
      EXPECT_EQ(KernelCase(&kernel).whole, KernelCase(&other).whole) << kernel.id << other.id;
      ++compared;
    }
  }
  if (compared == 0) GTEST_SKIP() << "this GPU has no two kernels that round alike";
}

TEST_F(BatchInvariance, SeparateSequencesGiveTheSameBits) {
  for_each_kernel([](const KernelCase& s) {
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const Bits alone = s.run_rows({.q = narrow(s.q, 0, b, 1),
                                     .k = narrow(keys(s.k), 0, b, 1),
                                     .v = narrow(keys(s.v), 0, b, 1)});
      for (std::int64_t h = 0; h < kQHeads; ++h) {
        ASSERT_EQ(s.slice(alone, h * kQLen, kQLen), s.expected(b, h, 0, kQLen)) << b << ' ' << h;
      }
    }
  });
}

TEST_F(BatchInvariance, OtherBatchesGiveTheSameBits) {
  const std::vector<std::int64_t> orders[] = {{2, 0, 1}, {1, 1, 0, 2, 0, 2, 1, 0, 0, 2, 1}};
  for_each_kernel([&](const KernelCase& s) {
    for (const std::vector<std::int64_t>& order : orders) {
      const Bits rows = s.run_batch(order);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto first = static_cast<std::int64_t>(i) * kQHeads * kQLen;
        ASSERT_EQ(s.slice(rows, first, kQHeads * kQLen),
                  s.slice(s.whole, order[i] * kQHeads * kQLen, kQHeads * kQLen))
            << "sequence " << i << " of " << order.size();
      }
    }
  });
}

TEST_F(BatchInvariance, SeparateHeadsGiveTheSameBits) {
  const std::int64_t group = kQHeads / kKvHeads;
  for_each_kernel([&](const KernelCase& s) {
    for (std::int64_t h = 0; h < kQHeads; ++h) {
      const Bits alone = s.run_rows({.q = narrow(s.q, 1, h, 1),
                                     .k = narrow(keys(s.k), 1, h / group, 1),
                                     .v = narrow(keys(s.v), 1, h / group, 1)});
      for (std::int64_t b = 0; b < kBatch; ++b) {
        ASSERT_EQ(s.slice(alone, b * kQLen, kQLen), s.expected(b, h, 0, kQLen)) << b << ' ' << h;
      }
    }
  });
}

TEST_F(BatchInvariance, PaddedCacheGivesTheSameBits) {
  const DeviceBuffer used(bytes_of(std::vector<std::int32_t>(kBatch, kKvLen)));
  for_each_kernel([&](const KernelCase& s) {
    ASSERT_EQ(s.run_rows({.q = s.q,
                          .k = s.k,
                          .v = s.v,
                          .seqused_k = view(used.data(), DType::i32, {kBatch}, kGpu)}),
              s.whole);
  });
}

TEST_F(BatchInvariance, ChunkedPrefillAndDecodeGiveTheSameBits) {
  for_each_kernel([](const KernelCase& s) {
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{17}, std::int64_t{64}, kQLen}) {
      for (std::int64_t first = 0; first < kQLen; first += chunk == 1 ? 37 : chunk) {
        const std::int64_t count = std::min(chunk, kQLen - first);
        const auto start = static_cast<std::int32_t>(kKvLen - kQLen + first);
        const DeviceBuffer q_start(bytes_of(std::vector<std::int32_t>(kBatch, start)));
        const Bits rows = s.run_rows({.q = narrow(s.q, 2, first, count),
                                      .k = keys(s.k),
                                      .v = keys(s.v),
                                      .q_start = view(q_start.data(), DType::i32, {kBatch}, kGpu)});
        for (std::int64_t b = 0; b < kBatch; ++b) {
          for (std::int64_t h = 0; h < kQHeads; ++h) {
            ASSERT_EQ(s.slice(rows, (b * kQHeads + h) * count, count),
                      s.expected(b, h, first, count))
                << "rows " << first << " to " << first + count << " of " << b << ' ' << h;
          }
        }
      }
    }
  });
}

// Chunked prefill of a server: the cache does not yet have the keys after the chunk.
TEST_F(BatchInvariance, GrowingCacheGivesTheSameBits) {
  for_each_kernel([](const KernelCase& s) {
    for (std::int64_t first = 0; first < kQLen; first += 50) {
      const std::int64_t visible = kKvLen - kQLen + first + 50;
      const DeviceBuffer used(
          bytes_of(std::vector<std::int32_t>(kBatch, static_cast<std::int32_t>(visible))));
      const Bits rows = s.run_rows({.q = narrow(s.q, 2, first, 50),
                                    .k = s.k,
                                    .v = s.v,
                                    .seqused_k = view(used.data(), DType::i32, {kBatch}, kGpu)});
      for (std::int64_t b = 0; b < kBatch; ++b) {
        for (std::int64_t h = 0; h < kQHeads; ++h) {
          ASSERT_EQ(s.slice(rows, (b * kQHeads + h) * 50, 50), s.expected(b, h, first, 50))
              << "rows from " << first << " of " << b << ' ' << h;
        }
      }
    }
  });
}

TEST_F(BatchInvariance, VarlenGivesTheSameBits) {
  std::vector<std::int32_t> q_ends;
  for (std::int32_t b = 0; b <= kBatch; ++b) q_ends.push_back(b * static_cast<std::int32_t>(kQLen));
  const DeviceBuffer cu_q(bytes_of(q_ends));
  for_each_kernel([&](KernelCase& s) {
    s.options.max_q_len = kQLen;
    const Bits rows =
        s.run_rows({.q = s.varlen_q(),
                    .k = keys(s.k),
                    .v = keys(s.v),
                    .cu_seqlens_q = view(cu_q.data(), DType::i32, {kBatch + 1}, kGpu)});
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t h = 0; h < kQHeads; ++h) {
        for (std::int64_t i = 0; i < kQLen; i += 13) {
          ASSERT_EQ(s.slice(rows, (b * kQLen + i) * kQHeads + h, 1), s.expected(b, h, i, 1))
              << b << ' ' << h << ' ' << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace flashcore::gpu_test
