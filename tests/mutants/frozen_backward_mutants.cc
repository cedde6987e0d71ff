// Mutants of the backward pass, written after its probes were frozen, so that no probe is tuned for
// them.
#include <algorithm>
#include <cmath>
#include <memory>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

float rounded(Format format, float x) { return static_cast<float>(verify::rounded(format, x)); }

bool is_causal(const BackwardWork& w) { return w.call->forward->causal != 0; }

VerifyBackwardFunction every_second_call_loses_a_row() {
  auto calls = std::make_shared<int>(0);
  BackwardParts p = default_backward();
  p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
  p.in_dv = [calls](const BackwardWork&, const Pair& x) {
    return *calls % 2 == 0 && x.i == 3 ? 0.0f : x.p;
  };
  return [p](const flashcore_verify_backward_call& c, std::string*) { return differentiate(p, c); };
}

std::vector<Mutant> memory_faults() {
  return {
      backward("bwd_columns_from_32_of_dk_unwritten", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 32; c < w.d; ++c) {
                       w.dk[at(j, w.d, c)] =
                           static_cast<float>(read(*w.call->dk, w.b, w.h / w.group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dv_of_last_head_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   const std::int64_t group = w.h / w.group;
                   if (group == 0 || group + 1 < w.kv_heads) return;
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                       w.dv[at(j, w.dv_dim, c)] =
                           static_cast<float>(read(*w.call->dv, w.b, group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dq_added_to_old_content", coverage, "f32 bf16",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dq[at(i, w.d, c)] += static_cast<float>(read(*w.call->dq, w.b, w.h, i, c));
                     }
                   }
                 };
               }),
  };
}

std::vector<Mutant> address_faults() {
  return {
      backward("bwd_batches_of_dq_exchanged", layout, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       write(*w.call->dq, w.batch - 1 - w.b, w.h, i, c, w.dq[at(i, w.d, c)]);
                     }
                   }
                 };
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   const bool is_dq = t.shape[1] == 6;
                   if (!is_dq || t.shape[0] == 1) write(t, b, h, i, c, x);
                 };
               }),
      backward("bwd_heads_interleaved", layout, "f32 f16",
               [](BackwardParts& p) {
                 p.kv_head = [](const BackwardWork& w) { return w.h % w.kv_heads; };
               }),
      backward("bwd_strides_of_dout_ignored", layout, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   const auto* dout = static_cast<const float*>(w.call->dout->data);
                   const std::int64_t first = (w.b * w.q_heads + w.h) * w.m * w.dv_dim;
                   std::copy(dout + first, dout + first + w.m * w.dv_dim, w.dout.begin());
                 };
               }),
      backward("bwd_dout_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.dout[0] += 1e-2f * static_cast<float>(read(*w.call->dout, w.batch - 1,
                                                                w.q_heads - 1, w.m - 1, w.dv_dim));
                 };
               }),
      backward("bwd_writes_past_dv", bounds, "f32 bf16",
               [](BackwardParts& p) {
                 p.returned = [](const flashcore_verify_backward_call& c) {
                   const flashcore_tensor& t = *c.dv;
                   write(t, t.shape[0] - 1, t.shape[1] - 1, t.shape[2] - 1, t.shape[3], 1);
                 };
               }),
      Mutant{"bwd_every_second_call_loses_a_row", determinism, "f32", mutant([](Parts&) {}), "",
             false, every_second_call_loses_a_row},
      backward("bwd_rows_past_a_multiple_of_16_lost", tail, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return x.i >= w.m / 16 * 16 && w.m > 16 ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_last_of_odd_keys_lost", tail, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork& w, const Pair& x) {
                   return w.n % 2 == 1 && x.j == w.n - 1 ? 0.0f : x.ds;
                 };
               }),
  };
}

std::vector<Mutant> p_faults() {
  return {
      backward("bwd_p_from_half_the_lse", dv, "f32 bf16",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.score - 0.5f * w.lse[static_cast<std::size_t>(x.i)]);
                 };
               }),
      backward("bwd_p_times_length", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return right(w, x) * static_cast<float>(w.n);
                 };
               }),
      backward("bwd_dv_with_dout_of_next_row", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dv = [right = p.p](const BackwardWork& w, const Pair& x) {
                   Pair next = x;
                   next.i = (x.i + 1) % w.m;
                   float score = 0;
                   for (std::int64_t c = 0; c < w.d; ++c) {
                     score += w.q[at(next.i, w.d, c)] * w.k[at(x.j, w.d, c)];
                   }
                   next.score = w.scale * score;
                   return right(w, next);
                 };
               }),
      backward("bwd_scores_scaled_twice", scale, "f32",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork& w) { return w.scale * w.scale; };
               }),
      backward("bwd_exp_by_a_short_series", precision, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return right(w, x) * (1 + 1e-3f * std::sin(20 * x.score));
                 };
               }),
      backward("bwd_dout_rounded_to_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dout) x = rounded(Format::bf16, x);
                 };
               }),
      backward("bwd_k_rounded_to_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.k) x = rounded(Format::bf16, x);
                 };
               }),
      backward("bwd_sum_of_dk_in_f16", precision, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (float& x : w.dk) x = rounded(Format::f16, x);
                 };
               }),
  };
}

std::vector<Mutant> dp_and_delta_faults() {
  return {
      backward("bwd_dp_with_first_column_twice", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return right(w, x) + w.dout[at(x.i, w.dv_dim, 0)] * w.v[at(x.j, w.dv_dim, 0)];
                 };
               }),
      backward("bwd_dp_from_out", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                     sum += w.out[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_of_row_before", dp, "f32 bf16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   Pair before = x;
                   before.i = x.i > 0 ? x.i - 1 : w.m - 1;
                   return right(w, before);
                 };
               }),
      backward("bwd_delta_of_dout_squared", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   float sum = -w.dlse[static_cast<std::size_t>(i)];
                   for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                     sum += w.dout[at(i, w.dv_dim, c)] * w.dout[at(i, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_delta_twice", delta, "f32 f16",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return 2 * right(w, i);
                 };
               }),
      backward("bwd_delta_is_a_mean", delta, "f32 bf16",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, i) / static_cast<float>(w.dv_dim);
                 };
               }),
      backward("bwd_delta_of_next_row", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, (i + 1) % w.m);
                 };
               }),
      backward("bwd_delta_never_negative", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return std::max(right(w, i), 0.0f);
                 };
               }),
  };
}

std::vector<Mutant> ds_faults() {
  return {
      backward("bwd_negative_ds_lost", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return std::max(right(w, x), 0.0f);
                 };
               }),
      backward("bwd_delta_not_times_p", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return x.p * x.dp - w.delta[static_cast<std::size_t>(x.i)];
                 };
               }),
      backward("bwd_softcap_slope_of_the_score", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [](const BackwardWork& w, const Pair& x) {
                   return w.softcap == 0 ? 1.0f : 1 - x.score * x.score;
                 };
               }),
      backward("bwd_softcap_slope_twice", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return right(w, x) * right(w, x);
                 };
               }),
      backward("bwd_dlse_not_times_p", dlse, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   const float dlse = w.dlse[static_cast<std::size_t>(x.i)];
                   return right(w, x) - x.p * dlse + dlse;
                 };
               }),
      backward("bwd_dlse_of_next_row", dlse, "f32 f16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   std::rotate(w.dlse.begin(), w.dlse.begin() + 1, w.dlse.end());
                 };
               }),
  };
}

std::vector<Mutant> product_faults() {
  return {
      backward("bwd_dk_without_scale", scale, "f32 bf16",
               [](BackwardParts& p) { p.dk_scale = [](const BackwardWork&) { return 1.0f; }; }),
      backward("bwd_both_times_ln2", scale, "f32",
               [](BackwardParts& p) {
                 p.dq_scale =
                     p.dk_scale = [](const BackwardWork& w) { return w.scale * 0.6931472f; };
               }),
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
      backward("bwd_dk_from_p", dk, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return x.p; };
               }),
      backward("bwd_dk_from_absolute_ds", dk, "f32 bf16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return std::fabs(x.ds); };
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
  };
}

std::vector<Mutant> mask_faults() {
  return {
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
  };
}

}  // namespace

std::vector<Mutant> frozen_backward_mutants() {
  std::vector<Mutant> all;
  for (const auto& part : {memory_faults(), address_faults(), p_faults(), dp_and_delta_faults(),
                           ds_faults(), product_faults(), mask_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
