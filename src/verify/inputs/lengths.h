// Which lengths to try, and what the set of those that fail says.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flashcore::verify {

/// 1 to 130 and both sides of the powers of two above (quick: fewer), multiples of `step`.
std::vector<std::int64_t> lengths_to_try(bool quick, std::int64_t step);

/// A call that ends its process costs a new one, one that hangs costs its limit: after so many a
/// sweep over lengths stops.
inline constexpr int kMostDeaths = 3;

/// Results by length: true where it passed.
using LengthResults = std::map<std::int64_t, bool>;

struct LengthVerdict {
  bool failed = false;
  /// Longer ones pass where a shorter one fails: the length itself decides, as where the last tile
  /// is not full. Otherwise all fail from the first on, or all but a few that pass by chance.
  bool depends_on_length = false;
  std::int64_t first = 0;  ///< the smallest that fails
  std::string text;        ///< "fails unless kv_len is a multiple of 64"
};
LengthVerdict judge_lengths(const LengthResults& results, const std::string& name);

}  // namespace flashcore::verify
