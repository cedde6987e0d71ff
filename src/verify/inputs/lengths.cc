#include "verify/inputs/lengths.h"
#include "verify/inputs/decimal.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace flashcore::verify {

std::vector<std::int64_t> lengths_to_try(bool quick, std::int64_t step) {
  std::set<std::int64_t> lengths;
  for (std::int64_t n = 1; n <= 130; ++n) {
    const bool near_8 = n % 8 <= 1 || n % 8 == 7;
    if (!quick || n <= 20 || near_8) lengths.insert(n);
  }
  for (std::int64_t n = 256; n <= (quick ? 512 : 1024); n *= 2) {
    lengths.insert({n - 1, n, n + 1, n + n / 4, n + n / 2});
  }
  std::set<std::int64_t> possible;
  for (const std::int64_t n : lengths) possible.insert((n + step - 1) / step * step);
  return {possible.begin(), possible.end()};
}

LengthVerdict judge_lengths(const LengthResults& results, const std::string& name) {
  LengthVerdict verdict;
  std::vector<std::int64_t> failing;
  for (const auto& [n, passed] : results) {
    if (!passed) failing.push_back(n);
  }
  if (failing.empty()) return verdict;
  verdict.failed = true;
  verdict.first = failing.front();
  std::int64_t step = 0;  // common divisor of the lengths that pass after the first failure
  for (const auto& [n, passed] : results) {
    if (passed && n > verdict.first) step = std::gcd(step, n);
  }
  // A fault in partial tiles lets every multiple of the tile pass. One length may pass by chance.
  verdict.depends_on_length =
      step == 1 || (step > 1 && std::all_of(results.begin(), results.end(), [&](const auto& r) {
                      return r.second || r.first <= verdict.first || r.first % step != 0;
                    }));
  if (verdict.depends_on_length && step > 1) {
    verdict.text = "fails unless " + name + " is a multiple of " + decimal(step);
  } else if (verdict.depends_on_length) {
    verdict.text = "fails at " + name;
    for (std::size_t i = 0; i < std::min<std::size_t>(failing.size(), 6); ++i) {
      verdict.text += (i == 0 ? " " : ", ") + decimal(failing[i]);
    }
    if (failing.size() > 6) verdict.text += ", ...";
  } else if (failing.size() == results.size()) {
    verdict.text = "fails at every " + name;
  } else if (step == 0) {
    verdict.text = "fails at every " + name + " from " + decimal(verdict.first);
  } else {
    verdict.text = "fails at nearly every " + name;
  }
  return verdict;
}

}  // namespace flashcore::verify
