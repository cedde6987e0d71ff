// The tensors of `flashcore quantize`: all in one block of memory, so that a copy of it on any
// device is the same call there; and whether the codes in it are right.
#pragma once

#include <cstddef>
#include <memory>

#include "cli/args.h"
#include "flashcore/types.h"

namespace flashcore::tool {

class QuantizeData {
 public:
  /// Reads or draws the input, and lays out what is made of it. Throws CommandError.
  explicit QuantizeData(const QuantizeArgs& args);

  std::byte* bytes() const { return bytes_.get(); }
  std::size_t input_bytes() const { return reinterpret_cast<std::uintptr_t>(codes.data); }
  std::size_t size() const { return size_; }

  /// A view into a copy of the block.
  static TensorView at(TensorView t, void* base, Device device);
  TensorView here(const TensorView& t) const { return at(t, bytes(), {}); }

  // A view's data is its offset in the block. The input comes first.
  TensorView wide, codes, scale, saturated, back;

 private:
  TensorView place(DType dtype, const std::int64_t* shape, int rank);
  void place_outputs(const QuantizeArgs& args);
  void draw_input(const QuantizeArgs& args);

  std::size_t size_ = 0;
  std::unique_ptr<std::byte[]> bytes_;
};

struct QuantizeFound {
  double relative_error = 0;  ///< of the values that came back
  std::int64_t saturated = 0, not_nearest = 0;
};

/// Is every code the nearest one to its value, rotated if they are? By the definition, in f64.
QuantizeFound judge(const QuantizeArgs& args, const QuantizeData& data);

}  // namespace flashcore::tool
