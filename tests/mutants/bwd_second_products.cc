// The second table of mutants of the backward pass: dq, dk, sums over tiles, scales and precision.
#include <bit>
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

constexpr float kLn2 = 0.6931472f, kLog2e = 1.442695f;

// dq

void dq_with_k_of_the_old_stage(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const std::int64_t old = j >= 16 ? j - 16 : j;
        add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + old * w.d, w.d, w.dq.data() + i * w.d);
      }
    }
  });
}

void dq_with_k_of_the_first_head(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    const std::vector<float> k = rows_of(*w.call->forward->k, w.b, 0);
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(w.scale * ds[at(i, w.n, j)], k.data() + j * w.d, w.d, w.dq.data() + i * w.d);
      }
    }
  });
}

/// As the epilogue of the forward pass does it.
void dq_divided_by_the_row_sum(BackwardParts& p) {
  const auto most = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    most->assign(static_cast<std::size_t>(w.m), -std::numeric_limits<float>::infinity());
  };
  p.in_dq = [=](const BackwardWork&, const Pair& x) {
    float& row_most = (*most)[static_cast<std::size_t>(x.i)];
    row_most = std::max(row_most, x.score);
    return x.ds;
  };
  p.head_done = [=](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      if (std::isinf(of_row(*most, i))) continue;
      const float sum = std::exp(of_row(w.lse, i) - of_row(*most, i));
      for (std::int64_t c = 0; c < w.d; ++c) w.dq[at(i, w.d, c)] /= sum;
    }
  };
}

void dq_with_ds_transposed(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const std::int64_t row = i / kTile * kTile + j % kTile;
        const std::int64_t column = j / kTile * kTile + i % kTile;
        if (row >= w.m || column >= w.n) continue;
        add_scaled(w.scale * ds[at(row, w.n, column)], w.k.data() + j * w.d, w.d,
                   w.dq.data() + i * w.d);
      }
    }
  });
}

void dq_with_values(BackwardParts& p) {
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(w.scale * ds[at(i, w.n, j)], w.v.data() + j * w.dv_dim, std::min(w.d, w.dv_dim),
                   w.dq.data() + i * w.d);
      }
    }
  });
}

std::vector<Mutant> dq_faults() {
  return {
      backward("bwd_dq_with_k_of_the_old_stage", dq, "f32 f16", dq_with_k_of_the_old_stage),
      backward("bwd_dq_with_k_of_the_first_head", dq, "f32", dq_with_k_of_the_first_head),
      backward("bwd_dq_divided_by_the_row_sum", dq, "f32 bf16", dq_divided_by_the_row_sum),
      backward("bwd_dq_with_ds_transposed", dq, "f32", dq_with_ds_transposed),
      backward("bwd_dq_with_values", dq, "f32 f16", dq_with_values),
  };
}

// dk

void dk_with_ds_not_transposed(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        const std::int64_t row = i / kTile * kTile + j % kTile;
        const std::int64_t column = j / kTile * kTile + i % kTile;
        if (row >= w.m || column >= w.n) continue;
        add_scaled(ds[at(row, w.n, column)], w.q.data() + i * w.d, w.d, w.dk.data() + j * w.d);
      }
    }
  });
}

void dk_with_q_of_the_old_stage(BackwardParts& p) {
  replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      const std::int64_t old = i >= 16 ? i - 16 : i;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], w.q.data() + old * w.d, w.d, w.dk.data() + j * w.d);
      }
    }
  });
}

void dk_with_dout(BackwardParts& p) {
  replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], w.dout.data() + i * w.dv_dim, std::min(w.d, w.dv_dim),
                   w.dk.data() + j * w.d);
      }
    }
  });
}

void dk_with_q_of_first_head_of_group(BackwardParts& p) {
  replace_product(p, kOfDk, [](BackwardWork& w, const std::vector<float>& ds) {
    const std::vector<float> q = rows_of(*w.call->forward->q, w.b, w.h - w.h % w.group);
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(ds[at(i, w.n, j)], q.data() + i * w.d, w.d, w.dk.data() + j * w.d);
      }
    }
  });
}

std::vector<Mutant> dk_faults() {
  return {
      backward("bwd_dk_with_ds_not_transposed", dk, "f32 bf16", dk_with_ds_not_transposed),
      backward("bwd_dk_with_q_of_the_old_stage", dk, "f32", dk_with_q_of_the_old_stage),
      backward("bwd_dk_with_dout", dk, "f32 f16", dk_with_dout),
      backward("bwd_dk_with_q_of_first_head", dk, "f32", dk_with_q_of_first_head_of_group),
  };
}

// Sums over tiles and heads. Tiles have 32 rows and 32 keys.

std::int64_t last_tile(std::int64_t length) { return (length - 1) / 32; }

void only_the_last_query_tile_counts(BackwardParts& p) {
  p.count = [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
    return g != kOfDq && q_tile != last_tile(w.m) ? 0.0f : 1.0f;
  };
}

void tile_between_two_splits_counts_twice(BackwardParts& p) {
  p.count = [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
    const std::int64_t tiles = last_tile(w.m) + 1;
    return g != kOfDq && tiles > 1 && q_tile == tiles / 2 ? 2.0f : 1.0f;
  };
}

/// A grid of four CTAs along the keys, without a loop over the rest.
void keys_from_128_lost_in_dq(BackwardParts& p) {
  p.count = [](const BackwardWork&, int g, std::int64_t, std::int64_t k_tile) {
    return g == kOfDq && k_tile >= 4 ? 0.0f : 1.0f;
  };
}

/// Heads of a group are taken in pairs.
void odd_head_of_the_group_lost(BackwardParts& p) {
  p.count = [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
    const bool is_odd_one = w.group > 1 && w.group % 2 == 1 && w.h % w.group == w.group - 1;
    return g != kOfDq && is_odd_one ? 0.0f : 1.0f;
  };
}

void pipeline_of_dk_drained_twice(BackwardParts& p) {
  p.count = [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
    return g == kOfDk && q_tile > 0 && q_tile == last_tile(w.m) ? 2.0f : 1.0f;
  };
}

std::vector<Mutant> accumulate_faults() {
  return {
      backward("bwd_only_last_query_tile_counts", accumulate, "f32 bf16",
               only_the_last_query_tile_counts),
      backward("bwd_tile_between_two_splits_twice", accumulate, "f32",
               tile_between_two_splits_counts_twice),
      backward("bwd_keys_from_128_lost_in_dq", accumulate, "f32 f16", keys_from_128_lost_in_dq),
      backward("bwd_odd_head_of_the_group_lost", accumulate, "f32", odd_head_of_the_group_lost),
      backward("bwd_pipeline_of_dk_drained_twice", accumulate, "f32 bf16",
               pipeline_of_dk_drained_twice),
  };
}

// Scales

/// Q in shared memory has the factor for exp2 already, and dk reads it too.
void dk_times_log2e(BackwardParts& p) {
  p.dk_scale = [](const BackwardWork& w) { return w.scale * kLog2e; };
}

void exp2_of_scores_of_base_e(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(kLn2 * x.score - of_row(w.lse, x.i));
  };
}

void dp_scaled_like_the_scores(BackwardParts& p) {
  p.dp = [right = p.dp](const BackwardWork& w, const Pair& x) { return w.scale * right(w, x); };
}

void gradients_scaled_twice(BackwardParts& p) {
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) { return w.scale * w.scale; };
}

void dk_scaled_by_v_dim(BackwardParts& p) {
  p.dk_scale = [](const BackwardWork& w) { return 1 / std::sqrt(static_cast<float>(w.dv_dim)); };
}

std::vector<Mutant> scale_faults() {
  return {
      backward("bwd_dk_times_log2e", scale, "f32 f16", dk_times_log2e),
      backward("bwd_exp2_of_scores_of_base_e", scale, "f32 f16", exp2_of_scores_of_base_e),
      backward("bwd_dp_scaled_like_the_scores", scale, "f32", dp_scaled_like_the_scores, dp),
      backward("bwd_gradients_scaled_twice", scale, "f32 bf16", gradients_scaled_twice),
      backward("bwd_dk_scaled_by_v_dim", scale, "f32", dk_scaled_by_v_dim),
  };
}

// Precision

void operands_in_tf32(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (std::vector<float>* operand : {&w.q, &w.k, &w.v, &w.dout}) {
      for (float& x : *operand) {
        x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0xffffe000u);
      }
    }
  };
}

/// The instruction for an approximate tanh has 11 bits.
void tanh_of_11_bits(BackwardParts& p) {
  const auto tanh = [](const BackwardWork& w, const Pair& x) {
    return rounded(Format::f16, std::tanh(x.z / w.softcap));
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    Pair coarse = x;
    if (w.softcap > 0) coarse.score = w.softcap * tanh(w, x);
    return right(w, coarse);
  };
  p.slope = [=](const BackwardWork& w, const Pair& x) {
    return w.softcap > 0 ? 1 - tanh(w, x) * tanh(w, x) : 1.0f;
  };
}

void lse_in_f16(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.lse) x = rounded(Format::f16, x);
  };
}

void scores_in_f16(BackwardParts& p) {
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(rounded(Format::f16, x.score) - of_row(w.lse, x.i));
  };
}

void ds_from_p_in_f16(BackwardParts& p) {
  p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
    Pair narrow = x;
    narrow.p = rounded(Format::f16, x.p);
    return right(w, narrow);
  };
}

/// Each tile of keys adds to dq in memory.
void dq_of_key_tiles_summed_in_f16(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  replace_product(p, kOfDq, [](BackwardWork& w, const std::vector<float>& ds) {
    std::vector<float> sum(static_cast<std::size_t>(w.d));
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t first = 0; first < w.n; first += kTile) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (std::int64_t j = first; j < std::min(first + kTile, w.n); ++j) {
          add_scaled(w.scale * ds[at(i, w.n, j)], w.k.data() + j * w.d, w.d, sum.data());
        }
        for (std::int64_t c = 0; c < w.d; ++c) {
          float& x = w.dq[at(i, w.d, c)];
          x = rounded(Format::f16, x + of_row(sum, c));
        }
      }
    }
  });
}

std::vector<Mutant> precision_faults() {
  return {
      backward("bwd_operands_in_tf32", precision, "f32", operands_in_tf32),
      backward("bwd_tanh_of_11_bits", precision, "f32", tanh_of_11_bits),
      backward("bwd_lse_in_f16", precision, "f32", lse_in_f16),
      backward("bwd_scores_in_f16", precision, "f32", scores_in_f16),
      backward("bwd_ds_from_p_in_f16", precision, "f32", ds_from_p_in_f16),
      backward("bwd_dq_of_key_tiles_summed_in_f16", precision, "f32",
               dq_of_key_tiles_summed_in_f16),
  };
}

}  // namespace

std::vector<Mutant> bwd_second_products() {
  std::vector<Mutant> all;
  for (const auto& part :
       {dq_faults(), dk_faults(), accumulate_faults(), scale_faults(), precision_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
