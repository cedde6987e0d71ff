// Quantization of f32, f16 and bf16 to the 8-bit types, and back.
//
//   value = code * scale;  byte: (code - 128) / 127 * 448 * scale
//
// quantize() chooses the code nearest to value * (1 / scale), ties to even. Values beyond the
// largest finite code, including infinities, saturate to it and are counted. NaN stays NaN in e4m3
// and e5m2. Rows with outlier columns can be rotated: QuantOptions::rotate.
#pragma once

#include <cstdint>

#include "flashcore/attention.h"

namespace flashcore {

/// Tensors of rank 1 to 4 with any strides, viewed as [batch, heads, rows, columns]; missing
/// leading axes are 1.
struct QuantTensors {
  TensorView from{};       ///< quantize(): f32, f16 or bf16; dequantize(): 8-bit
  TensorView to{};         ///< from's shape; quantize(): 8-bit; dequantize(): f32, f16 or bf16
  TensorView scale{};      ///< f32 [1], [batch, heads] or [batch, heads, blocks]
  TensorView saturated{};  ///< quantize() only, optional: i32, scale's shape; the number of
                           ///< saturated elements per scale
};

struct QuantOptions {
  std::int64_t block_rows = 0;  ///< rows per scale, if scale has blocks
  /// quantize() reads scale (positive, finite) instead of writing it. By default the largest finite
  /// magnitude of each slice becomes the largest code; a slice of zeros gets scale 1.
  bool given_scale = false;
  /// Rotate every row (at most 576 columns): quantize() first multiplies it by an orthogonal
  /// matrix, dequantize() finally by the inverse. The matrix depends on the number of columns only,
  /// so rotating both q and k preserves their scores; do not rotate v. With d columns, and 2^k the
  /// largest power of two that divides d, the matrix is diag(s) diag(H, ..., H) with d / 2^k
  /// blocks: s[c] = (-1)^n, n the number of adjacent pairs of ones in c's binary digits; H is
  /// Sylvester's Hadamard matrix of order 2^k over sqrt(2^k). Computed in f32. If a row has a NaN,
  /// an infinity or sums beyond f32, the columns of that block become NaN; int8 and byte reject it.
  bool rotate = false;
};

/// On the CPU a NaN for int8 or byte, or a scale that is not positive and finite, is an error that
/// names its index in `from`; nothing is written. On a GPU the host reads no data: such a NaN
/// becomes 0, and workspace_status() reports it if a workspace of at least kWorkspaceHeaderBytes is
/// given. `cancel`, here and below: as for run().
FLASHCORE_API Status quantize(const QuantTensors& tensors, const QuantOptions& options = {},
                              Workspace workspace = {}, Stream stream = nullptr,
                              const std::int32_t* cancel = nullptr) noexcept;

/// Reads options.block_rows and options.rotate only.
FLASHCORE_API Status dequantize(const QuantTensors& tensors, const QuantOptions& options = {},
                                Stream stream = nullptr,
                                const std::int32_t* cancel = nullptr) noexcept;

}  // namespace flashcore
