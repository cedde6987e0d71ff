// The oracle's scores of one row.
#pragma once

#include <cstdint>
#include <vector>

#include "flashcore/problem.h"
#include "reference/cut_sums.h"
#include "reference/oracle.h"
#include "reference/panels.h"

namespace flashcore::reference {

/// K and V of one (batch, KV head), in f64.
struct Head {
  std::int64_t b = -1, kv_head = -1;
  Lengths lengths{};
  Panels<double> k;                    // transposed: [head_dim][kv_len]
  Panels<double> v;                    // [kv_len][v_dim]
  FactorPanels k_factors;              // of k, if tensor cores may multiply it
  std::vector<double> v_scale_ratio;   // [kv_len]: V's largest scale over the key's scale
  bool equal_v_scales = true;          // all ratios are 1
  std::vector<std::uint8_t> v_finite;  // [kv_len]
};

void load_head(const Problem& problem, const Tensors& tensors, std::int64_t b, std::int64_t kv_head,
               const OracleParts& parts, Head& head);

/// By key of the row's sequence. Only score and magnitude are valid where the key is hidden.
struct RowScores {
  std::vector<double> score, magnitude, largest_product, largest_sum;
  std::vector<double> cut;  ///< empty: no sum is cut
  std::vector<std::uint8_t> visible;
};

/// Scores over all keys of the row's sequence, in the order of docs/numerics.md.
void compute_scores(const Problem& problem, const Tensors& tensors, const RowId& row,
                    const Head& head, RowScores& scores);

}  // namespace flashcore::reference
