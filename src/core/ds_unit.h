// The unit in which f16 kernels round dS.
#pragma once

#include "core/backward_params.h"
#include "core/numeric.h"

namespace flashcore::core {

/// Numbers that bound dS: |dS| <= |dO_i| |v_j| + |delta_i|, with Euclidean norms of rows.
enum class DsNorm : std::int32_t { dout, v, delta };
inline constexpr int kDsNorms = 3;

FLASHCORE_HD std::int64_t ds_norm_index(const BackwardParams& p, DsNorm norm, std::int32_t b,
                                        std::int32_t kv_head) {
  return (static_cast<std::int64_t>(norm) * p.fwd.batch + b) * p.fwd.kv_heads + kv_head;
}

/// A power of two: dS times it stays below 2^15. f16 cannot hold dS itself, which has the size of
/// dout: small gradients would vanish, large ones overflow. 1 for formats with more exponents.
FLASHCORE_HD float ds_unit(const BackwardParams& p, std::int32_t b, std::int32_t kv_head) {
  if (p.dout_largest == nullptr) return 1.f;
  const auto norm = [&](DsNorm which) {
    return float_of_bits(p.dout_largest[ds_norm_index(p, which, b, kv_head)]);
  };
  const float bound = norm(DsNorm::dout) * norm(DsNorm::v) + norm(DsNorm::delta);
  constexpr std::int32_t kBias = 127, kTop = 15, kLargest = 60;  // exponents of floats
  const std::int32_t exponent = static_cast<std::int32_t>(bits_of_float(bound) >> 23) - kBias + 1;
  const std::int32_t wanted = bound > 0.f ? kTop - exponent : 0;  // bound < 2^exponent
  return float_of_bits(static_cast<std::uint32_t>(kBias + (wanted < kLargest ? wanted : kLargest))
                       << 23);
}

}  // namespace flashcore::core
