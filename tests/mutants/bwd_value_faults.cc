// Mutants of the backward pass: P, dP, delta, dS and their products in tiles, rows and columns.
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

/// dP of a pair.
float dp_of(const BackwardWork& w, std::int64_t i, std::int64_t j) {
  float sum = 0;
  for (std::int64_t c = 0; c < w.dv_dim; ++c) {
    sum += w.dout[at(i, w.dv_dim, c)] * w.v[at(j, w.dv_dim, c)];
  }
  return sum;
}

float p_of(const BackwardWork& w, std::int64_t i, std::int64_t j) {
  float score = 0;
  for (std::int64_t c = 0; c < w.d; ++c) score += w.q[at(i, w.d, c)] * w.k[at(j, w.d, c)];
  return std::exp(w.scale * score - of_row(w.lse, i));
}

/// Delta of a row as a sum over the keys [first, end) of a range that depends on the key.
template <typename Range>
void delta_over_keys(BackwardParts& p, Range range) {
  const auto sums = std::make_shared<std::vector<float>>();  // of a row, up to each key
  const auto row = std::make_shared<std::int64_t>(-1);
  const auto sum_up = [=, visible = p.visible](const BackwardWork& w, std::int64_t i) {
    sums->assign(1, 0.0f);
    for (std::int64_t j = 0; j < w.n; ++j) {
      sums->push_back(sums->back() + (visible(w, i, j) ? p_of(w, i, j) * dp_of(w, i, j) : 0.0f));
    }
  };
  p.loaded = [=](BackwardWork&) { *row = -1; };
  p.tile = 1 << 20;  // row by row
  p.ds = [=](const BackwardWork& w, const Pair& x) {
    if (*row != x.i) sum_up(w, *row = x.i);
    const auto [first, end] = range(w, x.j);
    const float delta = of_row(*sums, end) - of_row(*sums, first) - of_row(w.dlse, x.i);
    return x.p * (x.dp - delta);
  };
}

/// The weight at row j and column i of a tile, in a product of its own.
template <typename Add>
void transposed_tiles(BackwardParts& p, int gradient, std::int64_t tile, Add add) {
  replace_product(p, gradient, [=](BackwardWork& w, const std::vector<float>& weights) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const std::int64_t row = i / tile * tile + j % tile, column = j / tile * tile + i % tile;
        if (row < w.m && column < w.n) add(w, i, j, weights[at(row, w.n, column)]);
      }
    }
  });
}

void add_to_dv(BackwardWork& w, std::int64_t i, std::int64_t j, float weight) {
  add_scaled(weight, w.dout.data() + i * w.dv_dim, w.dv_dim, w.dv.data() + j * w.dv_dim);
}
void add_to_dk(BackwardWork& w, std::int64_t i, std::int64_t j, float weight) {
  add_scaled(weight, w.q.data() + i * w.d, w.d, w.dk.data() + j * w.d);
}
void add_to_dq(BackwardWork& w, std::int64_t i, std::int64_t j, float weight) {
  add_scaled(w.scale * weight, w.k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
}

}  // namespace

std::vector<Mutant> bwd_p_tile_faults() {
  return {
      backward("bwd_p_not_transposed_in_tiles_of_8", dv, "f32 bf16",
               [](BackwardParts& p) { transposed_tiles(p, kOfDv, 8, add_to_dv); }),
      backward("bwd_small_p_skipped_in_dv", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork&, const Pair& x) {
                   return x.p < 0.015f ? 0.0f : x.p;
                 };
               }),
      backward("bwd_dv_with_dout_of_the_old_stage", dv, "f32",
               [](BackwardParts& p) {
                 replace_product(p, kOfDv, [](BackwardWork& w, const std::vector<float>& weights) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     const float* dout = w.dout.data() + (i >= 16 ? i - 16 : i) * w.dv_dim;
                     for (std::int64_t j = 0; j < w.n; ++j) {
                       add_scaled(weights[at(i, w.n, j)], dout, w.dv_dim,
                                  w.dv.data() + j * w.dv_dim);
                     }
                   }
                 });
               }),
      backward("bwd_lse_of_row_8_apart", dv, "f32 bf16",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.score - of_row(w.lse, (x.i ^ 8) < w.m ? x.i ^ 8 : x.i));
                 };
               }),
      backward("bwd_lse_never_negative", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.p = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.score - std::max(of_row(w.lse, x.i), 0.0f));
                 };
               }),
      backward("bwd_dv_from_p_squared", dv, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork&, const Pair& x) { return x.p * x.p; };
               }),
      backward("bwd_p_not_normalised_in_dv", dv, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork& w, const Pair& x) {
                   return x.p * std::exp(of_row(w.lse, x.i));
                 };
               }),
      backward("bwd_p_as_maximum_only", dv, "f32",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   return right(w, x) > 0.5f ? 1.0f : right(w, x);
                 };
               }),
  };
}

std::vector<Mutant> bwd_dp_tile_faults() {
  return {
      backward("bwd_dp_of_the_last_key_tile_zero", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return x.j / 16 == (w.n - 1) / 16 && w.n > 16 ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_dp_of_row_0_zero", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return x.i == 0 ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_dp_with_value_of_paired_key", dp, "f32 bf16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   Pair other = x;
                   if ((x.j ^ 1) < w.n) other.j = x.j ^ 1;
                   return right(w, other);
                 };
               }),
      backward("bwd_dp_absolute", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return std::fabs(right(w, x));
                 };
               }),
      backward("bwd_dp_negative", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return -right(w, x);
                 };
               }),
      backward("bwd_dp_three_times", dp, "f32 bf16",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return 3 * right(w, x);
                 };
               }),
      backward("bwd_dp_over_the_row_length", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
                   return right(w, x) / static_cast<float>(w.dv_dim);
                 };
               }),
      backward("bwd_dp_with_q", dp, "f32 f16",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
                     sum += w.q[at(x.i, w.d, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_of_whole_steps_of_32_columns", dp, "f32",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < w.dv_dim / 32 * 32; ++c) {
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_dp_from_transposed_tile_of_v", dp, "f32 bf16",
               [](BackwardParts& p) {
                 p.dp = [](const BackwardWork& w, const Pair& x) {
                   float sum = 0;
                   for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                     const std::int64_t key = x.j / 8 * 8 + c % 8, column = c / 8 * 8 + x.j % 8;
                     if (key >= w.n || column >= w.dv_dim) continue;
                     sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(key, w.dv_dim, column)];
                   }
                   return sum;
                 };
               }),
  };
}

std::vector<Mutant> bwd_delta_tile_faults() {
  const auto tile_of = [](std::int64_t tile) {
    return [=](const BackwardWork& w, std::int64_t j) {
      return std::pair{j / tile * tile, std::min(j / tile * tile + tile, w.n)};
    };
  };
  const auto so_far = [](std::int64_t tile) {
    return [=](const BackwardWork& w, std::int64_t j) {
      return std::pair{std::int64_t{0}, std::min(j / tile * tile + tile, w.n)};
    };
  };
  return {
      backward("bwd_delta_of_tiles_of_8", delta, "f32 f16",
               [=](BackwardParts& p) { delta_over_keys(p, tile_of(8)); }),
      backward("bwd_delta_of_tiles_of_32", delta, "f32",
               [=](BackwardParts& p) { delta_over_keys(p, tile_of(32)); }),
      backward("bwd_delta_of_tiles_of_64", delta, "f32",
               [=](BackwardParts& p) { delta_over_keys(p, tile_of(64)); }),
      backward("bwd_delta_so_far", delta, "f32 bf16",
               [=](BackwardParts& p) { delta_over_keys(p, so_far(16)); }),
      backward("bwd_delta_of_all_but_the_last_tile", delta, "f32",
               [](BackwardParts& p) {
                 delta_over_keys(p, [](const BackwardWork& w, std::int64_t) {
                   return std::pair{std::int64_t{0}, w.n > 16 ? (w.n - 1) / 16 * 16 : w.n};
                 });
               }),
      backward("bwd_delta_of_first_row_of_the_tile", delta, "f32 f16",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, i / 16 * 16);
                 };
               }),
      backward("bwd_delta_of_16_rows_before", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return right(w, i >= 16 ? i - 16 : i);
                 };
               }),
      backward("bwd_delta_from_q", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [](const BackwardWork& w, std::int64_t i) {
                   float sum = -of_row(w.dlse, i);
                   for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
                     sum += w.dout[at(i, w.dv_dim, c)] * w.q[at(i, w.d, c)];
                   }
                   return sum;
                 };
               }),
      backward("bwd_delta_summed_over_the_heads", delta, "f32 bf16",
               [](BackwardParts& p) {
                 const auto sum = std::make_shared<std::vector<float>>();
                 p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
                   if (w.h == 0 && i == 0) sum->assign(static_cast<std::size_t>(w.m), 0.0f);
                   return (*sum)[static_cast<std::size_t>(i)] += right(w, i);
                 };
               }),
      backward("bwd_delta_limited", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   return std::clamp(right(w, i), -1.0f, 1.0f);
                 };
               }),
      backward("bwd_delta_of_hidden_keys_too", delta, "f32",
               [](BackwardParts& p) {
                 p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
                   if (!is_causal(w) || std::isinf(of_row(w.lse, i))) return right(w, i);
                   float sum = -of_row(w.dlse, i);
                   for (std::int64_t j = 0; j < w.n; ++j) sum += p_of(w, i, j) * dp_of(w, i, j);
                   return sum;
                 };
               }),
  };
}

std::vector<Mutant> bwd_ds_tile_faults() {
  return {
      backward("bwd_ds_of_a_sigmoid", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return x.p * (1 - x.p) * (x.dp - of_row(w.delta, x.i));
                 };
               }),
      backward("bwd_ds_over_the_number_of_keys", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return right(w, x) / static_cast<float>(w.n);
                 };
               }),
      backward("bwd_ds_with_p_not_normalised", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return std::exp(x.score) * (x.dp - of_row(w.delta, x.i));
                 };
               }),
      backward("bwd_ds_with_root_of_p", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return std::sqrt(x.p) * (x.dp - of_row(w.delta, x.i));
                 };
               }),
      backward("bwd_ds_of_the_last_key_tile_zero", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return x.j / 16 == (w.n - 1) / 16 && w.n > 16 ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_ds_with_p_of_next_row", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return p_of(w, (x.i + 1) % w.m, x.j) * (x.dp - of_row(w.delta, x.i));
                 };
               }),
      backward("bwd_ds_with_p_of_next_key", ds, "f32 f16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return p_of(w, x.i, (x.j + 1) % w.n) * (x.dp - of_row(w.delta, x.i));
                 };
               }),
      backward("bwd_ds_of_small_p_lost", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return x.p < 0.015f ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_ds_on_the_diagonal_plus_p", ds, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   return right(w, x) + (x.i == x.j ? x.p : 0.0f);
                 };
               }),
      backward("bwd_ds_p_plus_difference", ds, "f32 bf16",
               [](BackwardParts& p) {
                 p.ds = [](const BackwardWork& w, const Pair& x) {
                   return x.p + x.dp - of_row(w.delta, x.i);
                 };
               }),
      backward("bwd_softcap_slope_of_half", ds, "f32",
               [](BackwardParts& p) {
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return w.softcap == 0 ? 1.0f : 0.5f * right(w, x);
                 };
               }),
  };
}

std::vector<Mutant> bwd_product_faults() {
  return {
      backward("bwd_dq_with_ds_transposed_in_tiles_of_8", dq, "f32 f16",
               [](BackwardParts& p) { transposed_tiles(p, kOfDq, 8, add_to_dq); }),
      backward("bwd_dk_with_ds_of_tiles_of_8_as_it_is", dk, "f32 bf16",
               [](BackwardParts& p) { transposed_tiles(p, kOfDk, 8, add_to_dk); }),
      backward("bwd_dq_over_the_number_of_keys", dq, "f32",
               [](BackwardParts& p) {
                 p.dq_scale = [](const BackwardWork& w) {
                   return w.scale / static_cast<float>(w.n);
                 };
               }),
      backward("bwd_dk_over_the_number_of_rows", dk, "f32 f16",
               [](BackwardParts& p) {
                 p.dk_scale = [](const BackwardWork& w) {
                   return w.scale / static_cast<float>(w.m);
                 };
               }),
      backward("bwd_dq_with_key_of_the_pair", dq, "f32",
               [](BackwardParts& p) {
                 replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t j = 0; j < w.n; ++j) {
                       const std::int64_t other = (j ^ 1) < w.n ? j ^ 1 : j;
                       add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + other * w.d, w.d,
                                  w.dq.data() + i * w.d);
                     }
                   }
                 });
               }),
      backward("bwd_dk_with_keys", dk, "f32 bf16",
               [](BackwardParts& p) {
                 replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t j = 0; j < w.n; ++j) {
                       add_scaled(ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d,
                                  w.dk.data() + j * w.d);
                     }
                   }
                 });
               }),
      backward("bwd_dk_from_p_times_ds", dk, "f32",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork&, const Pair& x) { return x.p * x.ds; };
               }),
      backward("bwd_dq_columns_rotated", dq, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     const auto row = w.dq.begin() + i * w.d;
                     std::rotate(row, row + std::min<std::int64_t>(8, w.d - 1), row + w.d);
                   }
                 };
               }),
      backward(
          "bwd_dk_with_next_heads_q", dk, "f32",
          [](BackwardParts& p) {
            replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
              const std::vector<float> q = rows_of(*w.call->forward->q, w.b, (w.h + 1) % w.q_heads);
              for (std::int64_t i = 0; i < w.m; ++i) {
                for (std::int64_t j = 0; j < w.n; ++j) {
                  add_scaled(ds[at(i, w.n, j)], q.data() + i * w.d, w.d, w.dk.data() + j * w.d);
                }
              }
            });
          }),
      backward("bwd_dq_with_scale_of_padded_head_dim", scale, "f32 f16",
               [](BackwardParts& p) {
                 p.dq_scale = [](const BackwardWork& w) {
                   return w.scale * std::sqrt(static_cast<float>(w.d) /
                                              static_cast<float>(w.d + padding(w.d, 32)));
                 };
               }),
      backward("bwd_dk_with_squared_root_scale", scale, "f32",
               [](BackwardParts& p) {
                 p.dk_scale = [](const BackwardWork& w) { return 1 / static_cast<float>(w.d); };
               }),
      backward(
          "bwd_dq_over_the_scale", scale, "f32 bf16",
          [](BackwardParts& p) { p.dq_scale = [](const BackwardWork& w) { return 1 / w.scale; }; }),
      backward("bwd_scores_with_scale_of_v_dim", scale, "f32",
               [](BackwardParts& p) {
                 p.score_scale = [](const BackwardWork& w) {
                   return w.call->forward->has_scale != 0
                              ? w.scale
                              : 1 / std::sqrt(static_cast<float>(w.dv_dim));
                 };
               }),
      backward("bwd_lse_in_bf16", precision, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.lse) x = rounded(Format::bf16, x);
                 };
               }),
      backward("bwd_dq_operand_in_f16", precision, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork&, const Pair& x) {
                   return rounded(Format::f16, x.ds);
                 };
               }),
      backward("bwd_v_in_e4m3_for_dp", precision, "bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.v) x = rounded(Format::e4m3, x);
                 };
               }),
  };
}

}  // namespace flashcore::mutants
