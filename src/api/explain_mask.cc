// explain() of a call with a block mask: the share of KV tiles that the kernel skips.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/block_mask.h"
#include "core/mask.h"
#include "core/packed_mask.h"
#include "flashcore/block_mask.h"
#include "plan/block_mask.h"
#include "plan/kernel_traits.h"

namespace flashcore {
namespace {

/// mask_blocks in host memory.
struct HostBlocks {
  std::vector<std::int32_t> memory;
  TensorView view;
};

Status read_blocks(const TensorView& blocks, HostBlocks& host) {
  host.view = blocks;
  if (blocks.device.type == DeviceType::cpu) return {};
  std::int64_t count = 1;
  for (int axis = 0; axis < blocks.rank; ++axis) {
    if (blocks.shape[axis] == 0) return {};
    count += (blocks.shape[axis] - 1) * blocks.strides[axis];
  }
  host.memory.resize(static_cast<std::size_t>(count));
  host.view.data = host.memory.data();
  host.view.device = {};
  const Result<const Backend*> backend = backend_for(blocks.device.type);
  if (!backend.ok()) return backend.status();
  return (*backend)->download(host.memory.data(), blocks.data,
                              host.memory.size() * sizeof(std::int32_t), blocks.device.index);
}

/// Numbers of blocks by kind, and of KV tiles: all, those left by causal masks and windows, and
/// those that the kernel computes.
struct MaskCounts {
  double hidden = 0, visible = 0, mixed = 0;
  double tiles = 0, in_range = 0, computed = 0;
};

class TileCounter {
 public:
  TileCounter(const Plan& plan, const core::BlockMask& mask) : plan_(plan), mask_(mask) {}

  /// Adds the tiles of heads [first_head, last_head] of sequence b.
  void add(std::int32_t b, std::int32_t first_head, std::int32_t last_head, MaskCounts& counts) {
    const Problem& p = plan_.problem;
    const Options& o = p.options;
    const core::Mask by_position{p.kv_len - p.q_len,
                                 o.window_left,
                                 o.causal ? 0 : o.window_right,
                                 static_cast<std::int32_t>(p.kv_len),
                                 {}};
    const std::int64_t rows = p.q_len * plan_.heads_in_tile;
    for (std::int64_t row = 0; row < rows; row += plan_.tile_q) {
      first_ = static_cast<std::int32_t>(row / plan_.heads_in_tile);
      last_ =
          static_cast<std::int32_t>((std::min(row + plan_.tile_q, rows) - 1) / plan_.heads_in_tile);
      const core::KeyRange range = core::keys_seen_by_any(by_position, first_, last_);
      const core::KeyRange shown = shown_range(b, first_head, last_head, range);
      for (std::int32_t key = 0; key < p.kv_len; key += plan_.tile_k) {
        const core::KeyRange tile{key, std::min(key + plan_.tile_k, by_position.kv_len)};
        counts.tiles += 1;
        if (core::intersect(tile, range).empty()) continue;
        counts.in_range += 1;
        if (core::intersect(tile, shown).empty()) continue;
        const bool skips = plan_.kernel->device == DeviceType::cpu;
        if (skips && hides(b, first_head, last_head, core::intersect(tile, range))) continue;
        counts.computed += 1;
      }
    }
  }

 private:
  bool hides(std::int32_t b, std::int32_t first_head, std::int32_t last_head,
             core::KeyRange keys) const {
    for (std::int32_t h = first_head; h <= last_head; ++h) {
      if (!mask_.hides(b, h, first_, last_, keys.begin, keys.end)) return false;
    }
    return true;
  }

  /// Kernels with packed masks skip the keys before the first and after the last visible block.
  core::KeyRange shown_range(std::int32_t b, std::int32_t first_head, std::int32_t last_head,
                             core::KeyRange range) const {
    if (traits_of(*plan_.kernel).loads != Loads::tma) return range;
    core::KeyRange shown{range.end, range.begin};
    constexpr std::int32_t kKeys = core::kMaskBlockKeys;
    for (std::int32_t key = range.begin / kKeys * kKeys; key < range.end; key += kKeys) {
      const core::KeyRange keys =
          core::intersect({key, key + kKeys}, {0, static_cast<std::int32_t>(plan_.problem.kv_len)});
      if (hides(b, first_head, last_head, keys)) continue;
      shown.begin = std::min(shown.begin, keys.begin);
      shown.end = std::max(shown.end, keys.end);
    }
    return shown;
  }

  const Plan& plan_;
  const core::BlockMask& mask_;
  std::int32_t first_ = 0, last_ = 0;  // queries of the tile
};

MaskCounts count_blocks(const Plan& plan, const Tensors& tensors, const TensorView& blocks) {
  const core::BlockMask mask = block_mask_of(blocks, tensors.mask_bits);
  MaskCounts counts;
  const Problem& p = plan.problem;
  const auto batch = static_cast<std::int32_t>(std::min(blocks.shape[0], p.batch));
  const auto heads = static_cast<std::int32_t>(std::min(blocks.shape[1], p.q_heads));
  for (std::int32_t b = 0; b < batch; ++b) {
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t q = 0; q < p.q_len; q += static_cast<std::int32_t>(p.mask_block_q)) {
        const std::int32_t* row = mask.row(b, h, q);
        for (std::int32_t k = 0; k < p.kv_len; k += static_cast<std::int32_t>(p.mask_block_k)) {
          const std::int32_t entry = mask.entry(row, k);
          (entry == core::kHiddenBlock    ? counts.hidden
           : entry == core::kVisibleBlock ? counts.visible
                                          : counts.mixed) += 1;
        }
      }
    }
    const std::int32_t step = heads == 1 ? 1 : std::max(plan.heads_in_tile, 1);
    for (std::int32_t h = 0; h < heads; h += step) {
      TileCounter(plan, mask).add(b, h, std::min(h + step, heads) - 1, counts);
    }
  }
  return counts;
}

std::string mask_lines(const Plan& plan, const MaskCounts& c) {
  const auto percent = [](double part, double whole) {
    return whole > 0 ? 100.0 * part / whole : 0.0;
  };
  const double blocks = c.hidden + c.visible + c.mixed;
  char text[256];
  std::snprintf(text, sizeof text,
                "mask       blocks of %lld x %lld: %.1f %% hidden, %.1f %% visible, %.1f %% mixed\n"
                "           KV tiles skipped: %.1f %% (by position alone %.1f %%)\n",
                static_cast<long long>(plan.problem.mask_block_q),
                static_cast<long long>(plan.problem.mask_block_k), percent(c.hidden, blocks),
                percent(c.visible, blocks), percent(c.mixed, blocks),
                percent(c.tiles - c.computed, c.tiles), percent(c.tiles - c.in_range, c.tiles));
  return text;
}

}  // namespace

std::string explain(const Plan& plan, const Tensors& tensors) {
  std::string text = explain(plan);
  if (plan.kernel == nullptr || !plan.problem.mask_blocks.given()) return text;
  HostBlocks blocks;
  if (!read_blocks(tensors.mask_blocks, blocks).ok()) return text;
  const std::size_t at = text.find("workspace  ");
  return text.insert(std::min(at, text.size()),
                     mask_lines(plan, count_blocks(plan, tensors, blocks.view)));
}

}  // namespace flashcore
