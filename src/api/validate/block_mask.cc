#include "api/validate/block_mask.h"

#include "api/validate/kv.h"
#include "api/validate/tensor.h"
#include "core/error.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;  // entries are 31-bit numbers
constexpr int kWordBits = 32;

std::int64_t blocks_of(std::int64_t length, std::int64_t block) noexcept {
  return (length + block - 1) / block;
}

}  // namespace

Status check_block_size(const char* name, std::int64_t size, std::int64_t least) noexcept {
  if (size >= least && size <= kLargestBlock && (size & (size - 1)) == 0) return {};
  return invalid_argument("%s is %lld; wanted a power of two from %lld to %lld", name,
                          static_cast<long long>(size), static_cast<long long>(least),
                          static_cast<long long>(kLargestBlock));
}

Status check_mask_bits(const TensorView& bits, std::int64_t& block_q,
                       std::int64_t& block_k) noexcept {
  FLASHCORE_RETURN_IF_ERROR(check_rank("mask_bits", bits, 3, "[tiles, block_q, block_k / 32]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("mask_bits", bits.dtype, DType::i32, DType::i32));
  block_q = bits.shape[1];
  block_k = bits.shape[2] * kWordBits;
  FLASHCORE_RETURN_IF_ERROR(check_block_size("mask_bits: block_q", block_q, kLeastBlockQ));
  FLASHCORE_RETURN_IF_ERROR(check_block_size("mask_bits: block_k", block_k, kLeastBlockK));
  if (bits.shape[0] > kMostTiles) {
    return unsupported("mask_bits: has %lld tiles; at most %lld are supported",
                       static_cast<long long>(bits.shape[0]), static_cast<long long>(kMostTiles));
  }
  const std::int64_t rows = bits.shape[1] * bits.shape[2];
  const bool compact = (bits.shape[0] <= 1 || bits.strides[0] == rows) &&
                       bits.strides[1] == bits.shape[2] &&
                       (bits.shape[2] == 1 || bits.strides[2] == 1);
  if (bits.shape[0] > 0 && !compact) {
    return invalid_argument("mask_bits: is not contiguous; copy it");
  }
  return {};
}

Status describe_block_mask(const Tensors& t, Problem& p) noexcept {
  if (!t.mask_blocks.given() && !t.mask_bits.given()) return {};
  if (!t.mask_blocks.given()) {
    return invalid_argument("mask_bits: given without mask_blocks; a block mask needs both");
  }
  if (!t.mask_bits.given()) {
    return invalid_argument(
        "mask_blocks: given without mask_bits; its shape [tiles, block_q, block_k / 32] is the "
        "block size, also with 0 tiles");
  }
  if (t.mask.given()) {
    return invalid_argument("mask_blocks: given together with mask; put both into one of them");
  }
  FLASHCORE_RETURN_IF_ERROR(check_mask_bits(t.mask_bits, p.mask_block_q, p.mask_block_k));
  FLASHCORE_RETURN_IF_ERROR(check_rank("mask_blocks", t.mask_blocks, 4,
                                       "[batch or 1, q_heads or 1, q_blocks, k_blocks]"));
  FLASHCORE_RETURN_IF_ERROR(
      check_dtype("mask_blocks", t.mask_blocks.dtype, DType::i32, DType::i32));
  const std::int64_t* shape = t.mask_blocks.shape;
  const auto ll = [](std::int64_t value) { return static_cast<long long>(value); };
  if (shape[0] != p.batch && shape[0] != 1) {
    return invalid_argument("mask_blocks: batch is %lld; wanted %lld or 1", ll(shape[0]),
                            ll(p.batch));
  }
  if (shape[1] != p.q_heads && shape[1] != 1) {
    return invalid_argument("mask_blocks: q_heads is %lld; wanted %lld or 1", ll(shape[1]),
                            ll(p.q_heads));
  }
  const std::int64_t q_blocks = blocks_of(p.q_len, p.mask_block_q);
  if (shape[2] != q_blocks) {
    return invalid_argument(
        "mask_blocks: q_blocks is %lld; wanted %lld for %lld queries in blocks "
        "of %lld",
        ll(shape[2]), ll(q_blocks), ll(p.q_len), ll(p.mask_block_q));
  }
  const std::int64_t k_blocks = blocks_of(p.kv_len, p.mask_block_k);
  if (shape[3] != k_blocks) {
    return invalid_argument(
        "mask_blocks: k_blocks is %lld; wanted %lld for %lld keys in blocks of "
        "%lld",
        ll(shape[3]), ll(k_blocks), ll(p.kv_len), ll(p.mask_block_k));
  }
  p.mask_blocks = layout_of(t.mask_blocks, {0, 1, 2, 3});
  p.mask_bits.dtype = DType::i32;
  return {};
}

}  // namespace flashcore
