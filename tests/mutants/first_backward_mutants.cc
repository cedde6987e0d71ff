// Mutants of the backward pass, written together with the probes, and correct ones.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

float rounded(Format format, float x) { return static_cast<float>(verify::rounded(format, x)); }

/// Counts a tile `times` if `which` holds for it, else once.
template <typename Which>
auto tile_counts(float times, Which which) {
  return [=](const BackwardWork& w, int gradient, std::int64_t q_tile, std::int64_t k_tile) {
    return which(w, gradient, q_tile, k_tile) ? times : 1.0f;
  };
}

std::vector<Mutant> memory_faults() {
  return {
      backward("bwd_last_row_of_dq_unwritten", coverage, "f32 bf16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   if (i + 1 < t.shape[2] || i == 0) write(t, b, h, i, c, x);
                 };
               }),
      backward("bwd_dk_not_zeroed", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dk[at(j, w.d, c)] +=
                           static_cast<float>(read(*w.call->dk, w.b, w.h / w.group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_partial_query_tile_lost", tail, "f32 bf16",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
                       return g != kOfDq && (q_tile + 1) * 32 > w.m && w.m > 32;
                     });
               }),
      backward("bwd_partial_key_tile_lost_in_dq", tail, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
                       return g == kOfDq && (k_tile + 1) * 32 > w.n;
                     });
               }),
  };
}

std::vector<Mutant> address_faults() {
  return {
      backward("bwd_dq_of_heads_exchanged", layout, "f32 f16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   write(t, b, t.shape[1] == 6 || t.shape[1] == 3 ? (h + 1) % t.shape[1] : h, i, c,
                         x);
                 };
               }),
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
      backward("bwd_strides_of_dv_ignored", layout, "f32 bf16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   flashcore_tensor compact = t;
                   std::int64_t strides[4] = {t.shape[1] * t.shape[2] * t.shape[3],
                                              t.shape[2] * t.shape[3], t.shape[3], 1};
                   compact.strides = strides;
                   write(compact, b, h, i, c, x);
                 };
               }),
      backward("bwd_key_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.k[0] += 1e-2f * static_cast<float>(read(*w.call->forward->k, w.batch - 1,
                                                             w.kv_heads - 1, w.n - 1, w.d));
                 };
               }),
      backward("bwd_writes_to_dout", bounds, "f32 f16",
               [](BackwardParts& p) {
                 p.returned = [](const flashcore_verify_backward_call& c) {
                   write(*c.dout, 0, 0, 0, 0, 0.5);
                 };
               }),
      Mutant{"bwd_every_third_call_differs", determinism, "f32", mutant([](Parts&) {}), "", false,
             []() -> VerifyBackwardFunction {
               auto calls = std::make_shared<int>(0);
               BackwardParts p = default_backward();
               p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
               p.head_done = [calls](BackwardWork& w) {
                 if (*calls % 3 == 0 && w.h == 0) w.dq[w.dq.size() / 2] += 0.01f;
               };
               return [p](const flashcore_verify_backward_call& c, std::string*) {
                 return differentiate(p, c);
               };
             }},
  };
}

std::vector<Mutant> p_faults() {
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
  };
}

std::vector<Mutant> dp_and_delta_faults() {
  return {
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
  };
}

std::vector<Mutant> ds_faults() {
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
  };
}

std::vector<Mutant> product_faults() {
  return {
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
      backward("bwd_dq_from_p", dq, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork&, const Pair& x) { return x.p; };
               }),
      backward(
          "bwd_dq_negative", dq, "f32 bf16",
          [](BackwardParts& p) { p.dq_scale = [](const BackwardWork& w) { return -w.scale; }; }),
      backward("bwd_dk_from_dp", dk, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return x.dp; };
               }),
      backward(
          "bwd_dk_negative", dk, "f32",
          [](BackwardParts& p) { p.dk_scale = [](const BackwardWork& w) { return -w.scale; }; }),
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
  };
}

std::vector<Mutant> mask_faults() {
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
  };
}

}  // namespace

std::vector<Mutant> first_backward_mutants() {
  std::vector<Mutant> all;
  for (const auto& part : {memory_faults(), address_faults(), p_faults(), dp_and_delta_faults(),
                           ds_faults(), product_faults(), mask_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::vector<Mutant> correct_backwards() {
  const auto rounded_operands = [](Format format) {
    return [=](BackwardParts& p) {
      p.in_dv = [=](const BackwardWork&, const Pair& x) { return rounded(format, x.p); };
      p.in_dk = p.in_dq = [=](const BackwardWork&, const Pair& x) { return rounded(format, x.ds); };
    };
  };
  const auto everything_rounded = [](Format format) {
    return [=](BackwardParts& p) {
      p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
        Pair narrow = x;
        narrow.score = rounded(format, x.score);
        return rounded(format, right(w, narrow));
      };
      p.dp = [=, right = p.dp](const BackwardWork& w, const Pair& x) {
        return rounded(format, right(w, x));
      };
      p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
        return rounded(format, right(w, i));
      };
      p.ds = [=, right = p.ds](const BackwardWork& w, const Pair& x) {
        return rounded(format, right(w, x));
      };
    };
  };
  return {
      backward("bwd_tiled_32", none, "f32 bf16 f16", [](BackwardParts&) {}),
      backward("bwd_one_tile", none, "f32 bf16", [](BackwardParts& p) { p.tile = 1 << 20; }),
      backward("bwd_tiled_1", none, "f32", [](BackwardParts& p) { p.tile = 1; }),
      backward("bwd_without_dlse", none, "f32", [](BackwardParts& p) { p.takes_dlse = false; }),
      backward("bwd_operands_in_bf16", none, "bf16", rounded_operands(Format::bf16)),
      backward("bwd_operands_in_f16", none, "f16", rounded_operands(Format::f16)),
      backward("bwd_everything_in_bf16", none, "bf16", everything_rounded(Format::bf16)),
      backward("bwd_everything_in_f16", none, "f16", everything_rounded(Format::f16)),
  };
}

}  // namespace flashcore::mutants
