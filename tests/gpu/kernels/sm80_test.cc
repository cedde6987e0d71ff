// Primitives of the tensor-core kernels in isolation: cp.async, ldmatrix, mma.sync, packing,
// dequantization, and a swizzled tile from cp.async to registers. The fragments follow
// core/mma_layout.h, so these tests compare its layouts with the hardware.
#include "sm80_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/mma_layout.h"
#include "core/numeric.h"
#include "gpu/support.h"
#include "verify/inputs/random.h"

namespace flashcore::gpu_test {
namespace {

constexpr int kLanes = 32;

class TensorCores : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const int capability = require(device_info(kGpu)).compute_capability;
    if (capability < 80) GTEST_SKIP() << "needs sm_80; this GPU is sm_" << capability;
  }
};

std::vector<std::uint8_t> random_bytes(std::size_t count, std::uint64_t seed) {
  verify::Random random(seed);
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(1 + random.below(255));
  return bytes;
}

// ---------------------------------------------------------------------------------------------
// Copies

TEST_F(TensorCores, CpAsyncZeroFillsTheRest) {
  constexpr std::size_t kCopies = 17 * 7;  // every size at every lane of a quarter-warp
  const std::vector<std::uint8_t> source = random_bytes(16 * kCopies, 1);
  std::vector<int> bytes;
  for (std::size_t i = 0; i < kCopies; ++i) bytes.push_back(static_cast<int>(i % 17));
  const std::vector<std::uint8_t> got = run_copy_async(source, bytes);
  for (std::size_t i = 0; i < kCopies; ++i) {
    const std::size_t from = kCopies - 1 - i;  // the kernel writes its result in reverse
    for (std::size_t byte = 0; byte < 16; ++byte) {
      const bool copied = static_cast<int>(byte) < bytes[from];
      ASSERT_EQ(got[16 * i + byte], copied ? source[16 * from + byte] : 0)
          << bytes[from] << " bytes, byte " << byte;
    }
  }
}

TEST_F(TensorCores, CpAsyncWaitLeavesOnlyTheLastGroupPending) {
  const std::vector<std::uint8_t> source = random_bytes(512 * 1000, 2);
  const std::vector<std::uint8_t> got = run_copy_pipeline(source);
  for (std::size_t i = 0; i < source.size(); ++i) {
    ASSERT_EQ(got[i], source[i ^ 16]) << "byte " << i;  // lane l reads the 16 bytes of lane l ^ 1
  }
}

// ---------------------------------------------------------------------------------------------
// ldmatrix

std::uint16_t half_of(std::uint32_t reg, int half) {
  return static_cast<std::uint16_t>(reg >> (16 * half));
}

struct Element {
  int row, column;
};

/// Loads from a 16 × 16 tile in which each element is its own index, and compares every loaded
/// element with wanted(lane, reg, half). address(lane) is the row address that the lane passes.
template <typename Address, typename Wanted>
void check_load(Address address, bool transposed, Wanted wanted) {
  std::vector<std::uint16_t> tile;
  for (int i = 0; i < 16 * 16; ++i) tile.push_back(static_cast<std::uint16_t>(i));
  std::vector<int> offset_bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    const core::Coordinate c = address(lane);
    offset_bytes.push_back(2 * (16 * c.row + 8 * c.column));
  }
  const std::vector<std::uint32_t> got = run_ldmatrix(tile, offset_bytes, transposed);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Element want = wanted(lane, reg, half);
        ASSERT_EQ(half_of(got[static_cast<std::size_t>(4 * lane + reg)], half),
                  16 * want.row + want.column)
            << "lane " << lane << " register " << reg << " half " << half;
      }
    }
  }
}

Element element_a(int lane, int reg, int half) {
  const core::Coordinate c = core::mma_a(lane, reg, half);
  return {c.row, c.column};
}

/// Registers 0, 1 are the B operand of n-tile 0, registers 2, 3 of n-tile 1; keys (n) are
/// the rows of the tile.
Element element_b(int lane, int reg, int half) {
  const core::Coordinate c = core::mma_b(lane, reg % 2, half);
  return {8 * (reg / 2) + c.column, c.row};
}

/// The same from a tile with keys (k) as rows.
Element element_b_transposed(int lane, int reg, int half) {
  const core::Coordinate c = core::mma_b(lane, reg % 2, half);
  return {c.row, 8 * (reg / 2) + c.column};
}

/// Registers 0, 1 are the B operand of k-step 0, registers 2, 3 of k-step 1; rows are n.
Element element_b_two_steps(int lane, int reg, int half) {
  const core::Coordinate c = core::mma_b(lane, reg % 2, half);
  return {c.column, 16 * (reg / 2) + c.row};
}

/// A operand from a tile with A's columns (k) as rows.
Element element_a_transposed(int lane, int reg, int half) {
  const core::Coordinate c = core::mma_a(lane, reg, half);
  return {c.column, c.row};
}

TEST_F(TensorCores, LdmatrixLoadsTheAOperand) { check_load(core::ldmatrix_a, false, element_a); }

TEST_F(TensorCores, LdmatrixLoadsTheBOperands) { check_load(core::ldmatrix_b, false, element_b); }

TEST_F(TensorCores, LdmatrixTransposedLoadsTheBOperands) {
  check_load(core::ldmatrix_b_trans, true, element_b_transposed);
}

TEST_F(TensorCores, LdmatrixLoadsTheOperandsOfSwapAB) {
  check_load(core::ldmatrix_b_two_steps, false, element_b_two_steps);
  check_load(core::ldmatrix_a_trans, true, element_a_transposed);
}

// A quad of lanes holds a row of eight elements, after movmatrix a column.
TEST_F(TensorCores, MovmatrixTransposes) {
  const auto element = [](int row, int column) { return std::uint32_t(100 * row + column); };
  std::vector<std::uint32_t> matrix;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    matrix.push_back(element(row, column) | element(row, column + 1) << 16);
  }
  const std::vector<std::uint32_t> got = run_movmatrix(matrix);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      ASSERT_EQ(half_of(got[static_cast<std::size_t>(lane)], half),
                element(2 * (lane % 4) + half, lane / 4))
          << "lane " << lane << " half " << half;
    }
  }
}

// ---------------------------------------------------------------------------------------------
// mma.sync

/// A batch of independent D = A B + C, stored as fragments.
class MmaBatch {
 public:
  explicit MmaBatch(HalfFormat format) : format_(format) {}

  /// a, b and c return the value at (row, column), which is rounded to the format.
  template <typename A, typename B, typename C>
  void add(A a, B b, C c) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int reg = 0; reg < 4; ++reg) {
        std::uint32_t both = 0;
        for (int half = 0; half < 2; ++half) {
          const core::Coordinate at = core::mma_a(lane, reg, half);
          both |= std::uint32_t{bits_of(format_, a(at.row, at.column))} << (16 * half);
        }
        a_.push_back(both);
      }
      for (int reg = 0; reg < 2; ++reg) {
        std::uint32_t both = 0;
        for (int half = 0; half < 2; ++half) {
          const core::Coordinate at = core::mma_b(lane, reg, half);
          both |= std::uint32_t{bits_of(format_, b(at.row, at.column))} << (16 * half);
        }
        b_.push_back(both);
      }
      for (int reg = 0; reg < 4; ++reg) {
        const core::Coordinate at = core::mma_c(lane, reg);
        c_.push_back(c(at.row, at.column));
      }
    }
  }

  void run() { d_ = run_mma(format_, a_, b_, c_); }

  /// D of the n-th product at (row, column).
  float result(std::size_t n, int row, int column) const {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int reg = 0; reg < 4; ++reg) {
        const core::Coordinate at = core::mma_c(lane, reg);
        if (at.row == row && at.column == column) {
          return d_[(n * kLanes + static_cast<std::size_t>(lane)) * 4 +
                    static_cast<std::size_t>(reg)];
        }
      }
    }
    return std::nanf("");
  }

 private:
  HalfFormat format_;
  std::vector<std::uint32_t> a_, b_;
  std::vector<float> c_, d_;
};

/// Integers that both formats hold exactly, distinct within each row and column.
float full_a(int i, int k) { return static_cast<float>((5 * i + 3 * k) % 67 - 33); }
float full_b(int k, int n) { return static_cast<float>((7 * k + 11 * n) % 61 - 30); }
float full_c(int i, int n) { return static_cast<float>(100 * i + n); }

// Each single non-zero element of A times a full B, then a full A times each single element of B.
TEST_F(TensorCores, EveryOperandElementContributesToItsRowOrColumn) {
  for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
    MmaBatch one_of_a(format), one_of_b(format);
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; ++k) {
        one_of_a.add([&](int row, int column) { return row == i && column == k ? 2.f : 0.f; },
                     full_b, full_c);
      }
    }
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) {
        one_of_b.add(
            full_a, [&](int row, int column) { return row == k && column == n ? 2.f : 0.f; },
            full_c);
      }
    }
    one_of_a.run();
    one_of_b.run();
    for (int i = 0; i < 16; ++i) {
      for (int n = 0; n < 8; ++n) {
        for (int row = 0; row < 16; ++row) {
          for (int k = 0; k < 16; ++k) {
            const float want = full_c(i, n) + (row == i ? 2.f * full_b(k, n) : 0.f);
            ASSERT_EQ(one_of_a.result(static_cast<std::size_t>(16 * row + k), i, n), want)
                << "A[" << row << "][" << k << "], D[" << i << "][" << n << ']';
          }
        }
        for (int k = 0; k < 16; ++k) {
          for (int column = 0; column < 8; ++column) {
            const float want = full_c(i, n) + (column == n ? 2.f * full_a(i, k) : 0.f);
            ASSERT_EQ(one_of_b.result(static_cast<std::size_t>(8 * k + column), i, n), want)
                << "B[" << k << "][" << column << "], D[" << i << "][" << n << ']';
          }
        }
      }
    }
  }
}

// Products of 16-bit values are exact in f32. The hardware may truncate each of the 17 terms of a
// sum at 2^-23 of the largest intermediate value, which is at most the sum of the magnitudes.
TEST_F(TensorCores, RandomMmaMatchesF64) {
  constexpr int kProducts = 200;
  for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
    for (const double sigma : {0.01, 1.0, 10.0}) {
      verify::Random random(7);
      MmaBatch batch(format);
      struct Inputs {
        double a[16][16], b[16][8], c[16][8];
      };
      std::vector<Inputs> all(kProducts);
      const auto draw = [&] {
        const auto x = static_cast<float>(sigma * random.normal());
        return static_cast<double>(value_of(format, bits_of(format, x)));
      };
      for (Inputs& in : all) {
        for (auto& row : in.a) std::generate(std::begin(row), std::end(row), draw);
        for (auto& row : in.b) std::generate(std::begin(row), std::end(row), draw);
        for (auto& row : in.c) {
          for (double& x : row) x = static_cast<double>(static_cast<float>(random.normal()));
        }
        batch.add([&](int i, int k) { return static_cast<float>(in.a[i][k]); },
                  [&](int k, int n) { return static_cast<float>(in.b[k][n]); },
                  [&](int i, int n) { return static_cast<float>(in.c[i][n]); });
      }
      batch.run();
      for (std::size_t number = 0; number < all.size(); ++number) {
        const Inputs& in = all[number];
        for (int i = 0; i < 16; ++i) {
          for (int n = 0; n < 8; ++n) {
            double want = in.c[i][n], magnitude = std::fabs(in.c[i][n]);
            for (int k = 0; k < 16; ++k) {
              want += in.a[i][k] * in.b[k][n];
              magnitude += std::fabs(in.a[i][k] * in.b[k][n]);
            }
            ASSERT_NEAR(static_cast<double>(batch.result(number, i, n)), want,
                        17 * 0x1p-23 * magnitude)
                << "sigma " << sigma << " D[" << i << "][" << n << ']';
          }
        }
      }
    }
  }
}

// A NaN affects its row of A or its column of B, and no other element.
TEST_F(TensorCores, NanAffectsItsRowOrColumnOnly) {
  for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
    MmaBatch batch(format);
    const float nan = std::nanf("");
    batch.add([&](int i, int k) { return i == 3 && k == 9 ? nan : full_a(i, k); }, full_b, full_c);
    batch.add(
        full_a, [&](int k, int n) { return k == 13 && n == 6 ? nan : full_b(k, n); }, full_c);
    batch.run();
    for (int i = 0; i < 16; ++i) {
      for (int n = 0; n < 8; ++n) {
        EXPECT_EQ(std::isnan(batch.result(0, i, n)), i == 3);
        EXPECT_EQ(std::isnan(batch.result(1, i, n)), n == 6);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Packing

TEST_F(TensorCores, PackRoundsAsTheHostDoesLowHalfFirst) {
  verify::Random random(11);
  std::vector<float> low, high;
  for (int i = 0; i < 1 << 18; ++i) {
    low.push_back(core::float_of_bits(static_cast<std::uint32_t>(random.bits())));
    high.push_back(static_cast<float>(random.normal()));
  }
  for (const float special : {0.f, -0.f, 1.f, 65504.f, 65520.f, 1e-8f,
                              std::numeric_limits<float>::infinity(), std::nanf("")}) {
    low.push_back(special);
    high.push_back(-special);
  }
  for (const HalfFormat format : {HalfFormat::f16, HalfFormat::bf16}) {
    const std::vector<std::uint32_t> got = run_pack(format, low, high);
    for (std::size_t i = 0; i < low.size(); ++i) {
      for (int half = 0; half < 2; ++half) {
        const float x = half == 0 ? low[i] : high[i];
        const std::uint16_t bits = half_of(got[i], half);
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(value_of(format, bits))) << "half " << half;
        } else {
          ASSERT_EQ(bits, bits_of(format, x)) << "of " << x << " half " << half;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// A swizzled tile, from cp.async to registers

std::uint16_t matrix_value(int row, int column) {
  return static_cast<std::uint16_t>(1 + row * 256 + column);  // non-zero and distinct
}

/// Compares each loaded element with the matrix; zero past its edges.
template <typename ElementOf>
void check_blocks(const TileCall& call, const std::vector<std::uint32_t>& got,
                  ElementOf element_of) {
  const int block_columns = call.tile_columns / 16;
  for (std::size_t at = 0; at < got.size(); ++at) {
    const int reg = static_cast<int>(at % 4), lane = static_cast<int>(at / 4 % kLanes);
    const int block = static_cast<int>(at / 4 / kLanes);
    for (int half = 0; half < 2; ++half) {
      const Element inside = element_of(lane, reg, half);
      const int row = 16 * (block / block_columns) + inside.row;
      const int column = 16 * (block % block_columns) + inside.column;
      const int want = row < call.rows && column < call.columns ? matrix_value(row, column) : 0;
      ASSERT_EQ(half_of(got[at], half), want)
          << "row " << row << " column " << column << " of a tile of " << call.tile_rows << " x "
          << call.tile_columns << " with " << call.rows << " x " << call.columns << " given";
    }
  }
}

TEST_F(TensorCores, SwizzledTileReachesRegistersWithZeroPadding) {
  for (const int tile_rows : kTestedRows) {
    for (const int tile_columns : kTestedColumns) {
      const int given_rows[] = {tile_rows, tile_rows - 1, 1, 0};
      const int given_columns[] = {tile_columns, tile_columns - 1, tile_columns - 9, 1};
      for (const int rows : given_rows) {
        for (const int columns : given_columns) {
          TileCall call{tile_rows, tile_columns, {}, rows, columns, tile_columns + 8};
          // Elements outside the given rows and columns are non-zero.
          call.matrix.assign(static_cast<std::size_t>(tile_rows * call.row_stride), 0xffff);
          for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < columns; ++c) {
              call.matrix[static_cast<std::size_t>(r * call.row_stride + c)] = matrix_value(r, c);
            }
          }
          const TileResult got = run_tile(call);
          check_blocks(call, got.a, element_a);
          check_blocks(call, got.b, element_b);
          check_blocks(call, got.b_transposed, element_b_transposed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// 8-bit values

// Every 8-bit pattern in every byte of a register, next to various other bytes.
// tests/unit/core/dequant_f16_test.cc checks the host version.
TEST_F(TensorCores, DequantizesEveryPatternInEveryByte) {
  std::vector<std::uint32_t> words;
  for (std::uint32_t pattern = 0; pattern < 256; ++pattern) {
    for (const std::uint32_t others : {0x00000000u, 0xffffffffu, 0x7f7f7f7fu, 0x80808080u}) {
      for (int byte = 0; byte < 4; ++byte) {
        words.push_back((others & ~(0xffu << (8 * byte))) | pattern << (8 * byte));
      }
    }
  }
  // The test has SASS for sm_80 and sm_90; only sm_90 has conversion instructions.
  const bool converts = require(device_info(kGpu)).compute_capability >= 90;
  for (const core::Element format :
       {core::Element::e4m3, core::Element::e5m2, core::Element::int8, core::Element::u8}) {
    const std::vector<std::uint32_t> got = run_dequantize(format, words);
    for (std::size_t i = 0; i < words.size(); ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        const std::uint16_t bits = half_of(got[2 * i + byte % 2], byte / 2);
        const float value = core::float_of_f16(bits) * core::code_unit(format, converts);
        const auto pattern = static_cast<std::uint8_t>(words[i] >> (8 * byte));
        const float want = core::decode(format, pattern);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(value) : value == want)
            << "format " << static_cast<int>(format) << " pattern " << int{pattern} << " byte "
            << byte << " got " << value << " want " << want;
      }
    }
  }
}

}  // namespace
}  // namespace flashcore::gpu_test
