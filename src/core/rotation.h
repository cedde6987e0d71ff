// The rotation of quantize(). It distributes outlier columns over many columns and preserves the
// dot products of rotated rows.
//
//   y = x S H / sqrt(order),  x = y H S / sqrt(order)
//
//   H  block-diagonal. The blocks are Sylvester's Hadamard matrix, H[i, j] = (-1)^popcount(i & j),
//      whose order is the largest power of two that divides the number of columns.
//   S  diagonal signs, the Rudin-Shapiro sequence. Its products with the rows of H all have sums of
//      the same size (within sqrt(2) if the order is not a square). So a row of equal elements is
//      distributed as evenly as a row with one large element.
//
// Butterflies of distance 1, 2, 4, …, in this order on every device, compute the sums. The factor
// 1 / sqrt(order) comes last. The compiler has nothing to contract, so CPU and GPU agree.
#pragma once

#include "core/numeric.h"

namespace flashcore::core {

/// Limit on the columns of a rotated row: the largest head_dim.
inline constexpr std::int32_t kMaxRotatedColumns = 576;

/// Order of the blocks of H; 1 (signs only) if the number of columns is odd.
FLASHCORE_HD constexpr std::int32_t rotation_order(std::int32_t columns) {
  return columns & -columns;
}

/// 1 / sqrt(order).
FLASHCORE_HD constexpr float rotation_norm(std::int32_t order) {
  float norm = 1.f;
  for (; order >= 4; order /= 4) norm *= 0.5f;
  return order == 2 ? norm * 0.70710678118654752f : norm;
}

/// The sign bit of a column: 1 if its binary digits have an odd number of adjacent pairs of ones.
FLASHCORE_HD constexpr std::uint32_t rotation_sign(std::int32_t column) {
  auto pairs = static_cast<std::uint32_t>(column & column >> 1);
  for (int bits = 16; bits > 0; bits /= 2) pairs ^= pairs >> bits;
  return pairs & 1u;
}

/// x times the sign of its column, exact.
FLASHCORE_HD float with_rotation_sign(float x, std::int32_t column) {
  return float_of_bits(bits_of_float(x) ^ rotation_sign(column) << 31);
}

/// An element of y from its butterfly sum. A non-finite element, from a NaN or an infinity in the
/// row or from sums beyond f32, becomes a NaN with the same bits on every machine.
FLASHCORE_HD float rotated(float sum, float norm) {
  const float y = sum * norm;
  const bool finite = (bits_of_float(y) & 0x7fffffffu) < 0x7f800000u;
  return finite ? y : float_of_bits(0x7fffffffu);
}

/// Applies the butterflies to a row, in place.
template <typename T>
FLASHCORE_HD void add_butterflies(T* row, std::int32_t columns) {
  const std::int32_t order = rotation_order(columns);
  for (std::int32_t distance = 1; distance < order; distance *= 2) {
    for (std::int32_t first = 0; first < columns; first += 2 * distance) {
      for (std::int32_t i = first; i < first + distance; ++i) {
        const T low = row[i], high = row[i + distance];
        row[i] = low + high;
        row[i + distance] = low - high;
      }
    }
  }
}

/// x to y, in place, and y to x.
FLASHCORE_HD void rotate_row(float* row, std::int32_t columns) {
  const float norm = rotation_norm(rotation_order(columns));
  for (std::int32_t c = 0; c < columns; ++c) row[c] = with_rotation_sign(row[c], c);
  add_butterflies(row, columns);
  for (std::int32_t c = 0; c < columns; ++c) row[c] = rotated(row[c], norm);
}
FLASHCORE_HD void rotate_row_back(float* row, std::int32_t columns) {
  const float norm = rotation_norm(rotation_order(columns));
  add_butterflies(row, columns);
  for (std::int32_t c = 0; c < columns; ++c) {
    row[c] = with_rotation_sign(rotated(row[c], norm), c);
  }
}

}  // namespace flashcore::core
