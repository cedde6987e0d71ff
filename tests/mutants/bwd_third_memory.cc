// The third table: what is written, read and added where, and when.
#include <bit>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

// Gradients that keep old content

bool is_zero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

void leave_dk_and_dv(BackwardWork& w) {
  w.dk = rows_of(*w.call->dk, w.b, w.h / w.group);
  w.dv = rows_of(*w.call->dv, w.b, w.h / w.group);
}

/// A head whose dout is 0 has nothing to add, and nothing is written.
void heads_without_dout_unwritten(BackwardParts& p) {
  const auto has_dout = std::make_shared<bool>(false);
  p.loaded = [=](BackwardWork& w) {
    *has_dout = (*has_dout && !is_first_of_group(w)) || !is_zero(w.dout);
  };
  p.head_done = [](BackwardWork& w) {
    if (is_zero(w.dout)) w.dq = rows_of(*w.call->dq, w.b, w.h);
  };
  p.group_done = [=](BackwardWork& w) {
    if (!*has_dout) leave_dk_and_dv(w);
  };
}

void zeros_unwritten(BackwardParts& p) {
  p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
               std::int64_t c, double x) {
    if (x != 0) write(t, b, h, i, c, x);
  };
}

/// Vector stores of eight elements, without a loop over the rest.
void columns_past_a_multiple_of_8_unwritten(BackwardParts& p) {
  p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
               std::int64_t c, double x) {
    if (c < t.shape[3] / 8 * 8) write(t, b, h, i, c, x);
  };
}

/// The path for decoding has a single query, and decoding needs no gradients of the cache.
void dk_and_dv_of_a_single_query_unwritten(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    if (w.m == 1) leave_dk_and_dv(w);
  };
}

/// A product with beta = 0 that reads the old content nevertheless.
void old_content_of_dq_times_0(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    const std::vector<float> old = rows_of(*w.call->dq, w.b, w.h);
    for (std::size_t e = 0; e < w.dq.size(); ++e) w.dq[e] += 0.0f * old[e];
  };
}

std::vector<Mutant> coverage_faults() {
  return {
      backward("bwd_heads_without_dout_unwritten", coverage, "f32 bf16",
               heads_without_dout_unwritten),
      backward("bwd_zeros_unwritten", coverage, "f32 f16", zeros_unwritten),
      backward("bwd_columns_past_a_multiple_of_8_unwritten", coverage, "f32",
               columns_past_a_multiple_of_8_unwritten),
      backward("bwd_dk_and_dv_of_a_single_query_unwritten", coverage, "f32 bf16",
               dk_and_dv_of_a_single_query_unwritten),
      backward("bwd_old_content_of_dq_times_0", coverage, "f32 f16", old_content_of_dq_times_0),
  };
}

// Races: events that differ from call to call

constexpr std::int64_t kTile = 16;

/// True about once in four times.
class Race {
 public:
  bool is_lost() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 62 == 0;
  }

 private:
  std::uint64_t state_ = 2;
};

/// CTAs of the other heads of a group add to dk without an atomic operation.
void updates_of_dk_by_heads_lost(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  p.count = [=](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
    return g == kOfDk && !is_first_of_group(w) && race->is_lost() ? 0.0f : 1.0f;
  };
}

/// The copy of the next rows of the LSE has no barrier of its own.
void lse_sometimes_of_the_tile_before(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  p.loaded = [=](BackwardWork& w) {
    for (std::int64_t first = w.m / kTile * kTile; first >= kTile; first -= kTile) {
      if (!race->is_lost()) continue;
      const std::int64_t rows = std::min(kTile, w.m - first);
      std::copy_n(w.lse.begin() + first - kTile, rows, w.lse.begin() + first);
    }
  };
  guard_empty_rows(p);
}

/// Another stream clears dv, sometimes when the first queries are in it.
void dv_sometimes_cleared_late(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  p.count = [=](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
    return g == kOfDv && q_tile == 0 && is_first_of_group(w) && race->is_lost() ? 0.0f : 1.0f;
  };
}

/// The first tile of keys stores its part of dq and the others add. The second may be too early.
void dq_sometimes_stored_over_the_sum(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t first = 0; first < w.m; first += kTile) {
      const std::int64_t end_of_lost = race->is_lost() ? 2 * kTile : kTile;
      for (std::int64_t i = first; i < std::min(first + kTile, w.m); ++i) {
        for (std::int64_t j = 0; j < w.n; ++j) {
          if (j >= kTile && j < end_of_lost) continue;
          add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
        }
      }
    }
  });
}

/// Only the last, partial tile of queries takes the path without a barrier.
void partial_tile_sometimes_lost(BackwardParts& p) {
  struct State {
    Race race;
    bool is_lost = false;
  };
  const auto state = std::make_shared<State>();
  p.loaded = [=](BackwardWork&) { state->is_lost = state->race.is_lost(); };
  const auto is_lost = [=](const BackwardWork& w, const Pair& x) {
    return state->is_lost && x.i >= w.m / kTile * kTile;
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.p; };
}

std::vector<Mutant> races() {
  return {
      backward("bwd_updates_of_dk_by_heads_lost", determinism, "f32 bf16",
               updates_of_dk_by_heads_lost),
      backward("bwd_lse_sometimes_of_the_tile_before", determinism, "f32",
               lse_sometimes_of_the_tile_before),
      backward("bwd_dv_sometimes_cleared_late", determinism, "f32 f16", dv_sometimes_cleared_late),
      backward("bwd_dq_sometimes_stored_over_the_sum", determinism, "f32 bf16",
               dq_sometimes_stored_over_the_sum),
      backward("bwd_partial_tile_sometimes_lost", determinism, "f32", partial_tile_sometimes_lost),
  };
}

// Addresses

/// Group sizes are powers of two.
void kv_head_by_a_shift(BackwardParts& p) {
  p.kv_head = [](const BackwardWork& w) {
    const auto shift = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(w.group))) - 1;
    return std::min(w.h >> shift, w.kv_heads - 1);
  };
}

/// Moves row `i` of head `h` of a gradient to where `place` says, which returns head and row.
template <typename Place>
void move_rows(const flashcore_tensor& t, Place place) {
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    std::vector<std::vector<float>> heads;
    for (std::int64_t h = 0; h < t.shape[1]; ++h) heads.push_back(rows_of(t, b, h));
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t i = 0; i < t.shape[2]; ++i) {
        const auto [to_head, to_row] = place(h, i);
        for (std::int64_t c = 0; c < t.shape[3]; ++c) {
          write(t, b, to_head, to_row, c, heads[static_cast<std::size_t>(h)][at(i, t.shape[3], c)]);
        }
      }
    }
  }
}

/// dv is written as [len, heads, dim] into memory for [heads, len, dim].
void heads_and_rows_of_dv_swapped(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const std::int64_t heads = call.dv->shape[1], rows = call.dv->shape[2];
    move_rows(*call.dv, [=](std::int64_t h, std::int64_t j) {
      return std::pair{(j * heads + h) / rows, (j * heads + h) % rows};
    });
  };
}

/// The rows of the heads of a group are packed, and stored as they are.
void dq_in_the_order_of_packed_rows(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const std::int64_t group = call.dq->shape[1] / call.dk->shape[1], rows = call.dq->shape[2];
    move_rows(*call.dq, [=](std::int64_t h, std::int64_t i) {
      const std::int64_t packed = i * group + h % group;
      return std::pair{h / group * group + packed / rows, packed % rows};
    });
  };
}

/// Read as [len, heads, dim], which is another memory order than that of out.
void heads_and_rows_of_dout_swapped(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t from = i * w.q_heads + w.h;
      for (std::int64_t c = 0; c < w.dv_dim; ++c) {
        w.dout[at(i, w.dv_dim, c)] =
            static_cast<float>(read(*w.call->dout, w.b, from / w.m, from % w.m, c));
      }
    }
  };
}

/// Its other strides are honoured.
void stride_of_columns_of_dout_ignored(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    const flashcore_tensor& t = *w.call->dout;
    const FlatTensor dout(t);
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t row = w.b * t.strides[0] + w.h * t.strides[1] + i * t.strides[2];
      for (std::int64_t c = 0; c < w.dv_dim; ++c) {
        w.dout[at(i, w.dv_dim, c)] = static_cast<float>(dout.get(row + c));
      }
    }
  };
}

std::vector<Mutant> layout_faults() {
  return {
      backward("bwd_kv_head_by_a_shift", layout, "f32 f16", kv_head_by_a_shift),
      backward("bwd_heads_and_rows_of_dv_swapped", layout, "f32 bf16",
               heads_and_rows_of_dv_swapped),
      backward("bwd_dq_in_the_order_of_packed_rows", layout, "f32 f16",
               dq_in_the_order_of_packed_rows),
      backward("bwd_heads_and_rows_of_dout_swapped", layout, "f32", heads_and_rows_of_dout_swapped),
      backward("bwd_stride_of_columns_of_dout_ignored", layout, "f32 bf16",
               stride_of_columns_of_dout_ignored),
  };
}

// Partial tiles

/// The loop over queries descends, and the mask of rows past the end is that of the first tile.
void rows_past_the_end_masked_in_the_first_tile(BackwardParts& p) {
  const auto is_lost = [](const BackwardWork& w, const Pair& x) {
    return w.m > kTile && w.m % kTile != 0 && x.i < kTile && x.i >= w.m % kTile;
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.p; };
}

/// The last tile of keys is moved back until it is full, and overlaps the one before.
void overlap_of_key_tiles_twice_in_dq(BackwardParts& p) {
  p.in_dq = [](const BackwardWork& w, const Pair& x) {
    const bool is_in_both = w.n > 32 && x.j >= w.n - 32 && x.j < w.n / 32 * 32;
    return is_in_both ? 2 * x.ds : x.ds;
  };
}

/// Padded keys have score 0 and k = 0, but exp(-LSE) may overflow.
void padded_keys_with_score_0(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.n % 32 == 0) return;
    for (std::int64_t i = 0; i < w.m; ++i) {
      if (sees_no_key(w, i)) continue;
      const float nothing = 0.0f * std::exp(-of_row(w.lse, i));
      for (std::int64_t c = 0; c < w.d; ++c) w.dq[at(i, w.d, c)] += nothing;
    }
  };
}

/// Delta of whole tiles is stored without a check, over the first rows of the next head.
void delta_of_padded_rows_stored(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    const bool is_first_head = w.b == 0 && w.h == 0;
    return !is_first_head && i < padding(w.m, kTile) ? 0.0f : right(w, i);
  };
}

/// So are the rows of dv.
void dv_of_padded_keys_stored(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const flashcore_tensor& t = *call.dv;
    for (std::int64_t head = 1; head < t.shape[0] * t.shape[1]; ++head) {
      for (std::int64_t j = 0; j < std::min(padding(t.shape[2], kTile), t.shape[2]); ++j) {
        for (std::int64_t c = 0; c < t.shape[3]; ++c) {
          write(t, head / t.shape[1], head % t.shape[1], j, c, 0);
        }
      }
    }
  };
}

/// The last tile of keys is as long as the last one of queries.
void rest_of_keys_from_q_len(BackwardParts& p) {
  p.in_dq = [](const BackwardWork& w, const Pair& x) {
    const bool is_last_tile = x.j / 32 == (w.n - 1) / 32;
    return is_last_tile && w.m % 32 != 0 && x.j % 32 >= w.m % 32 ? 0.0f : x.ds;
  };
}

/// q_len / 16 + 1 tiles, where loads past the end are moved to the last row.
void extra_tile_of_whole_lengths(BackwardParts& p) {
  const auto times = [](const BackwardWork& w, const Pair& x) {
    return w.m % kTile == 0 && x.i == w.m - 1 ? 1.0f + kTile : 1.0f;
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return times(w, x) * x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return times(w, x) * x.p; };
}

std::vector<Mutant> tail_faults() {
  return {
      backward("bwd_rows_past_the_end_masked_in_first_tile", tail, "f32 bf16",
               rows_past_the_end_masked_in_the_first_tile),
      backward("bwd_overlap_of_key_tiles_twice_in_dq", tail, "f32 f16",
               overlap_of_key_tiles_twice_in_dq),
      backward("bwd_padded_keys_with_score_0", tail, "f32 bf16", padded_keys_with_score_0),
      backward("bwd_delta_of_padded_rows_stored", tail, "f32", delta_of_padded_rows_stored, delta),
      backward("bwd_dv_of_padded_keys_stored", tail, "f32 f16", dv_of_padded_keys_stored),
      backward("bwd_rest_of_keys_from_q_len", tail, "f32", rest_of_keys_from_q_len),
      backward("bwd_extra_tile_of_whole_lengths", tail, "f32 bf16", extra_tile_of_whole_lengths),
  };
}

// Reads and writes that are not a gradient's own elements

/// The kernel for delta multiplies in place.
void out_times_dout_in_place(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const flashcore_tensor& t = *call.forward->out;
    for (std::int64_t i = 0; i < t.shape[2]; ++i) {
      for (std::int64_t c = 0; c < t.shape[3]; ++c) {
        write(t, 0, 0, i, c, read(t, 0, 0, i, c) * read(*call.dout, 0, 0, i, c));
      }
    }
  };
}

/// As a sum that the next call is to begin anew.
void dlse_cleared_in_place(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    if (call.dlse == nullptr) return;
    const flashcore_tensor& t = *call.dlse;
    for (std::int64_t i = 0; i < t.shape[2]; ++i) {
      write(t, t.shape[0] - 1, t.shape[1] - 1, i, 0, 0);
    }
  };
}

/// Rows of q are loaded up to a multiple of 32 columns, and meet zeros of k.
void columns_of_q_past_head_dim_read(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    if (w.d % 32 == 0) return;
    for (std::int64_t i = 0; i < w.m; ++i) {
      w.q[at(i, w.d, 0)] += 0.0f * static_cast<float>(read(*w.call->forward->q, w.b, w.h, i, w.d));
    }
  };
}

void element_before_dk_written(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) { write(*call.dk, 0, 0, 0, -1, 0); };
}

std::vector<Mutant> bounds_faults() {
  return {
      backward("bwd_out_times_dout_in_place", bounds, "f32 bf16", out_times_dout_in_place),
      backward("bwd_dlse_cleared_in_place", bounds, "f32", dlse_cleared_in_place),
      backward("bwd_columns_of_q_past_head_dim_read", bounds, "f32",
               columns_of_q_past_head_dim_read),
      backward("bwd_element_before_dk_written", bounds, "f32 f16", element_before_dk_written),
  };
}

}  // namespace

std::vector<Mutant> bwd_third_memory() {
  std::vector<Mutant> all;
  for (const auto& part :
       {coverage_faults(), races(), layout_faults(), tail_faults(), bounds_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
