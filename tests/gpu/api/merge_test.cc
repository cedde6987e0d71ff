// merge() on the GPU, compared with the definition in f64, with merge() on the CPU, and with whole
// calls after partial ones.
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>

#include "core/numeric.h"
#include "gpu/support.h"
#include "reference/oracle.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr std::int64_t kBatch = 2, kHeads = 3, kRows = 7, kDim = 80;
constexpr std::int64_t kOutElements = kBatch * kHeads * kRows * kDim;
constexpr std::int64_t kLseElements = kBatch * kHeads * kRows;
constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

/// Random partial results. If a row of a partial saw no key, its out is unwritten: NaN here.
struct Partials {
  std::vector<std::vector<float>> out, lse;
  std::vector<float> sinks;

  Partials(int count, std::uint64_t seed) {
    verify::Random random(seed);
    for (int i = 0; i < count; ++i) {
      std::vector<float> o, l;
      for (std::int64_t row = 0; row < kLseElements; ++row) {
        const bool empty = random.chance(0.2);
        l.push_back(empty ? kEmptyLse : static_cast<float>(4 * random.normal()));
        for (std::int64_t c = 0; c < kDim; ++c) {
          o.push_back(empty ? std::nanf("") : static_cast<float>(random.normal()));
        }
      }
      out.push_back(std::move(o));
      lse.push_back(std::move(l));
    }
    for (std::int64_t h = 0; h < kHeads; ++h) {
      sinks.push_back(h == 1 ? kEmptyLse : static_cast<float>(random.normal()));
    }
  }
};

struct Merged {
  std::vector<double> out, lse;
};

/// out = Σ exp(lse_i) out_i / (Σ exp(lse_i) + exp(sink)), as in docs/numerics.md. `bound`
/// receives the error bound of f32 arithmetic: each term has rounding errors of its exponent (which
/// grow with the distance from the maximum), of exp2, of the sum and of the products.
Merged definition(const Partials& partials, bool with_sinks, std::vector<double>& bound) {
  Merged merged;
  const auto roundings = static_cast<double>(8 + partials.out.size());
  for (std::int64_t row = 0; row < kLseElements; ++row) {
    const auto r = static_cast<std::size_t>(row);
    double sum = 0;
    for (const auto& lse : partials.lse) sum += std::exp(static_cast<double>(lse[r]));
    if (with_sinks) {
      const auto h = static_cast<std::size_t>(row / kRows % kHeads);
      sum += std::exp(static_cast<double>(partials.sinks[h]));
    }
    merged.lse.push_back(std::log(sum));
    for (std::int64_t c = 0; c < kDim; ++c) {
      const auto at = static_cast<std::size_t>(row * kDim + c);
      double value = 0, error = 0;
      for (std::size_t i = 0; i < partials.out.size(); ++i) {
        if (partials.lse[i][r] == kEmptyLse) continue;
        const double exponent = static_cast<double>(partials.lse[i][r]) - merged.lse.back();
        const double term = std::exp(exponent) * static_cast<double>(partials.out[i][at]);
        value += term;
        error += 0x1p-24 * (roundings + 2 * std::fabs(exponent)) * std::fabs(term);
      }
      merged.out.push_back(value);
      bound.push_back(error);
    }
  }
  return merged;
}

std::vector<float> repeat(const std::vector<float>& values, std::int64_t times) {
  std::vector<float> all;
  for (std::int64_t i = 0; i < times; ++i) all.insert(all.end(), values.begin(), values.end());
  return all;
}

/// Batch, heads and rows of a call.
struct MergeShape {
  std::int64_t batch = kBatch, heads = kHeads, rows = kRows;

  std::int64_t lse_elements() const { return batch * heads * rows; }
};

/// Partials and results in the memory of one device. Rows of the partials repeat to fill `shape`.
/// Tensors begin `shift` elements behind an aligned address.
class MergeCall {
 public:
  MergeCall(const Partials& partials, DType out_dtype, Device device, MergeShape shape = {},
            std::int64_t shift = 0)
      : device_(device), out_dtype_(out_dtype), shape_(shape) {
    const auto placed = [&](const std::vector<float>& values, DType dtype) {
      std::vector<float> all(static_cast<std::size_t>(shift), 0.f);
      const std::vector<float> repeated = repeat(values, shape.lse_elements() / kLseElements);
      all.insert(all.end(), repeated.begin(), repeated.end());
      return static_cast<std::byte*>(place(all)) + shift * size_of(dtype);
    };
    const auto rows = [&](const std::vector<float>& values) {
      return view(placed(values, DType::f32), DType::f32, {shape.batch, shape.heads, shape.rows},
                  device_);
    };
    const auto columns = [&](const std::vector<float>& values, DType dtype) {
      return view(placed(values, dtype), dtype, {shape.batch, shape.heads, shape.rows, kDim},
                  device_);
    };
    for (std::size_t i = 0; i < partials.out.size(); ++i) {
      partials_.push_back({columns(partials.out[i], DType::f32), rows(partials.lse[i])});
    }
    sinks_ = view(place(partials.sinks), DType::f32, {kHeads}, device_);
    out_ = columns(repeat({std::nanf("")}, kOutElements), out_dtype);
    lse_ = rows(repeat({std::nanf("")}, kLseElements));
  }

  Merged run(bool with_sinks) {
    require(merge(partials_, out_, lse_, with_sinks ? sinks_ : TensorView{}));
    Merged merged;
    const std::int64_t rows = shape_.lse_elements(), out_elements = rows * kDim;
    const std::vector<std::byte> out = fetch(out_, out_elements), lse = fetch(lse_, rows);
    for (std::int64_t i = 0; i < out_elements; ++i) {
      merged.out.push_back(reference::element(out.data(), out_dtype_, i));
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      merged.lse.push_back(reference::element(lse.data(), DType::f32, i));
    }
    return merged;
  }

 private:
  void* place(const std::vector<float>& values) {
    const std::size_t bytes = values.size() * sizeof(float);
    if (device_.type == DeviceType::cpu) {
      host_.push_back(std::make_unique<std::vector<float>>(values));
      return host_.back()->data();
    }
    buffers_.push_back(std::make_unique<DeviceBuffer>(bytes));
    buffers_.back()->upload(values.data(), bytes);
    return buffers_.back()->data();
  }
  std::vector<std::byte> fetch(const TensorView& t, std::int64_t elements) const {
    std::vector<std::byte> host(static_cast<std::size_t>(elements * size_of(t.dtype)));
    if (device_.type == DeviceType::cpu) {
      std::memcpy(host.data(), t.data, host.size());
    } else {
      require(cudaMemcpy(host.data(), t.data, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    return host;
  }

  Device device_;
  DType out_dtype_;
  MergeShape shape_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::vector<std::unique_ptr<std::vector<float>>> host_;
  std::vector<PartialResult> partials_;
  TensorView out_, lse_, sinks_;
};

double unit_of(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
}

/// The spacing of the format at 0.
double smallest_of(DType dtype) { return dtype == DType::f16 ? 0x1p-24 : 0x1p-126; }

class Merge : public GpuTest {};

TEST_F(Merge, AgreesWithTheDefinitionAndTheCpu) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int count : {1, 2, 5, 32, 33, 100}) {
      for (const bool with_sinks : {false, true}) {
        const Partials partials(count, static_cast<std::uint64_t>(10 * count + with_sinks));
        std::vector<double> arithmetic;
        const Merged want = definition(partials, with_sinks, arithmetic);
        const Merged gpu = MergeCall(partials, dtype, kGpu).run(with_sinks);
        const Merged cpu = MergeCall(partials, dtype, Device{}).run(with_sinks);
        for (std::size_t i = 0; i < want.out.size(); ++i) {
          const double bound =
              arithmetic[i] + unit_of(dtype) * std::fabs(want.out[i]) + smallest_of(dtype) / 2;
          ASSERT_NEAR(gpu.out[i], want.out[i], bound)
              << to_string(dtype) << ' ' << count << " partials";
          ASSERT_NEAR(gpu.out[i], cpu.out[i], 2 * bound);
        }
        for (std::size_t i = 0; i < want.lse.size(); ++i) {
          if (std::isinf(want.lse[i])) {
            ASSERT_EQ(gpu.lse[i], want.lse[i]);
          } else {
            ASSERT_NEAR(gpu.lse[i], want.lse[i], 2e-6 + 4 * 0x1p-24 * std::fabs(want.lse[i]));
          }
        }
      }
    }
  }
}

// Many rows of a head have a kernel of their own (cuda/common/combine_many.cuh). A row's bits are
// the same, also where vectors do not fit.
TEST_F(Merge, ManyRowsGiveTheBitsOfFew) {
  const MergeShape shape{kBatch, kHeads, kRows * ((1 << 15) / kLseElements + 1)};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int count : {1, 3, 32, 33}) {
      Partials partials(count, static_cast<std::uint64_t>(count));
      partials.sinks.assign(kHeads, 0.5f);  // a row meets every head
      const Merged few = MergeCall(partials, dtype, kGpu).run(true);
      for (const std::int64_t shift : {0, 1}) {
        const Merged many = MergeCall(partials, dtype, kGpu, shape, shift).run(true);
        for (std::size_t i = 0; i < many.out.size(); ++i) {
          ASSERT_EQ(many.out[i], few.out[i % few.out.size()])
              << count << " partials, shift " << shift << ", element " << i;
        }
        for (std::size_t i = 0; i < many.lse.size(); ++i) {
          ASSERT_EQ(many.lse[i], few.lse[i % few.lse.size()])
              << count << " partials, shift " << shift << ", row " << i;
        }
      }
    }
  }
}

TEST_F(Merge, WithEmptyPartialsIsExact) {
  Partials partials(3, 5);
  for (std::size_t i : {std::size_t{0}, std::size_t{2}}) {  // only the middle partial saw keys
    partials.lse[i].assign(partials.lse[i].size(), kEmptyLse);
    partials.out[i].assign(partials.out[i].size(), std::nanf(""));
  }
  const Merged merged = MergeCall(partials, DType::f32, kGpu).run(false);
  for (std::size_t i = 0; i < merged.out.size(); ++i) {
    const bool empty = partials.lse[1][i / static_cast<std::size_t>(kDim)] == kEmptyLse;
    ASSERT_EQ(merged.out[i], empty ? 0.0 : static_cast<double>(partials.out[1][i]));
  }
  for (std::size_t i = 0; i < merged.lse.size(); ++i) {
    ASSERT_EQ(merged.lse[i], static_cast<double>(partials.lse[1][i]));
  }
}

// Three partial calls on uneven key ranges, then one merge that also adds the sinks.
TEST_F(Merge, PartialCallsEqualOneCall) {
  verify::CaseSpec spec = dense(DType::f16, 2, 4, 2, 50, 300, 64);
  spec.lse = spec.sinks = true;
  const verify::CaseMemory memory(spec);
  GpuCase gpu(memory);
  gpu.load(memory);
  const Tensors& whole = gpu.tensors();
  const std::int64_t ends[] = {0, 65, 66, 300};
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<PartialResult> partials;
  for (int i = 0; i < 3; ++i) {
    const auto keys = [&](TensorView t) {
      t.data = static_cast<std::byte*>(t.data) + ends[i] * t.strides[2] * size_of(t.dtype);
      t.shape[2] = ends[i + 1] - ends[i];
      return t;
    };
    const auto rows = static_cast<std::size_t>(2 * 4 * 50);
    buffers.push_back(std::make_unique<DeviceBuffer>(rows * 64 * sizeof(float)));
    buffers.push_back(std::make_unique<DeviceBuffer>(rows * sizeof(float)));
    Tensors t{.q = whole.q, .k = keys(whole.k), .v = keys(whole.v)};
    t.out = view(buffers[buffers.size() - 2]->data(), DType::f32, {2, 4, 50, 64}, kGpu);
    t.lse = view(buffers.back()->data(), DType::f32, {2, 4, 50}, kGpu);
    Options options;
    options.partial = true;
    const Plan plan = plan_for(t, options);
    const TestWorkspace workspace(plan.workspace_bytes);
    require(run(plan, t, workspace.get()));
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    partials.push_back({t.out, t.lse});
  }
  require(merge(partials, whole.out, whole.lse, whole.sinks));
  expect_right(memory, gpu.block(), gpu.plan());
}

// merge() without an attention kernel: the oracle computes the partials, the GPU merges them. All
// data is f32, so the tight bound exposes a wrong weight. Early queries see none of the last keys:
// their partials are empty and hold NaN.
TEST_F(Merge, OraclePartialsGiveTheOracleResult) {
  for (const double sigma : {0.01, 1.0, 10.0}) {
    verify::CaseSpec spec = dense(DType::f32, 2, 4, 2, 50, 300, 64);
    spec.lse = spec.sinks = spec.options.causal = true;
    spec.sigma = sigma;
    const verify::CaseMemory memory(spec);
    GpuCase gpu(memory);
    gpu.load(memory);
    const std::int64_t ends[] = {0, 1, 65, 66, 260, 290, 300};
    constexpr std::size_t kPartRows = 2 * 4 * 50;
    std::vector<std::unique_ptr<DeviceBuffer>> buffers;
    std::vector<PartialResult> partials;
    for (std::size_t part = 0; part + 1 < std::size(ends); ++part) {
      std::vector<float> out(kPartRows * 64), lse(kPartRows);
      const auto keys = [&](TensorView t) {
        t.data = static_cast<std::byte*>(t.data) + ends[part] * t.strides[2] * size_of(t.dtype);
        t.shape[2] = ends[part + 1] - ends[part];
        return t;
      };
      Tensors t{.q = memory.tensors().q,
                .k = keys(memory.tensors().k),
                .v = keys(memory.tensors().v),
                .out = view(out.data(), DType::f32, {2, 4, 50, 64}),
                .lse = view(lse.data(), DType::f32, {2, 4, 50})};
      std::vector<std::int32_t> starts(2, 300 - 50), key_starts(2, static_cast<int>(ends[part]));
      t.q_start = view(starts.data(), DType::i32, {2});
      t.k_start = view(key_starts.data(), DType::i32, {2});
      Options options = spec.options;
      options.partial = true;
      const Problem problem = require(make_problem(t, options));
      const reference::Oracle oracle =
          reference::compute(problem, t, reference::all_rows(problem, t));
      ASSERT_EQ(oracle.lse.size(), kPartRows);
      for (std::size_t row = 0; row < kPartRows; ++row) {
        lse[row] = static_cast<float>(oracle.lse[row]);
        for (std::size_t c = row * 64; c < (row + 1) * 64; ++c) {
          out[c] = lse[row] == kEmptyLse ? std::nanf("") : static_cast<float>(oracle.out[c]);
        }
      }
      const auto place = [&](const std::vector<float>& values) {
        buffers.push_back(std::make_unique<DeviceBuffer>(values.size() * sizeof(float)));
        buffers.back()->upload(values.data(), values.size() * sizeof(float));
        return buffers.back()->data();
      };
      partials.push_back({view(place(out), DType::f32, {2, 4, 50, 64}, kGpu),
                          view(place(lse), DType::f32, {2, 4, 50}, kGpu)});
    }
    require(merge(partials, gpu.tensors().out, gpu.tensors().lse, gpu.tensors().sinks));
    expect_right(memory, gpu.block(), gpu.plan());
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
