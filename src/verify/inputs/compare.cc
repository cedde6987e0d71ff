#include "verify/inputs/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

#include "verify/inputs/case_memory.h"

namespace flashcore::verify {
namespace {

double unit_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-52;  // twice the roundoff, to include the error of the oracle
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    case DType::e4m3: return 0x1p-4;
    default: return 0x1p-24;
  }
}

bool is_poison(const void* data, DType dtype, std::int64_t index) {
  std::uint64_t bits = 0;
  const auto size = static_cast<std::size_t>(size_of(dtype));
  std::memcpy(&bits, static_cast<const std::byte*>(data) + static_cast<std::size_t>(index) * size,
              size);
  return bits == poison(dtype);
}

/// Smallest value that rounds to infinity: half a step above the largest finite one.
double overflow_edge(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f16: return 65520.0;
    case DType::bf16: return 0x1p128 - 0x1p119;
    default: return 0x1p128 - 0x1p103;
  }
}

std::string element_name(const ElementError& e) {
  char text[128];
  if (e.tensor != nullptr) {
    std::snprintf(text, sizeof text, "%s[b=%d, h=%d, row=%d, c=%lld]", e.tensor, e.row.b, e.row.h,
                  e.row.i, static_cast<long long>(e.column));
  } else if (e.column < 0) {
    std::snprintf(text, sizeof text, "lse[b=%d, h=%d, i=%d]", e.row.b, e.row.h, e.row.i);
  } else {
    std::snprintf(text, sizeof text, "out[b=%d, h=%d, i=%d, c=%lld]", e.row.b, e.row.h, e.row.i,
                  static_cast<long long>(e.column));
  }
  return text;
}

}  // namespace

Arithmetic arithmetic_of(DType out, DType probability) {
  // 16-bit formats have subnormals; f32 and f64 arithmetic may flush them.
  const auto smallest = [](DType dtype) {
    return dtype == DType::f64    ? 0x1p-1022
           : dtype == DType::f16  ? 0x1p-24
           : dtype == DType::e4m3 ? 0x1p-17  // 2^-9 for P stored times 2^8
                                  : 0x1p-126;
  };
  // With lazy rescaling 16-bit weights grow to 2^8 before the maximum changes. The rescale factor
  // is flushed below 2^-126, which loses up to 2^-118 of such a weight.
  const double p_smallest =
      probability == DType::bf16 ? 0x1p8 * smallest(probability) : smallest(probability);
  // 8-bit tensor cores truncate each of 32 products 13 bits below the largest.
  const bool fp8_mma = probability == DType::e4m3;
  return {unit_of(out),
          unit_of(probability),
          probability == DType::f64 ? 0x1p-52 : 0x1p-24,
          smallest(out),
          p_smallest,
          fp8_mma ? 0x1p-13 : 0.0,
          fp8_mma ? 32 * 0x1p-13 : 0.0,
          probability == DType::f16,
          probability == DType::f16 || probability == DType::bf16};
}

double score_bound(const reference::Oracle& o, std::size_t row, const Arithmetic& a) {
  // Roundings of scale, maximum and exponent, plus the random walk of a dot product or, on tensor
  // cores, what they cut.
  const auto head_dim = static_cast<double>(o.head_dim);
  const double walk = std::sqrt(head_dim) * o.magnitude[row];
  const double cut = a.truncates_sums ? o.largest_cut[row] : 0.0;
  // 8-bit tensor cores truncate the sum so far each time they add 32 products.
  const double sums = a.product_unit / 32 * (head_dim / 32) * o.largest_sum[row];
  return a.sum_unit * (4 * o.magnitude[row] + std::max(walk, cut)) + sums;
}

/// Roundings of one sign in sums over keys: equal terms round alike until the sum has grown. Tiles
/// of 12 to 256 keys are summed first, then the tiles, which limits them.
double equal_roundings(const reference::Oracle& o, std::size_t row) {
  return std::min<double>(o.equal_keys[row], 256 + o.kv_len[row] / 12.0);
}

double out_bound(const reference::Oracle& o, std::size_t row, std::size_t column,
                 const Arithmetic& a) {
  const std::size_t at = row * static_cast<std::size_t>(o.v_dim) + column;
  const double want = std::fabs(o.out[at]);
  // Scores in 16 bits are off by ε, which is not small for scores of hundreds. The bound is then
  // (e^2ε - 1) / 2 · deviation instead of ε · deviation (docs/verify.md).
  constexpr double kMax = 1e100;  // infinity times a deviation of 0 would be NaN
  const double score_error =
      score_bound(o, row, a) +
      std::min(0.5 * std::expm1(2 * (a.score_unit * o.magnitude[row] +
                                     a.product_unit * o.largest_product[row])),
               kMax);
  return 2 * a.out_unit * want +
         4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(o.kv_len[row]))) *
             std::max(o.spread[at], want) +
         a.sum_unit * equal_roundings(o, row) * (want + o.deviation[at]) +
         score_error * o.deviation[at] + a.out_smallest +
         a.p_smallest * (a.scales_p ? o.v_mass_in_steps : o.v_mass)[at];
}

double lse_bound(const reference::Oracle& o, std::size_t row, const Arithmetic& a) {
  return a.sum_unit * (2e-6 * 0x1p24 + std::sqrt(static_cast<double>(o.kv_len[row])) +
                       equal_roundings(o, row) + 2 * std::fabs(o.lse[row])) +
         score_bound(o, row, a) + a.score_unit * (o.magnitude[row] + std::fabs(o.lse[row]) + 1) +
         a.product_unit * o.largest_product[row];
}

namespace {

/// Compares element by element and accumulates the statistics.
class Comparer {
 public:
  explicit Comparer(const reference::Oracle& oracle)
      : sample_step_(std::max<std::int64_t>(static_cast<std::int64_t>(oracle.rows.size()) *
                                                std::max<std::int64_t>(oracle.v_dim, 1) / 5,
                                            1)) {}

  void add_out(const ElementError& e, bool excused, bool unwritten) {
    judge(e, excused, unwritten);
    if (c_.elements % sample_step_ == sample_step_ / 2 && c_.samples.size() < 5) {
      c_.samples.push_back(e);
    }
    ++c_.elements;
  }
  void add_lse(const ElementError& e, bool unwritten) {
    judge(e, false, unwritten);
    ++c_.lse_elements;
  }
  Comparison finish();

 private:
  struct HeadSums {
    double error2 = 0, bound2 = 0;
  };

  void judge(const ElementError& e, bool excused, bool unwritten);
  void judge_non_finite(const ElementError& e);
  void judge_finite(const ElementError& e);
  void note(const ElementError& e, double severity) {
    if (!(severity > worst_severity_)) return;
    worst_severity_ = severity;
    c_.worst = e;
  }

  Comparison c_;
  std::int64_t sample_step_, finite_ = 0;
  double error_sum_ = 0, bias_sum_ = 0, error2_ = 0, want2_ = 0, worst_severity_ = -1;
  std::map<std::pair<int, int>, HeadSums> heads_;
};

/// Compares finite values with the bound. Non-finite values must be at the same places.
void Comparer::judge(const ElementError& e, bool excused, bool unwritten) {
  if (unwritten) {
    ++c_.unwritten;
    note(e, 4e300);
  } else if (!std::isfinite(e.want) || !std::isfinite(e.got)) {
    if (!excused) judge_non_finite(e);
  } else {
    judge_finite(e);
  }
}

void Comparer::judge_non_finite(const ElementError& e) {
  // An output may be inf or NaN if the oracle's is either: inf times a weight that underflows is
  // NaN, and the underflow depends on the kernel. An LSE of -inf means a row without keys and must
  // match exactly.
  const bool same_place = std::isfinite(e.want) == std::isfinite(e.got);
  constexpr double kNoKey = -std::numeric_limits<double>::infinity();
  if (!same_place || (e.column < 0 && (e.want == kNoKey) != (e.got == kNoKey))) {
    ++c_.non_finite;
    note(e, 2e300);
  }
}

void Comparer::judge_finite(const ElementError& e) {
  const double error = std::fabs(e.error());
  if (e.column < 0) {
    c_.max_lse_error = std::max(c_.max_lse_error, error);
  } else {
    ++finite_;
    c_.max_error = std::max(c_.max_error, error);
    error_sum_ += error;
    bias_sum_ += e.error();
    error2_ += error * error;
    want2_ += e.want * e.want;
    HeadSums& head = heads_[{e.row.b, e.row.h}];
    head.error2 += error * error;
    head.bound2 += e.bound * e.bound;
    if (std::fabs(e.want) > e.bound && e.got * e.want < 0) ++c_.sign_flips;
  }
  const double ratio = error / e.bound;
  c_.worst_ratio = std::max(c_.worst_ratio, ratio);
  if (!(error <= e.bound)) ++c_.over_bound;
  note(e, ratio);
}

Comparison Comparer::finish() {
  if (finite_ > 0) {
    c_.mean_error = error_sum_ / static_cast<double>(finite_);
    c_.bias = bias_sum_ / static_cast<double>(finite_);
    c_.relative_error = want2_ > 0 ? std::sqrt(error2_ / want2_) : std::sqrt(error2_);
  }
  for (const auto& [head, sums] : heads_) {
    if (sums.bound2 > 0) {
      c_.worst_head_ratio =
          std::max(c_.worst_head_ratio, std::sqrt(sums.error2) / (0.5 * std::sqrt(sums.bound2)));
    } else if (sums.error2 > 0) {
      c_.worst_head_ratio = std::numeric_limits<double>::infinity();
    }
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

Comparison compare(const reference::Oracle& oracle, const Problem& problem, const Tensors& result,
                   const Arithmetic& arithmetic) {
  Comparer comparer(oracle);
  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    const reference::RowId& row = oracle.rows[r];
    std::int64_t q_row = row.i;
    if (problem.q_varlen) {
      q_row += static_cast<const std::int32_t*>(result.cu_seqlens_q.data)[row.b];
    }
    const bool excused = oracle.may_be_poisoned[r] != 0;
    const std::int64_t base =
        row.b * problem.out.batch + row.h * problem.out.head + q_row * problem.out.row;
    for (std::int64_t col = 0; col < oracle.v_dim; ++col) {
      const std::int64_t at = base + col * problem.out.column;
      const std::size_t index =
          r * static_cast<std::size_t>(oracle.v_dim) + static_cast<std::size_t>(col);
      ElementError e{row, col, reference::element(result.out.data, problem.out.dtype, at),
                     oracle.out[index],
                     out_bound(oracle, r, static_cast<std::size_t>(col), arithmetic)};
      // A value near the largest finite one may correctly round to infinity.
      if (std::isinf(e.got) && std::isfinite(e.want) &&
          std::fabs(e.want) + e.bound >= overflow_edge(problem.out.dtype)) {
        e.want = std::copysign(std::numeric_limits<double>::infinity(), e.want);
      }
      comparer.add_out(e, excused, is_poison(result.out.data, problem.out.dtype, at));
    }
    if (result.lse.given()) {
      const std::int64_t at =
          row.b * problem.lse.batch + row.h * problem.lse.head + q_row * problem.lse.row;
      comparer.add_lse({row, -1, reference::element(result.lse.data, problem.lse.dtype, at),
                        oracle.lse[r], lse_bound(oracle, r, arithmetic)},
                       is_poison(result.lse.data, problem.lse.dtype, at));
    }
  }
  return comparer.finish();
}

std::string report(const Comparison& c) {
  std::string text;
  char line[512];
  const auto add = [&](const char* format, auto... values) {
    std::snprintf(line, sizeof line, format, values...);
    text += line;
  };
  const std::int64_t judged = c.elements + c.lse_elements;
  add("  %s\n", c.ok ? "ok" : c.reason.c_str());
  add("  worst      %s: got %.9g, want %.9g, error %.3g, bound %.3g\n",
      element_name(c.worst).c_str(), c.worst.got, c.worst.want, c.worst.error(), c.worst.bound);
  add("  errors     max %.3g, mean %.3g, relative %.3g, bias %+.3g, LSE max %.3g\n", c.max_error,
      c.mean_error, c.relative_error, c.bias, c.max_lse_error);
  add("  elements   %lld, over bound %lld (%.3g %%), never written %lld, non-finite %lld, sign "
      "flips %lld\n",
      static_cast<long long>(judged), static_cast<long long>(c.over_bound),
      judged > 0 ? 100.0 * static_cast<double>(c.over_bound) / static_cast<double>(judged) : 0.0,
      static_cast<long long>(c.unwritten), static_cast<long long>(c.non_finite),
      static_cast<long long>(c.sign_flips));
  for (const ElementError& e : c.samples) {
    add("  sample     %s: got %.9g, want %.9g, bound %.3g\n", element_name(e).c_str(), e.got,
        e.want, e.bound);
  }
  return text;
}

}  // namespace flashcore::verify
