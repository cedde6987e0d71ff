// quantize() and dequantize() on the GPU give the bits of the CPU, which
// tests/unit/api/quantize_test.cc compares with the definition. Also the asynchronous NaN report.
#include "flashcore/quant.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "gpu/support.h"
#include "reference/oracle.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr DType kQuantized[] = {DType::e4m3, DType::e5m2, DType::int8, DType::u8};
constexpr DType kWide[] = {DType::f32, DType::f16, DType::bf16};

struct Granularity {
  const char* name;
  int rank;
  std::int64_t block_rows;
};
constexpr Granularity kGranularities[] = {{"tensor", 1, 0}, {"head", 2, 0}, {"block", 3, 8}};

/// All tensors of a call in one buffer, so that a copy on another device is the same call.
struct Block {
  std::vector<std::byte> bytes;
  QuantTensors offsets;  ///< data is the offset

  Block(DType wide, DType stored, const Granularity& g, std::int64_t columns, std::int64_t slack,
        bool infinities = true) {
    const std::int64_t batch = 2, heads = 3, rows = 37;
    const auto place = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
      TensorView t = view(nullptr, dtype, shape);
      t.data = reinterpret_cast<void*>(bytes.size());
      std::int64_t stride = 1;
      for (int i = t.rank - 1; i >= 0; --i) {
        t.strides[i] = stride;
        stride = stride * t.shape[i] + slack;
      }
      bytes.resize(
          (bytes.size() + static_cast<std::size_t>(stride * size_of(dtype)) + 255) / 256 * 256,
          std::byte{0xff});
      return t;
    };
    offsets.from = place(wide, {batch, heads, rows, columns});
    offsets.to = place(stored, {batch, heads, rows, columns});
    const std::int64_t blocks = (rows + 7) / 8;
    const auto slots = [&](DType dtype) {
      if (g.rank == 1) return place(dtype, {1});
      if (g.rank == 2) return place(dtype, {batch, heads});
      return place(dtype, {batch, heads, blocks});
    };
    offsets.scale = slots(DType::f32);
    offsets.saturated = slots(DType::i32);
    verify::Random random(columns);
    std::byte* from = bytes.data() + reinterpret_cast<std::uintptr_t>(offsets.from.data);
    std::int64_t n = 0;
    verify::for_each_element(offsets.from, [&](std::int64_t at) {
      double x = std::exp2(random.between(-20, 4)) * random.normal();
      if (infinities && n % 997 == 5) x = std::numeric_limits<double>::infinity();
      if (n / columns / 8 == 1) x = 0;  // a block of zeros
      verify::store(from, wide, at, x);
      ++n;
    });
  }

  QuantTensors at(std::byte* base, Device device) const {
    QuantTensors t = offsets;
    for (TensorView* view : {&t.from, &t.to, &t.scale, &t.saturated}) {
      view->data = base + reinterpret_cast<std::uintptr_t>(view->data);
      view->device = device;
    }
    return t;
  }
};

class Quantize : public GpuTest {};

struct Columns {
  std::int64_t count, slack;
};

/// The arguments of the inverse call.
QuantTensors back(QuantTensors t) {
  std::swap(t.from, t.to);
  t.saturated = {};
  return t;
}

/// Quantizes and dequantizes on both devices; dequantize() overwrites the inputs.
void expect_bits_of_the_cpu(std::initializer_list<Columns> all_columns, bool rotate) {
  for (const DType wide : kWide) {
    for (const DType stored : kQuantized) {
      for (const Granularity& g : kGranularities) {
        for (const Columns& columns : all_columns) {
          SCOPED_TRACE(std::string(to_string(wide)) + " " + to_string(stored) + " per " + g.name +
                       ", " + std::to_string(columns.count) + " columns, slack " +
                       std::to_string(columns.slack));
          Block block(wide, stored, g, columns.count, columns.slack, !rotate);
          DeviceBuffer device(block.bytes);
          QuantOptions options{.block_rows = g.block_rows, .rotate = rotate};
          const auto run = [&](const char* step, auto call) {
            require(call(block.at(device.data(), kGpu)));
            require(call(block.at(block.bytes.data(), {})));
            require(cudaDeviceSynchronize(), step);
            EXPECT_EQ(device.download(), block.bytes) << step;
          };
          run("scales found", [&](const QuantTensors& t) { return quantize(t, options); });
          // Half the scale: values above half of the maximum saturate.
          options.given_scale = true;
          verify::for_each_element(block.offsets.scale, [&](std::int64_t at) {
            std::byte* scale =
                block.bytes.data() + reinterpret_cast<std::uintptr_t>(block.offsets.scale.data);
            verify::store(scale, DType::f32, at, reference::element(scale, DType::f32, at) / 2);
          });
          device.upload(block.bytes.data(), block.bytes.size());
          run("scales given", [&](const QuantTensors& t) { return quantize(t, options); });
          run("back", [&](const QuantTensors& t) { return dequantize(back(t), options); });
        }
      }
    }
  }
}

TEST_F(Quantize, GivesTheBitsOfTheCpu) {
  expect_bits_of_the_cpu({{64, 0}, {64, 16}, {20, 0}, {33, 7}}, false);
}

TEST_F(Quantize, RotatedGivesTheBitsOfTheCpu) {
  expect_bits_of_the_cpu({{16, 0},
                          {64, 16},
                          {80, 0},
                          {96, 16},
                          {128, 0},
                          {192, 0},
                          {512, 0},
                          {576, 16},
                          {2, 1},
                          {20, 0},
                          {33, 7},
                          {72, 0},
                          {128, 3},
                          {576, 7}},
                         true);
}

TEST_F(Quantize, NonFiniteValueSpoilsItsRotatedBlock) {
  for (const std::int64_t slack : {0, 1}) {  // in registers, and in shared memory
    for (const DType stored : {DType::e4m3, DType::e5m2}) {
      Block block(DType::bf16, stored, kGranularities[1], 96, slack);
      DeviceBuffer device(block.bytes);
      const QuantOptions options{.rotate = true};
      require(quantize(block.at(device.data(), kGpu), options));
      require(quantize(block.at(block.bytes.data(), {}), options));
      require(cudaDeviceSynchronize(), "quantize");
      EXPECT_EQ(device.download(), block.bytes);
      require(dequantize(back(block.at(device.data(), kGpu)), options));
      require(dequantize(back(block.at(block.bytes.data(), {})), options));
      require(cudaDeviceSynchronize(), "dequantize");
      const std::vector<std::byte> got = device.download();
      std::int64_t nans = 0;
      verify::for_each_element(block.offsets.from, [&](std::int64_t at) {
        const double x = reference::element(got.data(), DType::bf16, at);
        const double want = reference::element(block.bytes.data(), DType::bf16, at);
        nans += std::isnan(x) ? 1 : 0;
        EXPECT_TRUE(std::isnan(want) ? std::isnan(x) : x == want);
      });
      EXPECT_GE(nans, 32 * 20);  // blocks of 32 columns
    }
  }
}

TEST_F(Quantize, EveryFiniteValueRoundTrips) {
  for (const DType stored : kQuantized) {
    for (const DType wide : kWide) {
      std::vector<std::byte> patterns(256), scale(4);
      for (std::size_t i = 0; i < 256; ++i) patterns[i] = static_cast<std::byte>(i);
      verify::store(scale.data(), DType::f32, 0, 0.0371);
      const DeviceBuffer g_patterns(patterns), g_scale(scale), g_back(patterns), g_wide(1024);
      const auto tensor = [](const DeviceBuffer& buffer, DType dtype) {
        return view(buffer.data(), dtype, {1, 1, 16, 16}, kGpu);
      };
      const TensorView s = view(g_scale.data(), DType::f32, {1}, kGpu);
      require(dequantize({tensor(g_patterns, stored), tensor(g_wide, wide), s, {}}));
      require(quantize({tensor(g_wide, wide), tensor(g_back, stored), s, {}},
                       {.block_rows = 0, .given_scale = true}));
      require(cudaDeviceSynchronize(), "quantize");
      const std::vector<std::byte> back = g_back.download();
      for (std::size_t i = 0; i < 256; ++i) {
        const double value =
            reference::element(patterns.data(), stored, static_cast<std::int64_t>(i));
        const bool never_produced =
            (stored == DType::int8 && i == 128) || (stored == DType::u8 && i == 0);
        if (std::isfinite(value) && !never_produced) {
          EXPECT_EQ(back[i], patterns[i]) << to_string(stored) << " by " << to_string(wide);
        }
      }
    }
  }
}

TEST_F(Quantize, RoundsEvery16BitValueAsTheCpuDoes) {
  for (const DType stored : kQuantized) {
    for (const DType wide : {DType::f16, DType::bf16}) {
      for (const float scale : {1.f, 0.37f}) {
        SCOPED_TRACE(std::string(to_string(stored)) + " from " + to_string(wide));
        std::vector<std::byte> bytes(3 * 65536 + 8);
        for (std::size_t i = 0; i < 65536; ++i) {
          const auto bits = static_cast<std::uint16_t>(i);
          const bool nan = std::isnan(reference::element(&bits, wide, 0));
          std::memcpy(&bytes[2 * i], &bits, nan ? 0 : sizeof bits);  // a NaN's sign may differ
        }
        std::memcpy(&bytes[3 * 65536], &scale, sizeof scale);
        DeviceBuffer device(bytes);
        const auto call = [&](std::byte* base, Device place) {
          require(quantize({view(base, wide, {1, 1, 512, 128}, place),
                            view(base + 2 * 65536, stored, {1, 1, 512, 128}, place),
                            view(base + 3 * 65536, DType::f32, {1}, place),
                            view(base + 3 * 65536 + 4, DType::i32, {1}, place)},
                           {.given_scale = true}));
        };
        call(device.data(), kGpu);
        call(bytes.data(), {});
        require(cudaDeviceSynchronize(), "quantize");
        EXPECT_EQ(device.download(), bytes);
      }
    }
  }
}

TEST_F(Quantize, ReportsNanThatTheFormatCannotHold) {
  Block block(DType::f32, DType::int8, kGranularities[0], 64, 0);
  verify::store(block.bytes.data(), DType::f32, 777, std::nan(""));
  DeviceBuffer device(block.bytes);
  const TestWorkspace workspace(kWorkspaceHeaderBytes);
  require(quantize(block.at(device.data(), kGpu), {}, workspace.get()));
  const Status status = workspace_status(workspace.get());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("element 777"), std::string::npos) << status.message();
  EXPECT_TRUE(workspace_status(workspace.get()).ok());  // cleared
}

TEST_F(Quantize, ReportsTheElementThatCannotBeRotated) {
  for (const std::int64_t columns : {64, 36}) {  // in registers, and in shared memory
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      Block block(DType::f32, DType::u8, kGranularities[0], columns, 0, false);
      const std::int64_t at = 5 * columns + 14;
      verify::store(block.bytes.data(), DType::f32, at, bad);
      verify::store(block.bytes.data(), DType::f32, at + 1, bad);
      DeviceBuffer device(block.bytes);
      const TestWorkspace workspace(kWorkspaceHeaderBytes);
      require(quantize(block.at(device.data(), kGpu), {.rotate = true}, workspace.get()));
      const Status status = workspace_status(workspace.get());
      EXPECT_EQ(status.code(), StatusCode::invalid_argument);
      EXPECT_NE(status.message().find("element " + std::to_string(at) + ","), std::string::npos)
          << status.message();
      EXPECT_NE(status.message().find("rotation"), std::string::npos) << status.message();
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
