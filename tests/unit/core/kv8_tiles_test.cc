// Emulates the GEMMs of a warp of the sm80 kernels with 8-bit K/V tiles on the host: swizzled
// tiles, ldmatrix, core/dequant_f16.h, mma.m16n8k16. Small integers make every sum exact.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/dequant_f16.h"
#include "core/mma_layout.h"
#include "verify/inputs/random.h"

namespace flashcore::core {
namespace {

constexpr int kLanes = 32, kKeys = 32, kRows = 16;

using Registers = std::array<std::array<std::uint32_t, 4>, kLanes>;
using Accumulators = std::array<std::array<double, 4>, kLanes>;
using Bytes = std::vector<std::uint8_t>;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::uint16_t half_bits(double value) {
  const auto x = static_cast<float>(value);
  return f16_of_float(x);
}

double half_value(std::uint32_t word, int which) {
  const auto bits = static_cast<std::uint16_t>(word >> (16 * which));
  return float_of_f16(bits);
}

/// ldmatrix.x4: each lane passes the address of 16 bytes. Register i of a lane comes from the
/// addresses of lanes 8 i … 8 i + 7.
template <typename Address>
Registers ldmatrix_x4(const Bytes& memory, bool transposed, Address address) {
  Registers r{};
  const auto element = [&](int matrix, int row, int column) {
    std::uint16_t bits;
    std::memcpy(&bits, memory.data() + address(8 * matrix + row) + 2 * column, sizeof bits);
    return std::uint32_t{bits};
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = transposed ? element(i, t, g) : element(i, g, t);
      const std::uint32_t high = transposed ? element(i, t + 1, g) : element(i, g, t + 1);
      r[index(lane)][index(i)] = high << 16 | low;
    }
  }
  return r;
}

/// c += a b. b(lane, 0) and b(lane, 1) are the registers of B.
template <typename B>
void mma_m16n8k16(Accumulators& c, const Registers& a, B b) {
  double left[16][16], right[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int which = 0; which < 2; ++which) {
      for (int reg = 0; reg < 4; ++reg) {
        const Coordinate at = mma_a(lane, reg, which);
        left[at.row][at.column] = half_value(a[index(lane)][index(reg)], which);
      }
      for (int reg = 0; reg < 2; ++reg) {
        const Coordinate at = mma_b(lane, reg, which);
        right[at.row][at.column] = half_value(b(index(lane), reg), which);
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      const Coordinate at = mma_c(lane, reg);
      double& sum = c[index(lane)][index(reg)];
      for (int k = 0; k < 16; ++k) sum += left[at.row][k] * right[k][at.column];
    }
  }
}

/// A quantized small integer.
std::uint8_t draw_small(Element format, verify::Random& random) {
  const int value = static_cast<int>(random.between(-3, 3));
  return encode(format, static_cast<float>(value)).bits;
}

template <int kDim, Element kReader>
class TileGemms {
  using KeyTile = SwizzledTile<kKeys, kDim / 2>;
  using QueryTile = SwizzledTile<kRows, kDim>;
  static constexpr std::size_t kSize = std::size_t{kKeys} * kDim;

 public:
  explicit TileGemms(Element format) : format_(format), read_(format), random_(3) {
    tile_.resize(kSize);
    values_.resize(kSize);
    for (int key = 0; key < kKeys; ++key) {
      for (int d = 0; d < kDim; ++d) {
        const std::uint8_t bits = draw_small(format, random_);
        values_[at(key, d)] = bits;
        tile_[index(KeyTile::offset(key, d / 16) + d % 16)] = bits;
      }
    }
  }

  /// Checks Q K^T of 16 rows and 32 keys.
  void check_scores() {
    Bytes queries(2 * kRows * kDim);
    std::vector<double> q(kRows * kDim);
    for (int row = 0; row < kRows; ++row) {
      for (int place = 0; place < kDim; ++place) {
        const int d = place / 16 * 16 + even_odd_index(place % 16);
        const double value = static_cast<double>(random_.between(-4, 4));
        q[index(row * kDim + d)] = value;
        const std::uint16_t bits = half_bits(value);
        std::memcpy(queries.data() + QueryTile::offset(row, place / 8) + 2 * (place % 8), &bits, 2);
      }
    }
    std::array<Accumulators, kKeys / 8> score{};
    for (int steps = 0; steps < kDim / 16; steps += 2) {
      for (int n = 0; n < kKeys / 8; n += 2) {
        const Registers k = ldmatrix_x4(tile_, false, [&](int lane) {
          const Coordinate b = ldmatrix_b(lane);
          const auto first = static_cast<unsigned>(KeyTile::offset(b.row, b.column));
          return KeyTile::advance_rows8(KeyTile::advance_k(first, steps / 2), n);
        });
        for (int i = 0; i < 4; ++i) {
          const Registers a = ldmatrix_x4(queries, false, [&](int lane) {
            const Coordinate c = ldmatrix_a(lane);
            return QueryTile::advance_k(static_cast<unsigned>(QueryTile::offset(c.row, c.column)),
                                        steps + i % 2);
          });
          mma_m16n8k16(score[index(n + i / 2)], a, [&](std::size_t lane, int reg) {
            const F16x2Pair pairs = read_(k[lane][index(i)]);
            return reg == 0 ? pairs.even : pairs.odd;
          });
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int n = 0; n < kKeys / 8; ++n) {
        for (int reg = 0; reg < 4; ++reg) {
          const Coordinate c = mma_c(lane, reg);
          double want = 0;
          for (int d = 0; d < kDim; ++d) {
            want += q[index(c.row * kDim + d)] * value(8 * n + c.column, d);
          }
          ASSERT_EQ(score[index(n)][index(lane)][index(reg)] * unit(), want)
              << "row " << c.row << " key " << 8 * n + c.column;
        }
      }
    }
  }

  /// Checks P V of 16 rows and 32 keys, and the order of its columns.
  void check_output() {
    double p[kRows][kKeys];
    for (auto& row : p) {
      for (double& x : row) x = static_cast<double>(random_.between(0, 4));
    }
    std::array<Accumulators, kDim / 8> out{};
    for (int step = 0; step < kKeys / 16; ++step) {
      Registers a{};
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int which = 0; which < 2; ++which) {
            const Coordinate c = mma_a(lane, reg, which);
            a[index(lane)][index(reg)] |= std::uint32_t{half_bits(p[c.row][16 * step + c.column])}
                                          << (16 * which);
          }
        }
      }
      for (int n = 0; n < kDim / 8; n += 4) {
        const Registers v = ldmatrix_x4(tile_, true, [&](int lane) {
          const Coordinate b = ldmatrix_b_trans(lane);
          const auto first = static_cast<unsigned>(KeyTile::offset(b.row, b.column));
          return KeyTile::advance_rows8(KeyTile::advance_k(first, n / 4), 2 * step);
        });
        for (int i = 0; i < 4; ++i) {  // chunk i / 2, its even or odd columns
          mma_m16n8k16(out[index(n + i)], a, [&](std::size_t lane, int reg) {
            const auto word = index(2 * (i / 2) + reg);
            const F16x2Pair pairs = read_(v[lane][word]);
            return i % 2 == 0 ? pairs.even : pairs.odd;
          });
        }
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int n = 0; n < kDim / 8; n += 2) {
        for (int half = 0; half < 2; ++half) {
          // The kernel stores four adjacent columns, starting at 8 n + 4 (lane % 4).
          for (int i = 0; i < 4; ++i) {
            const int row = mma_c(lane, 2 * half).row, column = 8 * n + 4 * (lane % 4) + i;
            double want = 0;
            for (int key = 0; key < kKeys; ++key) want += p[row][key] * value(key, column);
            const auto tile = index(n + i % 2);
            const auto reg = index(2 * half + i / 2);
            ASSERT_EQ(out[tile][index(lane)][reg] * unit(), want)
                << "row " << row << " column " << column;
          }
        }
      }
    }
  }

 private:
  static std::size_t at(int key, int d) { return index(key * kDim + d); }
  double value(int key, int d) const { return decode(format_, values_[at(key, d)]); }
  double unit() const { return code_unit(format_); }

  Element format_;
  Dequantizer<kReader> read_;
  verify::Random random_;
  Bytes tile_, values_;  // swizzled; row-major
};

template <int kDim>
void check_formats() {
  const auto check = [](auto gemms) {
    gemms.check_scores();
    gemms.check_output();
  };
  check(TileGemms<kDim, Element::e4m3>(Element::e4m3));
  check(TileGemms<kDim, Element::e5m2>(Element::e5m2));
  check(TileGemms<kDim, Element::int8>(Element::int8));
  check(TileGemms<kDim, Element::int8>(Element::u8));
}

TEST(Kv8Tiles, GemmsAreExactForEveryFormat) {
  check_formats<64>();
  check_formats<128>();
  check_formats<256>();
}

}  // namespace
}  // namespace flashcore::core
