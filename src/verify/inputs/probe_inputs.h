// Inputs of the probes: dense f64 calls filled by formulas. call_variants.h changes existing calls.
#pragma once

#include <algorithm>
#include <cmath>

#include "verify/implementation.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {

/// A compact f64 call of the shape with q, k and v zero.
HostCall blank_call(const Shape& shape, const Options& options);

/// Sets every element of q, k or v: value(batch, head, row, column).
template <typename Value>
void fill(const TensorView& t, Value value) {
  auto* data = static_cast<double*>(t.data);
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t i = 0; i < t.shape[2]; ++i) {
        for (std::int64_t c = 0; c < t.shape[3]; ++c) *data++ = value(b, h, i, c);
      }
    }
  }
}

/// Independent normal numbers.
void fill_random(const TensorView& t, double sigma, std::uint64_t seed, std::uint64_t stream);

/// V[j][c] is 1 if (j + 1) mod v_dim = c: a row of the output is P folded to v_dim columns. The
/// rotation by one makes V differ from its transpose at any length.
void fill_folded_one_hot(HostCall& call);

/// The score of key j is score(j) for every query, up to rounding: q and k are nonzero in one
/// dimension only.
template <typename Score>
void fill_scores_by_key(HostCall& call, std::int64_t dimension, Score score) {
  const Tensors& t = call.tensors;
  const double d = static_cast<double>(t.q.shape[3]);
  const double scale = call.options.scale.value_or(1.0 / std::sqrt(d));
  // Factors of similar size stay in the range of narrow formats.
  double largest = 1;
  for (std::int64_t j = 0; j < t.k.shape[2]; ++j) {
    largest = std::max(largest, std::fabs(score(j)));
  }
  const double size = std::exp2(std::round(std::log2(std::sqrt(largest / std::fabs(scale)))));
  fill(t.q, [&](auto, auto, auto, std::int64_t c) { return c == dimension ? size : 0.0; });
  fill(t.k, [&](auto, auto, std::int64_t j, std::int64_t c) {
    return c == dimension ? score(j) / (scale * size) : 0.0;
  });
}

/// The first, last and every fourth key are equal and have the largest score of every row, so that
/// the running maximum is the same for any tile, split or order. The other scores are random with
/// standard deviation `sigma`.
void fill_flat_maximum(HostCall& call, double sigma, std::uint64_t seed);

/// Row i of q is nonzero in dimension i mod head_dim only. The first, last and every fourth key
/// have the largest score of every row.
void fill_one_dimension_per_row(HostCall& call, std::uint64_t seed);

constexpr bool is_top_key(std::int64_t j, std::int64_t kv_len) {
  return j % 4 == 0 || j == kv_len - 1;
}

}  // namespace flashcore::verify
