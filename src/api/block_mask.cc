// Builds block masks from their descriptions, and expands them.
#include "flashcore/block_mask.h"

#include <algorithm>
#include <map>
#include <utility>

#include "api/guarded.h"
#include "api/mask_rows.h"
#include "api/validate/block_mask.h"
#include "api/validate/tensor.h"
#include "core/block_mask.h"
#include "core/error.h"
#include "plan/block_mask.h"

namespace flashcore {
namespace {

constexpr std::int64_t kMostBlocks = std::int64_t{1} << 32;

/// The words of a mixed tile. A type of its own: the library exports no instance of std::map.
struct TileBits {
  std::vector<std::uint32_t> words;
  bool operator<(const TileBits& other) const { return words < other.words; }
};

/// Classifies the blocks of one block row at a time.
class MaskBuilder {
 public:
  explicit MaskBuilder(BlockMask& mask) : mask_(mask), words_(mask.k_blocks() * mask.block_k / 32) {
    rows_.resize(static_cast<std::size_t>(mask.block_q * words_));
    tile_.resize(static_cast<std::size_t>(mask.block_q * (mask.block_k / 32)));
  }

  void add_block_row(MaskRows& rows, std::int64_t b, std::int64_t h, std::int64_t q_block) {
    std::fill(rows_.begin(), rows_.end(), 0u);
    const std::int64_t first = q_block * mask_.block_q;
    queries_ = std::min(mask_.block_q, mask_.q_len - first);
    for (std::int64_t i = 0; i < queries_; ++i) {
      rows.read(b, h, first + i, {rows_.data() + i * words_, static_cast<std::size_t>(words_)});
    }
    for (std::int64_t k_block = 0; k_block < mask_.k_blocks(); ++k_block) {
      mask_.blocks.push_back(classify(k_block));
    }
  }

 private:
  std::int32_t classify(std::int64_t k_block) {
    const std::int64_t words = mask_.block_k / 32;
    const std::int64_t keys = std::min(mask_.block_k, mask_.kv_len - k_block * mask_.block_k);
    bool all = true, any = false;
    std::fill(tile_.begin(), tile_.end(), 0u);
    for (std::int64_t i = 0; i < queries_; ++i) {
      for (std::int64_t w = 0; w < words; ++w) {
        const std::uint32_t word =
            rows_[static_cast<std::size_t>(i * words_ + k_block * words + w)];
        const std::int64_t here = std::clamp<std::int64_t>(keys - 32 * w, 0, 32);
        const std::uint32_t full = here == 32 ? ~0u : (1u << here) - 1;
        all = all && word == full;
        any = any || word != 0;
        tile_[static_cast<std::size_t>(i * words + w)] = word;
      }
    }
    if (!any) return core::kHiddenBlock;
    return all ? core::kVisibleBlock : core::kMixedBlock + tile_index();
  }

  /// The index of the tile with these bits. Equal tiles are stored once.
  std::int32_t tile_index() {
    const auto next = static_cast<std::int32_t>(known_.size());
    const auto [found, is_new] = known_.emplace(TileBits{tile_}, next);
    if (is_new) {
      for (const std::uint32_t word : tile_) mask_.bits.push_back(static_cast<std::int32_t>(word));
    }
    return found->second;
  }

  BlockMask& mask_;
  std::int64_t words_;  // of a row of keys
  std::int64_t queries_ = 0;
  std::vector<std::uint32_t> rows_, tile_;
  std::map<TileBits, std::int32_t> known_;
};

/// Checks an i32 tensor [n] or [batch, n]; `wanted` < 0: any n.
Status check_mask_values(const TensorView& t, std::int64_t wanted, const char* meaning) {
  FLASHCORE_RETURN_IF_ERROR(check_rank("values", t, t.rank == 2 ? 2 : 1, meaning));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("values", t.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(check_pointer("values", t));
  const std::int64_t length = t.shape[t.rank - 1];
  if (wanted < 0 || length == wanted) return {};
  return invalid_argument("values: length is %lld; wanted %lld, %s", static_cast<long long>(length),
                          static_cast<long long>(wanted), meaning);
}

Status check_tree(const BlockMaskSpec& spec) {
  if (spec.kv_len < spec.q_len) {
    return invalid_argument("kv_len is %lld; a tree of %lld tokens needs as many keys",
                            static_cast<long long>(spec.kv_len),
                            static_cast<long long>(spec.q_len));
  }
  const std::int64_t batch = spec.values.rank == 2 ? spec.values.shape[0] : 1;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < spec.q_len; ++i) {
      const std::int64_t parent = mask_value(spec.values, b, i);
      if (parent < i) continue;
      return invalid_argument(
          "values: the parent of token %lld is %lld; a parent comes before its "
          "children, -1: none",
          static_cast<long long>(i), static_cast<long long>(parent));
    }
  }
  return {};
}

Status check_dense_mask(const BlockMaskSpec& spec) {
  const TensorView& t = spec.values;
  FLASHCORE_RETURN_IF_ERROR(
      check_rank("values", t, 4, "[batch or 1, q_heads or 1, q_len, kv_len]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("values", t.dtype, DType::boolean, DType::boolean));
  FLASHCORE_RETURN_IF_ERROR(check_pointer("values", t));
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("values", "q_len", t.shape[2], spec.q_len, "the description"));
  return check_extent("values", "kv_len", t.shape[3], spec.kv_len, "the description");
}

/// Fills a mask from block sparse rows.
Status read_bsr(const BlockMaskSpec& spec, BlockMask& mask) {
  const TensorView &offsets = spec.values, &columns = spec.columns;
  FLASHCORE_RETURN_IF_ERROR(
      check_rank("values", offsets, 3, "[batch or 1, q_heads or 1, q_blocks + 1]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("values", offsets.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(check_pointer("values", offsets));
  FLASHCORE_RETURN_IF_ERROR(check_rank("columns", columns, 1, "[stored blocks]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("columns", columns.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(check_pointer("columns", columns));
  FLASHCORE_RETURN_IF_ERROR(
      check_extent("values", "q_blocks", offsets.shape[2] - 1, mask.q_blocks(), "the description"));
  mask.batch = offsets.shape[0], mask.heads = offsets.shape[1];
  const auto offset = [&](std::int64_t plane, std::int64_t row) {
    return std::int64_t{static_cast<const std::int32_t*>(
        offsets.data)[plane / mask.heads * offsets.strides[0] +
                      plane % mask.heads * offsets.strides[1] + row * offsets.strides[2]]};
  };
  const std::int64_t rows = mask.q_blocks(), row_blocks = mask.k_blocks();
  mask.blocks.assign(static_cast<std::size_t>(mask.batch * mask.heads * rows * row_blocks),
                     core::kHiddenBlock);
  for (std::int64_t index = 0; index < mask.batch * mask.heads * rows; ++index) {
    const std::int64_t begin = offset(index / rows, index % rows);
    const std::int64_t end = offset(index / rows, index % rows + 1);
    if (begin < 0 || end < begin || end > columns.shape[0]) {
      return invalid_argument("values: block row %lld is [%lld, %lld) of %lld columns",
                              static_cast<long long>(index), static_cast<long long>(begin),
                              static_cast<long long>(end),
                              static_cast<long long>(columns.shape[0]));
    }
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t column = mask_value(columns, 0, n);
      if (column < 0 || column >= row_blocks) {
        return invalid_argument("columns: entry %lld is %lld; wanted 0 to %lld",
                                static_cast<long long>(n), static_cast<long long>(column),
                                static_cast<long long>(row_blocks - 1));
      }
      mask.blocks[static_cast<std::size_t>(index * row_blocks + column)] = core::kVisibleBlock;
    }
  }
  return {};
}

Status check_mask_sizes(const BlockMaskSpec& spec) {
  FLASHCORE_RETURN_IF_ERROR(check_block_size("block_q", spec.block_q, kLeastBlockQ));
  FLASHCORE_RETURN_IF_ERROR(check_block_size("block_k", spec.block_k, kLeastBlockK));
  for (const auto& [name, length] : {std::pair{"q_len", spec.q_len}, {"kv_len", spec.kv_len}}) {
    if (length < 0 || length > kMostPositions) {
      return invalid_argument("%s is %lld; wanted 0 to %lld", name, static_cast<long long>(length),
                              static_cast<long long>(kMostPositions));
    }
  }
  for (const auto& [name, tensor] :
       {std::pair{"values", &spec.values}, {"columns", &spec.columns}}) {
    if (tensor->given() && tensor->device.type != DeviceType::cpu) {
      return unsupported("%s: is on a GPU; block masks are built from host memory, copy it", name);
    }
  }
  return {};
}

Status build(MaskRows& rows, BlockMask& mask) {
  const std::int64_t block_rows = mask.batch * mask.heads * mask.q_blocks();
  if (block_rows > kMostBlocks / std::max<std::int64_t>(mask.k_blocks(), 1)) {
    return unsupported("the mask has more than %lld blocks; use larger blocks",
                       static_cast<long long>(kMostBlocks));
  }
  mask.blocks.reserve(static_cast<std::size_t>(block_rows * mask.k_blocks()));
  MaskBuilder builder(mask);
  for (std::int64_t b = 0; b < mask.batch; ++b) {
    for (std::int64_t h = 0; h < mask.heads; ++h) {
      for (std::int64_t q = 0; q < mask.q_blocks(); ++q) builder.add_block_row(rows, b, h, q);
    }
  }
  return {};
}

Status fill_block_mask(const BlockMaskSpec& spec, BlockMask& mask) {
  FLASHCORE_RETURN_IF_ERROR(check_mask_sizes(spec));
  mask.q_len = spec.q_len, mask.kv_len = spec.kv_len;
  mask.block_q = spec.block_q, mask.block_k = spec.block_k;
  const std::int64_t sequences = spec.values.rank == 2 ? spec.values.shape[0] : 1;
  switch (spec.pattern) {
    case MaskPattern::documents:
      FLASHCORE_RETURN_IF_ERROR(
          check_mask_values(spec.values, spec.kv_len, "[kv_len] or [batch, kv_len]"));
      mask.batch = sequences;
      break;
    case MaskPattern::prefix_lm:
      FLASHCORE_RETURN_IF_ERROR(check_mask_values(spec.values, -1, "[batch]"));
      if (spec.values.rank == 2) return invalid_argument("values: rank is 2; wanted 1 [batch]");
      mask.batch = spec.values.shape[0];
      break;
    case MaskPattern::sliding_window:
      if (spec.window_left < -1 || spec.window_right < -1 || spec.global_tokens < 0) {
        return invalid_argument(
            "window is (%lld, %lld) with %lld global tokens; wanted -1 (no "
            "limit) or a number of keys, and 0 or more tokens",
            static_cast<long long>(spec.window_left), static_cast<long long>(spec.window_right),
            static_cast<long long>(spec.global_tokens));
      }
      break;
    case MaskPattern::tree:
      FLASHCORE_RETURN_IF_ERROR(
          check_mask_values(spec.values, spec.q_len, "[q_len] or [batch, q_len]"));
      FLASHCORE_RETURN_IF_ERROR(check_tree(spec));
      mask.batch = sequences;
      break;
    case MaskPattern::dense:
      FLASHCORE_RETURN_IF_ERROR(check_dense_mask(spec));
      mask.batch = spec.values.shape[0], mask.heads = spec.values.shape[1];
      break;
    case MaskPattern::bsr: return read_bsr(spec, mask);
    default:
      return invalid_argument("pattern is %d; wanted 0 to 5", static_cast<int>(spec.pattern));
  }
  return build(*mask_rows(spec), mask);
}

Status write_dense(const TensorView& blocks, const TensorView& bits, const TensorView& dense) {
  std::int64_t block_q = 0, block_k = 0;
  FLASHCORE_RETURN_IF_ERROR(check_mask_bits(bits, block_q, block_k));
  FLASHCORE_RETURN_IF_ERROR(check_rank("mask_blocks", blocks, 4, "[batch, heads, q, k]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("mask_blocks", blocks.dtype, DType::i32, DType::i32));
  FLASHCORE_RETURN_IF_ERROR(check_rank("dense", dense, 4, "[batch, heads, q_len, kv_len]"));
  FLASHCORE_RETURN_IF_ERROR(check_dtype("dense", dense.dtype, DType::boolean, DType::boolean));
  for (const NamedView& one :
       {NamedView{"mask_blocks", &blocks}, {"mask_bits", &bits}, {"dense", &dense}}) {
    if (one.view->device.type != DeviceType::cpu) {
      return unsupported("%s: is on a GPU; wanted host memory", one.name);
    }
    FLASHCORE_RETURN_IF_ERROR(check_pointer(one.name, *one.view));
  }
  const std::int64_t rows = dense.shape[2], keys = dense.shape[3];
  const std::int64_t wanted[] = {dense.shape[0], dense.shape[1], (rows + block_q - 1) / block_q,
                                 (keys + block_k - 1) / block_k};
  static constexpr const char* kAxes[] = {"batch", "heads", "q_blocks", "k_blocks"};
  for (int axis = 0; axis < 4; ++axis) {
    FLASHCORE_RETURN_IF_ERROR(
        check_extent("mask_blocks", kAxes[axis], blocks.shape[axis], wanted[axis], "dense"));
  }
  const core::BlockMask mask = block_mask_of(blocks, bits);
  for (std::int64_t row = 0; row < dense.shape[0] * dense.shape[1] * rows; ++row) {
    const std::int64_t b = row / rows / dense.shape[1], h = row / rows % dense.shape[1];
    const auto i = static_cast<std::int32_t>(row % rows);
    const std::int32_t* entries =
        mask.row(static_cast<std::int32_t>(b), static_cast<std::int32_t>(h), i);
    std::uint8_t* to = static_cast<std::uint8_t*>(dense.data) + b * dense.strides[0] +
                       h * dense.strides[1] + i * dense.strides[2];
    for (std::int32_t j = 0; j < keys; ++j) {
      to[j * dense.strides[3]] = mask.shows(entries, i, j) ? 1 : 0;
    }
  }
  return {};
}

}  // namespace

Result<BlockMask> make_block_mask(const BlockMaskSpec& spec) noexcept {
  BlockMask mask;
  FLASHCORE_RETURN_IF_ERROR(guarded([&] { return fill_block_mask(spec, mask); }));
  return mask;
}

Status expand_block_mask(const TensorView& mask_blocks, const TensorView& mask_bits,
                         const TensorView& dense) noexcept {
  return guarded([&] { return write_dense(mask_blocks, mask_bits, dense); });
}

}  // namespace flashcore
