// Matrix descriptors of wgmma: where an element of an operand lies in shared memory.
#pragma once

#include <cstdint>

namespace flashcore::emulator {

/// The canonical layouts of the PTX manual, with the swizzle of the descriptor.
class MatrixDescriptor {
 public:
  explicit MatrixDescriptor(std::uint64_t bits)
      : start_(static_cast<std::uint32_t>(bits & 0x3fff) << 4),
        leading_(static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride_(static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4),
        base_offset_(static_cast<std::uint32_t>(bits >> 49 & 7)) {
    static constexpr std::uint32_t kRowBytes[] = {16, 128, 64, 32};
    row_bytes_ = kRowBytes[bits >> 62];
  }

  bool has_base_offset() const { return base_offset_ != 0; }

  /// Address of the element at `row` (of M or N) and `column` bytes along K.
  std::uint32_t k_major(std::uint32_t row, std::uint32_t column) const {
    const std::uint32_t in_group = row / 8 * stride_ + row % 8 * row_bytes_;
    if (row_bytes_ == 16) return start_ + in_group + column / 16 * leading_ + column % 16;
    return swizzled(start_ + in_group + column);
  }
  /// Address of the 16-bit element at `row` (of M or N) and `k`; rows are contiguous.
  std::uint32_t mn_major(std::uint32_t row, std::uint32_t k) const {
    const std::uint32_t per_panel = row_bytes_ / 2,
                        in_row = row % per_panel * 2 + k % 8 * row_bytes_;
    if (row_bytes_ == 16) return start_ + row / per_panel * stride_ + k / 8 * leading_ + in_row;
    return swizzled(start_ + row / per_panel * leading_ + k / 8 * stride_ + in_row);
  }

 private:
  /// XORs the 16-byte chunk of a row with the number of the row in the swizzle's pattern.
  std::uint32_t swizzled(std::uint32_t address) const {
    return address ^ (address >> 3 & (row_bytes_ - 16));
  }

  std::uint32_t start_, leading_, stride_, base_offset_, row_bytes_;
};

}  // namespace flashcore::emulator
