// Reader and writer of NumPy's .npy files. Files are untrusted: the reader checks every claim of
// the header against the size of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashcore/types.h"

namespace flashcore::tool {

/// An array inside the bytes of a file. The data may be unaligned: copy it before use.
struct NpyArray {
  DType dtype = DType::none;
  int rank = 0;
  std::int64_t shape[TensorView::kMaxRank] = {};
  std::int64_t strides[TensorView::kMaxRank] = {};  ///< in elements; express Fortran order
  std::span<const std::byte> data;                  ///< exactly the elements of the shape
};

/// Reads versions 1.0 to 3.0, little-endian, rank 1 to 4: f2, f4, f8, i4, b1, u1 (as booleans),
/// V2 (bf16, as NumPy extensions store it) and, if two_bytes_are_bf16, u2. Never reads outside
/// `file`, and allocates nothing whose size the header claims.
Result<NpyArray> parse_npy(std::span<const std::byte> file, bool two_bytes_are_bf16 = false);

/// The bytes of a .npy file (version 1.0, C order) with a host tensor of any strides.
std::vector<std::byte> to_npy(const TensorView& tensor);

/// Reads or writes a whole file. Throws CommandError.
std::vector<std::byte> read_file(const std::string& path);
void write_file(const std::string& path, std::span<const std::byte> bytes);

}  // namespace flashcore::tool
