// Batch-invariant plans on the GPU: a row's bits depend on that row's own data alone. One block of
// memory is read through many views: alone, in a batch, packed, padded, in chunks.
#include <algorithm>
#include <cstring>
#include <memory>

#include "core/numeric.h"
#include "support.h"
#include "verify/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr std::int64_t kBatch = 3, kQHeads = 4, kKvHeads = 2, kQLen = 150, kKvLen = 333, kDim = 64;
constexpr std::int64_t kSlack = 40;  // keys past the used ones: NaN

using Rows = std::vector<std::uint16_t>;  // bits of out, [batch, q_heads, q_len, dim]

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// bf16 in [batch, len, heads, dim] memory; rows past `used` of each sequence are NaN.
std::vector<std::byte> random_rows(std::int64_t len, std::int64_t used, std::int64_t heads,
                                   std::uint64_t seed) {
  verify::Random random(seed);
  std::vector<std::uint16_t> values;
  for (std::int64_t row = 0; row < kBatch * len; ++row) {
    for (std::int64_t i = 0; i < heads * kDim; ++i) {
      const float x = static_cast<float>(random.normal());
      values.push_back(row % len < used ? core::bf16_of_float(x) : std::uint16_t{0x7fff});
    }
  }
  return bytes_of(values);
}

TensorView part(TensorView t, int axis, std::int64_t first, std::int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + first * t.strides[axis] * size_of(t.dtype);
  t.shape[axis] = count;
  return t;
}

class BatchInvariance : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    q_memory_ = std::make_unique<DeviceBuffer>(random_rows(kQLen, kQLen, kQHeads, 1));
    k_memory_ = std::make_unique<DeviceBuffer>(random_rows(kKvLen + kSlack, kKvLen, kKvHeads, 2));
    v_memory_ = std::make_unique<DeviceBuffer>(random_rows(kKvLen + kSlack, kKvLen, kKvHeads, 3));
    const auto heads_second = [](DeviceBuffer& memory, std::int64_t len, std::int64_t heads) {
      return swap_axes(view(memory.data(), DType::bf16, {kBatch, len, heads, kDim}, kGpu), 1, 2);
    };
    q_ = heads_second(*q_memory_, kQLen, kQHeads);
    k_ = heads_second(*k_memory_, kKvLen + kSlack, kKvHeads);
    v_ = heads_second(*v_memory_, kKvLen + kSlack, kKvHeads);
    options_.causal = true;
    options_.window_left = 200;
    options_.reproducibility = Reproducibility::batch_invariant;
    whole_ = run_rows({.q = q_, .k = keys(k_), .v = keys(v_)});
  }

  static TensorView keys(const TensorView& t) { return part(t, 2, 0, kKvLen); }

  /// Runs the views with a compact out and returns its bits.
  Rows run_rows(Tensors t) const {
    std::int64_t elements = 1;
    for (int i = 0; i < t.q.rank; ++i) elements *= t.q.shape[i];
    const DeviceBuffer out(static_cast<std::size_t>(elements) * 2);
    t.out = t.q.rank == 3
                ? view(out.data(), DType::bf16, {t.q.shape[0], t.q.shape[1], t.q.shape[2]}, kGpu)
                : view(out.data(), DType::bf16,
                       {t.q.shape[0], t.q.shape[1], t.q.shape[2], t.q.shape[3]}, kGpu);
    const Plan plan = plan_for(t, options_);
    const TestWorkspace workspace(plan.workspace_bytes);
    require(run(plan, t, workspace.get()));
    const std::vector<std::byte> bytes = out.download();
    Rows bits(static_cast<std::size_t>(elements));
    std::memcpy(bits.data(), bytes.data(), bytes.size());
    return bits;
  }

  /// Rows [first, first + count) of batch b, head h in the whole result.
  Rows expected(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) const {
    const auto begin = whole_.begin() + ((b * kQHeads + h) * kQLen + first) * kDim;
    return {begin, begin + count * kDim};
  }

  static Rows slice(const Rows& rows, std::int64_t first, std::int64_t count) {
    const auto begin = rows.begin() + first * kDim;
    return {begin, begin + count * kDim};
  }

  std::unique_ptr<DeviceBuffer> q_memory_, k_memory_, v_memory_;
  TensorView q_, k_, v_;
  Options options_;
  Rows whole_;
};

TEST_F(BatchInvariance, SequencesAlone) {
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const Rows alone = run_rows(
        {.q = part(q_, 0, b, 1), .k = part(keys(k_), 0, b, 1), .v = part(keys(v_), 0, b, 1)});
    for (std::int64_t h = 0; h < kQHeads; ++h) {
      EXPECT_EQ(slice(alone, h * kQLen, kQLen), expected(b, h, 0, kQLen)) << b << ' ' << h;
    }
  }
}

TEST_F(BatchInvariance, HeadsAlone) {
  const std::int64_t group = kQHeads / kKvHeads;
  for (std::int64_t h = 0; h < kQHeads; ++h) {
    const Rows alone = run_rows({.q = part(q_, 1, h, 1),
                                 .k = part(keys(k_), 1, h / group, 1),
                                 .v = part(keys(v_), 1, h / group, 1)});
    for (std::int64_t b = 0; b < kBatch; ++b) {
      EXPECT_EQ(slice(alone, b * kQLen, kQLen), expected(b, h, 0, kQLen)) << b << ' ' << h;
    }
  }
}

TEST_F(BatchInvariance, PaddedCache) {
  const DeviceBuffer used(bytes_of(std::vector<std::int32_t>(kBatch, kKvLen)));
  EXPECT_EQ(
      run_rows(
          {.q = q_, .k = k_, .v = v_, .used_k = view(used.data(), DType::i32, {kBatch}, kGpu)}),
      whole_);
}

TEST_F(BatchInvariance, ChunkedPrefillAndDecode) {
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{17}, std::int64_t{64}, kQLen}) {
    for (std::int64_t first = 0; first < kQLen; first += chunk == 1 ? 37 : chunk) {
      const std::int64_t count = std::min(chunk, kQLen - first);
      const auto start = static_cast<std::int32_t>(kKvLen - kQLen + first);
      const DeviceBuffer q_start(bytes_of(std::vector<std::int32_t>(kBatch, start)));
      const Rows rows = run_rows({.q = part(q_, 2, first, count),
                                  .k = keys(k_),
                                  .v = keys(v_),
                                  .q_start = view(q_start.data(), DType::i32, {kBatch}, kGpu)});
      for (std::int64_t b = 0; b < kBatch; ++b) {
        for (std::int64_t h = 0; h < kQHeads; ++h) {
          ASSERT_EQ(slice(rows, (b * kQHeads + h) * count, count), expected(b, h, first, count))
              << "rows " << first << " to " << first + count << " of " << b << ' ' << h;
        }
      }
    }
  }
}

TEST_F(BatchInvariance, PackedSequences) {
  std::vector<std::int32_t> q_ends;
  for (std::int32_t b = 0; b <= kBatch; ++b) q_ends.push_back(b * static_cast<std::int32_t>(kQLen));
  const DeviceBuffer cu_q(bytes_of(q_ends));
  Options packed = options_;
  packed.max_q_len = kQLen;
  std::swap(options_, packed);
  const Rows rows =
      run_rows({.q = view(q_memory_->data(), DType::bf16, {kBatch * kQLen, kQHeads, kDim}, kGpu),
                .k = keys(k_),
                .v = keys(v_),
                .cu_seqlens_q = view(cu_q.data(), DType::i32, {kBatch + 1}, kGpu)});
  std::swap(options_, packed);
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t h = 0; h < kQHeads; ++h) {
      for (std::int64_t i = 0; i < kQLen; i += 13) {
        ASSERT_EQ(slice(rows, (b * kQLen + i) * kQHeads + h, 1), expected(b, h, i, 1))
            << b << ' ' << h << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
