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
// bwd_address_faults.cc
std::vector<Mutant> bwd_address_faults();
// bwd_value_faults.cc
std::vector<Mutant> bwd_p_tile_faults();
std::vector<Mutant> bwd_dp_tile_faults();
std::vector<Mutant> bwd_delta_tile_faults();
std::vector<Mutant> bwd_ds_tile_faults();
std::vector<Mutant> bwd_product_faults();
// bwd_option_faults.cc
std::vector<Mutant> bwd_coverage_by_option_faults();
std::vector<Mutant> bwd_state_faults();
std::vector<Mutant> bwd_sum_by_size_faults();
std::vector<Mutant> bwd_mask_by_option_faults();
std::vector<Mutant> bwd_dlse_by_option_faults();
std::vector<Mutant> bwd_few_input_faults();
// bwd_second_values.cc, bwd_second_memory.cc, bwd_second_products.cc, bwd_second_options.cc: the
// second table, written by someone who had not read the probes.
std::vector<Mutant> bwd_second_values();
std::vector<Mutant> bwd_second_memory();
std::vector<Mutant> bwd_second_products();
std::vector<Mutant> bwd_second_options();
// bwd_third_values.cc, bwd_third_memory.cc, bwd_third_products.cc, bwd_third_options.cc: the third
// table, by another author who had not read the probes.
std::vector<Mutant> bwd_third_values();
std::vector<Mutant> bwd_third_memory();
std::vector<Mutant> bwd_third_products();
std::vector<Mutant> bwd_third_options();
// bwd_fourth_tiles.cc, bwd_fourth_rows.cc, bwd_fourth_arguments.cc, bwd_fourth_numbers.cc: the
// fourth table, by one more author who had not read the probes.
std::vector<Mutant> bwd_fourth_tiles();
std::vector<Mutant> bwd_fourth_rows();
std::vector<Mutant> bwd_fourth_arguments();
std::vector<Mutant> bwd_fourth_numbers();

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
