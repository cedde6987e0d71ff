// The third table: dq, dk, sums over tiles and heads, scales and precision.
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

// dq

/// Keys without their mean. That changes nothing where the sum of dS over the keys is 0, which it
/// is neither under a softcap nor with a gradient of the LSE.
void dq_with_centred_keys(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    const std::vector<float> mean = mean_row(w.k, w.n, w.d);
    for (std::int64_t i = 0; i < w.m; ++i) {
      float* dq = w.dq.data() + i * w.d;
      for (std::int64_t j = 0; j < w.n; ++j) {
        const float weight = w.scale * ds[at(i, w.n, j)];
        add_scaled(weight, w.k.data() + j * w.d, w.d, dq);
        add_scaled(-weight, mean.data(), w.d, dq);
      }
    }
  });
}

void dq_with_another_swizzle(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const float weight = w.scale * ds[at(i, w.n, j)];
        for (std::int64_t c = 0; c < w.d; ++c) {
          const std::int64_t moved = (j & 4) != 0 && (c ^ 8) < w.d ? c ^ 8 : c;
          w.dq[at(i, w.d, c)] += weight * w.k[at(j, w.d, moved)];
        }
      }
    }
  });
}

/// The kernel for dq takes v_dim for head_dim, the one for dk does not.
void dq_from_dp_of_head_dim_columns(BackwardParts& p) {
  p.in_dq = [slope = p.slope](const BackwardWork& w, const Pair& x) {
    float dp = 0;
    for (std::int64_t c = 0; c < std::min(w.d, w.dv_dim); ++c) {
      dp += w.dout[at(x.i, w.dv_dim, c)] * w.v[at(x.j, w.dv_dim, c)];
    }
    return x.p * (dp - of_row(w.delta, x.i)) * slope(w, x);
  };
}

/// Columns are stored as the fragments of four threads have them.
void dq_in_the_order_of_fragments(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    const std::vector<float> dq = w.dq;
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t c = 0; c < w.d / 16 * 16; ++c) {
        const std::int64_t thread = c % 16 / 4, half = c % 4 / 2;
        w.dq[at(i, w.d, c)] = dq[at(i, w.d, c / 16 * 16 + 8 * half + 2 * thread + c % 2)];
      }
    }
  };
}

std::vector<Mutant> dq_faults() {
  return {
      backward("bwd_dq_with_centred_keys", dq, "f32 f16", dq_with_centred_keys),
      backward("bwd_dq_with_another_swizzle", dq, "f32 bf16", dq_with_another_swizzle),
      backward("bwd_dq_from_dp_of_head_dim_columns", dq, "f32 f16", dq_from_dp_of_head_dim_columns),
      backward("bwd_dq_in_the_order_of_fragments", dq, "f32 bf16", dq_in_the_order_of_fragments),
  };
}

// dk

/// Two of the four 8 × 8 quadrants of a fragment are exchanged.
void quadrants_of_dk_exchanged(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    for (std::int64_t j = 0; j + 8 < w.n; ++j) {
      for (std::int64_t c = 8; j % 16 < 8 && c < w.d; ++c) {
        if (c % 16 >= 8) std::swap(w.dk[at(j, w.d, c)], w.dk[at(j + 8, w.d, c - 8)]);
      }
    }
  };
}

/// The heads of a group share the keys: their dS and their q are summed before the product.
void dk_of_summed_heads(BackwardParts& p) {
  struct State {
    std::vector<float> ds, q;
  };
  const auto sum = std::make_shared<State>();
  p.loaded = [=](BackwardWork& w) {
    if (is_first_of_group(w)) {
      sum->ds.assign(static_cast<std::size_t>(w.m * w.n), 0.0f);
      sum->q.assign(w.q.size(), 0.0f);
    }
    add_scaled(1, w.q.data(), w.m * w.d, sum->q.data());
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) {
    sum->ds[at(x.i, w.n, x.j)] += x.ds;
    return 0.0f;
  };
  p.group_done = [=](BackwardWork& w) {
    const float factor = w.scale / static_cast<float>(w.group);
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(factor * sum->ds[at(i, w.n, j)], sum->q.data() + i * w.d, w.d,
                   w.dk.data() + j * w.d);
      }
    }
  };
}

/// The loop over queries descends, also in a tile of q, but not in dS.
void dk_with_rows_of_q_descending(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t first = i / kTile * kTile, end = std::min(first + kTile, w.m);
      const float* q = w.q.data() + (end - 1 - (i - first)) * w.d;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], q, w.d, w.dk.data() + j * w.d);
      }
    }
  });
}

/// dk reads dS while delta is still to be subtracted.
void dk_without_delta(BackwardParts& p) {
  p.in_dk = [slope = p.slope](const BackwardWork& w, const Pair& x) {
    return x.p * (x.dp + of_row(w.dlse, x.i)) * slope(w, x);
  };
}

std::vector<Mutant> dk_faults() {
  return {
      backward("bwd_quadrants_of_dk_exchanged", dk, "f32 f16", quadrants_of_dk_exchanged),
      backward("bwd_dk_of_summed_heads", dk, "f32 bf16", dk_of_summed_heads),
      backward("bwd_dk_with_rows_of_q_descending", dk, "f32", dk_with_rows_of_q_descending),
      backward("bwd_dk_without_delta", dk, "f32 f16", dk_without_delta),
  };
}

// Sums over tiles, heads and batches

/// Two warps share the keys of a tile, and only one stores its sum.
void dq_of_the_second_warp_lost(BackwardParts& p) {
  p.in_dq = [](const BackwardWork&, const Pair& x) { return x.j % 32 >= 16 ? 0.0f : x.ds; };
}

constexpr std::int64_t kSplit = 64;  // keys of a KV split

std::int64_t splits(const BackwardWork& w) { return (w.n + kSplit - 1) / kSplit; }

void dq_averaged_over_splits(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    for (float& x : w.dq) x /= static_cast<float>(splits(w));
  };
}

/// As the combine step of the forward pass weighs its splits.
void dq_of_splits_weighed_by_their_lse(BackwardParts& p) {
  const auto weights = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    weights->assign(static_cast<std::size_t>(w.m * splits(w)), 0.0f);
  };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) {
    (*weights)[at(x.i, splits(w), x.j / kSplit)] += x.p;
    return x.p;
  };
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const float weight = (*weights)[at(i, splits(w), j / kSplit)];
        add_scaled(w.scale * weight * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d,
                   w.dq.data() + i * w.d);
      }
    }
  });
}

/// As the output: each new maximum of a row shrinks what the tiles before have added.
void dq_rescaled_like_the_output(BackwardParts& p) {
  constexpr std::int64_t kTile = 32;
  const auto scores = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    scores->assign(static_cast<std::size_t>(w.m * w.n), -std::numeric_limits<float>::infinity());
  };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) {
    (*scores)[at(x.i, w.n, x.j)] = x.score;
    return x.p;
  };
  replace_product(p, kOfDq, [=](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      float most = -std::numeric_limits<float>::infinity();
      for (std::int64_t j = 0; j < w.n; ++j) {
        if (j % kTile == 0) {
          const float before = most;
          for (std::int64_t of = j; of < std::min(j + kTile, w.n); ++of) {
            most = std::max(most, (*scores)[at(i, w.n, of)]);
          }
          const float factor = std::isinf(before) ? 1.0f : std::exp(before - most);
          for (std::int64_t c = 0; c < w.d; ++c) w.dq[at(i, w.d, c)] *= factor;
        }
        add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
      }
    }
  });
}

/// A persistent CTA keeps the accumulators from one tile of keys to the next.
void dv_not_cleared_between_key_tiles(BackwardParts& p) {
  constexpr std::int64_t kTile = 32;
  p.group_done = [](BackwardWork& w) {
    for (std::int64_t j = kTile; j < w.n; ++j) {
      add_scaled(1, w.dv.data() + (j - kTile) * w.dv_dim, w.dv_dim, w.dv.data() + j * w.dv_dim);
    }
  };
}

/// A CTA has at most four heads.
void heads_of_a_group_past_the_fourth_lost(BackwardParts& p) {
  p.count = [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
    return g != kOfDq && w.h % w.group >= 4 ? 0.0f : 1.0f;
  };
}

/// The workspace for dk has no batch axis.
void dk_of_batches_added_up(BackwardParts& p) {
  const auto sums = std::make_shared<std::vector<std::vector<float>>>();
  p.called = [=](const flashcore_verify_backward_call& c) {
    sums->assign(static_cast<std::size_t>(c.dk->shape[1]), {});
  };
  p.group_done = [=](BackwardWork& w) {
    std::vector<float>& sum = (*sums)[static_cast<std::size_t>(w.h / w.group)];
    if (!sum.empty()) add_scaled(1, sum.data(), w.n * w.d, w.dk.data());
    sum = w.dk;
  };
}

std::vector<Mutant> accumulate_faults() {
  return {
      backward("bwd_dq_of_the_second_warp_lost", accumulate, "f32 bf16",
               dq_of_the_second_warp_lost),
      backward("bwd_dq_averaged_over_splits", accumulate, "f32", dq_averaged_over_splits),
      backward("bwd_dq_of_splits_weighed_by_their_lse", accumulate, "f32 f16",
               dq_of_splits_weighed_by_their_lse),
      backward("bwd_dq_rescaled_like_the_output", accumulate, "f32", dq_rescaled_like_the_output),
      backward("bwd_dv_not_cleared_between_key_tiles", accumulate, "f32 bf16",
               dv_not_cleared_between_key_tiles),
      backward("bwd_heads_of_a_group_past_the_fourth_lost", accumulate, "f32",
               heads_of_a_group_past_the_fourth_lost),
      backward("bwd_dk_of_batches_added_up", accumulate, "f32 f16", dk_of_batches_added_up),
  };
}

// Scales

/// Q and K share the scale as its square root, and their gradients get theirs once.
void gradients_times_root_of_scale(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) {
    return std::copysign(std::sqrt(std::fabs(w.scale)), w.scale);
  };
}

void sign_of_the_scale_lost(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) { return std::fabs(w.scale); };
}

void default_scale_of_padded_head_dim(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) {
    return w.call->forward->has_scale != 0
               ? w.scale
               : 1 / std::sqrt(static_cast<float>(w.d + padding(w.d, 32)));
  };
}

/// "scale or default", of which 0 is the default.
void scale_of_0_taken_for_none(BackwardParts& p) {
  p.score_scale = p.dq_scale = p.dk_scale = [](const BackwardWork& w) {
    return w.scale != 0 ? w.scale : 1 / std::sqrt(static_cast<float>(w.d));
  };
}

std::vector<Mutant> scale_faults() {
  return {
      backward("bwd_gradients_times_root_of_scale", scale, "f32 bf16",
               gradients_times_root_of_scale),
      backward("bwd_sign_of_the_scale_lost", scale, "f32 f16", sign_of_the_scale_lost),
      backward("bwd_default_scale_of_padded_head_dim", scale, "f32 bf16",
               default_scale_of_padded_head_dim),
      backward("bwd_scale_of_0_taken_for_none", scale, "f32 f16", scale_of_0_taken_for_none),
  };
}

// Precision

/// Integer additions need no order, but a fixed unit.
void dq_summed_in_fixed_point(BackwardParts& p) {
  constexpr float kUnits = 1 << 14;
  p.head_done = [](BackwardWork& w) {
    for (float& x : w.dq) x = std::nearbyint(x * kUnits) / kUnits;
  };
}

void p_in_int8(BackwardParts& p) {
  p.in_dv = [](const BackwardWork&, const Pair& x) { return std::nearbyint(x.p * 127) / 127; };
}

/// dk of each query head is stored in 16 bits, and summed by another kernel.
void dk_of_heads_in_bf16(BackwardParts& p) {
  const auto before = std::make_shared<std::vector<float>>();
  p.head_done = [=](BackwardWork& w) {
    if (w.group == 1) return;
    if (is_first_of_group(w)) before->assign(w.dk.size(), 0.0f);
    for (std::size_t e = 0; e < w.dk.size(); ++e) {
      w.dk[e] = (*before)[e] + rounded(Format::bf16, w.dk[e] - (*before)[e]);
    }
    *before = w.dk;
  };
}

/// The instruction for two exponentials takes f16.
void exponents_in_f16(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(rounded(Format::f16, x.score - of_row(w.lse, x.i)));
  };
}

std::vector<Mutant> precision_faults() {
  return {
      backward("bwd_dq_summed_in_fixed_point", precision, "f32", dq_summed_in_fixed_point),
      backward("bwd_p_in_int8", precision, "f32 f16", p_in_int8),
      backward("bwd_dk_of_heads_in_bf16", precision, "f32", dk_of_heads_in_bf16),
      backward("bwd_exponents_in_f16", precision, "f32", exponents_in_f16),
  };
}

/// Results are staged in f16, whose range is smaller than that of bf16.
void results_staged_in_f16(BackwardParts& p) {
  p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
               std::int64_t c, double x) { write(t, b, h, i, c, verify::rounded(Format::f16, x)); };
}

}  // namespace

std::vector<Mutant> bwd_third_products() {
  std::vector<Mutant> all = {
      backward("bwd_results_staged_in_f16", unlocalised, "bf16", results_staged_in_f16)};
  for (const auto& part :
       {dq_faults(), dk_faults(), accumulate_faults(), scale_faults(), precision_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
