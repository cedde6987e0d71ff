// The rotation of quantize(): it spreads what is large in a few columns over many, and leaves
// products of two rotated rows as they are.
//
//   y = x S H / sqrt(order),  x = y H S / sqrt(order)
//
//   H  block-diagonal: Sylvester's Hadamard matrices, H[i, j] = (-1)^popcount(i & j), of the
//   largest
//      power of two that divides the number of columns
//   S  signs, so that a row of equal elements is spread out as well as one with a single large one:
//      the Rudin-Shapiro sequence, whose products with the rows of H all have sums of the same size
//      (within sqrt(2), where the order is no square)
//
// Sums are taken by butterflies of distance 1, 2, 4, …, in this order everywhere, and multiplied by
// 1 / sqrt(order) afterwards: there is nothing a compiler could contract, and CPU and GPU agree.
#pragma once

#include "core/numeric.h"

namespace flashcore::core {

/// As many columns as a head may have.
inline constexpr std::int32_t kMaxRotatedColumns = 576;

/// Of the blocks of H: 1 (nothing but signs) where the number of columns is odd.
FLASHCORE_HD constexpr std::int32_t rotation_order(std::int32_t columns) {
  return columns & -columns;
}

/// 1 / sqrt(order).
FLASHCORE_HD constexpr float rotation_norm(std::int32_t order) {
  float norm = 1.f;
  for (; order >= 4; order /= 4) norm *= 0.5f;
  return order == 2 ? norm * 0.70710678118654752f : norm;
}

/// The sign of a column, 0 or 1: whether it has an odd number of two neighbouring ones in binary.
FLASHCORE_HD constexpr std::uint32_t rotation_sign(std::int32_t column) {
  auto pairs = static_cast<std::uint32_t>(column & column >> 1);
  for (int bits = 16; bits > 0; bits /= 2) pairs ^= pairs >> bits;
  return pairs & 1u;
}

/// x with the sign of its column, exactly.
FLASHCORE_HD float with_rotation_sign(float x, std::int32_t column) {
  return float_of_bits(bits_of_float(x) ^ rotation_sign(column) << 31);
}

/// A sum of the butterflies as an element of y. What is not finite has no rotation: where a row has
/// a NaN or an infinity, or sums f32 cannot hold, it becomes the one NaN that is the same on every
/// machine.
FLASHCORE_HD float rotated(float sum, float norm) {
  const float y = sum * norm;
  const bool finite = (bits_of_float(y) & 0x7fffffffu) < 0x7f800000u;
  return finite ? y : float_of_bits(0x7fffffffu);
}

/// The butterflies over a row, in place.
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

/// x becomes y, and back.
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
