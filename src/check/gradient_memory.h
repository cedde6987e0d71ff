// The gradients of a case in one block of memory, with NaN around them.
#pragma once

#include <cstddef>
#include <vector>

#include "flashcore/backward.h"
#include "verify/inputs/case.h"

namespace flashcore::verify {

class GradientMemory {
 public:
  /// Draws dout (and dlse), the layouts and types of the gradients, and which ones are wanted.
  /// Poisons the outputs.
  GradientMemory(const CaseSpec& spec, const Tensors& tensors);

  const std::vector<std::byte>& bytes() const { return bytes_; }
  const Gradients& gradients() const { return gradients_; }
  /// The same views into a copy of bytes() at `base`, on `device`.
  Gradients at(void* base, Device device) const;
  /// True if `after` differs from bytes() only in elements of the outputs.
  bool only_outputs_changed(const std::vector<std::byte>& after) const;

 private:
  /// The rows of a tensor: adjacent or with a gap, and aligned to 8 elements or not.
  enum class Rows { dense, apart, aligned, aligned_apart };
  TensorView place(const TensorView& like, DType dtype, Rows rows);
  void poison_outputs();

  std::vector<std::byte> bytes_;
  Gradients gradients_;
};

}  // namespace flashcore::verify
