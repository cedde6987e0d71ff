// Mutants of the backward pass: faults of P, of factors and of roundings.
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

std::vector<Mutant> bwd_p_faults() {
  return {
      backward("bwd_p_not_normalised", dv, "f32 bf16",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork&, const Pair& x) { return std::exp(x.score); };
               }),
      backward("bwd_dv_from_ds", dv, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork&, const Pair& x) { return x.ds; };
               }),
      backward("bwd_dv_times_scale", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork& w, const Pair& x) { return x.p * w.scale; };
               }),
      backward("bwd_lse_of_next_row", dv, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   std::rotate(w.lse.begin(), w.lse.begin() + 1, w.lse.end());
                 };
               }),
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
      backward("bwd_lse_of_another_head", dv, "f32 bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->forward->lse, w.b, (w.h + 1) % w.q_heads, w.m, 1, w.lse);
                 };
               }),
      backward("bwd_lse_of_the_kv_head", dv, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->forward->lse, w.b, w.h / w.group, w.m, 1, w.lse);
                 };
               }),
      backward("bwd_exp_before_the_lse", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.score) / std::exp(w.lse[static_cast<std::size_t>(x.i)]);
                 };
               }),
      backward("bwd_dv_with_v_in_place_of_dout", dv, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::size_t e = 0; e < w.dv.size(); ++e) w.dv[e] = w.v[e];
                 };
               }),
      backward("bwd_softcap_missing_in_p", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.z - w.lse[static_cast<std::size_t>(x.i)]);
                 };
               }),
      backward("bwd_scores_without_last_column", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   const float last =
                       w.scale * w.q[at(x.i, w.d, w.d - 1)] * w.k[at(x.j, w.d, w.d - 1)];
                   return std::exp(x.score - last - w.lse[static_cast<std::size_t>(x.i)]);
                 };
               }),
      backward("bwd_dv_negative", dv, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork&, const Pair& x) { return -x.p; };
               }),
      backward("bwd_columns_of_dv_exchanged", dv, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     std::swap(w.dv[at(j, w.dv_dim, 2)], w.dv[at(j, w.dv_dim, 3)]);
                   }
                 };
               }),
      backward("bwd_dv_columns_from_128_zero", dv, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 128; c < w.dv_dim; ++c) w.dv[at(j, w.dv_dim, c)] = 0;
                   }
                 };
               }),
      backward("bwd_p_never_above_a_half", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return std::min(right(w, x), 0.5f);
                 };
               }),
      backward("bwd_dv_with_dout_of_another_head", dv, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   std::fill(w.dv.begin(), w.dv.end(), 0.0f);
                   for (std::int64_t h = w.h; h < w.h + w.group; ++h) {
                     const auto& c = *w.call;
                     std::vector<float> q(w.q.size()), dout(w.dout.size()), lse(w.lse.size());
                     load_rows(*c.forward->q, w.b, h, w.m, w.d, q);
                     load_rows(*c.dout, w.b, (h + 1) % w.q_heads, w.m, w.dv_dim, dout);
                     load_rows(*c.forward->lse, w.b, h, w.m, 1, lse);
                     for (std::int64_t i = 0; i < w.m; ++i) {
                       for (std::int64_t j = 0; j < w.n; ++j) {
                         float score = -lse[static_cast<std::size_t>(i)];
                         for (std::int64_t x = 0; x < w.d; ++x) {
                           score += w.scale * q[at(i, w.d, x)] * w.k[at(j, w.d, x)];
                         }
                         for (std::int64_t x = 0; x < w.dv_dim; ++x) {
                           w.dv[at(j, w.dv_dim, x)] += std::exp(score) * dout[at(i, w.dv_dim, x)];
                         }
                       }
                     }
                   }
                 };
               }),
      backward("bwd_lse_of_rows_from_64_missing", dv, "f32 bf16",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return x.i < 64 ? right(w, x) : std::exp(x.score);
                 };
               }),
      backward("bwd_p_of_rows_from_64_squared", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   const float once = right(w, x);
                   return x.i < 64 ? once : once * once;
                 };
               }),
  };
}

std::vector<Mutant> bwd_scale_faults() {
  return {
      backward("bwd_scores_times_log2e", scale, "f32 f16",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork& w) { return w.scale * 1.442695f; };
                 p.loaded = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {  // normalised, as if recomputed
                     float sum = 0;
                     for (std::int64_t j = 0; j < w.n; ++j) {
                       float s = 0;
                       for (std::int64_t c = 0; c < w.d; ++c)
                         s += w.q[at(i, w.d, c)] * w.k[at(j, w.d, c)];
                       sum += std::exp(s * w.scale * 1.442695f);
                     }
                     w.lse[static_cast<std::size_t>(i)] = std::log(sum);
                   }
                 };
               }),
      backward("bwd_scores_unscaled", scale, "f32",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork&) {
                   return 0.125f;
                 };  // the default of head dim 64
                 p.dq_scale = p.dk_scale = p.score_scale;
               }),
      backward("bwd_dq_without_scale", scale, "f32 bf16",
               [](BackwardParts& p) { p.dq_scale = [](const BackwardWork&) { return 1.0f; }; }),
      backward("bwd_dk_with_scale_twice", scale, "f32 f16",
               [](BackwardParts& p) {
                 p.dk_scale = [](const BackwardWork& w) { return w.scale * w.scale; };
               }),
      backward("bwd_dq_with_default_scale", scale, "f32",
               [](BackwardParts& p) {
                 p.dq_scale = [](const BackwardWork& w) {
                   return 1 / std::sqrt(static_cast<float>(w.d));
                 };
               }),
      backward("bwd_scores_scaled_twice", scale, "f32",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork& w) { return w.scale * w.scale; };
               }),
      backward("bwd_dk_without_scale", scale, "f32 bf16",
               [](BackwardParts& p) { p.dk_scale = [](const BackwardWork&) { return 1.0f; }; }),
      backward("bwd_both_times_ln2", scale, "f32",
               [](BackwardParts& p) {
                 p.dq_scale =
                     p.dk_scale = [](const BackwardWork& w) { return w.scale * 0.6931472f; };
               }),
      backward("bwd_scale_of_v_dim", scale, "f32",
               [](BackwardParts& p) {
                 p.dq_scale = p.dk_scale = [](const BackwardWork& w) {
                   return w.call->forward->has_scale != 0
                              ? w.scale
                              : 1 / std::sqrt(static_cast<float>(w.dv_dim));
                 };
               }),
      backward("bwd_large_scale_ignored_in_dk", scale, "f32 bf16",
               [](BackwardParts& p) {
                 p.dk_scale = [](const BackwardWork& w) { return std::min(w.scale, 1.0f); };
               }),
      backward("bwd_ds_times_scale", scale, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return w.scale * right(w, x);
                 };
               }),
      backward("bwd_scores_with_default_scale", scale, "f32 f16",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork& w) {
                   return 1 / std::sqrt(static_cast<float>(w.d));
                 };
               }),
  };
}

std::vector<Mutant> bwd_precision_faults() {
  return {
      backward("bwd_p_in_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork&, const Pair& x) {
                   return rounded(Format::bf16, x.p);
                 };
               }),
      backward("bwd_ds_in_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.in_dq = p.in_dk = [](const BackwardWork&, const Pair& x) {
                   return rounded(Format::bf16, x.ds);
                 };
               }),
      backward("bwd_sums_in_bf16", precision, "bf16",
               [](BackwardParts& p) {
                 p.add = [](float sum, float term) {
                   // rounded() is too slow for every term of a sum.
                   const auto bits = std::bit_cast<std::uint32_t>(sum + term);
                   const std::uint32_t even = 0x7fff + (bits >> 16 & 1);
                   return std::bit_cast<float>((bits + even) & 0xffff0000);
                 };
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
      backward("bwd_p_in_f16", precision, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return rounded(Format::f16, right(w, x));
                 };
               }),
      backward("bwd_lse_in_f16", precision, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.lse) x = rounded(Format::f16, x);
                 };
               }),
      backward("bwd_dp_in_bf16", precision, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return rounded(Format::bf16, right(w, x));
                 };
               }),
      backward("bwd_scores_in_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(rounded(Format::bf16, x.score) -
                                   w.lse[static_cast<std::size_t>(x.i)]);
                 };
               }),
      backward("bwd_v_in_bf16_for_dp", precision, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.v) x = rounded(Format::bf16, x);
                 };
               }),
      backward("bwd_ds_in_e4m3", precision, "bf16",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork&, const Pair& x) {
                   return rounded(Format::e4m3, x.ds);
                 };
               }),
  };
}

}  // namespace flashcore::mutants
