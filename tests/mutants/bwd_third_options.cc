// The third table: masks and the gradient of the LSE.
#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

// Masks

constexpr std::int64_t kTile = 16;

/// Visibility of a pair under other options than those of the call.
struct Sight {
  bool causal = false;
  std::int64_t left = -1, right = -1;  ///< -1: no limit

  explicit Sight(const BackwardWork& w)
      : causal(is_causal(w)),
        left(w.call->forward->window_left),
        right(w.call->forward->window_right) {}

  bool sees(std::int64_t query, std::int64_t key) const {
    return !(causal && key > query) && !(left >= 0 && query - key > left) &&
           !(right >= 0 && key - query > right);
  }
};

/// A window of 0 keys is taken for none.
void window_of_0_is_no_limit(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    Sight sight(w);
    if (sight.left == 0) sight.left = -1;
    if (sight.right == 0) sight.right = -1;
    return sight.sees(position(w, i), j);
  };
}

/// A window without keys to the right is causal, and its left side is forgotten.
void window_to_the_left_is_causal(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    Sight sight(w);
    if (sight.right == 0) sight.left = -1;
    return sight.sees(position(w, i), j);
  };
}

/// The number of queries stands in for the side of a window that has no limit.
void left_side_without_limit_is_q_len(BackwardParts& p) {
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    Sight sight(w);
    if (sight.left < 0 && sight.right >= 0) sight.left = w.m;
    return sight.sees(position(w, i), j);
  };
}

/// A window has one size, for both sides.
void both_sides_of_the_window_are_the_larger(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    Sight sight(w);
    if (sight.left >= 0 || sight.right >= 0) {
      sight.left = sight.right = std::max(sight.left, sight.right);
    }
    return sight.sees(position(w, i), j);
  };
}

void window_without_the_offset(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    Sight window(w);
    window.causal = false;
    return window.sees(i, j) && !(is_causal(w) && j > position(w, i));
  };
}

/// kv_len - q_len, cut off at 0.
void offset_never_negative(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return Sight(w).sees(std::max(position(w, i), i), j);
  };
}

void offset_with_wrong_sign(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return Sight(w).sees(i + w.m - w.n, j);
  };
}

/// The diagonal of a tile of queries crosses two tiles of keys, unless the lengths fit.
void only_the_last_visible_tile_masked(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const std::int64_t last_row = std::min(i / kTile * kTile + kTile, w.m) - 1;
    return right(w, i, j) || (is_causal(w) && j / kTile * kTile + kTile <= position(w, last_row));
  };
}

/// Rows and keys are compared within a tile, also in tiles below the diagonal.
void triangle_in_every_tile(BackwardParts& p) {
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return right(w, i, j) && !(is_causal(w) && j % kTile > position(w, i) % kTile);
  };
}

/// The softmax of equal scores, as large and negative as they may be.
void rows_without_keys_see_all(BackwardParts& p) {
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return right(w, i, j) || sees_no_key(w, i);
  };
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    return sees_no_key(w, x.i) ? 1 / static_cast<float>(w.n) : right(w, x);
  };
}

/// dk and dv without the queries for which `is_lost` holds.
template <typename Lost>
void lose_queries_of_keys(BackwardParts& p, Lost is_lost) {
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.p; };
}

/// The first query of a tile of keys, as a row of packed heads where rows are not packed.
void first_query_of_packed_rows(BackwardParts& p) {
  lose_queries_of_keys(p, [](const BackwardWork& w, const Pair& x) {
    return is_causal(w) && x.i < w.group * (x.j / kTile * kTile - (w.n - w.m));
  });
}

/// The last query of a tile of keys, without kv_len - q_len.
void last_query_of_a_window_without_the_offset(BackwardParts& p) {
  lose_queries_of_keys(p, [](const BackwardWork& w, const Pair& x) {
    const std::int64_t left = w.call->forward->window_left;
    return left >= 0 && x.i >= x.j / kTile * kTile + kTile + left;
  });
}

std::vector<Mutant> mask_faults() {
  return {
      backward("bwd_window_of_0_is_no_limit", mask, "f32 bf16", window_of_0_is_no_limit),
      backward("bwd_window_to_the_left_is_causal", mask, "f32", window_to_the_left_is_causal),
      backward("bwd_left_side_without_limit_is_q_len", mask, "f32 f16",
               left_side_without_limit_is_q_len),
      backward("bwd_both_sides_of_the_window_are_the_larger", mask, "f32 bf16",
               both_sides_of_the_window_are_the_larger),
      backward("bwd_window_without_the_offset", mask, "f32", window_without_the_offset),
      backward("bwd_offset_never_negative", mask, "f32 f16", offset_never_negative),
      backward("bwd_offset_with_wrong_sign", mask, "f32 bf16", offset_with_wrong_sign),
      backward("bwd_only_the_last_visible_tile_masked", mask, "f32 f16",
               only_the_last_visible_tile_masked),
      backward("bwd_triangle_in_every_tile", mask, "f32", triangle_in_every_tile),
      backward("bwd_rows_without_keys_see_all", mask, "f32 bf16", rows_without_keys_see_all),
      backward("bwd_first_query_of_packed_rows", mask, "f32", first_query_of_packed_rows),
      backward("bwd_last_query_of_a_window_without_offset", mask, "f32 f16",
               last_query_of_a_window_without_the_offset),
  };
}

// The gradient of the LSE

void dlse_times_scale(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.dlse) x *= w.scale;
  };
}

/// As the gradient of the sum of exponentials.
void dlse_without_the_logarithm(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      if (sees_no_key(w, i)) continue;
      w.dlse[static_cast<std::size_t>(i)] *= std::exp(of_row(w.lse, i));
    }
  };
}

void dlse_divided_by_the_group(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.dlse) x /= static_cast<float>(w.group);
  };
}

/// Another kernel serves a v_dim that is not head_dim.
void dlse_ignored_if_v_dim_differs(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    if (w.dv_dim != w.d) std::fill(w.dlse.begin(), w.dlse.end(), 0.0f);
  };
}

/// The kernel for delta skips rows whose dout is 0, and it also adds the gradient of the LSE.
void dlse_ignored_without_dout(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    const float* dout = w.dout.data() + i * w.dv_dim;
    const bool is_zero = std::all_of(dout, dout + w.dv_dim, [](float x) { return x == 0; });
    return is_zero ? 0.0f : right(w, i);
  };
}

void dlse_in_the_first_key_tile_only(BackwardParts& p) {
  p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
    return x.j < 32 ? right(w, x) : right(w, x) - x.p * of_row(w.dlse, x.i);
  };
}

/// Its product with P goes to dv too.
void dlse_added_to_dv(BackwardParts& p) {
  const auto sums = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    if (is_first_of_group(w)) sums->assign(static_cast<std::size_t>(w.n), 0.0f);
  };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) {
    (*sums)[static_cast<std::size_t>(x.j)] += x.p * of_row(w.dlse, x.i);
    return x.p;
  };
  p.group_done = [=](BackwardWork& w) {
    for (std::int64_t j = 0; j < w.n; ++j) {
      for (std::int64_t c = 0; c < w.dv_dim; ++c) w.dv[at(j, w.dv_dim, c)] += of_row(*sums, j);
    }
  };
}

std::vector<Mutant> dlse_faults() {
  return {
      backward("bwd_dlse_times_scale", dlse, "f32 f16", dlse_times_scale),
      backward("bwd_dlse_without_the_logarithm", dlse, "f32 bf16", dlse_without_the_logarithm),
      backward("bwd_dlse_divided_by_the_group", dlse, "f32", dlse_divided_by_the_group),
      backward("bwd_dlse_ignored_if_v_dim_differs", dlse, "f32 f16", dlse_ignored_if_v_dim_differs),
      backward("bwd_dlse_ignored_without_dout", dlse, "f32 bf16", dlse_ignored_without_dout),
      backward("bwd_dlse_in_the_first_key_tile_only", dlse, "f32", dlse_in_the_first_key_tile_only),
      backward("bwd_dlse_added_to_dv", dlse, "f32 f16", dlse_added_to_dv),
  };
}

}  // namespace

std::vector<Mutant> bwd_third_options() {
  std::vector<Mutant> all = mask_faults();
  const std::vector<Mutant> more = dlse_faults();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace flashcore::mutants
