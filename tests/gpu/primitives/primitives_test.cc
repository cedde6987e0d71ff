// Device primitives in isolation: reductions in every lane, NaN rules, accuracy of exp2, 16-bit
// conversions of every bit pattern, and load_chunk() at every edge of a tile.
#include "primitives_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "gpu/support.h"
#include "reference/oracle.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::size_t kRowLanes = 16;  // adjacent lanes that share a row

class Primitives : public GpuTest {};

TEST_F(Primitives, RowReductionsReachEveryLane) {
  verify::Random random(1);
  std::vector<float> in(256 * 64);
  for (float& x : in) x = static_cast<float>(random.normal());
  // Some rows hold special values.
  for (std::size_t i = 0; i < kRowLanes; ++i) in[i] = -kInfinity;
  in[1 * kRowLanes + 5] = kInfinity;
  for (std::size_t lane = 0; lane < kRowLanes; ++lane) {  // one row per position of the maximum
    in[(2 + lane) * kRowLanes + lane] = 100.f + static_cast<float>(lane);
  }
  const LaneResults got = run_lanes(in);
  for (std::size_t row = 0; row < in.size() / kRowLanes; ++row) {
    float max = -kInfinity;
    double sum = 0, magnitude = 0;
    for (std::size_t i = 0; i < kRowLanes; ++i) {
      max = std::max(max, in[row * kRowLanes + i]);
      sum += in[row * kRowLanes + i];
      magnitude += std::fabs(in[row * kRowLanes + i]);
    }
    for (std::size_t i = 0; i < kRowLanes; ++i) {
      const std::size_t at = row * kRowLanes + i;
      ASSERT_EQ(got.max[at], max) << "row " << row << " lane " << i;
      ASSERT_EQ(got.sum[at], got.sum[row * kRowLanes]) << "all lanes of a row get the same sum";
      if (std::isinf(sum)) {
        ASSERT_EQ(got.sum[at], static_cast<float>(sum));
      } else {
        ASSERT_NEAR(got.sum[at], sum, 4 * 0x1p-24 * magnitude) << "row " << row;
      }
    }
  }
}

/// Checks reductions over groups of `lanes` adjacent lanes: every lane has the result, the maximum
/// ignores NaN, the sum keeps it, and other groups have no effect.
void check_group(const std::vector<float>& in, const std::vector<float>& max,
                 const std::vector<float>& sum, std::size_t lanes) {
  for (std::size_t first = 0; first < in.size(); first += lanes) {
    float want_max = -kInfinity;
    double want_sum = 0, magnitude = 0;
    for (std::size_t i = first; i < first + lanes; ++i) {
      want_max = std::fmax(want_max, in[i]);
      want_sum += in[i];
      magnitude += std::fabs(in[i]);
    }
    for (std::size_t i = first; i < first + lanes; ++i) {
      ASSERT_EQ(max[i], want_max) << "lane " << i % 32 << " of groups of " << lanes;
      if (std::isnan(want_sum)) {
        ASSERT_TRUE(std::isnan(sum[i]));
      } else if (std::isinf(want_sum)) {
        ASSERT_EQ(sum[i], static_cast<float>(want_sum));
      } else {
        ASSERT_EQ(sum[i], sum[first]) << "all lanes of a group get the same sum";
        ASSERT_NEAR(sum[i], want_sum, 5 * 0x1p-24 * magnitude);
      }
    }
  }
}

/// Reorders each warp so that lanes with the same lane % width are adjacent.
std::vector<float> group_by_modulo(const std::vector<float>& lanes, std::size_t width) {
  const std::size_t groups = 32 / width;
  std::vector<float> sorted;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    sorted.push_back(lanes[i / 32 * 32 + i % groups * width + i % 32 / groups]);
  }
  return sorted;
}

TEST_F(Primitives, ReductionsReachEveryLaneOfTheirGroup) {
  verify::Random random(5);
  std::vector<float> in(128 * 64);
  for (float& x : in) x = static_cast<float>(random.normal());
  std::size_t warp = 0;
  for (std::size_t lane = 0; lane < 32; ++lane) {  // maximum, then NaN, at each lane
    in[32 * warp++ + lane] = 100.f + static_cast<float>(lane);
    in[32 * warp++ + lane] = std::nanf("");
  }
  for (std::size_t i = 0; i < 32; ++i) in[32 * warp + i] = -kInfinity;
  in[32 * ++warp + 9] = kInfinity;
  const LaneGroupResults got = run_lane_groups(in);
  check_group(in, got.quad_max, got.quad_sum, 4);
  check_group(group_by_modulo(in, 4), group_by_modulo(got.cross_quad_max, 4),
              group_by_modulo(got.cross_quad_sum, 4), 8);
  check_group(group_by_modulo(in, 8), group_by_modulo(got.cross_octet_max, 8),
              group_by_modulo(got.cross_octet_sum, 8), 4);
  check_group(in, got.warp_max, got.warp_sum, 32);
}

TEST_F(Primitives, EachOctetGetsItsOwnSum) {
  std::vector<float> in(128);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i * i % 89);
  const std::vector<float> got = run_lane_groups(in).cross_octet_sum_each;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::size_t first = i / 32 * 32 + i % 8, octet = i % 32 / 8;
    const float sum = in[first] + in[first + 8] + in[first + 16] + in[first + 24];
    ASSERT_EQ(got[i], static_cast<float>(octet + 1) * sum) << "lane " << i % 32;
  }
}

TEST_F(Primitives, LargestIsRightForEveryCount) {
  constexpr std::size_t kValues = kMaxValuesPerThread;
  std::vector<float> in;
  for (std::size_t largest = 0; largest < kValues; ++largest) {  // one thread per position
    for (std::size_t i = 0; i < kValues; ++i) {
      in.push_back(i == largest ? 1.f : -2.f - static_cast<float>(i));
    }
  }
  const std::vector<float> got = run_largest(in);
  for (std::size_t largest = 0; largest < kValues; ++largest) {
    for (std::size_t count = 1; count <= kValues; ++count) {
      EXPECT_EQ(got[largest * kValues + count - 1], largest < count ? 1.f : -2.f)
          << count << " values, the largest at " << largest;
    }
  }
}

// The row max ignores NaN, and the row sum keeps it: NaN reaches out and LSE through the sum.
TEST_F(Primitives, MaximumIgnoresNanAndSumKeepsIt) {
  std::vector<float> in(256, 1.f);
  for (std::size_t lane = 0; lane < kRowLanes; ++lane) {
    in[lane * kRowLanes + lane] = std::nanf("");
    in[lane * kRowLanes + (lane + 7) % kRowLanes] = 3.f;
  }
  const LaneResults got = run_lanes(in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::size_t row = i / kRowLanes, lane = i % kRowLanes;
    ASSERT_EQ(got.max[i], 3.f) << "row " << row << " lane " << lane;
    ASSERT_TRUE(std::isnan(got.sum[i])) << "row " << row << " lane " << lane;
  }
  const float nan = std::nanf("");
  const std::vector<float> a = {1.f, 2.f, -kInfinity, 5.f, -kInfinity, nan};
  const std::vector<float> b = {2.f, 1.f, nan, nan, -kInfinity, 1.f};
  const std::vector<float> max = run_max_ignore_nan(a, b);
  const float wanted[] = {2.f, 2.f, -kInfinity, 5.f, -kInfinity, 1.f};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(max[i], wanted[i]) << i;
}

TEST_F(Primitives, FastExp2IsAccurate) {
  std::vector<float> in;
  for (int i = -125 * 512; i < 128 * 512; ++i) in.push_back(static_cast<float>(i) / 512.f);
  verify::Random random(2);
  for (int i = 0; i < 100000; ++i) {
    in.push_back(
        static_cast<float>((random.uniform() - 1) * std::exp2(6.9 - 30 * random.uniform())));
  }
  const std::size_t special = in.size();
  for (const float x : {-kInfinity, kInfinity, std::nanf(""), 0.f, -0.f, -150.f, -1e30f, 128.f}) {
    in.push_back(x);
  }
  in.resize((in.size() + 255) / 256 * 256, 0.f);
  const std::vector<float> got = run_lanes(in).exp2;
  for (std::size_t i = 0; i < special; ++i) {
    const double want = std::exp2(static_cast<double>(in[i]));
    ASSERT_NEAR(got[i], want, 0x1p-22 * want) << "2^" << in[i];
  }
  EXPECT_EQ(got[special], 0.f);
  EXPECT_EQ(got[special + 1], kInfinity);
  EXPECT_TRUE(std::isnan(got[special + 2]));
  EXPECT_EQ(got[special + 3], 1.f) << "2^0 must be exact: a rescale by 1 changes nothing";
  EXPECT_EQ(got[special + 4], 1.f);
  EXPECT_EQ(got[special + 5], 0.f) << "subnormal results are flushed";
  EXPECT_EQ(got[special + 6], 0.f);
  EXPECT_EQ(got[special + 7], kInfinity);
}

TEST_F(Primitives, EverySixteenBitPatternLoads) {
  for (const auto& [format, dtype] :
       {std::pair{Format::f16, DType::f16}, std::pair{Format::bf16, DType::bf16}}) {
    const std::vector<float> got = run_load_all(format);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const double want = reference::element(&pattern, dtype, 0);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(got[bits])) << bits;
      } else {
        ASSERT_EQ(got[bits], want) << bits;
        ASSERT_EQ(std::signbit(got[bits]), (bits & 0x8000u) != 0) << bits;
      }
    }
  }
}

// The device must round as the host does; unit tests cover the host conversions exhaustively.
TEST_F(Primitives, StoringRoundsAsTheHostDoes) {
  std::vector<float> values;
  verify::Random random(3);
  for (int i = 0; i < 1 << 20; ++i) {
    values.push_back(core::float_of_bits(static_cast<std::uint32_t>(random.bits())));
  }
  for (std::uint32_t half = 0; half < 65536; ++half) {  // ties between two f16 values, and ±1 ulp
    const float x = core::float_of_f16(static_cast<std::uint16_t>(half));
    for (const std::uint32_t step : {0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(core::float_of_bits(core::bits_of_float(x) + step));
    }
  }
  values.resize(values.size() / 4 * 4);
  for (const Format format : {Format::f16, Format::bf16}) {
    const std::vector<std::uint16_t> got = run_store(format, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {
        const std::uint16_t magnitude = got[i] & 0x7fffu;
        ASSERT_GT(magnitude, format == Format::f16 ? 0x7c00u : 0x7f80u);
        continue;
      }
      const std::uint16_t want =
          format == Format::f16 ? core::f16_of_float(values[i]) : core::bf16_of_float(values[i]);
      ASSERT_EQ(got[i], want) << "of " << values[i];
    }
  }
}

std::uint32_t bits_in(Format format, float x) {
  switch (format) {
    case Format::f32: return core::bits_of_float(x);
    case Format::f16: return core::f16_of_float(x);
    default: return core::bf16_of_float(x);
  }
}

/// Small integers, exact in every format. The matrix is NaN outside [rows, columns].
float value_at(std::int64_t row, std::int64_t column) {
  return static_cast<float>((row * 7 + column * 3) % 113 - 50);
}

void check_chunk(ChunkCall call) {
  constexpr int kMatrixRows = 80, kStored = 160;
  call.row_stride = kStored * call.column_stride;
  call.matrix.assign(static_cast<std::size_t>(kMatrixRows * call.row_stride),
                     bits_in(call.format, std::nanf("")));
  for (std::int64_t r = 0; r < kMatrixRows; ++r) {
    if (r < call.first_row || r >= call.first_row + call.rows) continue;  // other rows stay NaN
    for (std::int64_t c = 0; c < call.columns; ++c) {
      call.matrix[static_cast<std::size_t>(r * call.row_stride + c * call.column_stride)] =
          bits_in(call.format, value_at(r, c));
    }
  }
  const std::vector<float> tile = run_load_chunk(call);
  for (int r = 0; r < call.tile_rows; ++r) {
    for (int c = 0; c < 68; ++c) {
      const int column = call.first_column + c;
      float want = 0.f;
      if (c >= 64) {
        want = kUntouched;
      } else if (r < call.rows && column < call.columns) {
        want = call.factor * value_at(call.first_row + r, column);
      }
      ASSERT_EQ(tile[static_cast<std::size_t>(r * 68 + c)], want)
          << "row " << r << " column " << c << ", rows " << call.rows << " columns " << call.columns
          << " first column " << call.first_column << " vector " << call.vector_rows;
    }
  }
}

TEST_F(Primitives, LoadChunkIsRightAtEveryEdge) {
  for (const Format format : {Format::f32, Format::f16, Format::bf16}) {
    for (const int tile_rows : {16, 32, 64}) {
      for (const int rows : {0, 1, 15, 16, 17, tile_rows - 1, tile_rows}) {
        if (rows > tile_rows) continue;
        for (const int columns : {1, 4, 63, 64, 65, 100, 128}) {
          for (const int first_column : {0, 64}) {
            ChunkCall call{format, tile_rows, {},           0,    1,    columns,
                           9,      rows,      first_column, 0.5f, false};
            check_chunk(call);
            if (columns % 4 == 0) {
              call.vector_rows = true;
              check_chunk(call);
              call.vector_rows = false;
            }
            call.column_stride = 2;
            check_chunk(call);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
