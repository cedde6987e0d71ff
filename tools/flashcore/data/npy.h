// NumPy's .npy files, read in place and written. A file comes from anywhere: nothing in it is
// believed before it was checked against the number of bytes there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashcore/types.h"

namespace flashcore::tool {

/// An array inside the bytes of a file. The data may lie at any address: copy it before use.
struct NpyArray {
  DType dtype = DType::none;
  int rank = 0;
  std::int64_t shape[TensorView::kMaxRank] = {};
  std::int64_t strides[TensorView::kMaxRank] = {};  ///< in elements; Fortran order shows here
  std::span<const std::byte> data;                  ///< exactly shape's elements
};

/// Reads versions 1.0 to 3.0, little-endian, rank 1 to 4: f2, f4, f8, i4, b1, u1 (as booleans),
/// V2 (bf16, as NumPy extensions store it) and, where two_bytes_are_bf16, u2. Never reads outside
/// `file` and allocates nothing that depends on what the header claims.
Result<NpyArray> parse_npy(std::span<const std::byte> file, bool two_bytes_are_bf16 = false);

/// The bytes of a .npy file (version 1.0, C order) holding a host tensor, whatever its strides.
std::vector<std::byte> to_npy(const TensorView& tensor);

/// The bytes of a file, and a file of some bytes. Both throw CommandError.
std::vector<std::byte> read_file(const std::string& path);
void write_file(const std::string& path, std::span<const std::byte> bytes);

}  // namespace flashcore::tool
