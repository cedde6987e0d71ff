// The fourth table: dP, dS, the products of dS, and their precision.
#include "mutants/bwd_fourth_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

// dP

/// Every step of 16 columns starts the accumulators anew.
void dp_of_the_last_step_of_columns(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = tile_start(w.dv_dim - 1, 16); c < w.dv_dim; ++c) {
      sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return sum;
  };
}

/// When the loop over queries begins again, dout is still that of its last whole tile.
void dp_with_dout_left_by_the_key_tile_before(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
    const bool is_first_round = x.j < kKeyTile || x.i >= kTile || w.m < 2 * kTile;
    return right(w, is_first_round ? x : Pair{tile_start(w.m, kTile) - kTile + x.i, x.j});
  };
}

/// P and dP have their fragments in another order.
void dp_transposed_in_tiles_of_8(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
    const Pair moved{tile_start(x.i, 8) + x.j % 8, tile_start(x.j, 8) + x.i % 8};
    return right(w, moved.i < w.m && moved.j < w.n ? moved : x);
  };
}

/// A persistent CTA loads v once.
void dp_with_v_of_the_first_key_tile(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
    return right(w, {x.i, x.j % kKeyTile});
  };
}

std::vector<Mutant> dp_faults() {
  return {
      backward("bwd_dp_of_the_last_step_of_columns", dp, "f32 bf16",
               dp_of_the_last_step_of_columns),
      backward("bwd_dp_with_dout_left_by_the_key_tile_before", dp, "f32 f16",
               dp_with_dout_left_by_the_key_tile_before),
      backward("bwd_dp_transposed_in_tiles_of_8", dp, "f32 bf16", dp_transposed_in_tiles_of_8),
      backward("bwd_dp_with_v_of_the_first_key_tile", dp, "f32 f16",
               dp_with_v_of_the_first_key_tile),
  };
}

// dS

/// Two of them share a register, in the wrong halves.
void ds_of_adjacent_keys_exchanged(BackwardParts& p) {
  p.ds = [right = p.ds, visible = p.visible](const BackwardWork& w, const Pair& x) {
    const std::int64_t other = (x.j ^ 1) < w.n ? x.j ^ 1 : x.j;
    return visible(w, x.i, other) ? right(w, pair_of(w, x.i, other)) : 0.0f;
  };
}

/// Replaces the derivative of the softcap.
template <typename Slope>
void replace_slope(BackwardParts& p, Slope slope) {
  p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
    return w.softcap == 0 ? 1.0f : slope(w, x, right(w, x));
  };
}

/// 1 - tanh² as a series around 0.
void slope_by_a_short_series(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork& w, const Pair& x, float) {
    const float square = x.z / w.softcap * (x.z / w.softcap);
    return std::clamp(1 - square + 2 * square * square / 3, 0.0f, 1.0f);
  });
}

/// The partial tile has a path of its own.
void slope_missing_in_the_partial_key_tile(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork& w, const Pair& x, float right) {
    return x.j >= tile_start(w.n, kTile) ? 1.0f : right;
  });
}

/// The slopes stay in registers from one head of a group to the next.
void slope_of_the_first_head_of_the_group(BackwardParts& p) {
  const auto first = std::make_shared<BackwardWork>();
  p.loaded = [=](BackwardWork& w) {
    if (is_first_of_group(w)) *first = w;
  };
  p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
    return right(w, w.softcap > 0 ? pair_of(*first, x.i, x.j) : x);
  };
}

std::vector<Mutant> ds_faults() {
  return {
      backward("bwd_ds_of_adjacent_keys_exchanged", ds, "f32 bf16", ds_of_adjacent_keys_exchanged),
      backward("bwd_slope_by_a_short_series", ds, "f32 f16", slope_by_a_short_series),
      backward("bwd_slope_missing_in_the_partial_key_tile", ds, "f32 bf16",
               slope_missing_in_the_partial_key_tile, tail),
      backward("bwd_slope_of_the_first_head_of_the_group", ds, "f32 f16",
               slope_of_the_first_head_of_the_group),
  };
}

// dq

/// `column` returns the column of k that is multiplied for column c, and may change its row.
template <typename Column>
void multiply_dq_with(BackwardParts& p, Column column) {
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const float weight = w.scale * ds[at(i, w.n, j)];
        for (std::int64_t c = 0; weight != 0 && c < w.d; ++c) {
          std::int64_t row = j;
          const std::int64_t from = column(w, row, c);
          w.dq[at(i, w.d, c)] += weight * w.k[at(row, w.d, from)];
        }
      }
    }
  });
}

/// The descriptor of k is not advanced from one chunk of 16 columns to the next.
void dq_with_first_chunk_of_k(BackwardParts& p) {
  multiply_dq_with(p, [](const BackwardWork&, std::int64_t, std::int64_t c) { return c % 16; });
}

/// K is loaded as for the scores, that is transposed, one 8 × 8 matrix at a time.
void dq_with_k_transposed_in_tiles_of_8(BackwardParts& p) {
  multiply_dq_with(p, [](const BackwardWork& w, std::int64_t& j, std::int64_t c) {
    const std::int64_t row = tile_start(j, 8) + c % 8, column = tile_start(c, 8) + j % 8;
    if (row >= w.n || column >= w.d) return c;
    j = row;
    return column;
  });
}

/// Two consumer warpgroups store half a tile each, where the other should.
void halves_of_tiles_of_dq_exchanged(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    for (std::int64_t i = 0; i + 8 < w.m; ++i) {
      if (i % 16 >= 8) continue;
      std::swap_ranges(w.dq.begin() + i * w.d, w.dq.begin() + (i + 1) * w.d,
                       w.dq.begin() + (i + 8) * w.d);
    }
  };
}

std::vector<Mutant> dq_faults() {
  return {
      backward("bwd_dq_with_first_chunk_of_k", dq, "f32 bf16", dq_with_first_chunk_of_k),
      backward("bwd_dq_with_k_transposed_in_tiles_of_8", dq, "f32 f16",
               dq_with_k_transposed_in_tiles_of_8),
      backward("bwd_halves_of_tiles_of_dq_exchanged", dq, "f32 bf16",
               halves_of_tiles_of_dq_exchanged, layout),
  };
}

// dk

/// `row` returns what replaces row i of q.
template <typename Row>
void multiply_dk_with(BackwardParts& p, Row row) {
  replace_product(p, kOfDk, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::vector<float> q = row(w, i);
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], q.data(), w.d, w.dk.data() + j * w.d);
      }
    }
  });
}

std::vector<float> row_of_q(const BackwardWork& w, std::int64_t i) {
  return {w.q.begin() + i * w.d, w.q.begin() + (i + 1) * w.d};
}

/// The copy of the next tile of q is issued one product too early.
void dk_with_q_of_the_next_tile(BackwardParts& p) {
  multiply_dk_with(p, [](const BackwardWork& w, std::int64_t i) {
    return row_of_q(w, i + kTile < w.m ? i + kTile : i);
  });
}

/// Queries without their mean, as an 8-bit forward pass has its keys.
void dk_with_centred_queries(BackwardParts& p) {
  multiply_dk_with(p, [](const BackwardWork& w, std::int64_t i) {
    std::vector<float> row = row_of_q(w, i);
    add_scaled(-1, mean_row(w.q, w.m, w.d).data(), w.d, row.data());
    return row;
  });
}

/// Rows are stored as the fragments of a warp have them.
void dk_in_the_order_of_fragments(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    const std::vector<float> dk = w.dk;
    for (std::int64_t j = 0; j < tile_start(w.n, 16); ++j) {
      const std::int64_t from = tile_start(j, 16) + j % 2 * 8 + j % 16 / 2;
      std::copy_n(dk.begin() + from * w.d, w.d, w.dk.begin() + j * w.d);
    }
  };
}

/// dS is multiplied by the derivative of the softcap after it is stored for dk.
void dk_without_slope_of_the_softcap(BackwardParts& p) {
  p.in_dk = [ds = p.ds](const BackwardWork& w, const Pair& x) { return ds(w, x); };
}

std::vector<Mutant> dk_faults() {
  return {
      backward("bwd_dk_with_q_of_the_next_tile", dk, "f32 bf16", dk_with_q_of_the_next_tile),
      backward("bwd_dk_with_centred_queries", dk, "f32 f16", dk_with_centred_queries),
      backward("bwd_dk_in_the_order_of_fragments", dk, "f32 bf16", dk_in_the_order_of_fragments,
               layout),
      backward("bwd_dk_without_slope_of_the_softcap", dk, "f32 f16",
               dk_without_slope_of_the_softcap, ds),
  };
}

// Precision

/// Only the operands of the scores are split into two parts.
void q_in_tf32_for_dk(BackwardParts& p) {
  multiply_dk_with(p, [](const BackwardWork& w, std::int64_t i) {
    std::vector<float> row = row_of_q(w, i);
    for (float& x : row) {
      int exponent = 0;
      const float fraction = std::frexp(x, &exponent);
      x = std::ldexp(std::nearbyint(fraction * 2048) / 2048, exponent);
    }
    return row;
  });
}

/// Parts of dq of 64 keys each are stored in the format of bf16 results, and summed later.
void dq_of_splits_in_bf16(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t first = 0; first < w.n; first += 64) {
      std::vector<float> part(w.dq.size(), 0.0f);
      for (std::int64_t j = first; j < std::min(first + 64, w.n); ++j) {
        for (std::int64_t i = 0; i < w.m; ++i) {
          add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, part.data() + i * w.d);
        }
      }
      for (std::size_t e = 0; e < part.size(); ++e) w.dq[e] += rounded(Format::bf16, part[e]);
    }
  });
}

std::vector<Mutant> precision_faults() {
  return {
      backward("bwd_q_in_tf32_for_dk", precision, "f32", q_in_tf32_for_dk, dk),
      backward("bwd_dq_of_splits_in_bf16", precision, "f32", dq_of_splits_in_bf16, dq),
  };
}

}  // namespace

std::vector<Mutant> bwd_fourth_numbers() {
  std::vector<Mutant> all;
  for (const auto& part :
       {dp_faults(), ds_faults(), dq_faults(), dk_faults(), precision_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
