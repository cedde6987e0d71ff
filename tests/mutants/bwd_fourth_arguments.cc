// The fourth table: layouts, masks and scales, which the arguments of a call say.
#include "mutants/bwd_fourth_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

// Layouts

/// The LSE of another library is [batch, q_len, heads].
void lse_read_as_heads_of_rows(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t from = i * w.q_heads + w.h;
      w.lse[static_cast<std::size_t>(i)] =
          static_cast<float>(read(*w.call->forward->lse, w.b, from / w.m, from % w.m, 0));
    }
  };
  guard_empty_rows(p);
}

void dout_read_by_strides_of_q(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    const std::int64_t* strides = w.call->forward->q->strides;
    const FlatTensor dout(*w.call->dout);
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t row = w.b * strides[0] + w.h * strides[1] + i * strides[2];
      for (std::int64_t c = 0; c < w.dv_dim; ++c) {
        w.dout[at(i, w.dv_dim, c)] = static_cast<float>(dout.get(row + c * strides[3]));
      }
    }
  };
}

/// Its rows are padded to 16 columns, and read as if they were not.
void dq_from_a_workspace_of_padded_rows(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    const std::vector<float> dq = w.dq;
    const std::int64_t pitch = w.d + padding(w.d, 16);
    for (std::int64_t e = 0; e < w.m * w.d; ++e) {
      const std::int64_t row = e / pitch, column = e % pitch;
      w.dq[static_cast<std::size_t>(e)] = column < w.d ? dq[at(row, w.d, column)] : 0.0f;
    }
  };
}

/// k is loaded twice. The load for dq ignores the stride of its columns.
void stride_of_columns_of_k_ignored_in_dq(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    const flashcore_tensor& t = *w.call->forward->k;
    const FlatTensor k(t);
    for (std::int64_t j = 0; j < w.n; ++j) {
      const std::int64_t first = w.b * t.strides[0] + w.kv_head * t.strides[1] + j * t.strides[2];
      for (std::int64_t c = 0; c < w.d; ++c) {
        const float weight = w.scale * static_cast<float>(k.get(first + c));
        for (std::int64_t i = 0; i < w.m; ++i) {
          w.dq[at(i, w.d, c)] += ds[at(i, w.n, j)] * weight;
        }
      }
    }
  });
}

/// The rows of a head are padded to whole tiles, and read as if they were not.
void delta_from_a_workspace_of_padded_heads(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    const std::int64_t from = w.h * w.m + i, pitch = w.m + padding(w.m, kTile);
    return from % pitch < w.m ? delta_of(w, w.b, from / pitch, from % pitch) : 0.0f;
  };
}

std::vector<Mutant> layout_faults() {
  return {
      backward("bwd_lse_read_as_heads_of_rows", layout, "f32 bf16", lse_read_as_heads_of_rows, dv),
      backward("bwd_dout_read_by_strides_of_q", layout, "f32 f16", dout_read_by_strides_of_q),
      backward("bwd_dq_from_a_workspace_of_padded_rows", layout, "f32 bf16",
               dq_from_a_workspace_of_padded_rows, dq),
      backward("bwd_stride_of_columns_of_k_ignored_in_dq", layout, "f32 f16",
               stride_of_columns_of_k_ignored_in_dq, dq),
      backward("bwd_delta_from_a_workspace_of_padded_heads", layout, "f32 bf16",
               delta_from_a_workspace_of_padded_heads, delta),
  };
}

// Masks

/// A tile whose first row sees no key is skipped.
void tiles_skipped_by_their_first_row(BackwardParts& p) {
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return right(w, i, j) && !sees_no_key(w, tile_start(i, kTile));
  };
}

/// The loop over the queries of a tile of keys ends before its last, partial tile.
void last_query_tile_of_a_window_rounded_down(BackwardParts& p) {
  lose_pairs(p, {kOfDk, kOfDv}, [](const BackwardWork& w, const Pair& x) {
    const std::int64_t left = w.call->forward->window_left;
    const std::int64_t end = tile_start(x.j, kTile) + kTile + left - (w.n - w.m);
    return left >= 0 && x.i >= tile_start(end, kTile);
  });
}

/// The first visible tile of keys is masked to the left. The edge also crosses the second one.
void left_edge_masked_in_the_first_key_tile_only(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const flashcore_verify_call& c = *w.call->forward;
    const std::int64_t first_row = position(w, tile_start(i, kTile));
    const std::int64_t first_key = std::max<std::int64_t>(first_row - c.window_left, 0);
    if (c.window_left < 0 || j < tile_start(first_key, kTile) + kTile) return right(w, i, j);
    return !(is_causal(w) && j > position(w, i)) &&
           !(c.window_right >= 0 && j - position(w, i) > c.window_right);
  };
}

/// The loop over keys for dq ends where the first row of a tile of queries is, not the last.
void keys_of_dq_end_at_the_first_row(BackwardParts& p) {
  lose_pairs(p, {kOfDq}, [](const BackwardWork& w, const Pair& x) {
    return is_causal(w) && tile_start(x.j, kTile) > position(w, tile_start(x.i, kTile));
  });
}

void left_side_of_the_window_one_less(BackwardParts& p) {
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const std::int64_t left = w.call->forward->window_left;
    return right(w, i, j) && !(left >= 0 && position(w, i) - j == left);
  };
}

/// The partial tile has a path of its own, which compares keys with kv_len only.
void causal_ignored_in_the_partial_key_tile(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return right(w, i, j) || (is_causal(w) && j >= tile_start(w.n, kTile));
  };
}

/// P is computed for all pairs and multiplied by 0 or 1. Hidden scores may be far above the LSE.
void mask_as_a_factor_of_p(BackwardParts& p) {
  p.p = [right = p.p, visible = p.visible](const BackwardWork& w, const Pair& x) {
    return right(w, x) * (visible(w, x.i, x.j) ? 1.0f : 0.0f);
  };
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t) {
    return !sees_no_key(w, i);
  };
}

std::vector<Mutant> mask_faults() {
  return {
      backward("bwd_tiles_skipped_by_their_first_row", mask, "f32 bf16",
               tiles_skipped_by_their_first_row),
      backward("bwd_last_query_tile_of_a_window_rounded_down", mask, "f32 f16",
               last_query_tile_of_a_window_rounded_down),
      backward("bwd_left_edge_masked_in_first_key_tile_only", mask, "f32 bf16",
               left_edge_masked_in_the_first_key_tile_only),
      backward("bwd_keys_of_dq_end_at_the_first_row", mask, "f32 f16",
               keys_of_dq_end_at_the_first_row, dq),
      backward("bwd_left_side_of_the_window_one_less", mask, "f32 bf16",
               left_side_of_the_window_one_less),
      backward("bwd_causal_ignored_in_the_partial_key_tile", mask, "f32 f16",
               causal_ignored_in_the_partial_key_tile, tail),
      backward("bwd_mask_as_a_factor_of_p", mask, "f32 bf16", mask_as_a_factor_of_p, unlocalised),
  };
}

// Scales and the softcap

/// The epilogue moved into the loop over the heads of a group.
void dk_scaled_after_each_head(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.h % w.group == w.group - 1) return;
    for (float& x : w.dk) x *= w.scale;
  };
}

/// The sum so far is scaled, not what the tile adds.
void dq_scaled_after_each_key_tile(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      float* dq = w.dq.data() + i * w.d;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, dq);
        if (j % kKeyTile != kKeyTile - 1 && j != w.n - 1) continue;
        for (std::int64_t c = 0; c < w.d; ++c) dq[c] *= w.scale;
      }
    }
  });
}

/// Under a softcap the variable of the scale has that of the exponent, which is 1.
void gradients_without_scale_under_a_softcap(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) { return w.softcap > 0 ? 1.0f : w.scale; };
}

/// The epilogue multiplies in the format of the results.
void scale_of_the_gradients_in_bf16(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) { return rounded(Format::bf16, w.scale); };
}

/// The kernel that packs the heads of a group is compiled without softcap.
void softcap_ignored_in_groups(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    Pair uncapped = x;
    if (w.group > 1) uncapped.score = x.z;
    return right(w, uncapped);
  };
  p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
    return w.group > 1 ? 1.0f : right(w, x);
  };
}

std::vector<Mutant> scale_faults() {
  return {
      backward("bwd_dk_scaled_after_each_head", scale, "f32 bf16", dk_scaled_after_each_head,
               accumulate),
      backward("bwd_dq_scaled_after_each_key_tile", scale, "f32 f16", dq_scaled_after_each_key_tile,
               accumulate),
      backward("bwd_gradients_without_scale_under_a_softcap", scale, "f32 bf16",
               gradients_without_scale_under_a_softcap),
      backward("bwd_scale_of_the_gradients_in_bf16", scale, "f32", scale_of_the_gradients_in_bf16,
               precision),
      backward("bwd_softcap_ignored_in_groups", unlocalised, "f32 f16", softcap_ignored_in_groups,
               dv),
  };
}

}  // namespace

std::vector<Mutant> bwd_fourth_arguments() {
  std::vector<Mutant> all;
  for (const auto& part : {layout_faults(), mask_faults(), scale_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
