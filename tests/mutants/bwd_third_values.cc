// The third table of mutants of the backward pass, written without sight of its probes: P, dP,
// delta and dS.
#include <bit>
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

constexpr float kLog2e = 1.442695f;

// P and its product with dout.

/// exp2 in software adds the integer part to the exponent's bits, and does not clamp it.
void exponent_wraps(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    const float exponent = std::max(kLog2e * (x.score - of_row(w.lse, x.i)), -1e6f);
    const float whole = std::floor(exponent);
    const auto fraction = std::bit_cast<std::uint32_t>(std::exp2(exponent - whole));
    const auto shift = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole)) << 23;
    return std::bit_cast<float>(fraction + shift);
  };
}

/// Rows of padding have LSE 0. So has a row with one key and score 0.
void rows_of_lse_0_taken_for_padding(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    return of_row(w.lse, x.i) == 0 ? 0.0f : right(w, x);
  };
}

void lse_never_negative(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.lse) x = std::isinf(x) ? x : std::max(x, 0.0f);
  };
}

/// The softmax is recomputed for each tile of keys.
void p_normalised_in_each_tile(BackwardParts& p) {
  constexpr std::int64_t kTile = 32;
  const auto sums = std::make_shared<std::vector<float>>();
  p.loaded = [=, visible = p.visible](BackwardWork& w) {
    const std::int64_t tiles = (w.n + kTile - 1) / kTile;
    sums->assign(static_cast<std::size_t>(w.m * tiles), 0.0f);
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        if (visible(w, i, j)) (*sums)[at(i, tiles, j / kTile)] += pair_of(w, i, j).p;
      }
    }
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    return right(w, x) / (*sums)[at(x.i, (w.n + kTile - 1) / kTile, x.j / kTile)];
  };
}

/// The heads of a group share the keys, and here P too.
void dv_with_p_of_first_head_of_group(BackwardParts& p) {
  const auto first = std::make_shared<BackwardWork>();
  p.loaded = [=](BackwardWork& w) {
    if (is_first_of_group(w)) *first = w;
  };
  p.in_dv = [=](const BackwardWork&, const Pair& x) { return pair_of(*first, x.i, x.j).p; };
}

/// The softmax is normalised along the wrong axis.
void dv_divided_by_the_sum_over_queries(BackwardParts& p) {
  const auto sums = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    if (is_first_of_group(w)) sums->assign(static_cast<std::size_t>(w.n), 0.0f);
  };
  p.in_dv = [=](const BackwardWork&, const Pair& x) {
    (*sums)[static_cast<std::size_t>(x.j)] += x.p;
    return x.p;
  };
  p.group_done = [=](BackwardWork& w) {
    for (std::int64_t j = 0; j < w.n; ++j) {
      if (of_row(*sums, j) == 0) continue;
      for (std::int64_t c = 0; c < w.dv_dim; ++c) w.dv[at(j, w.dv_dim, c)] /= of_row(*sums, j);
    }
  };
}

/// Keys without their mean have the same softmax, but not the same LSE.
void p_of_centred_keys(BackwardParts& p) {
  const auto mean = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { *mean = mean_row(w.k, w.n, w.d); };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    Pair centred = x;
    centred.score = capped(w, x.z - w.scale * dot_of_rows(w.q, x.i, *mean, 0, w.d));
    return right(w, centred);
  };
}

/// P times the derivative of the softcap replaces P too early.
void dv_with_the_slope_of_the_softcap(BackwardParts& p) {
  p.in_dv = [slope = p.slope](const BackwardWork& w, const Pair& x) { return x.p * slope(w, x); };
}

/// Three stages of 16 rows of dout, of which a later round reads the old content.
void dv_with_dout_of_the_round_before(BackwardParts& p) {
  replace_product(p, kOfDv, [](BackwardWork& w, const std::vector<float>& weights) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const float* dout = w.dout.data() + (i >= 48 ? i - 48 : i) * w.dv_dim;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(weights[at(i, w.n, j)], dout, w.dv_dim, w.dv.data() + j * w.dv_dim);
      }
    }
  });
}

std::vector<Mutant> p_faults() {
  return {
      backward("bwd_exponent_wraps", dv, "f32 bf16", exponent_wraps),
      backward("bwd_rows_of_lse_0_taken_for_padding", dv, "f32 f16",
               rows_of_lse_0_taken_for_padding),
      backward("bwd_lse_never_negative", dv, "f32 bf16", lse_never_negative),
      backward("bwd_p_normalised_in_each_tile", dv, "f32 f16", p_normalised_in_each_tile),
      backward("bwd_dv_with_p_of_first_head_of_group", dv, "f32", dv_with_p_of_first_head_of_group),
      backward("bwd_dv_divided_by_the_sum_over_queries", dv, "f32 bf16",
               dv_divided_by_the_sum_over_queries),
      backward("bwd_p_of_centred_keys", dv, "f32", p_of_centred_keys),
      backward("bwd_dv_with_the_slope_of_the_softcap", dv, "f32 f16",
               dv_with_the_slope_of_the_softcap),
      backward("bwd_dv_with_dout_of_the_round_before", dv, "f32", dv_with_dout_of_the_round_before),
  };
}

// dP

/// Out, and so delta, is that of the values as they are.
void dp_with_centred_values(BackwardParts& p) {
  const auto mean = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { *mean = mean_row(w.v, w.n, w.dv_dim); };
  p.dp = [=, right = p.dp](const BackwardWork& w, const Pair& x) {
    return right(w, x) - dot_of_rows(w.dout, x.i, *mean, 0, w.dv_dim);
  };
}

/// The descriptor of dout is not advanced from one step of 16 columns to the next.
void dp_with_first_step_of_dout(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += w.dout[at(x.i, w.dv_dim, c % 16)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return sum;
  };
}

/// V goes through a transposing load.
void dp_with_v_transposed(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      const std::int64_t row = x.j / kTile * kTile + c % kTile;
      const std::int64_t column = c / kTile * kTile + x.j % kTile;
      if (row >= w.n || column >= w.dv_dim) continue;
      sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(row, w.dv_dim, column)];
    }
    return sum;
  };
}

/// The accumulators still have the scores.
void dp_added_to_the_scores(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
    return right(w, x) + dot_of_rows(w.q, x.i, w.k, x.j, w.d);
  };
}

/// The first of each pair of 16-bit elements is taken for both.
void dp_of_even_columns_twice(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += w.dout[at(x.i, w.dv_dim, c / 2 * 2)] * w.v[at(x.j, w.dv_dim, c / 2 * 2)];
    }
    return sum;
  };
}

std::vector<Mutant> dp_faults() {
  return {
      backward("bwd_dp_with_centred_values", dp, "f32 bf16", dp_with_centred_values),
      backward("bwd_dp_with_first_step_of_dout", dp, "f32", dp_with_first_step_of_dout),
      backward("bwd_dp_with_v_transposed", dp, "f32 f16", dp_with_v_transposed),
      backward("bwd_dp_added_to_the_scores", dp, "f32 bf16", dp_added_to_the_scores),
      backward("bwd_dp_of_even_columns_twice", dp, "f32 f16", dp_of_even_columns_twice),
  };
}

// delta

/// Replaces delta by a sum over keys, without the gradient of the LSE.
template <typename Term>
void sum_delta(BackwardParts& p, Term term) {
  p.delta = [=, visible = p.visible](const BackwardWork& w, std::int64_t i) {
    float sum = -of_row(w.dlse, i);
    for (std::int64_t j = 0; j < w.n; ++j) {
      sum += term(w, pair_of(w, i, j), visible(w, i, j));
    }
    return sum;
  };
}

/// The derivative of a softmax over the queries of a key.
void delta_over_the_queries(BackwardParts& p) {
  const auto sums = std::make_shared<std::vector<float>>();
  p.loaded = [=, visible = p.visible](BackwardWork& w) {
    sums->assign(static_cast<std::size_t>(w.n), 0.0f);
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        if (!visible(w, i, j)) continue;
        const Pair x = pair_of(w, i, j);
        (*sums)[static_cast<std::size_t>(j)] += x.p * x.dp;
      }
    }
  };
  p.ds = [=](const BackwardWork& w, const Pair& x) {
    return x.p * (x.dp - of_row(*sums, x.j) + of_row(w.dlse, x.i));
  };
}

/// Recomputed from P and dP in a kernel without the mask.
void delta_over_hidden_keys(BackwardParts& p) {
  sum_delta(p, [](const BackwardWork&, const Pair& x, bool) { return x.p * x.dp; });
}

void delta_of_p_squared(BackwardParts& p) {
  sum_delta(p, [](const BackwardWork&, const Pair& x, bool is_visible) {
    return is_visible ? x.p * x.p * x.dp : 0.0f;
  });
}

void delta_with_slope_of_the_softcap(BackwardParts& p) {
  sum_delta(p, [slope = p.slope](const BackwardWork& w, const Pair& x, bool is_visible) {
    return is_visible ? x.p * x.dp * slope(w, x) : 0.0f;
  });
}

/// The output before its division by the row's sum of exponentials.
void delta_of_unnormalised_out(BackwardParts& p) {
  p.delta = [visible = p.visible](const BackwardWork& w, std::int64_t i) {
    float most = -std::numeric_limits<float>::infinity();
    for (std::int64_t j = 0; j < w.n; ++j) {
      if (visible(w, i, j)) most = std::max(most, pair_of(w, i, j).score);
    }
    const float sum = sees_no_key(w, i) ? 0.0f : std::exp(of_row(w.lse, i) - most);
    return sum * dot_of_rows(w.dout, i, w.out, i, w.dv_dim) - of_row(w.dlse, i);
  };
}

/// Written as [group, q_len], read as [q_len, group].
void delta_of_packed_rows(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    const std::int64_t packed = i * w.group + w.h % w.group;
    const std::int64_t head = w.h - w.h % w.group + packed / w.m, row = packed % w.m;
    double sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum +=
          read(*w.call->dout, w.b, head, row, c) * read(*w.call->forward->out, w.b, head, row, c);
    }
    return static_cast<float>(sum) - of_row(w.dlse, i);
  };
}

/// Out is loaded in another order of columns than dout.
void delta_of_columns_in_another_order(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    float sum = -of_row(w.dlse, i);
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      const std::int64_t moved = (c ^ 4) < w.dv_dim ? c ^ 4 : c;
      sum += w.dout[at(i, w.dv_dim, c)] * w.out[at(i, w.dv_dim, moved)];
    }
    return sum;
  };
}

std::vector<Mutant> delta_faults() {
  return {
      backward("bwd_delta_over_the_queries", delta, "f32 bf16", delta_over_the_queries),
      backward("bwd_delta_over_hidden_keys", delta, "f32 f16", delta_over_hidden_keys),
      backward("bwd_delta_of_p_squared", delta, "f32", delta_of_p_squared),
      backward("bwd_delta_with_slope_of_the_softcap", delta, "f32 bf16",
               delta_with_slope_of_the_softcap),
      backward("bwd_delta_of_unnormalised_out", delta, "f32 f16", delta_of_unnormalised_out),
      backward("bwd_delta_of_packed_rows", delta, "f32 bf16", delta_of_packed_rows),
      backward("bwd_delta_of_columns_in_another_order", delta, "f32",
               delta_of_columns_in_another_order),
  };
}

// dS

/// Replaces the derivative of the softcap: `slope` gets the argument of tanh.
template <typename Slope>
void replace_slope(BackwardParts& p, Slope slope) {
  p.slope = [=](const BackwardWork& w, const Pair& x) {
    return w.softcap == 0 ? 1.0f : slope(w, x, x.z / w.softcap);
  };
}

void slope_of_the_unscaled_score(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork& w, const Pair& x, float) {
    const float t = std::tanh(dot_of_rows(w.q, x.i, w.k, x.j, w.d) / w.softcap);
    return 1 - t * t;
  });
}

/// The derivative of a cap that cuts scores off.
void slope_of_a_hard_cap(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork&, const Pair&, float argument) {
    return std::fabs(argument) < 1 ? 1.0f : 0.0f;
  });
}

void slope_of_negative_scores_above_1(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork&, const Pair&, float argument) {
    const float t = std::tanh(argument);
    return 1 - t * std::fabs(t);
  });
}

/// 1 / cosh² by one exponential, which overflows.
void slope_by_an_exponential(BackwardParts& p) {
  replace_slope(p, [](const BackwardWork&, const Pair&, float argument) {
    const float e = std::exp(2 * argument);
    return 4 * e / ((1 + e) * (1 + e));
  });
}

void slope_of_the_tile_before(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto last = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { last->assign(static_cast<std::size_t>(w.m * kTile), 1.0f); };
  p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
    const float slope = right(w, x);
    const float before = std::exchange((*last)[at(x.i, kTile, x.j % kTile)], slope);
    return x.j < kTile ? slope : before;
  };
}

/// The slopes of a tile are kept as [keys, queries].
void slope_of_the_transposed_tile(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
    if (w.softcap == 0) return 1.0f;
    const std::int64_t row = x.i / kTile * kTile + x.j % kTile;
    const std::int64_t key = x.j / kTile * kTile + x.i % kTile;
    return right(w, row < w.m && key < w.n ? pair_of(w, row, key) : x);
  };
}

/// dS replaces P in place, twice.
void ds_with_its_factor_twice(BackwardParts& p) {
  p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
    return right(w, x) * (x.dp - of_row(w.delta, x.i));
  };
}

std::vector<Mutant> ds_faults() {
  return {
      backward("bwd_slope_of_the_unscaled_score", ds, "f32 bf16", slope_of_the_unscaled_score),
      backward("bwd_slope_of_a_hard_cap", ds, "f32 f16", slope_of_a_hard_cap),
      backward("bwd_slope_of_negative_scores_above_1", ds, "f32", slope_of_negative_scores_above_1),
      backward("bwd_slope_by_an_exponential", ds, "f32 bf16", slope_by_an_exponential),
      backward("bwd_slope_of_the_tile_before", ds, "f32", slope_of_the_tile_before),
      backward("bwd_slope_of_the_transposed_tile", ds, "f32 f16", slope_of_the_transposed_tile),
      backward("bwd_ds_with_its_factor_twice", ds, "f32 bf16", ds_with_its_factor_twice),
  };
}

}  // namespace

std::vector<Mutant> bwd_third_values() {
  std::vector<Mutant> all;
  for (const auto& part : {p_faults(), dp_faults(), delta_faults(), ds_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
