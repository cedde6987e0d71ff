// The second table of mutants of the backward pass, which the probes had not seen: P, dP, delta and
// dS.
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

constexpr float kLn2 = 0.6931472f;

// P and its product with dout.

void lse_of_base_e_for_exp2(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(x.score - kLn2 * of_row(w.lse, x.i));
  };
}

void p_of_the_maximum(BackwardParts& p) {
  p.loaded = [visible = p.visible](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      float most = -std::numeric_limits<float>::infinity();
      for (std::int64_t j = 0; j < w.n; ++j) {
        if (!visible(w, i, j)) continue;
        float s = 0;
        for (std::int64_t c = 0; c < w.d; ++c) s += w.q[at(i, w.d, c)] * w.k[at(j, w.d, c)];
        most = std::max(most, s * w.scale);
      }
      w.lse[static_cast<std::size_t>(i)] =
          w.softcap > 0 ? w.softcap * std::tanh(most / w.softcap) : most;
    }
  };
}

void dv_from_out(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) { std::swap(w.out, w.dout); };  // delta has both as factors
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += w.out[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return sum;
  };
}

void p_not_transposed(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  replace_product(p, kOfDv, [](BackwardWork& w, const std::vector<float>& weights) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        // The weight stands at row j and column i of its tile.
        const std::int64_t row = i / kTile * kTile + j % kTile;
        const std::int64_t column = j / kTile * kTile + i % kTile;
        if (row >= w.m || column >= w.n) continue;
        add_scaled(weights[at(row, w.n, column)], w.dout.data() + i * w.dv_dim, w.dv_dim,
                   w.dv.data() + j * w.dv_dim);
      }
    }
  });
}

void p_without_softcap(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) { return std::exp(x.z - of_row(w.lse, x.i)); };
}

void p_as_quotient_of_exponentials(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(x.score) / std::exp(of_row(w.lse, x.i));
  };
}

std::vector<Mutant> p_faults() {
  return {
      backward("bwd_lse_of_base_e_for_exp2", dv, "f32 f16", lse_of_base_e_for_exp2),
      backward("bwd_p_of_the_maximum", dv, "f32 bf16", p_of_the_maximum),
      backward("bwd_dv_from_out", dv, "f32", dv_from_out),
      backward("bwd_p_not_transposed", dv, "f32 f16", p_not_transposed),
      backward("bwd_p_without_softcap", dv, "f32 f16", p_without_softcap),
      backward("bwd_p_as_quotient_of_exponentials", dv, "f32", p_as_quotient_of_exponentials),
  };
}

// dP

void dp_with_keys(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
      sum += w.dout[at(x.i, w.dv_dim, c)] * w.k[at(x.j, w.d, c)];
    }
    return sum;
  };
}

void dp_keeps_the_last_tile(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto sums = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { sums->assign(static_cast<std::size_t>(w.m * kTile), 0.0f); };
  p.dp = [=, right = p.dp](const BackwardWork& w, const Pair& x) {
    return (*sums)[at(x.i, kTile, x.j % kTile)] += right(w, x);
  };
}

void dp_with_v_of_the_old_stage(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) {
    Pair old = x;
    if (x.j >= 16) old.j -= 16;
    return right(w, old);
  };
}

void dp_with_another_swizzle(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      const std::int64_t moved = (x.j & 4) != 0 && (c ^ 8) < w.dv_dim ? c ^ 8 : c;
      sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, moved)];
    }
    return sum;
  };
}

void dp_with_dout_of_first_head_of_group(BackwardParts& p) {
  const auto dout = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { *dout = rows_of(*w.call->dout, w.b, w.h - w.h % w.group); };
  p.dp = [=](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += (*dout)[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return sum;
  };
}

void dp_over_the_columns_of_k(BackwardParts& p) {
  p.dp = [](const BackwardWork& w, const Pair& x) {
    float sum = 0;
    for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
      sum += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return sum;
  };
}

std::vector<Mutant> dp_faults() {
  return {
      backward("bwd_dp_with_keys", dp, "f32 bf16", dp_with_keys),
      backward("bwd_dp_keeps_the_last_tile", dp, "f32 f16", dp_keeps_the_last_tile),
      backward("bwd_dp_with_v_of_the_old_stage", dp, "f32", dp_with_v_of_the_old_stage),
      backward("bwd_dp_with_another_swizzle", dp, "f32 bf16", dp_with_another_swizzle),
      backward("bwd_dp_with_dout_of_first_head", dp, "f32", dp_with_dout_of_first_head_of_group),
      backward("bwd_dp_over_the_columns_of_k", dp, "f32 f16", dp_over_the_columns_of_k),
  };
}

// delta

void delta_from_out_in_bf16(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    float sum = -of_row(w.dlse, i);
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += w.dout[at(i, w.dv_dim, c)] * rounded(Format::bf16, w.out[at(i, w.dv_dim, c)]);
    }
    return sum;
  };
}

void delta_summed_in_f16(BackwardParts& p) {
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    float sum = 0;
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum = rounded(Format::f16, sum + w.dout[at(i, w.dv_dim, c)] * w.out[at(i, w.dv_dim, c)]);
    }
    return sum - of_row(w.dlse, i);
  };
}

/// The softmax of a tile is differentiated as if its keys were all.
void delta_of_the_tile(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto dp = std::make_shared<std::vector<float>>();
  const auto p_of = std::make_shared<std::vector<float>>();
  p.ds = [](const BackwardWork&, const Pair& x) { return x.p; };  // P times the slope
  p.in_dk = [](const BackwardWork&, const Pair&) { return 0.0f; };
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& sloped) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t first = 0; first < w.n; first += kTile) {
        const std::int64_t end = std::min(first + kTile, w.n);
        float delta = -of_row(w.dlse, i);
        for (std::int64_t j = first; j < end; ++j) {
          delta += (*p_of)[at(i, w.n, j)] * (*dp)[at(i, w.n, j)];
        }
        for (std::int64_t j = first; j < end; ++j) {
          const float ds = sloped[at(i, w.n, j)] * ((*dp)[at(i, w.n, j)] - delta);
          add_scaled(ds * w.scale, w.k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
          add_scaled(ds, w.q.data() + i * w.d, w.d, w.dk.data() + j * w.d);
        }
      }
    }
  });
  p.loaded = [=, before = p.loaded](BackwardWork& w) {
    before(w);
    dp->assign(static_cast<std::size_t>(w.m * w.n), 0.0f);
    p_of->assign(static_cast<std::size_t>(w.m * w.n), 0.0f);
  };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) {
    (*dp)[at(x.i, w.n, x.j)] = x.dp;
    return (*p_of)[at(x.i, w.n, x.j)] = x.p;
  };
}

void delta_times_scale(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    return w.scale * right(w, i);
  };
}

void delta_of_first_head_of_group(BackwardParts& p) {
  const auto out = std::make_shared<std::vector<float>>();
  const auto dout = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    const std::int64_t first = w.h - w.h % w.group;
    *out = rows_of(*w.call->forward->out, w.b, first);
    *dout = rows_of(*w.call->dout, w.b, first);
  };
  p.delta = [=](const BackwardWork& w, std::int64_t i) {
    float sum = -of_row(w.dlse, i);
    for (std::int64_t c = 0; c < w.dv_dim; ++c) {
      sum += (*dout)[at(i, w.dv_dim, c)] * (*out)[at(i, w.dv_dim, c)];
    }
    return sum;
  };
}

/// A fragment has rows r and r + 8 in one thread.
void delta_of_row_8_apart(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    return right(w, (i ^ 8) < w.m ? i ^ 8 : i);
  };
}

std::vector<Mutant> delta_faults() {
  return {
      backward("bwd_delta_from_out_in_bf16", delta, "f32", delta_from_out_in_bf16),
      backward("bwd_delta_summed_in_f16", delta, "f32", delta_summed_in_f16),
      backward("bwd_delta_of_the_tile", delta, "f32 f16", delta_of_the_tile),
      backward("bwd_delta_times_scale", delta, "f32 f16", delta_times_scale),
      backward("bwd_delta_of_first_head_of_group", delta, "f32", delta_of_first_head_of_group),
      backward("bwd_delta_of_row_8_apart", delta, "f32 bf16", delta_of_row_8_apart),
  };
}

// dS

void ds_of_an_elementwise_function(BackwardParts& p) {
  p.ds = [](const BackwardWork& w, const Pair& x) {
    return x.p * (1 - x.p) * (x.dp + of_row(w.dlse, x.i));
  };
}

void ds_with_p_of_the_old_stage(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto last = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) { last->assign(static_cast<std::size_t>(w.m * kTile), 0.0f); };
  p.ds = [=, right = p.ds](const BackwardWork& w, const Pair& x) {
    float& kept = (*last)[at(x.i, kTile, x.j % kTile)];
    Pair old = x;
    if (x.j >= kTile) old.p = kept;
    kept = x.p;
    return right(w, old);
  };
}

/// The format of gradients in 8 bits.
void ds_in_e5m2(BackwardParts& p) {
  p.in_dq = p.in_dk = [](const BackwardWork&, const Pair& x) {
    return rounded(Format::e5m2, 64 * x.ds) / 64;
  };
}

void slope_of_the_capped_score(BackwardParts& p) {
  p.slope = [](const BackwardWork& w, const Pair& x) {
    if (w.softcap == 0) return 1.0f;
    const float t = std::tanh(x.score / w.softcap);
    return 1 - t * t;
  };
}

void slope_of_dp_only(BackwardParts& p) {
  p.ds = [slope = p.slope](const BackwardWork& w, const Pair& x) {
    return x.p * (x.dp * slope(w, x) - of_row(w.delta, x.i));
  };
  p.slope = [](const BackwardWork&, const Pair&) { return 1.0f; };
}

void slope_divided_by_the_cap(BackwardParts& p) {
  p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
    return w.softcap == 0 ? 1.0f : right(w, x) / w.softcap;
  };
}

std::vector<Mutant> ds_faults() {
  return {
      backward("bwd_ds_of_an_elementwise_function", ds, "f32 f16", ds_of_an_elementwise_function),
      backward("bwd_ds_with_p_of_the_old_stage", ds, "f32", ds_with_p_of_the_old_stage),
      backward("bwd_ds_in_e5m2", ds, "f16 f32", ds_in_e5m2),
      backward("bwd_slope_of_the_capped_score", ds, "f32 f16", slope_of_the_capped_score),
      backward("bwd_slope_of_dp_only", ds, "f32", slope_of_dp_only),
      backward("bwd_slope_divided_by_the_cap", ds, "f32 f16", slope_divided_by_the_cap),
  };
}

}  // namespace

std::vector<Mutant> bwd_second_values() {
  std::vector<Mutant> all;
  for (const auto& part : {p_faults(), dp_faults(), delta_faults(), ds_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
