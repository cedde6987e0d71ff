// Mutants of the backward pass: faults of the products, of their sums and of masks.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "mutants/bwd_faults.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

}  // namespace

std::vector<Mutant> bwd_dq_faults() {
  return {
      backward("bwd_dq_from_p", dq, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork&, const Pair& x) { return x.p; };
               }),
      backward(
          "bwd_dq_negative", dq, "f32 bf16",
          [](BackwardParts& p) { p.dq_scale = [](const BackwardWork& w) { return -w.scale; }; }),
      backward("bwd_dq_from_dp", dq, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork&, const Pair& x) { return x.dp; };
               }),
      backward("bwd_last_column_of_dq_zero", dq, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) w.dq[at(i, w.d, w.d - 1)] = 0;
                 };
               }),
      backward("bwd_dq_with_k_of_next_key", dq, "f32 bf16",
               [](BackwardParts& p) {
                 // The k of key j meets dS of the key before it.
                 p.in_dq = [](const BackwardWork& w, const Pair& x) {
                   return ds_of(w, x.i, (x.j + w.n - 1) % w.n);
                 };
               }),
      backward("bwd_columns_of_dq_exchanged", dq, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     std::swap(w.dq[at(i, w.d, w.d - 1)], w.dq[at(i, w.d, w.d - 2)]);
                   }
                 };
               }),
      backward("bwd_dq_columns_from_192_zero", dq, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 192; c < w.d; ++c) w.dq[at(i, w.d, c)] = 0;
                   }
                 };
               }),
      backward("bwd_softcap_slope_missing_in_dq", dq, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [slope = p.slope](const BackwardWork& w, const Pair& x) {
                   return x.ds / std::max(slope(w, x), 1e-6f);
                 };
               }),
  };
}

std::vector<Mutant> bwd_dk_faults() {
  return {
      backward("bwd_dk_from_dp", dk, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return x.dp; };
               }),
      backward(
          "bwd_dk_negative", dk, "f32",
          [](BackwardParts& p) { p.dk_scale = [](const BackwardWork& w) { return -w.scale; }; }),
      backward("bwd_dk_from_p", dk, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return x.p; };
               }),
      backward("bwd_dk_from_absolute_ds", dk, "f32 bf16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return std::fabs(x.ds); };
               }),
      backward("bwd_dk_with_q_of_next_row", dk, "f32",
               [](BackwardParts& p) {
                 // The q of row i meets dS of the row after it.
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return ds_of(w, (x.i + 1) % w.m, x.j);
                 };
               }),
      backward("bwd_first_half_of_dk_columns_only", dk, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = w.d / 2; c < w.d; ++c) w.dk[at(j, w.d, c)] = 0;
                   }
                 };
               }),
  };
}

std::vector<Mutant> bwd_accumulate_faults() {
  return {
      backward("bwd_last_query_tile_dropped", accumulate, "f32 bf16",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
                       return g != kOfDq && q_tile > 0 && q_tile == (w.m - 1) / 32;
                     });
               }),
      backward("bwd_dq_tile_added_twice", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(2, [](const BackwardWork&, int g, std::int64_t,
                                       std::int64_t k_tile) { return g == kOfDq && k_tile == 1; });
               }),
      backward("bwd_second_key_tile_lost_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork&, int g, std::int64_t,
                                       std::int64_t k_tile) { return g == kOfDq && k_tile == 2; });
               }),
      backward("bwd_last_head_of_the_group_only", accumulate, "f32 bf16",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
                       return g != kOfDq && w.h % w.group != w.group - 1;
                     });
               }),
      backward("bwd_first_query_tile_twice_in_dv", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
                   return g == kOfDv && q_tile == 0 && w.m > 32 ? 2.0f : 1.0f;
                 };
               }),
      backward("bwd_last_key_tile_only_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
                   return g == kOfDq && k_tile != (w.n - 1) / 32 ? 0.0f : 1.0f;
                 };
               }),
      backward("bwd_every_third_tile_lost_in_dk", accumulate, "f32 bf16",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork&, int g, std::int64_t q_tile, std::int64_t) {
                   return g == kOfDk && q_tile % 3 == 2 ? 0.0f : 1.0f;
                 };
               }),
      backward("bwd_first_head_of_the_group_twice", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
                   return g != kOfDq && w.group > 1 && w.h % w.group == 0 ? 2.0f : 1.0f;
                 };
               }),
      backward("bwd_dk_and_dv_mean_over_the_group", accumulate, "f32 bf16",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork& w, const Pair& x) {
                   return x.p / static_cast<float>(w.group);
                 };
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return x.ds / static_cast<float>(w.group);
                 };
               }),
      backward("bwd_second_head_of_the_group_lost_in_dk", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
                       return g == kOfDk && w.h % w.group == 1;
                     });
               }),
      backward("bwd_query_tiles_past_512_lost_in_dv", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.count = tile_counts(0, [](const BackwardWork&, int g, std::int64_t q_tile,
                                             std::int64_t) { return g == kOfDv && q_tile >= 16; });
               }),
      backward("bwd_key_tiles_past_1024_lost_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork&, int g, std::int64_t,
                                       std::int64_t k_tile) { return g == kOfDq && k_tile >= 32; });
               }),
      backward("bwd_key_tile_33_twice_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(2, [](const BackwardWork&, int g, std::int64_t,
                                       std::int64_t k_tile) { return g == kOfDq && k_tile == 33; });
               }),
      backward("bwd_only_diagonal_tiles_in_dk", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork&, int g, std::int64_t q_tile, std::int64_t k_tile) {
                       return g == kOfDk && (q_tile + k_tile) % 2 == 1;
                     });
               }),
      backward("bwd_first_row_of_each_tile_lost_in_dk", accumulate, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return x.i % 32 == 0 && w.m > 32 ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_second_query_tile_overwrites_dv", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
                   return g == kOfDv && q_tile < (w.m - 1) / 64 * 2 ? 0.0f : 1.0f;
                 };
               }),
      backward("bwd_dq_not_zeroed_between_heads", accumulate, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   if (w.h == 0) return;
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dq[at(i, w.d, c)] +=
                           static_cast<float>(read(*w.call->dq, w.b, w.h - 1, i, c));
                     }
                   }
                 };
               }),
      backward("bwd_third_query_tile_three_times_in_dk", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.count = tile_counts(3, [](const BackwardWork&, int g, std::int64_t q_tile,
                                             std::int64_t) { return g == kOfDk && q_tile == 2; });
               }),
      backward("bwd_half_of_later_key_tiles_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0.5f, [](const BackwardWork&, int g, std::int64_t, std::int64_t k_tile) {
                       return g == kOfDq && k_tile > 0;
                     });
               }),
  };
}

std::vector<Mutant> bwd_mask_faults() {
  return {
      backward("bwd_mask_not_applied_again", mask, "f32 bf16",
               [](BackwardParts& p) {
                 p.visible = [](const BackwardWork&, std::int64_t, std::int64_t) { return true; };
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   const float lse = w.lse[static_cast<std::size_t>(x.i)];
                   return std::isinf(lse) ? 0.0f : std::exp(x.score - lse);
                 };
               }),
      backward("bwd_causal_off_by_one", mask, "f32 f16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return right(w, i, j) && (w.call->forward->causal == 0 || j != i + w.n - w.m);
                 };
               }),
      backward("bwd_row_without_keys_is_nan", mask, "f32",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return right(w, i, j) || std::isinf(w.lse[static_cast<std::size_t>(i)]);
                 };
               }),
      backward("bwd_diagonal_tile_skipped", mask, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t k) {
                       return g == kOfDk && w.call->forward->causal != 0 && q_tile == k && k > 0;
                     });
               }),
      backward("bwd_window_ignored", mask, "f32 bf16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return w.call->forward->causal != 0 ? right(w, i, j) : true;
                 };
               }),
      backward("bwd_causal_top_left", mask, "f32 f16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return is_causal(w) ? j <= i && !std::isinf(w.lse[static_cast<std::size_t>(i)])
                                       : right(w, i, j);
                 };
               }),
      backward("bwd_diagonal_missing_in_dk", mask, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return is_causal(w) && x.j == x.i + w.n - w.m ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_window_one_wider", mask, "f32 bf16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   const std::int64_t left = w.call->forward->window_left;
                   return right(w, i, j) || (left >= 0 && i + w.n - w.m - j == left + 1);
                 };
               }),
      backward("bwd_tiles_above_the_diagonal_skipped", mask, "f32",
               [](BackwardParts& p) {
                 // As if q_len and kv_len were equal.
                 p.count = [](const BackwardWork& w, int, std::int64_t q_tile,
                              std::int64_t k_tile) {
                   return is_causal(w) && k_tile > q_tile ? 0.0f : 1.0f;
                 };
               }),
      backward(
          "bwd_window_left_ignored", mask, "f32",
          [](BackwardParts& p) {
            p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
              const std::int64_t position = i + w.n - w.m, reach = w.call->forward->window_right;
              return right(w, i, j) || (!std::isinf(w.lse[static_cast<std::size_t>(i)]) &&
                                        j <= position && !(reach >= 0 && j - position > reach));
            };
          }),
      backward("bwd_window_right_one_less", mask, "f32 f16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   const std::int64_t reach = w.call->forward->window_right;
                   return right(w, i, j) && !(reach > 0 && j - (i + w.n - w.m) == reach);
                 };
               }),
      backward("bwd_hidden_pairs_of_p_in_dv", mask, "f32",
               [](BackwardParts& p) {
                 p.visible = [](const BackwardWork&, std::int64_t, std::int64_t) { return true; };
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   const float lse = w.lse[static_cast<std::size_t>(x.i)];
                   return std::isinf(lse) ? 0.0f : std::exp(x.score - lse);
                 };
                 p.in_dk = p.in_dq = [right = p.visible](const BackwardWork& w, const Pair& x) {
                   const std::int64_t position = x.i + w.n - w.m;
                   const flashcore_verify_call& c = *w.call->forward;
                   const bool hidden = (c.causal != 0 && x.j > position) ||
                                       (c.window_left >= 0 && position - x.j > c.window_left) ||
                                       (c.window_right >= 0 && x.j - position > c.window_right);
                   return hidden ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_causal_ignored_in_a_window", mask, "f32 bf16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   const flashcore_verify_call& c = *w.call->forward;
                   if (c.window_left < 0 || c.causal == 0) return right(w, i, j);
                   const std::int64_t position = i + w.n - w.m;
                   return position - j <= c.window_left &&
                          !std::isinf(w.lse[static_cast<std::size_t>(i)]);
                 };
               }),
      backward(
          "bwd_diagonal_tile_unmasked_in_long_calls", mask, "f32",
          [](BackwardParts& p) {
            p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
              return right(w, i, j) || (is_causal(w) && w.m == w.n && i >= 64 && i / 32 == j / 32);
            };
          }),
      backward("bwd_dq_is_nan_for_rows_without_keys", mask, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     if (std::isinf(w.lse[static_cast<std::size_t>(i)])) {
                       w.dq[at(i, w.d, 0)] = std::nanf("");
                     }
                   }
                 };
               }),
      backward("bwd_first_visible_tile_of_a_window_skipped", mask, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int, std::int64_t q_tile, std::int64_t k_tile) {
                       const std::int64_t left = w.call->forward->window_left;
                       return left >= 0 && k_tile > 0 &&
                              k_tile == (q_tile * 32 + w.n - w.m - left) / 32 && k_tile < q_tile;
                     });
               }),
      backward("bwd_hidden_scores_of_minus_1000", mask, "f32 bf16",
               [](BackwardParts& p) {
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return right(w, i, j) || !std::isinf(w.lse[static_cast<std::size_t>(i)]);
                 };
                 p.p = [right = p.p, seen = default_backward().visible](const BackwardWork& w,
                                                                        const Pair& x) {
                   Pair pair = x;
                   if (!seen(w, x.i, x.j)) pair.score = -1000;
                   return right(w, pair);
                 };
               }),
  };
}

}  // namespace flashcore::mutants
