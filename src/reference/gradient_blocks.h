// Adds what blocks of rows contribute to the gradients of q, k and v.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/gradient_pairs.h"
#include "reference/oracle_bwd.h"

namespace flashcore::reference {

/// Neighbouring rows of one head with their pairs: the gradients of a key are read and written once
/// for all of them.
struct RowBlock {
  static constexpr std::size_t kRows = 8;
  std::vector<GradientRow> rows;
  std::array<RowPairs, kRows> pairs;  ///< of each row; kept, so that the memory is used again
};

/// The position of an element in the logical order of a dense or varlen tensor.
struct Order {
  std::int64_t heads, rows, columns;
  bool varlen;
  std::size_t at(std::int64_t b, std::int64_t h, std::int64_t row) const {
    const std::int64_t first = varlen ? row * heads + h : (b * heads + h) * rows + row;
    return static_cast<std::size_t>(first * columns);
  }
};

/// The sums of gradients, and the offsets of rows in them.
struct GradientTargets {
  GradientOracle& result;
  Order q, k, v;
  /// Like dk: Σ (error of delta · P · slope · q)², independent between rows.
  std::vector<double> dk_walk = {};

  std::size_t q_at(const Keys& keys, const GradientRow& row) const {
    return q.at(row.id.b, row.id.h, keys.lengths.q_row + row.id.i);
  }
  std::size_t k_at(const Keys& keys, std::int64_t j) const {
    return k.at(keys.b, keys.head, keys.lengths.k_row + j);
  }
  std::size_t v_at(const Keys& keys, std::int64_t j) const {
    return v.at(keys.b, keys.head, keys.lengths.k_row + j);
  }
};

/// Adds the pairs of a block, each sum in the order of rows and keys.
void add_block(const Keys& keys, const RowBlock& block, GradientTargets& targets);

}  // namespace flashcore::reference
