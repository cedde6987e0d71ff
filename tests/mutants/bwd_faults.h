// The mutants of the backward pass that its probes were written or extended for, by kind.
#pragma once

#include <cmath>
#include <vector>

#include "mutants/mutants.h"

namespace flashcore::mutants {

// bwd_memory_faults.cc
std::vector<Mutant> bwd_coverage_faults();
std::vector<Mutant> bwd_tail_faults();
std::vector<Mutant> bwd_layout_faults();
std::vector<Mutant> bwd_bounds_faults();
std::vector<Mutant> bwd_determinism_faults();
// bwd_weight_faults.cc
std::vector<Mutant> bwd_p_faults();
std::vector<Mutant> bwd_scale_faults();
std::vector<Mutant> bwd_precision_faults();
// bwd_ds_faults.cc
std::vector<Mutant> bwd_dp_faults();
std::vector<Mutant> bwd_delta_faults();
std::vector<Mutant> bwd_ds_faults();
std::vector<Mutant> bwd_dlse_faults();
// bwd_sum_faults.cc
std::vector<Mutant> bwd_dq_faults();
std::vector<Mutant> bwd_dk_faults();
std::vector<Mutant> bwd_accumulate_faults();
std::vector<Mutant> bwd_mask_faults();

/// Loads rows of another head or batch: `columns` numbers per row.
inline void load_rows(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t rows,
                      std::int64_t columns, std::vector<float>& values) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < columns; ++c) {
      values[at(i, columns, c)] = static_cast<float>(read(t, b, h, i, c));
    }
  }
}

/// dS of another pair, without masks and softcap.
inline float ds_of(const BackwardWork& w, std::int64_t i, std::int64_t j) {
  float score = 0, dp = 0;
  for (std::int64_t c = 0; c < w.d; ++c) score += w.q[at(i, w.d, c)] * w.k[at(j, w.d, c)];
  for (std::int64_t c = 0; c < w.dv_dim; ++c) {
    dp += w.dout[at(i, w.dv_dim, c)] * w.v[at(j, w.dv_dim, c)];
  }
  const auto row = static_cast<std::size_t>(i);
  return std::exp(w.scale * score - w.lse[row]) * (dp - w.delta[row]);
}

/// Counts a tile `times` if `which` holds for it, else once.
template <typename Which>
auto tile_counts(float times, Which which) {
  return [=](const BackwardWork& w, int gradient, std::int64_t q_tile, std::int64_t k_tile) {
    return which(w, gradient, q_tile, k_tile) ? times : 1.0f;
  };
}

}  // namespace flashcore::mutants
