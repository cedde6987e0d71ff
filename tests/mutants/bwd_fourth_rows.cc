// The fourth table: what each query row has, P with its LSE, delta and the gradient of the LSE.
// Also what is read or written past the last row.
#include "mutants/bwd_fourth_tools.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

// P and its product with dout

/// exp2((score - LSE) · scale · log2 e), where the score has its scale from another place.
void lse_times_scale(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return sees_no_key(w, x.i) ? 0.0f : std::exp(x.score - w.scale * of_row(w.lse, x.i));
  };
}

/// The factor of the exponent is the scale, as if the softcap had not applied it.
void capped_scores_scaled_again(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    Pair scaled = x;
    if (w.softcap > 0) scaled.score *= w.scale;
    return right(w, scaled);
  };
}

/// Scores are in units of base 2 before the softcap, the cap is not.
void softcap_of_scores_of_base_2(BackwardParts& p) {
  constexpr float kLog2e = 1.442695f;
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    Pair early = x;
    early.score = w.softcap > 0 ? capped(w, kLog2e * x.z) / kLog2e : x.score;
    return right(w, early);
  };
}

void lse_of_the_first_batch(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) { w.lse = rows_of(*w.call->forward->lse, 0, w.h); };
}

/// Two consumer warpgroups have a buffer of P each, and dv takes the wrong one.
void dv_with_p_of_the_other_warpgroup(BackwardParts& p) {
  replace_product(p, kOfDv, [](BackwardWork& w, const std::vector<float>& weights) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t from = (i ^ kTile) < w.m ? i ^ kTile : i;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(weights[at(from, w.n, j)], w.dout.data() + i * w.dv_dim, w.dv_dim,
                   w.dv.data() + j * w.dv_dim);
      }
    }
  });
}

/// dS takes the place of P before the second step of the product is issued.
void dv_from_ds_in_the_second_step(BackwardParts& p) {
  p.in_dv = [](const BackwardWork&, const Pair& x) { return x.i % kTile >= 8 ? x.ds : x.p; };
}

/// A guard against overflow, from a time without the LSE.
void scores_limited_to_50(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    Pair limited = x;
    limited.score = std::clamp(x.score, -50.0f, 50.0f);
    return right(w, limited);
  };
}

/// exp(LSE) would overflow, which is taken for a row of padding.
void rows_of_large_lse_skipped(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    return of_row(w.lse, x.i) > 88 ? 0.0f : right(w, x);
  };
}

std::vector<Mutant> p_faults() {
  return {
      backward("bwd_lse_times_scale", dv, "f32 bf16", lse_times_scale, scale),
      backward("bwd_capped_scores_scaled_again", dv, "f32 f16", capped_scores_scaled_again, scale),
      backward("bwd_softcap_of_scores_of_base_2", dv, "f32 bf16", softcap_of_scores_of_base_2),
      backward("bwd_lse_of_the_first_batch", dv, "f32 f16", lse_of_the_first_batch, layout),
      backward("bwd_dv_with_p_of_the_other_warpgroup", dv, "f32 bf16",
               dv_with_p_of_the_other_warpgroup),
      backward("bwd_dv_from_ds_in_the_second_step", dv, "f32 f16", dv_from_ds_in_the_second_step),
      backward("bwd_scores_limited_to_50", dv, "f32 bf16", scores_limited_to_50, unlocalised),
      backward("bwd_rows_of_large_lse_skipped", dv, "f32 f16", rows_of_large_lse_skipped,
               unlocalised),
  };
}

// delta

/// Its kernel has a grid over kv_len.
void delta_of_rows_past_kv_len_missing(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    return i < w.n ? right(w, i) : 0.0f;
  };
}

/// Vectors of 16 columns, without a check of the last one.
void delta_runs_into_the_next_row(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    return dot_past_the_row(w.dout, i, w.out, i, w.dv_dim) - of_row(w.dlse, i);
  };
}

void delta_by_kv_head(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    return delta_of(w, w.b, w.h / w.group, i);
  };
}

/// The workspace has no batch axis, and its last writer is the last batch.
void delta_of_the_last_batch(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) { return delta_of(w, w.batch - 1, w.h, i); };
}

std::vector<Mutant> delta_faults() {
  return {
      backward("bwd_delta_of_rows_past_kv_len_missing", delta, "f32 bf16",
               delta_of_rows_past_kv_len_missing),
      backward("bwd_delta_runs_into_the_next_row", delta, "f32 f16", delta_runs_into_the_next_row,
               tail),
      backward("bwd_delta_by_kv_head", delta, "f32 bf16", delta_by_kv_head),
      backward("bwd_delta_of_the_last_batch", delta, "f32 f16", delta_of_the_last_batch, layout),
  };
}

// The gradient of the LSE

/// The softmax of one score is constant, so that its row has no dS. Its LSE is not.
void dlse_of_rows_with_one_key_ignored(BackwardParts& p) {
  p.loaded = [visible = p.visible](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      std::int64_t keys = 0;
      for (std::int64_t j = 0; j < w.n; ++j) keys += visible(w, i, j) ? 1 : 0;
      if (keys == 1) w.dlse[static_cast<std::size_t>(i)] = 0;
    }
  };
}

/// The LSE of another library is [batch, q_len, heads].
void dlse_read_as_heads_of_rows(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (std::int64_t i = 0; w.call->dlse != nullptr && i < w.m; ++i) {
      const std::int64_t from = i * w.q_heads + w.h;
      w.dlse[static_cast<std::size_t>(i)] =
          static_cast<float>(read(*w.call->dlse, w.b, from / w.m, from % w.m, 0));
    }
  };
}

/// The path of tiles that the mask crosses reads delta anew, from the kernel without dlse.
void dlse_ignored_in_tiles_with_a_mask(BackwardParts& p) {
  p.ds = [right = p.ds, visible = p.visible](const BackwardWork& w, const Pair& x) {
    const std::int64_t i = tile_start(x.i, kTile), j = tile_start(x.j, kTile);
    const std::int64_t last_i = std::min(i + kTile, w.m) - 1;
    const std::int64_t last_j = std::min(j + kTile, w.n) - 1;
    const bool is_full = visible(w, i, last_j) && visible(w, last_i, j);
    return is_full ? right(w, x) : right(w, x) - x.p * of_row(w.dlse, x.i);
  };
}

/// Delta stays in registers, and each tile of keys subtracts it there.
void dlse_added_again_by_each_key_tile(BackwardParts& p) {
  p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
    return right(w, x) + static_cast<float>(x.j / kKeyTile) * x.p * of_row(w.dlse, x.i);
  };
}

std::vector<Mutant> dlse_faults() {
  return {
      backward("bwd_dlse_of_rows_with_one_key_ignored", dlse, "f32 bf16",
               dlse_of_rows_with_one_key_ignored),
      backward("bwd_dlse_read_as_heads_of_rows", dlse, "f32 f16", dlse_read_as_heads_of_rows,
               layout),
      backward("bwd_dlse_ignored_in_tiles_with_a_mask", dlse, "f32 bf16",
               dlse_ignored_in_tiles_with_a_mask, mask),
      backward("bwd_dlse_added_again_by_each_key_tile", dlse, "f32 f16",
               dlse_added_again_by_each_key_tile),
  };
}

// Past the last row

/// dS of padded rows is 0, but what it meets in q is not.
void padded_row_of_q_times_0(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.m % kTile == 0) return;
    for (std::int64_t c = 0; c < w.d; ++c) {
      const auto past_the_end = static_cast<float>(read(*w.call->forward->q, w.b, w.h, w.m, c));
      for (std::int64_t j = 0; j < w.n; ++j) w.dk[at(j, w.d, c)] += 0.0f * past_the_end;
    }
  };
}

/// CTAs have two KV heads each.
void dv_of_an_extra_head_written(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const flashcore_tensor& t = *call.dv;
    if (t.shape[1] % 2 == 0) return;
    for (std::int64_t c = 0; c < t.shape[3]; ++c) write(t, t.shape[0] - 1, t.shape[1], 0, c, 0);
  };
}

std::vector<Mutant> bounds_faults() {
  return {
      backward("bwd_padded_row_of_q_times_0", bounds, "f32 bf16", padded_row_of_q_times_0),
      backward("bwd_dv_of_an_extra_head_written", bounds, "f32 f16", dv_of_an_extra_head_written),
  };
}

}  // namespace

std::vector<Mutant> bwd_fourth_rows() {
  std::vector<Mutant> all;
  for (const auto& part : {p_faults(), delta_faults(), dlse_faults(), bounds_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
