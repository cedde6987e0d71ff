#include "verify/inputs/case_lengths.h"

#include <algorithm>

#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

// Probability that a case has only extreme lengths. Others have lengths of every size.
constexpr double kExtremeLengths = 0.3;

/// cu_seqlens of sequences of up to `most` rows; at least one has `most` rows.
std::vector<std::int32_t> draw_ends(Random& random, std::int64_t batch, std::int64_t most) {
  std::vector<std::int32_t> ends{0};
  const std::int64_t full = batch > 0 ? random.below(batch) : 0;
  const bool extreme = random.chance(kExtremeLengths);
  const std::int64_t extremes[] = {0, 0, std::min<std::int64_t>(most, 1), most};
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = b == full ? most
                                : extreme ? random.pick(extremes)
                                          : random.between(0, most);
    ends.push_back(static_cast<std::int32_t>(ends.back() + length));
  }
  return ends;
}

/// used_k of a sequence: none, one or all keys, or at least half of them.
std::int64_t draw_used(Random& random, bool extreme, std::int64_t length) {
  const std::int64_t extremes[] = {0, std::min<std::int64_t>(length, 1), length};
  if (extreme) return random.pick(extremes);
  return random.chance(0.1) ? 0 : random.between((length + 1) / 2, length);
}

}  // namespace

CaseLengths draw_lengths(const CaseSpec& s) {
  Random random(s.seed, kLengths);
  CaseLengths lengths;
  // A varlen tensor may have unused rows after the last sequence. Without a maximal length, all
  // rows of the tensor count: as bits, a block mask could then exceed the memory.
  const bool by_blocks = s.mask_block_q > 0;
  if (s.q_varlen) {
    lengths.q_ends = draw_ends(random, s.batch, s.q_len);
    lengths.total_q = lengths.q_ends.back() + random.between(0, 2);
    lengths.sets_max_q_len = random.chance(0.5) || by_blocks;
  }
  if (s.kv_varlen) {
    lengths.k_ends = draw_ends(random, s.batch, s.kv_len);
    lengths.total_k = lengths.k_ends.back() + random.between(0, 2);
    lengths.sets_max_kv_len = random.chance(0.5) || by_blocks;
  }
  const bool extreme = random.chance(kExtremeLengths), far = random.chance(0.3);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    const std::int64_t length = s.kv_varlen ? lengths.k_ends[i + 1] - lengths.k_ends[i] : s.kv_len;
    std::int64_t used = length;
    if (s.used_k) {
      used = s.used_lengths.empty() ? draw_used(random, extreme, length) : s.used_lengths[i];
    }
    lengths.used_k.push_back(static_cast<std::int32_t>(used));
    // A distant start puts queries before the first key or after the last.
    const std::int64_t span = std::max<std::int64_t>(length, 8);
    const std::int64_t least = far ? -std::max(s.q_len, span) : -span / 4;
    lengths.q_start.push_back(static_cast<std::int32_t>(random.between(least, span)));
    lengths.k_start.push_back(static_cast<std::int32_t>(random.between(-span / 4, span / 4)));
  }
  return lengths;
}

}  // namespace flashcore::verify
