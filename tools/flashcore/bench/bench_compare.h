// Compares two benchmark results. Faster means a smaller time.
#pragma once

#include <string>
#include <vector>

#include "data/cases.h"

namespace flashcore::tool {

enum class Verdict { faster, slower, noise };

const char* to_string(Verdict verdict);

/// A change counts if it exceeds both spreads and this.
inline constexpr double kSmallestChange = 0.03;

/// `change` is new time over old time, minus 1: negative is faster.
Verdict classify(double change, double old_spread, double new_spread);

struct RowChange {
  std::string name, shape, dtype;
  std::string old_kernel, new_kernel;
  double old_us = 0, new_us = 0, change = 0;
  Verdict verdict = Verdict::noise;
};

struct BenchChanges {
  std::vector<RowChange> rows;
  std::vector<std::string> only_old, only_new;  ///< rows that the other result lacks
  std::string warning;                          ///< the results are from different devices
};

/// Rows match if their cases are the same and, if a case has several rows, their kernels. Throws
/// CommandError if an argument is not a benchmark result.
BenchChanges compare_results(const Json& old_result, const Json& new_result);

Json to_json(const BenchChanges& changes);
std::string to_text(const BenchChanges& changes);

/// Reads a result file. Throws CommandError.
Json load_result(const std::string& path);

}  // namespace flashcore::tool
