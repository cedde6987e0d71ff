// The check of `flashcore quantize`: correct values pass, and a single wrong value is found.
#include "data/quantize_data.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "flashcore/quant.h"

namespace flashcore::tool {
namespace {

QuantizeErrors check_after(const QuantizeArgs& args,
                           const std::function<void(std::uint8_t*)>& change) {
  const QuantizeData data(args);
  const QuantOptions options{args.block_rows, false, args.rotate};
  EXPECT_TRUE(quantize({data.here(data.wide), data.here(data.quantized), data.here(data.scale),
                        data.here(data.saturated)},
                       options)
                  .ok());
  EXPECT_TRUE(
      dequantize(
          {data.here(data.quantized), data.here(data.dequantized), data.here(data.scale), {}},
          options)
          .ok());
  change(static_cast<std::uint8_t*>(data.here(data.quantized).data));
  return check_quantized(args, data);
}

TEST(QuantizeData, FindsOneWrongValue) {
  for (const char* dtype : {"e4m3", "e5m2", "int8", "byte"}) {
    for (const bool rotate : {false, true}) {
      for (const char* per : {"tensor", "head", "block"}) {
        SCOPED_TRACE(std::string(dtype) + " per " + per + (rotate ? ", rotated" : ""));
        QuantizeArgs args;
        args.shape = "2,3,300,48";
        args.dtype = dtype;
        args.per = per;
        args.rotate = rotate;
        const QuantizeErrors correct = check_after(args, [](std::uint8_t*) {});
        EXPECT_EQ(correct.not_nearest, 0);
        EXPECT_GT(correct.relative_error, 0);
        for (const std::size_t at : {std::size_t{0}, std::size_t{40000}, std::size_t{86399}}) {
          const auto off_by_one = [&](std::uint8_t* values) { values[at] ^= 1; };
          EXPECT_EQ(check_after(args, off_by_one).not_nearest, 1) << at;
        }
        EXPECT_GT(check_after(args, [](std::uint8_t* values) { values[77] ^= 0x80; }).not_nearest,
                  0);
      }
    }
  }
}

TEST(QuantizeData, FindsAMissingRotation) {
  QuantizeArgs args;
  args.shape = "1,1,10,64";
  args.rotate = true;
  const QuantizeData data(args);
  // Quantized without the rotation, checked with it.
  ASSERT_TRUE(quantize({data.here(data.wide), data.here(data.quantized), data.here(data.scale),
                        data.here(data.saturated)},
                       {})
                  .ok());
  ASSERT_TRUE(
      dequantize(
          {data.here(data.quantized), data.here(data.dequantized), data.here(data.scale), {}}, {})
          .ok());
  EXPECT_GT(check_quantized(args, data).not_nearest, 500);
}

}  // namespace
}  // namespace flashcore::tool
