// The fourth table: tiles that are not written, partial ones, sums over tiles, and tiles that are
// read or written at the wrong time.
#include "mutants/bwd_fourth_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

// Gradients that are not written

/// A CTA returns before its epilogue if no query sees its keys.
void key_tiles_without_queries_unwritten(BackwardParts& p) {
  p.group_done = [visible = p.visible](BackwardWork& w) {
    for (std::int64_t first = 0; first < w.n; first += kTile) {
      const std::int64_t end = std::min(first + kTile, w.n);
      bool is_seen = false;
      for (std::int64_t pair = 0; pair < w.m * (end - first) && !is_seen; ++pair) {
        is_seen = visible(w, pair % w.m, first + pair / w.m);
      }
      for (std::int64_t j = first; j < end && !is_seen; ++j) {
        leave_row(w, *w.call->dk, w.h / w.group, j, w.dk);
        leave_row(w, *w.call->dv, w.h / w.group, j, w.dv);
      }
    }
  };
}

/// The kernel that converts the sums of dq has a grid of q_len / 16 CTAs.
void dq_converted_in_whole_tiles(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    const std::int64_t end = std::max(tile_start(w.m, kTile), std::min(w.m, kTile));
    for (std::int64_t i = end; i < w.m; ++i) leave_row(w, *w.call->dq, w.h, i, w.dq);
  };
}

/// Dk is a sum of atomic additions, and as much of it is cleared as dq has.
void dk_cleared_for_q_len_rows(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    const std::vector<float> old = rows_of(*w.call->dk, w.b, w.h / w.group);
    for (std::size_t e = at(w.m, w.d, 0); e < w.dk.size(); ++e) w.dk[e] += old[e];
  };
}

/// The grid has a CTA per KV head.
void dq_of_heads_past_the_kv_heads_unwritten(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.h >= w.kv_heads) w.dq = rows_of(*w.call->dq, w.b, w.h);
  };
}

std::vector<Mutant> coverage_faults() {
  return {
      backward("bwd_key_tiles_without_queries_unwritten", coverage, "f32 bf16",
               key_tiles_without_queries_unwritten, mask),
      backward("bwd_dq_converted_in_whole_tiles", coverage, "f32 f16", dq_converted_in_whole_tiles,
               tail),
      backward("bwd_dk_cleared_for_q_len_rows", coverage, "f32 bf16", dk_cleared_for_q_len_rows),
      backward("bwd_dq_of_heads_past_the_kv_heads_unwritten", coverage, "f32 f16",
               dq_of_heads_past_the_kv_heads_unwritten),
  };
}

// Partial tiles

/// Columns are padded to the step of a matrix instruction, but neither operand is cleared there.
void dp_runs_into_the_next_rows(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    return dot_past_the_row(w.dout, x.i, w.v, x.j, w.dv_dim);
  };
}

/// The same for the scores.
void scores_run_into_the_next_rows(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    Pair longer = x;
    longer.score = capped(w, w.scale * dot_past_the_row(w.q, x.i, w.k, x.j, w.d));
    return right(w, longer);
  };
}

/// The last tile has the rows of the tile before where its own are past the end.
void rows_of_the_tile_before_past_the_end(BackwardParts& p) {
  weigh_pairs(p, {kOfDk, kOfDv}, [](const BackwardWork& w, const Pair& x) {
    return x.i >= w.m - kTile && x.i < tile_start(w.m, kTile) && w.m % kTile != 0 ? 2.0f : 1.0f;
  });
}

/// Loads of queries stop at kv_len.
void queries_past_kv_len_lost(BackwardParts& p) {
  lose_pairs(p, {kOfDk, kOfDv}, [](const BackwardWork& w, const Pair& x) { return x.i >= w.n; });
}

/// Pairs of rows share a register of the transposed P.
void last_of_odd_queries_lost_in_dv(BackwardParts& p) {
  lose_pairs(p, {kOfDv},
             [](const BackwardWork& w, const Pair& x) { return w.m % 2 == 1 && x.i == w.m - 1; });
}

std::vector<Mutant> tail_faults() {
  return {
      backward("bwd_dp_runs_into_the_next_rows", tail, "f32 bf16", dp_runs_into_the_next_rows, dp),
      backward("bwd_scores_run_into_the_next_rows", tail, "f32 f16", scores_run_into_the_next_rows,
               dv),
      backward("bwd_rows_of_the_tile_before_past_the_end", tail, "f32 bf16",
               rows_of_the_tile_before_past_the_end),
      backward("bwd_queries_past_kv_len_lost", tail, "f32 f16", queries_past_kv_len_lost,
               accumulate),
      backward("bwd_last_of_odd_queries_lost_in_dv", tail, "f32", last_of_odd_queries_lost_in_dv),
  };
}

// Sums over tiles and heads

/// Each tile of keys has its own part of dq. As many are summed as there are tiles of queries.
void as_many_parts_of_dq_as_query_tiles(BackwardParts& p) {
  lose_pairs(p, {kOfDq}, [](const BackwardWork& w, const Pair& x) {
    return x.j / kKeyTile > (w.m - 1) / kKeyTile;
  });
}

/// The loop over heads clears the sums at the first visible tile of queries, if there is a mask.
void sums_of_a_group_cleared_by_each_causal_head(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    if (!is_causal(w)) return;
    std::fill(w.dk.begin(), w.dk.end(), 0.0f);
    std::fill(w.dv.begin(), w.dv.end(), 0.0f);
  };
}

/// A persistent CTA clears them at query 0, which keys past the diagonal do not get to.
void sums_cleared_at_query_0_only(BackwardParts& p) {
  p.group_done = [visible = p.visible](BackwardWork& w) {
    for (std::int64_t j = kTile; j < w.n; ++j) {
      bool is_cleared = false;
      const std::int64_t first = tile_start(j, kTile), keys = std::min(kTile, w.n - first);
      for (std::int64_t pair = 0; pair < std::min(kTile, w.m) * keys; ++pair) {
        is_cleared |= visible(w, pair / keys, first + pair % keys);
      }
      if (is_cleared) continue;
      add_scaled(1, w.dk.data() + (j - kTile) * w.d, w.d, w.dk.data() + j * w.d);
      add_scaled(1, w.dv.data() + (j - kTile) * w.dv_dim, w.dv_dim, w.dv.data() + j * w.dv_dim);
    }
  };
}

/// Only one of two consumer warpgroups adds to dq after the first tile of keys.
void dq_of_the_second_warpgroup_from_first_tile(BackwardParts& p) {
  lose_pairs(p, {kOfDq},
             [](const BackwardWork&, const Pair& x) { return x.i % 32 >= 16 && x.j >= kKeyTile; });
}

/// Queries are processed in chunks, whose ends are inclusive.
void query_between_two_chunks_twice(BackwardParts& p) {
  weigh_pairs(p, {kOfDk, kOfDv}, [](const BackwardWork&, const Pair& x) {
    return x.i > 0 && x.i % 64 == 0 ? 2.0f : 1.0f;
  });
}

std::vector<Mutant> accumulate_faults() {
  return {
      backward("bwd_as_many_parts_of_dq_as_query_tiles", accumulate, "f32 bf16",
               as_many_parts_of_dq_as_query_tiles),
      backward("bwd_sums_of_a_group_cleared_by_each_causal_head", accumulate, "f32 f16",
               sums_of_a_group_cleared_by_each_causal_head),
      backward("bwd_sums_cleared_at_query_0_only", accumulate, "f32 bf16",
               sums_cleared_at_query_0_only, mask),
      backward("bwd_dq_of_the_second_warpgroup_from_first_tile", accumulate, "f32",
               dq_of_the_second_warpgroup_from_first_tile),
      backward("bwd_query_between_two_chunks_twice", accumulate, "f32 f16",
               query_between_two_chunks_twice),
  };
}

// Races

/// The kernel for delta has not finished its last tile.
void delta_sometimes_not_yet_written(BackwardParts& p) {
  struct State {
    Event event;
    bool is_early = false;
  };
  const auto state = std::make_shared<State>();
  p.loaded = [=](BackwardWork&) { state->is_early = state->event.happens(); };
  p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
    return state->is_early && i >= tile_start(w.m - 1, kTile) ? 0.0f : right(w, i);
  };
}

/// The next tile of dS is stored before dq has read this one.
void ds_sometimes_of_the_next_tile_in_dq(BackwardParts& p) {
  const auto event = std::make_shared<Event>();
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t first = 0; first < w.n; first += kKeyTile) {
      const std::int64_t ahead = event->happens() ? kKeyTile : 0;
      for (std::int64_t j = first; j < std::min(first + kKeyTile, w.n); ++j) {
        const std::int64_t from = j + ahead < w.n ? j + ahead : j;
        for (std::int64_t i = 0; i < w.m; ++i) {
          add_scaled(w.scale * ds[at(i, w.n, from)], w.k.data() + j * w.d, w.d,
                     w.dq.data() + i * w.d);
        }
      }
    }
  });
}

/// The wait for a stage of q has the wrong phase, and the copy is mostly in time.
void q_sometimes_of_the_old_stage_in_dk(BackwardParts& p) {
  const auto event = std::make_shared<Event>();
  replace_product(p, kOfDk, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t first = 0; first < w.m; first += kTile) {
      const std::int64_t back = event->happens() && first > 0 ? kTile : 0;
      for (std::int64_t i = first; i < std::min(first + kTile, w.m); ++i) {
        for (std::int64_t j = 0; j < w.n; ++j) {
          add_scaled(ds[at(i, w.n, j)], w.q.data() + (i - back) * w.d, w.d, w.dk.data() + j * w.d);
        }
      }
    }
  });
}

/// The kernel that converts the sums of dq starts before the last tile of keys is added.
void dq_sometimes_converted_early(BackwardParts& p) {
  const auto event = std::make_shared<Event>();
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    const std::int64_t end = event->happens() ? tile_start(w.n - 1, kKeyTile) : w.n;
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < end; ++j) {
        add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
      }
    }
  });
}

/// Tiles of keys add to dq by atomic operations on bf16, in any order.
void dq_by_atomics_in_bf16(BackwardParts& p) {
  const auto event = std::make_shared<Event>();
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    const std::int64_t tiles = (w.n + kTile - 1) / kTile, turn = event->happens() ? tiles / 2 : 0;
    for (std::int64_t t = 0; t < tiles; ++t) {
      std::vector<float> part(w.dq.size(), 0.0f);
      const std::int64_t first = (t + turn) % tiles * kTile;
      for (std::int64_t j = first; j < std::min(first + kTile, w.n); ++j) {
        for (std::int64_t i = 0; i < w.m; ++i) {
          add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, part.data() + i * w.d);
        }
      }
      for (std::size_t e = 0; e < part.size(); ++e) {
        w.dq[e] = rounded(Format::bf16, w.dq[e] + part[e]);
      }
    }
  });
}

std::vector<Mutant> races() {
  return {
      backward("bwd_delta_sometimes_not_yet_written", determinism, "f32 bf16",
               delta_sometimes_not_yet_written),
      backward("bwd_ds_sometimes_of_the_next_tile_in_dq", determinism, "f32 f16",
               ds_sometimes_of_the_next_tile_in_dq),
      backward("bwd_q_sometimes_of_the_old_stage_in_dk", determinism, "f32",
               q_sometimes_of_the_old_stage_in_dk),
      backward("bwd_dq_sometimes_converted_early", determinism, "f32 bf16",
               dq_sometimes_converted_early),
      backward("bwd_dq_by_atomics_in_bf16", determinism, "f32", dq_by_atomics_in_bf16, precision),
  };
}

}  // namespace

std::vector<Mutant> bwd_fourth_tiles() {
  std::vector<Mutant> all;
  for (const auto& part : {coverage_faults(), tail_faults(), accumulate_faults(), races()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
