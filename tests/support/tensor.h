// Owned tensors for tests. The memory of each ends exactly where its last element does, so that
// AddressSanitizer sees a kernel that reads one byte too many.
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
  /// A tensor that is not given.
  Tensor() = default;
  /// All bytes are 0xff: a NaN in every float format.
  Tensor(DType dtype, const Shape& shape, MemoryLayout layout = MemoryLayout::heads_first);

  bool given() const { return view_.given(); }
  DType dtype() const { return view_.dtype; }
  int rank() const { return view_.rank; }
  std::int64_t size(int axis) const { return view_.shape[axis]; }
  Shape shape() const { return {view_.shape, view_.shape + view_.rank}; }

  /// Valid until the tensor is changed or gone. Copies of a Tensor own copies of the memory.
  TensorView view() const;

  /// Where an element lies, in elements from view().data.
  std::int64_t offset(const Shape& index) const;
  double at(const Shape& index) const;
  void set(const Shape& index, double value);

  /// The elements in logical order, and back.
  std::vector<double> values() const;
  std::vector<std::uint64_t> bits() const;
  void set_bits(const std::vector<std::uint64_t>& bits);
  void fill(double value);
  void fill_bits(std::uint64_t bits);

 private:
  TensorView view_;             // data is null: see view()
  std::size_t first_byte_ = 0;  // of the first element
  std::vector<std::byte> bytes_;
};

/// A compact tensor of the given values.
Tensor tensor_of(DType dtype, const Shape& shape, const std::vector<double>& values);
Tensor ints(const std::vector<std::int64_t>& values);

/// The same elements laid out in another way.
Tensor rearranged(const Tensor& tensor, MemoryLayout layout);

/// Element i along `axis` of the result is element indices[i]: slices, permutations, repetitions.
Tensor take(const Tensor& tensor, int axis, const std::vector<std::int64_t>& indices);
std::vector<std::int64_t> range(std::int64_t begin, std::int64_t end);

/// The values rounded to another format.
Tensor converted(const Tensor& tensor, DType dtype);

/// Empty where the elements of both have equal bits, otherwise the first that differ.
std::string difference(const Tensor& a, const Tensor& b);

}  // namespace flashcore::test
