// quantize() and dequantize() on the CPU against their definition in f64.
#include "flashcore/quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "flashcore/flashcore.h"
#include "quantized.h"
#include "support/draw.h"
#include "support/tensor.h"

namespace flashcore::test {
namespace {

TEST(Quantize, RoundsToNearestForEveryTypeLayoutAndGranularity) {
  const Shape shape = {2, 3, 37, 20};
  const Granularity all[] = {
      {"tensor", {1}, 0}, {"head", {2, 3}, 0}, {"block", {2, 3, 5}, 8}, {"row", {2, 3, 37}, 1}};
  Random random(11);
  for (const DType wide : kWide) {
    for (const DType code : kCodes) {
      for (const Granularity& g : all) {
        SCOPED_TRACE(std::string(to_string(wide)) + " " + to_string(code) + " per " + g.name);
        const Tensor from = rearranged(draw_normal(random, wide, shape, 3.0), MemoryLayout::padded);
        Tensor to(code, shape, MemoryLayout::rows_first);
        Tensor scale(DType::f32, g.scale), saturated(DType::i32, g.scale);
        const Status status = quantize({from.view(), to.view(), scale.view(), saturated.view()},
                                       {.block_rows = g.block_rows});
        ASSERT_TRUE(status.ok()) << status.message();
        Tensor largest(DType::f32, g.scale);
        largest.fill(0);
        for_each_index(shape, [&](const Shape& at) {
          const Shape slot = slot_of(g, at);
          largest.set(slot, std::max(largest.at(slot), std::fabs(from.at(at))));
        });
        for_each_index(shape, [&](const Shape& at) {
          const Shape slot = slot_of(g, at);
          const double s = scale.at(slot);
          ASSERT_NEAR(s, largest.at(slot) / largest_of(code), 1e-6 * s);
          ASSERT_EQ(saturated.at(slot), 0);
          // Three roundings of 2^-24.
          const double want = from.at(at) / s;
          ASSERT_LE(std::fabs(to.at(at) - want),
                    half_step(code, want) + 3 * 0x1p-24 * std::fabs(want));
        });
      }
    }
  }
}

TEST(Quantize, InvertsDequantizeForEveryFiniteEncoding) {
  for (const DType code : kCodes) {
    for (const DType wide : kWide) {
      for (const double scale_value : {1.0, 0.0371, 0x1p-12}) {
        SCOPED_TRACE(std::string(to_string(code)) + " by " + to_string(wide));
        Tensor codes(code, {1, 1, 16, 16}), wide_values(wide, {1, 1, 16, 16});
        std::vector<std::uint64_t> bits(256);
        for (int i = 0; i < 256; ++i) {
          bits[static_cast<std::size_t>(i)] = static_cast<std::uint64_t>(i);
        }
        codes.set_bits(bits);
        Tensor scale = tensor_of(DType::f32, {1}, {scale_value});
        ASSERT_TRUE(dequantize({codes.view(), wide_values.view(), scale.view(), {}}).ok());
        Tensor back(code, {1, 1, 16, 16}), saturated(DType::i32, {1});
        // NaN of e4m3 and e5m2 stay NaN; infinities of e5m2 become the largest finite value.
        const Status status =
            quantize({wide_values.view(), back.view(), scale.view(), saturated.view()},
                     {.block_rows = 0, .given_scale = true});
        ASSERT_TRUE(status.ok()) << status.message();
        int beyond = 0;
        for (std::int64_t i = 0; i < 256; ++i) {
          const Shape at = {0, 0, i / 16, i % 16};
          const double value = codes.at(at);
          const bool smallest = !std::isnan(value) && value < -largest_of(code);  // int8 -128
          const bool f16_lost = wide == DType::f16 && scale_value < 0.01 && code == DType::e5m2 &&
                                std::fabs(value * scale_value) < 0x1p-14;  // subnormal in f16
          if (std::isnan(value)) {
            EXPECT_TRUE(std::isnan(back.at(at)));
          } else if (!std::isfinite(value) || smallest) {
            ++beyond;
            EXPECT_EQ(std::fabs(back.at(at)), largest_of(code));
          } else if (!f16_lost) {
            EXPECT_EQ(back.bits()[static_cast<std::size_t>(i)], bits[static_cast<std::size_t>(i)])
                << i;
          }
        }
        EXPECT_EQ(saturated.at({0}), beyond);
      }
    }
  }
}

TEST(Quantize, ZerosGetScaleOneAndStayZero) {
  for (const DType code : kCodes) {
    Tensor from(DType::f16, {1, 2, 4, 8}), to(code, {1, 2, 4, 8}), scale(DType::f32, {1, 2});
    from.fill(0);
    from.set({0, 1, 2, 3}, 5.0);  // the other head is not all zeros
    ASSERT_TRUE(quantize({from.view(), to.view(), scale.view(), {}}).ok());
    EXPECT_EQ(scale.at({0, 0}), 1.0);
    EXPECT_NE(scale.at({0, 1}), 1.0);
    for (const double x : take(to, 1, {0}).values()) EXPECT_EQ(x, 0.0);
  }
}

TEST(Quantize, CountsSaturatedValues) {
  for (const DType code : kCodes) {
    Tensor from(DType::f32, {1, 1, 2, 4}), to(code, {1, 1, 2, 4});
    const double top = largest_of(code);
    const std::vector<double> values = {
        0, top, -top, 2 * top, -3 * top, 1, std::numeric_limits<double>::infinity(), -1};
    for (std::int64_t i = 0; i < 8; ++i) {
      from.set({0, 0, i / 4, i % 4}, values[static_cast<std::size_t>(i)]);
    }
    Tensor scale = tensor_of(DType::f32, {1, 1, 2}, {1, 1}), saturated(DType::i32, {1, 1, 2});
    ASSERT_TRUE(quantize({from.view(), to.view(), scale.view(), saturated.view()},
                         {.block_rows = 1, .given_scale = true})
                    .ok());
    EXPECT_EQ(saturated.at({0, 0, 0}), 1);
    EXPECT_EQ(saturated.at({0, 0, 1}), 2);
    EXPECT_EQ(to.at({0, 0, 0, 3}), top);
    EXPECT_EQ(to.at({0, 0, 1, 0}), -top);
    EXPECT_EQ(to.at({0, 0, 1, 2}), top);
  }
}

TEST(Quantize, ReportsNanIfTheFormatHasNone) {
  for (const DType code : kCodes) {
    Tensor from(DType::bf16, {2, 2, 3, 4}), to(code, {2, 2, 3, 4}), scale(DType::f32, {1});
    from.fill(1);
    from.set({1, 0, 2, 3}, std::nan(""));
    const Tensor to_before = to, scale_before = scale;
    const Status status = quantize({from.view(), to.view(), scale.view(), {}});
    if (code == DType::e4m3 || code == DType::e5m2) {
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(std::isnan(to.at({1, 0, 2, 3})));
      EXPECT_EQ(to.at({0, 0, 0, 0}), largest_of(code));
    } else {
      EXPECT_EQ(status.code(), StatusCode::invalid_argument);
      EXPECT_NE(status.message().find("from[1, 0, 2, 3]"), std::string::npos) << status.message();
      EXPECT_EQ(difference(to, to_before), "");
      EXPECT_EQ(difference(scale, scale_before), "");
    }
  }
}

TEST(Quantize, RejectsBadTensorsAndWritesNothing) {
  const Tensor from = tensor_of(DType::f32, {1, 1, 2, 2}, {1, 2, 3, 4});
  Tensor to(DType::int8, {1, 1, 2, 2}), scale(DType::f32, {1}), i32(DType::i32, {1});
  const auto refuses = [&](const QuantTensors& tensors, const QuantOptions& options,
                           const char* word) {
    const Tensor before = to;
    const Status status = quantize(tensors, options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_EQ(difference(to, before), "");
  };
  refuses({to.view(), to.view(), scale.view(), {}}, {}, "wanted f32, f16 or bf16");
  refuses({from.view(), from.view(), scale.view(), {}}, {}, "wanted e4m3");
  refuses({from.view(), to.view(), {}, {}}, {}, "scale");
  refuses({from.view(), to.view(), i32.view(), {}}, {}, "wanted f32");
  refuses({from.view(), to.view(), scale.view(), scale.view()}, {}, "saturated");
  Tensor blocks(DType::f32, {1, 1, 1});
  refuses({from.view(), to.view(), blocks.view(), {}}, {}, "block_rows is 0");
  refuses({from.view(), to.view(), blocks.view(), {}}, {.block_rows = 1}, "need 2");
  refuses({from.view(), to.view(), scale.view(), {}}, {.block_rows = -1}, "block_rows is -1");
  scale.fill(0);
  refuses({from.view(), to.view(), scale.view(), {}}, {.given_scale = true}, "scale[0, 0, 0] is 0");
  Tensor other(DType::int8, {1, 1, 2, 3});
  refuses({from.view(), other.view(), scale.view(), {}}, {}, "its shape differs");
  TensorView repeated = to.view();
  repeated.strides[2] = 0;
  refuses({from.view(), repeated, scale.view(), {}}, {}, "overlap");
}

TEST(Quantize, TheCAbiReturnsTheSameResult) {
  const Tensor from = tensor_of(DType::f32, {2, 2}, {1, -2, 3, -4});
  Tensor to(DType::e4m3, {2, 2}), want(DType::e4m3, {2, 2}), back(DType::f32, {2, 2});
  Tensor scale(DType::f32, {1}), want_scale(DType::f32, {1});
  ASSERT_TRUE(quantize({from.view(), want.view(), want_scale.view(), {}}).ok());
  CQuantCall call(from, to, scale, back);
  flashcore_quant_params& params = call.params;
  flashcore_error error{};
  ASSERT_EQ(flashcore_quantize(&params, &error), FLASHCORE_OK) << error.message;
  EXPECT_EQ(difference(to, want), "");
  EXPECT_EQ(difference(scale, want_scale), "");
  call.turn_round();
  ASSERT_EQ(flashcore_dequantize(&params, &error), FLASHCORE_OK) << error.message;
  EXPECT_NEAR(back.at({1, 1}), -4, 1e-6);
  params.struct_size = 8;
  EXPECT_EQ(flashcore_quantize(&params, &error), FLASHCORE_INVALID_ARGUMENT);
  EXPECT_EQ(flashcore_quantize(nullptr, &error), FLASHCORE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace flashcore::test
