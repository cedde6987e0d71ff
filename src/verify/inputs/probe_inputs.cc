#include "verify/inputs/probe_inputs.h"

#include <algorithm>
#include <cmath>

namespace flashcore::verify {
namespace {

/// Score of the top keys, several standard deviations above the others.
constexpr double kTopScore = 2.5;

double scale_of(const HostCall& call) {
  return call.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(call.tensors.q.shape[3])));
}

}  // namespace

HostCall blank_call(const Shape& s, const Options& options) {
  HostCall call;
  call.options = options;
  call.place(&Tensors::q, DType::f64, {s.batch, s.q_heads, s.q_len, s.head_dim});
  call.place(&Tensors::k, DType::f64, {s.batch, s.kv_heads, s.kv_len, s.head_dim});
  call.place(&Tensors::v, DType::f64, {s.batch, s.kv_heads, s.kv_len, s.v_dim});
  call.place(&Tensors::out, DType::f64, {s.batch, s.q_heads, s.q_len, s.v_dim});
  for (const TensorView* t : {&call.tensors.q, &call.tensors.k, &call.tensors.v}) {
    fill(*t, [](auto, auto, auto, auto) { return 0.0; });
  }
  return call;
}

void fill_random(const TensorView& t, double sigma, std::uint64_t seed, std::uint64_t stream) {
  Random random(seed, stream);
  fill(t, [&](auto, auto, auto, auto) { return sigma * random.normal(); });
}

void fill_folded_one_hot(HostCall& call) {
  const std::int64_t v_dim = call.tensors.v.shape[3];
  fill(call.tensors.v, [&](auto, auto, std::int64_t j, std::int64_t c) {
    return (j + 1) % v_dim == c ? 1.0 : 0.0;
  });
}

void fill_flat_maximum(HostCall& call, double sigma, std::uint64_t seed) {
  const Tensors& t = call.tensors;
  const std::int64_t d = t.q.shape[3], n = t.k.shape[2];
  const double scale = scale_of(call);
  // Queries have a component along (1, ..., 1), the direction of the top keys; the rest is random.
  // A key that scores above 90 % of a top key is drawn again, smaller.
  const double amplitude =
      std::sqrt(sigma / (std::fabs(scale) * std::sqrt(static_cast<double>(d))));
  Random random(seed, 21);
  fill(t.q, [&](auto, auto, auto, auto) {
    return amplitude * (0.75 + 0.5 * std::clamp(random.normal(), -2.5, 2.5));
  });
  Random key_random(seed, 22);
  const double top = kTopScore / (scale * static_cast<double>(d) * 0.75 * amplitude);
  std::vector<double> row(static_cast<std::size_t>(d));
  fill(t.k, [&](std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t c) {
    if (c > 0) return row[static_cast<std::size_t>(c)];
    if (is_top_key(j, n)) {
      std::fill(row.begin(), row.end(), top);
      return row[0];
    }
    for (double size = amplitude;; size *= 0.8) {
      for (double& x : row) x = size * std::clamp(key_random.normal(), -2.5, 2.5);
      const std::int64_t group = t.q.shape[1] / t.k.shape[1], rows = t.q.shape[2];
      const auto* q =
          static_cast<const double*>(t.q.data) + (b * t.q.shape[1] + h * group) * rows * d;
      double largest = -1e300;  // relative to the top key's score of the same row
      for (std::int64_t r = 0; r < group * rows; ++r) {
        double score = 0, top_score = 0;
        for (std::int64_t e = 0; e < d; ++e) {
          score += q[r * d + e] * row[static_cast<std::size_t>(e)];
          top_score += q[r * d + e] * top;
        }
        largest = std::max(largest, scale * (score - 0.9 * top_score));
      }
      if (largest <= 0) break;
    }
    return row[0];
  });
}

void fill_one_dimension_per_row(HostCall& call, std::uint64_t seed) {
  const Tensors& t = call.tensors;
  const std::int64_t d = t.q.shape[3], n = t.k.shape[2];
  // Scores from -2 to 2 in steps of 1/8, which are exact in 16 bits and nearly so in 8 bits.
  const double size = std::exp2(std::round(std::log2(1.0 / std::fabs(scale_of(call)))));
  fill(t.q, [&](auto, auto, std::int64_t i, std::int64_t c) { return i % d == c ? size : 0.0; });
  Random random(seed, 23);
  fill(t.k, [&](auto, auto, std::int64_t j, auto) {
    return is_top_key(j, n) ? 2.0 : static_cast<double>(random.between(-12, 12)) / 8.0;
  });
}

}  // namespace flashcore::verify
