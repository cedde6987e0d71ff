#include "verify/inputs/compare_bwd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "reference/elements.h"
#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

/// A value that rounds to infinity: half a step above the largest finite one.
double largest_before_infinity(DType dtype) {
  return dtype == DType::f64    ? std::numeric_limits<double>::max()
         : dtype == DType::f16  ? 65520.0
         : dtype == DType::bf16 ? 0x1p128 - 0x1p119
                                : 0x1p128 - 0x1p103;
}

bool still_poisoned(const TensorView& t, std::int64_t at) {
  std::uint64_t bits = 0;
  const auto size = static_cast<std::size_t>(size_of(t.dtype));
  std::memcpy(&bits, static_cast<const std::byte*>(t.data) + static_cast<std::size_t>(at) * size,
              size);
  return bits == poison(t.dtype);
}

/// Compares one gradient after the other and accumulates the statistics.
class GradientComparer {
 public:
  void add(const char* name, const reference::Gradient& oracle, const TensorView& result,
           DType probability);
  Comparison finish();

 private:
  struct Sums {
    double ratio2 = 0;  // of errors to their bounds
    std::int64_t elements = 0;
  };
  void judge(const ElementError& e, bool excused, DType dtype, Sums& sums);
  void note(const ElementError& e, double severity) {
    if (!(severity > worst_severity_)) return;
    worst_severity_ = severity;
    c_.worst = e;
  }

  Comparison c_;
  double worst_severity_ = -1, error_sum_ = 0, bias_sum_ = 0, error2_ = 0, want2_ = 0;
  std::int64_t finite_ = 0;
};

void GradientComparer::add(const char* name, const reference::Gradient& oracle,
                           const TensorView& result, DType probability) {
  const Arithmetic arithmetic = arithmetic_of(result.dtype, probability);
  // Axes of batch, head and row. A varlen tensor has rows first, dsinks heads only.
  const bool dense = result.rank == 4;
  std::int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {};
  for (int i = 0; i < result.rank; ++i) {
    shape[4 - result.rank + i] = result.shape[i];
    stride[4 - result.rank + i] = result.strides[i];
  }
  std::map<std::pair<int, int>, Sums> heads;
  std::size_t index = 0;
  std::vector<double> values(static_cast<std::size_t>(shape[3]));
  // Compares a row of the tensor, whose first element is at `at`.
  const auto compare_row = [&](const reference::RowId& row, std::int64_t at) {
    Sums& sums = heads[{row.b, row.h}];
    reference::read_elements(result.data, result.dtype, at, stride[3], shape[3], values.data());
    for (std::int64_t column = 0; column < shape[3]; ++column, ++index) {
      const ElementError e{row,
                           column,
                           values[static_cast<std::size_t>(column)],
                           oracle.value[index],
                           gradient_bound(oracle, index, arithmetic),
                           name};
      ++c_.elements;
      if (still_poisoned(result, at + column * stride[3])) {
        ++c_.unwritten;
        note(e, 4e300);
      } else {
        judge(e, oracle.excused[index] != 0, result.dtype, sums);
      }
    }
  };
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    for (std::int64_t j = 0; j < shape[1]; ++j) {
      for (std::int64_t k = 0; k < shape[2]; ++k) {
        compare_row({static_cast<std::int32_t>(i), static_cast<std::int32_t>(dense ? j : k),
                     static_cast<std::int32_t>(dense ? k : j)},
                    i * stride[0] + j * stride[1] + k * stride[2]);
      }
    }
  }
  // The mean is that of errors relative to their bounds: the bounds of rows differ by orders of
  // magnitude. The elements of a row share the error of its dS, so it needs several rows. Each
  // element is within its own bound in any case.
  constexpr std::int64_t kRowsOfMean = 8;
  if (result.rank < 3 || shape[dense ? 2 : 1] < kRowsOfMean) return;
  for (const auto& [head, sums] : heads) {
    if (sums.elements == 0) continue;
    const double mean = sums.ratio2 / static_cast<double>(sums.elements);
    c_.worst_head_ratio = std::max(c_.worst_head_ratio, 2 * std::sqrt(mean));
  }
}

void GradientComparer::judge(const ElementError& e, bool excused, DType dtype, Sums& sums) {
  // A value near the largest finite one may correctly round to infinity.
  if (std::isinf(e.got) && std::isfinite(e.want) &&
      std::fabs(e.want) + e.bound >= largest_before_infinity(dtype)) {
    return;
  }
  if (!std::isfinite(e.want) || !std::isfinite(e.got)) {
    if (!excused && std::isfinite(e.want) != std::isfinite(e.got)) {
      ++c_.non_finite;
      note(e, 2e300);
    }
    return;
  }
  const double error = std::fabs(e.error());
  ++finite_;
  c_.max_error = std::max(c_.max_error, error);
  error_sum_ += error;
  bias_sum_ += e.error();
  error2_ += error * error;
  want2_ += e.want * e.want;
  if (std::fabs(e.want) > e.bound && e.got * e.want < 0) ++c_.sign_flips;
  const double ratio = error / e.bound;
  if (e.bound > 0) {
    sums.ratio2 += ratio * ratio;
    ++sums.elements;
  }
  c_.worst_ratio = std::max(c_.worst_ratio, ratio);
  if (!(error <= e.bound)) ++c_.over_bound;
  note(e, ratio);
}

Comparison GradientComparer::finish() {
  if (finite_ > 0) {
    c_.mean_error = error_sum_ / static_cast<double>(finite_);
    c_.bias = bias_sum_ / static_cast<double>(finite_);
    c_.relative_error = want2_ > 0 ? std::sqrt(error2_ / want2_) : std::sqrt(error2_);
  }
  if (c_.unwritten > 0) {
    c_.reason = "elements were never written";
  } else if (c_.non_finite > 0) {
    c_.reason = "non-finite values are at other places than in the oracle";
  } else if (c_.over_bound > 0) {
    c_.reason = "errors exceed their bounds";
  } else if (c_.worst_head_ratio > 1) {
    c_.reason = "the RMS error of a head exceeds half of its bound";
  }
  c_.ok = c_.reason.empty();
  return std::move(c_);
}

}  // namespace

double gradient_bound(const reference::Gradient& g, std::size_t i, const Arithmetic& a) {
  constexpr double kMax = 1e300;  // keeps the squares of a head's sum from being NaN
  const double want = std::fabs(g.value[i]);
  const double walk = std::max(std::sqrt(g.noise[i]), want);
  const double bound =
      2 * a.out_unit * want + 4 * (a.p_unit + a.sum_unit * std::sqrt(g.terms[i])) * walk +
      a.p_unit * g.alike[i] + g.error[i] + a.out_smallest + a.p_smallest * g.mass[i];
  return std::min(bound, kMax);
}

Comparison compare_gradients(const reference::GradientOracle& oracle, const Gradients& result,
                             DType probability) {
  GradientComparer comparer;
  const struct {
    const char* name;
    const reference::Gradient& oracle;
    const TensorView& result;
  } all[] = {{"dq", oracle.dq, result.dq},
             {"dk", oracle.dk, result.dk},
             {"dv", oracle.dv, result.dv},
             {"dbias", oracle.dbias, result.dbias},
             {"dsinks", oracle.dsinks, result.dsinks}};
  for (const auto& [name, gradient, view] : all) {
    if (view.given()) comparer.add(name, gradient, view, probability);
  }
  return comparer.finish();
}

}  // namespace flashcore::verify
