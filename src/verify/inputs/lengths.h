// Lengths of a sweep, and the conclusion from those that fail.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flashcore::verify {

/// 1 to 130 and both sides of larger powers of two (quick: fewer), rounded up to multiples of
/// `step`.
std::vector<std::int64_t> lengths_to_try(bool quick, std::int64_t step);

/// A sweep over lengths stops after this many calls that end their process: each costs a new
/// process, and a hang costs the deadline.
inline constexpr int kMaxDeaths = 3;

/// Hides the code of a container: instances of std types alone would be exported.
struct Ascending {
  bool operator()(std::int64_t a, std::int64_t b) const { return a < b; }
};
/// Pass or fail by length.
using LengthResults = std::map<std::int64_t, bool, Ascending>;

struct LengthVerdict {
  bool failed = false;
  /// True if a length above a failing one passes: the remainder of the length decides, as with a
  /// partial last tile. False if all lengths from the first failure on fail, except a few by
  /// chance.
  bool depends_on_length = false;
  std::int64_t first = 0;  ///< the smallest that fails
  std::string text;        ///< "fails unless kv_len is a multiple of 64"
};
LengthVerdict judge_lengths(const LengthResults& results, const std::string& name);

}  // namespace flashcore::verify
