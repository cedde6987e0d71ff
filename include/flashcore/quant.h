// Quantising and dequantising: f32, f16 and bf16 to and from the 8-bit types.
//
//   value = code * scale;  of the byte format (code - 128) / 127 * 448 * scale
//
// A code is the nearest one to value * (1 / scale), ties to even. What lies beyond the largest
// finite code, infinities too, becomes that code and is counted. NaN stays NaN in e4m3 and e5m2.
//
// Rows may be rotated on the way, for inputs some of whose columns are far larger than the others:
// see QuantOptions::rotate.
#pragma once

#include <cstdint>

#include "flashcore/attention.h"

namespace flashcore {

/// Tensors of rank 1 to 4, seen as [batch, heads, rows, columns] (missing axes in front are 1), by
/// any strides.
struct QuantTensors {
  TensorView from{};       ///< f32, f16 or bf16 to quantize(), 8-bit to dequantize()
  TensorView to{};         ///< of from's shape: the other way round
  TensorView scale{};      ///< f32 [1], [batch, heads] or [batch, heads, blocks]
  TensorView saturated{};  ///< quantize() only, optional: i32 of scale's shape; how many of the
                           ///< elements that share a scale were beyond the largest code
};

struct QuantOptions {
  std::int64_t block_rows = 0;  ///< rows that share a scale, where scale has blocks
  /// quantize(): scale is read (positive, finite) instead of written. Otherwise the largest finite
  /// magnitude of what shares a scale becomes the largest code; a slice of zeros gets scale 1.
  bool given_scale = false;
  /// Rotate every row (of at most 576 columns): quantize() multiplies it by an orthogonal matrix
  /// before scales and codes are found, dequantize() by its inverse in the end. It is the same for
  /// all rows of so many columns, so q and k, both rotated, have the scores they had; v is not
  /// rotated. With d columns, and 2^k the largest power of two that divides d, the matrix is
  /// diag(s) diag(H, …, H): s[c] = (-1)^(how often c has two neighbouring ones in binary), H
  /// Sylvester's Hadamard matrix of order 2^k over sqrt(2^k), d / 2^k times. Computed in f32.
  /// A row with a NaN or an infinity, or with sums beyond f32, becomes NaN in the columns of that
  /// H; int8 and byte refuse it.
  bool rotate = false;
};

/// On the CPU a NaN that the type cannot say, or a scale that is not positive and finite, makes it
/// fail with its index (in from) named and nothing written. On a GPU nothing is read back: such a
/// NaN becomes 0 and is reported by workspace_status() if a workspace (of kWorkspaceHeaderBytes or
/// more) is given. `cancel`: as for run(), here and below.
FLASHCORE_API Status quantize(const QuantTensors& tensors, const QuantOptions& options = {},
                              Workspace workspace = {}, Stream stream = nullptr,
                              const std::int32_t* cancel = nullptr) noexcept;

/// options.block_rows and options.rotate only.
FLASHCORE_API Status dequantize(const QuantTensors& tensors, const QuantOptions& options = {},
                                Stream stream = nullptr,
                                const std::int32_t* cancel = nullptr) noexcept;

}  // namespace flashcore
