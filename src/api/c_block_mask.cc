// The C ABI of block masks.
#include <algorithm>
#include <utility>

#include "api/c_convert.h"
#include "api/c_entry.h"
#include "flashcore/block_mask.h"
#include "flashcore/flashcore.h"

/// A block mask and its C descriptors.
struct flashcore_block_mask {
  flashcore::BlockMask mask;
  std::int64_t blocks_shape[4], bits_shape[3];
  flashcore_tensor blocks, bits;
};

namespace flashcore {
namespace {

static_assert(FLASHCORE_MASK_DOCUMENTS == static_cast<int>(MaskPattern::documents) &&
              FLASHCORE_MASK_PREFIX_LM == static_cast<int>(MaskPattern::prefix_lm) &&
              FLASHCORE_MASK_SLIDING_WINDOW == static_cast<int>(MaskPattern::sliding_window) &&
              FLASHCORE_MASK_TREE == static_cast<int>(MaskPattern::tree) &&
              FLASHCORE_MASK_DENSE == static_cast<int>(MaskPattern::dense) &&
              FLASHCORE_MASK_BSR == static_cast<int>(MaskPattern::bsr));

/// Describes a compact i32 array.
flashcore_tensor describe_array(const std::vector<std::int32_t>& values, std::int64_t* shape,
                                std::int32_t rank) {
  return {const_cast<std::int32_t*>(values.data()),
          {FLASHCORE_CPU, 0},
          rank,
          {FLASHCORE_INT, 32, 1},
          shape,
          nullptr,
          0};
}

Status create_block_mask(const flashcore_block_mask_params& p, flashcore_block_mask** made) {
  BlockMaskSpec spec;
  spec.pattern = static_cast<MaskPattern>(p.pattern);
  spec.q_len = p.q_len, spec.kv_len = p.kv_len;
  if (p.block_q != 0) spec.block_q = p.block_q;
  if (p.block_k != 0) spec.block_k = p.block_k;
  spec.window_left = p.window_left, spec.window_right = p.window_right;
  spec.global_tokens = p.global_tokens;
  const bool dense = spec.pattern == MaskPattern::dense;
  FLASHCORE_RETURN_IF_ERROR(
      convert("values", p.values, dense ? TypeRule::boolean : TypeRule::i32, spec.values));
  FLASHCORE_RETURN_IF_ERROR(convert("columns", p.columns, TypeRule::i32, spec.columns));
  Result<BlockMask> mask = make_block_mask(spec);
  if (!mask.ok()) return mask.status();
  auto* one = new flashcore_block_mask{std::move(mask).value(), {}, {}, {}, {}};
  const BlockMask& m = one->mask;
  const std::int64_t blocks[] = {m.batch, m.heads, m.q_blocks(), m.k_blocks()};
  const std::int64_t bits[] = {m.tiles(), m.block_q, m.block_k / 32};
  std::copy(blocks, blocks + 4, one->blocks_shape);
  std::copy(bits, bits + 3, one->bits_shape);
  one->blocks = describe_array(m.blocks, one->blocks_shape, 4);
  one->bits = describe_array(m.bits, one->bits_shape, 3);
  *made = one;
  return {};
}

}  // namespace
}  // namespace flashcore

using namespace flashcore;  // NOLINT: only C functions follow

std::int32_t flashcore_block_mask_create(const flashcore_block_mask_params* params,
                                         flashcore_block_mask** mask, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    if (params == nullptr) return invalid_argument("params: is NULL");
    if (mask == nullptr) return invalid_argument("mask: is NULL");
    FLASHCORE_RETURN_IF_ERROR(check_struct("params", params->struct_size, sizeof *params));
    return create_block_mask(*params, mask);
  });
}

const flashcore_tensor* flashcore_block_mask_blocks(const flashcore_block_mask* mask) {
  return mask == nullptr ? nullptr : &mask->blocks;
}

const flashcore_tensor* flashcore_block_mask_bits(const flashcore_block_mask* mask) {
  return mask == nullptr ? nullptr : &mask->bits;
}

void flashcore_block_mask_free(flashcore_block_mask* mask) { delete mask; }

std::int32_t flashcore_block_mask_expand(const flashcore_tensor* mask_blocks,
                                         const flashcore_tensor* mask_bits,
                                         const flashcore_tensor* dense, flashcore_error* error) {
  return entry(error, [&]() -> Status {
    TensorView blocks, bits, to;
    FLASHCORE_RETURN_IF_ERROR(convert("mask_blocks", mask_blocks, TypeRule::i32, blocks));
    FLASHCORE_RETURN_IF_ERROR(convert("mask_bits", mask_bits, TypeRule::i32, bits));
    FLASHCORE_RETURN_IF_ERROR(convert("dense", dense, TypeRule::boolean, to));
    return expand_block_mask(blocks, bits, to);
  });
}
