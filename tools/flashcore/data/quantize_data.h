// The tensors of `flashcore quantize` and the check of its result. All tensors are in one block of
// memory, so that one copy moves them to a device.
#pragma once

#include <cstddef>
#include <memory>

#include "cli/args.h"
#include "flashcore/types.h"

namespace flashcore::tool {

class QuantizeData {
 public:
  /// Reads or draws the input and reserves the outputs. Throws CommandError.
  explicit QuantizeData(const QuantizeArgs& args);

  std::byte* bytes() const { return bytes_.get(); }
  std::size_t input_bytes() const { return reinterpret_cast<std::uintptr_t>(quantized.data); }
  std::size_t size() const { return size_; }

  /// A view into the copy of the block at `base`.
  static TensorView at(TensorView t, void* base, Device device);
  TensorView here(const TensorView& t) const { return at(t, bytes(), {}); }

  // The data of a view is its offset in the block. The input is first.
  TensorView wide, quantized, scale, saturated, dequantized;

 private:
  TensorView place(DType dtype, const std::int64_t* shape, int rank);
  void place_outputs(const QuantizeArgs& args);
  void draw_input(const QuantizeArgs& args);

  std::size_t size_ = 0;
  std::unique_ptr<std::byte[]> bytes_;
};

struct QuantizeErrors {
  double relative_error = 0;  ///< of the dequantized values
  std::int64_t saturated = 0, not_nearest = 0;
};

/// Counts the quantized values that are not the nearest ones to their (rotated) inputs, by the
/// definition in f64.
QuantizeErrors check_quantized(const QuantizeArgs& args, const QuantizeData& data);

}  // namespace flashcore::tool
