// Owned tensors for tests. The memory of a tensor ends with its last element, so that
// AddressSanitizer reports a kernel that reads one byte too many.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flashcore/types.h"
#include "verify/inputs/case.h"

namespace flashcore::test {

using verify::MemoryLayout;
using Shape = std::vector<std::int64_t>;

class Tensor {
 public:
  /// An absent tensor.
  Tensor() = default;
  /// Fills all bytes with 0xff: a NaN in every float format.
  Tensor(DType dtype, const Shape& shape, MemoryLayout layout = MemoryLayout::heads_first);

  bool given() const { return view_.given(); }
  DType dtype() const { return view_.dtype; }
  int rank() const { return view_.rank; }
  std::int64_t size(int axis) const { return view_.shape[axis]; }
  Shape shape() const { return {view_.shape, view_.shape + view_.rank}; }

  /// Valid until the tensor changes or is destroyed. Copies of a Tensor own copies of the memory.
  TensorView view() const;

  /// Offset of an element from view().data, in elements.
  std::int64_t offset(const Shape& index) const;
  double at(const Shape& index) const;
  void set(const Shape& index, double value);

  /// Read and write the elements in logical order.
  std::vector<double> values() const;
  std::vector<std::uint64_t> bits() const;
  void set_bits(const std::vector<std::uint64_t>& bits);
  void fill(double value);
  void fill_bits(std::uint64_t bits);

 private:
  TensorView view_;             // data is null; view() sets it
  std::size_t first_byte_ = 0;  // of the first element
  std::vector<std::byte> bytes_;
};

/// A compact tensor of the given values.
Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<double>& values);
Tensor ints(const std::vector<std::int64_t>& values);

/// The same elements in another memory layout.
Tensor rearranged(const Tensor& tensor, MemoryLayout layout);

/// Slices, permutes or repeats: element i along `axis` of the result is element indices[i].
Tensor take(const Tensor& tensor, int axis, const std::vector<std::int64_t>& indices);
std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end);

/// The values rounded to another format.
Tensor converted(const Tensor& tensor, DType dtype);

/// Empty if all elements of both have equal bits, otherwise names the first that differ.
std::string difference(const Tensor& a, const Tensor& b);

}  // namespace flashcore::test
