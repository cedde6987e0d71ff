// Key ranges: parts of fixed length in which the keys of a sequence are read, from key 0 on. The
// results of a row in its ranges are folded in ascending order, so its bits depend neither on the
// CTAs that compute them nor on the rest of the call. A range without keys of the row changes no
// bit.
#pragma once

#include "core/mask.h"
#include "core/softmax.h"

namespace flashcore::core {

/// KV tiles of a range. Fewer give a single sequence more CTAs, more take less time to fold.
inline constexpr int kRangeTiles = 12;

struct KeyRanges {
  std::int32_t first;  // index of the first range
  std::int32_t count;  // at least 1
};

/// The ranges, of `keys` keys each, that contain these visible keys.
FLASHCORE_HD constexpr KeyRanges ranges_of(KeyRange visible, std::int32_t keys) {
  if (visible.empty()) return {0, 1};
  const std::int32_t first = visible.begin / keys;
  return {first, (visible.end - 1) / keys + 1 - first};
}

FLASHCORE_HD constexpr KeyRange keys_of_range(std::int32_t index, std::int32_t keys) {
  constexpr std::int32_t kMost = 0x7fffffff;
  const std::int32_t begin = index * keys;
  return {begin, begin < kMost - keys ? begin + keys : kMost};
}

/// x wx + y wy, with three roundings. The same bits if x and y change places.
FLASHCORE_HD float weighted_sum(float x, float wx, float y, float wy) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(__fmul_rn(x, wx), __fmul_rn(y, wy));
#else
  const volatile float a = x * wx, b = y * wy;  // no FMA
  return a + b;
#endif
}

/// Two results of a row over different keys as one. Their outputs are to be added with the weights.
struct FoldedStats {
  SoftmaxState<float> state;
  float weight[2];
};

template <typename Math = AccurateMath>
FLASHCORE_HD FoldedStats fold(SoftmaxState<float> a, SoftmaxState<float> b) {
  const float max = a.max > b.max ? a.max : b.max;
  const float of_a = partial_weight<Math>(a.max, max), of_b = partial_weight<Math>(b.max, max);
  return {{max, weighted_sum(a.sum, of_a, b.sum, of_b)}, {of_a, of_b}};
}

}  // namespace flashcore::core
