// Matrices in the layout that the oracle's inner loops read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "reference/sums.h"

namespace flashcore::reference {

/// A matrix as [panels][rows][kPanel]: a panel is kPanel columns. Columns past the last one are 0.
template <typename T>
class Panels {
 public:
  void reset(std::size_t rows, std::size_t columns) {
    rows_ = rows;
    columns_ = columns;
    data_.assign(count() * rows * kPanel, T{});
  }
  std::size_t rows() const { return rows_; }
  std::size_t count() const { return (columns_ + kPanel - 1) / kPanel; }
  T& at(std::size_t row, std::size_t column) {
    return data_[(column / kPanel * rows_ + row) * kPanel + column % kPanel];
  }
  const T& at(std::size_t row, std::size_t column) const {
    return data_[(column / kPanel * rows_ + row) * kPanel + column % kPanel];
  }
  const T* panel(std::size_t index) const { return data_.data() + index * rows_ * kPanel; }
  /// The columns of a panel that are in the matrix.
  std::size_t width(std::size_t index) const { return std::min(kPanel, columns_ - index * kPanel); }

  void set_row(std::size_t row, const T* values) {
    for (std::size_t column = 0; column < columns_; ++column) at(row, column) = values[column];
  }
  void set_column(std::size_t column, const T* values) {
    for (std::size_t row = 0; row < rows_; ++row) at(row, column) = values[row];
  }

 private:
  std::size_t rows_ = 0, columns_ = 0;
  std::vector<T> data_;
};

}  // namespace flashcore::reference
