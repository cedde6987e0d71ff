// Tools of mutants of the backward pass: correct values of any pair of a query and a key.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "mutants/bwd_tools.h"

namespace flashcore::mutants {

inline float dot_of_rows(const std::vector<float>& a, std::int64_t i, const std::vector<float>& b,
                         std::int64_t j, std::int64_t columns) {
  float sum = 0;
  for (std::int64_t c = 0; c < columns; ++c) sum += a[at(i, columns, c)] * b[at(j, columns, c)];
  return sum;
}

inline float capped(const BackwardWork& w, float z) {
  return w.softcap > 0 ? w.softcap * std::tanh(z / w.softcap) : z;
}

inline bool sees_no_key(const BackwardWork& w, std::int64_t i) {
  return std::isinf(of_row(w.lse, i));
}

/// Correct values of any pair, hidden or not. P of a row without keys is 0.
inline Pair pair_of(const BackwardWork& w, std::int64_t i, std::int64_t j) {
  Pair x{i, j};
  x.z = w.scale * dot_of_rows(w.q, i, w.k, j, w.d);
  x.score = capped(w, x.z);
  x.p = sees_no_key(w, i) ? 0.0f : std::exp(x.score - of_row(w.lse, i));
  x.dp = dot_of_rows(w.dout, i, w.v, j, w.dv_dim);
  return x;
}

/// Mean of the rows of [rows, columns].
inline std::vector<float> mean_row(const std::vector<float>& values, std::int64_t rows,
                                   std::int64_t columns) {
  std::vector<float> mean(static_cast<std::size_t>(columns), 0.0f);
  for (std::int64_t i = 0; i < rows; ++i) {
    add_scaled(1 / static_cast<float>(rows), values.data() + i * columns, columns, mean.data());
  }
  return mean;
}

inline bool is_first_of_group(const BackwardWork& w) { return w.h % w.group == 0; }

/// Position of a query among the keys.
inline std::int64_t position(const BackwardWork& w, std::int64_t i) { return i + w.n - w.m; }

}  // namespace flashcore::mutants
