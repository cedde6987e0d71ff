// Mutants of the backward pass: faults of dP, delta and dS.
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

std::vector<Mutant> bwd_dp_faults() {
  return {
      backward("bwd_dp_with_v_of_another_head", dp, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                       w.v[at(j, w.dv_dim, c)] = static_cast<float>(
                           read(*w.call->forward->v, w.b, (w.kv_head + 1) % w.kv_heads, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dp_of_half_the_columns", dp, "f32 bf16",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < w.dv_dim / 2; ++c) {
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_with_next_value", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   Pair next = x;
                   next.j = (x.j + 1) % w.n;
                   return right(w, next);
                 };
               }),
      backward("bwd_dp_of_last_column_missing", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   const std::int64_t c = w.dv_dim - 1;
                   return right(w, x) - w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                 };
               }),
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
      backward("bwd_dp_with_k_in_place_of_v", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.k[at(x.j, w.d, c)];
                   }
                   return sum;
                 };
               }),
      backward(
          "bwd_dp_times_scale", dp, "f32 bf16",
          [](BackwardParts& p) {
            p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
              return w.scale * right(w, x);
            };
          },
          scale),
      backward("bwd_dp_limited", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return std::clamp(right(w, x), -4.0f, 4.0f);
                 };
               }),
      backward("bwd_dp_of_head_dim_columns", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_with_dout_of_another_head", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                     sum += static_cast<float>(
                                read(*w.call->dout, w.b, (w.h + 1) % w.q_heads, x.i, c)) *
                            w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_without_columns_from_96", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < std::min<std::int64_t>(w.dv_dim, 96); ++c) {
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
  };
}

std::vector<Mutant> bwd_delta_faults() {
  return {
      backward("bwd_delta_left_out", delta, "f32 bf16",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   return -w.dlse[static_cast<std::size_t>(i)];
                 };
               }),
      backward("bwd_delta_of_row_before", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, std::max<std::int64_t>(i - 1, 0));
                 };
               }),
      backward("bwd_delta_in_bf16", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return rounded(Format::bf16, right(w, i));
                 };
               }),
      backward("bwd_delta_added", delta, "f32 f16",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return -right(w, i);
                 };
               }),
      backward("bwd_delta_of_half_the_columns", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   float sum = -w.dlse[static_cast<std::size_t>(i)];
                   for (std::int64_t c = 0; c < w.dv_dim / 2; ++c) {
                     sum += w.dout[at(i, w.dv_dim, c)] * w.out[at(i, w.dv_dim, c)];
                   }
                   return sum;
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
      backward("bwd_delta_of_first_head", delta, "f32 f16",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   float sum = -w.dlse[static_cast<std::size_t>(i)];
                   for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                     sum += static_cast<float>(read(*w.call->dout, w.b, 0, i, c) *
                                               read(*w.call->forward->out, w.b, 0, i, c));
                   }
                   return sum;
                 };
               }),
      backward("bwd_delta_with_out_of_another_head", delta, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->forward->out, w.b, (w.h + 1) % w.q_heads, w.m, w.dv_dim,
                             w.out);
                 };
               }),
      backward("bwd_delta_summed_over_rows", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, i) + (i > 0 ? w.delta[static_cast<std::size_t>(i - 1)] : 0);
                 };
               }),
      backward("bwd_delta_times_scale", delta, "f32 bf16",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return w.scale * right(w, i);
                 };
               }),
      backward("bwd_delta_of_later_row_tiles_missing", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return i < 32 ? right(w, i) : -w.dlse[static_cast<std::size_t>(i)];
                 };
               }),
      backward("bwd_delta_missing_if_causal", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return is_causal(w) ? -w.dlse[static_cast<std::size_t>(i)] : right(w, i);
                 };
               }),
      backward("bwd_delta_without_last_column", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   const std::size_t last = at(i, w.dv_dim, w.dv_dim - 1);
                   return right(w, i) - w.dout[last] * w.out[last];
                 };
               }),
      backward("bwd_delta_of_head_dim_columns", delta, "f32 bf16",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   float sum = -w.dlse[static_cast<std::size_t>(i)];
                   for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
                     sum += w.dout[at(i, w.dv_dim, c)] * w.out[at(i, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_delta_absolute", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return std::fabs(right(w, i));
                 };
               }),
      backward("bwd_delta_of_rows_from_1024_missing", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return i < 1024 ? right(w, i) : -w.dlse[static_cast<std::size_t>(i)];
                 };
               }),
  };
}

std::vector<Mutant> bwd_ds_faults() {
  return {
      backward("bwd_ds_without_p", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return x.dp - w.delta[static_cast<std::size_t>(x.i)];
                 };
               }),
      backward("bwd_ds_with_p_squared", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return x.p * right(w, x);
                 };
               }),
      backward("bwd_softcap_derivative_left_out", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.slope = [](const BackwardWork&, const Pair&) { return 1.0f; };
               }),
      backward("bwd_softcap_derivative_without_square", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [](const BackwardWork& w, const Pair& x) {
                   return w.softcap == 0 ? 1.0f : 1 - std::fabs(std::tanh(x.z / w.softcap));
                 };
               }),
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
      backward("bwd_ds_negative", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return -right(w, x);
                 };
               }),
      backward("bwd_ds_limited", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return std::clamp(right(w, x), -0.25f, 0.25f);
                 };
               }),
      backward("bwd_ds_with_1_minus_p", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return right(w, x) * (1 - x.p);
                 };
               }),
      backward("bwd_dp_not_times_p", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return x.dp - x.p * w.delta[static_cast<std::size_t>(x.i)];
                 };
               }),
      backward("bwd_absolute_ds", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return std::fabs(right(w, x));
                 };
               }),
      backward("bwd_ds_of_small_weights_lost", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return x.p < 0.03f ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_softcap_slope_plus", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [](const BackwardWork& w, const Pair& x) {
                   if (w.softcap == 0) return 1.0f;
                   const float t = std::tanh(x.z / w.softcap);
                   return 1 + t * t;
                 };
               }),
      backward("bwd_softcap_slope_of_the_capped_score", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.slope = [](const BackwardWork& w, const Pair& x) {
                   if (w.softcap == 0) return 1.0f;
                   const float t = std::tanh(x.score / w.softcap);
                   return 1 - t * t;
                 };
               }),
      backward("bwd_softcap_slope_over_the_cap", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return w.softcap == 0 ? 1.0f : right(w, x) / w.softcap;
                 };
               }),
      backward("bwd_softcap_slope_times_the_cap", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return w.softcap == 0 ? 1.0f : right(w, x) * w.softcap;
                 };
               }),
      backward("bwd_softcap_slope_missing_if_causal", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return is_causal(w) ? 1.0f : right(w, x);
                 };
               }),
  };
}

std::vector<Mutant> bwd_dlse_faults() {
  return {
      backward("bwd_dlse_ignored", dlse, "f32 bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) { std::fill(w.dlse.begin(), w.dlse.end(), 0.0f); };
               }),
      backward("bwd_dlse_with_wrong_sign", dlse, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dlse) x = -x;
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
      backward("bwd_dlse_twice", dlse, "f32 f16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dlse) x *= 2;
                 };
               }),
      backward("bwd_dlse_of_another_head", dlse, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   if (w.call->dlse == nullptr) return;
                   load_rows(*w.call->dlse, w.b, (w.h + 1) % w.q_heads, w.m, 1, w.dlse);
                 };
               }),
      backward("bwd_dlse_ignored_with_a_softcap", dlse, "f32 bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   if (w.softcap > 0) std::fill(w.dlse.begin(), w.dlse.end(), 0.0f);
                 };
               }),
      backward("bwd_dlse_in_dq_only", dlse, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return x.ds - x.p * w.dlse[static_cast<std::size_t>(x.i)];
                 };
               }),
      backward("bwd_dlse_of_windows_ignored", dlse, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   if (w.call->forward->window_left >= 0) {
                     std::fill(w.dlse.begin(), w.dlse.end(), 0.0f);
                   }
                 };
               }),
  };
}

}  // namespace flashcore::mutants
