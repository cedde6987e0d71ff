// The memory of one call of an implementation: tensors in their formats and strides in one block,
// with guard bands between them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashcore/verify_c.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/format.h"

namespace flashcore::verify {

/// One tensor of a call in the block.
struct Placed {
  const char* name = "";
  Format format = Format::f32;
  std::int64_t offset = 0, reach = 0;  ///< bytes from the start of the block; elements spanned
  int rank = 0;
  std::int64_t shape[4] = {}, strides[4] = {};
  flashcore_tensor descriptor{};

  std::int64_t count() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  /// visit(position in row-major order, element offset)
  template <typename Visit>
  void each(Visit visit) const {
    TensorView view;
    view.rank = rank;
    std::copy(shape, shape + 4, view.shape);
    std::copy(strides, strides + 4, view.strides);
    std::int64_t position = 0;
    for_each_element(view, [&](std::int64_t at) { visit(position++, at); });
  }
};

/// Places tensors one after the other, with guard bands between them.
class Block {
 public:
  Placed& place(Placed& p, const char* name, Format format, std::vector<std::int64_t> shape,
                MemoryLayout layout);
  std::int64_t bytes() const { return bytes_; }
  /// Fills the block with the guard value, in the format of the nearest tensor.
  void fill(std::byte* base, double guard) const;
  /// Sets the descriptors of all tensors.
  void describe(std::byte* base);
  /// "v, 3 elements past its end": the tensor a byte belongs to, or the nearest one.
  std::string owner(std::int64_t byte) const;

 private:
  std::int64_t bytes_ = 0;
  std::vector<Placed*> all_;
};

/// Writes one input in its format and replaces the values of `master` by the rounded ones. Returns
/// the scale without factors. `scales` is null for a tensor without scales.
double write_input(const TensorView& master, const Placed& p, std::byte* base, const Placed* scales,
                   const std::vector<double>& factors, bool unit_scale);

/// Fills an output with poison, or with the number `content`.
void fill_output(const Placed& p, std::byte* base, double content);

/// Reads an output and restores its bytes to those before the call. Any byte of the block that
/// still differs was written outside the outputs.
void read_output(const Placed& p, std::byte* base, const std::vector<std::byte>& before,
                 std::vector<double>& values, std::vector<std::byte>& bits, std::int64_t& unwritten,
                 std::vector<std::uint8_t>* is_unwritten);

}  // namespace flashcore::verify
