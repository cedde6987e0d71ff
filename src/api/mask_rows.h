// The rows of a block mask's pattern, as bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "flashcore/block_mask.h"

namespace flashcore {

using MaskWords = std::span<std::uint32_t>;  // bits of a row of keys

/// The limit of q_len and kv_len.
inline constexpr std::int64_t kMostPositions = std::int64_t{1} << 30;

/// Element i of row b of an i32 tensor [n] or [batch, n].
std::int64_t mask_value(const TensorView& t, std::int64_t b, std::int64_t i);

/// Row i of sequence b and head h. `row` is zero before.
class MaskRows {
 public:
  virtual ~MaskRows() = default;
  virtual void read(std::int64_t b, std::int64_t h, std::int64_t i, MaskWords row) = 0;
};

/// The rows of a checked description, which must outlive them; null for a pattern that has none
/// (bsr).
std::unique_ptr<MaskRows> mask_rows(const BlockMaskSpec& spec);

}  // namespace flashcore
