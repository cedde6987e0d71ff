#include "sm90_launch.h"

#include <algorithm>

namespace flashcore::protocol {
namespace {

std::int32_t draw_keys(verify::Random& random, std::int32_t tile_k) {
  if (random.chance(0.35)) return 0;
  if (random.chance(0.2)) return 1;
  const auto tiles = static_cast<std::int32_t>(random.below(5));
  return tiles * tile_k + static_cast<std::int32_t>(random.between(1, tile_k));
}

}  // namespace

ModelProblem draw_problem(const core::Sm90Traits& shape, std::uint64_t seed) {
  verify::Random random(seed);
  ModelProblem p{};
  p.shape = shape;
  p.num_ctas = static_cast<std::int32_t>(random.between(1, 3));
  p.producers = random.chance(0.5) ? shape.page_producers() : 1;
  p.gathers = p.producers > 1 && shape.gathers_pages() && random.chance(0.5);
  p.dirty_tail = random.chance(0.5);
  const bool equal = random.chance(0.2);  // no lengths, no mask
  const auto batch = static_cast<std::int32_t>(random.between(1, equal ? 3 : 8));
  std::int32_t group = 1 << random.below(3);
  p.heads = {shape.packs_gqa() ? static_cast<std::int32_t>(random.below(group == 4 ? 3 : group))
                               : 0};
  const std::int32_t tile_rows = shape.tile_q >> p.heads.log2;
  const auto most_tiles = static_cast<std::int32_t>(random.between(1, 3));
  const bool causal = !equal && random.chance(0.5), window = !equal && random.chance(0.4);
  const std::int64_t left = window ? random.below(2 * shape.tile_k) : -1;
  const std::int64_t right = causal ? 0 : window ? random.below(shape.tile_k) : -1;
  p.tiles_from_window = window && random.chance(0.5);
  const std::int32_t equal_keys = std::max(draw_keys(random, shape.tile_k), 1);
  for (std::int32_t b = 0; b < batch; ++b) {
    ModelSequence s{};
    s.q_len = equal ? most_tiles * tile_rows
                    : static_cast<std::int32_t>(random.between(0, most_tiles * tile_rows));
    const std::int32_t kv_len = equal ? equal_keys : draw_keys(random, shape.tile_k);
    const std::int64_t q_start = random.chance(0.8) ? kv_len - s.q_len : random.between(-300, 300);
    s.mask = {equal ? kv_len - s.q_len : q_start, left, right, kv_len, {}};
    p.sequences.push_back(s);
  }
  group >>= p.heads.log2;
  const auto kv_heads = static_cast<std::int32_t>(random.between(1, 2));
  p.order = core::make_tile_scheduler(batch, kv_heads * group, group, most_tiles,
                                      equal ? 0 : 4 * p.num_ctas);
  p.tail = {p.order.tiles, 0, core::make_fast_divmod(1)};
  const std::int32_t tiles = (equal_keys + shape.tile_k - 1) / shape.tile_k;
  if (equal && shape.packs_gqa() && tiles > 1 && random.chance(0.6)) {
    const auto split = static_cast<std::int32_t>(random.between(1, p.order.tiles));
    const auto each = static_cast<std::int32_t>(random.between(1, tiles - 1));
    p.tail = {p.order.tiles - split, each, core::make_fast_divmod((tiles + each - 1) / each)};
  }
  return p;
}

std::string to_string(const ModelProblem& p) {
  std::string text =
      "head_dim " + std::to_string(p.shape.head_dim) + ", tile " + std::to_string(p.shape.tile_q) +
      " x " + std::to_string(p.shape.tile_k) + ", " + std::to_string(p.shape.stages) + " stages, " +
      std::to_string(p.num_ctas) + " CTAs, " + std::to_string(p.producers) +
      (p.gathers ? " gathering" : "") + " producers; KV tiles of the scheduled tiles:";
  for (std::int32_t index = 0; index < p.num_scheduled(); ++index) {
    core::TileSteps work{};
    text += decode_work_tile(p, index, work) ? " " + std::to_string(work.tiles) : " -";
  }
  return text;
}

bool decode_work_tile(const ModelProblem& p, std::int32_t index, core::TileSteps& work) {
  const core::ScheduledTile scheduled = core::scheduled_tile(p.tail, index);
  const core::TileCoord coordinates = core::coord_of(p.order, scheduled.tile);
  const ModelSequence& s = p.sequences[static_cast<std::size_t>(coordinates.batch)];
  const std::int32_t tile_rows = p.shape.tile_q >> p.heads.log2;
  const std::int32_t first = coordinates.q_tile * tile_rows;
  work.queries = std::min(tile_rows, s.q_len - first);
  const core::Mask mask = p.tiles_from_window ? core::without_first_keys(
                                                    s.mask, core::visible_keys(s.mask, first).begin)
                                              : s.mask;
  core::find_kv_tiles(work, mask, first, p.heads.queries(),
                      core::TailRange{scheduled.split, p.tail.kv_tiles}, p.shape.consumers(),
                      p.shape.tile_k);
  return work.queries > 0;
}

Launch::Launch(const ModelProblem& problem, Fibers& fibers) : problem_(problem), fibers_(fibers) {
  const auto tiles = static_cast<std::size_t>(problem.order.tiles * warps());
  tail_arrivals_.resize(tiles);
  written_.resize(tiles);
}

std::int32_t Launch::next_index() {
  fibers_.may_pause();
  const std::int32_t scheduled = problem_.num_scheduled();
  if (scheduled <= problem_.num_ctas) return scheduled;
  return problem_.num_ctas + static_cast<std::int32_t>(count_and_wrap(
                                 tile_counter_, static_cast<std::uint32_t>(scheduled - 1)));
}

void Launch::write(std::int32_t index, int warp) {
  const core::ScheduledTile scheduled = core::scheduled_tile(problem_.tail, index);
  const auto slot = static_cast<std::size_t>(scheduled.tile * warps() + warp);
  if (scheduled.split >= 0) {
    fibers_.may_pause();
    const auto last = static_cast<std::uint32_t>(problem_.tail.splits() - 1);
    if (count_and_wrap(tail_arrivals_[slot], last) != last) return;
  }
  ++written_[slot];
}

void Launch::check_end() const {
  if (tile_counter_ != 0)
    throw Violation{"the tile counter is left at " + std::to_string(tile_counter_)};
  for (const std::uint32_t count : tail_arrivals_) {
    if (count != 0) throw Violation{"a counter of tail splits is left at " + std::to_string(count)};
  }
  for (std::int32_t i = 0; i < problem_.order.tiles; ++i) {
    core::TileSteps work{};
    const bool in_tail = i >= problem_.tail.first;
    const std::int32_t index =
        in_tail ? problem_.tail.first + (i - problem_.tail.first) * problem_.tail.splits() : i;
    const int expected = decode_work_tile(problem_, index, work) ? 1 : 0;
    for (int warp = 0; warp < warps(); ++warp) {
      const int times = written_[static_cast<std::size_t>(i * warps() + warp)];
      if (times != expected) {
        throw Violation{"tile " + std::to_string(i) + ", warp " + std::to_string(warp) +
                        ": written " + std::to_string(times) + " times"};
      }
    }
  }
}

}  // namespace flashcore::protocol
