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
    case DType::f64: return 0x1p-52;  // twice the roundoff: the oracle's own error counts too
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    case DType::e4m3: return 0x1p-4;
    default: return 0x1p-24;
  }
}

bool holds_poison(const void* data, DType dtype, std::int64_t index) {
  std::uint64_t bits = 0;
  const auto size = static_cast<std::size_t>(size_of(dtype));
  std::memcpy(&bits, static_cast<const std::byte*>(data) + static_cast<std::size_t>(index) * size,
              size);
  return bits == poison(dtype);
}

/// From here on values round to infinity: half a step past the largest of the format.
double overflow_edge(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f16: return 65520.0;
    case DType::bf16: return 0x1p128 - 0x1p119;
    default: return 0x1p128 - 0x1p103;
  }
}

struct Accumulator {
  double error2 = 0, bound2 = 0;
};

std::string element_name(const ElementError& e) {
  char text[128];
  if (e.column < 0) {
    std::snprintf(text, sizeof text, "lse[b=%d, h=%d, i=%d]", e.row.b, e.row.h, e.row.i);
  } else {
    std::snprintf(text, sizeof text, "out[b=%d, h=%d, i=%d, c=%lld]", e.row.b, e.row.h, e.row.i,
                  static_cast<long long>(e.column));
  }
  return text;
}

}  // namespace

Arithmetic arithmetic_of(DType out, DType probability) {
  // 16-bit formats are stored with subnormals; f32 and f64 arithmetic may flush them.
  const auto smallest = [](DType dtype) {
    return dtype == DType::f64    ? 0x1p-1022
           : dtype == DType::f16  ? 0x1p-24
           : dtype == DType::e4m3 ? 0x1p-17  // 2^-9, where P is kept times 2^8
                                  : 0x1p-126;
  };
  // Kernels that keep P in 16 bits let the maximum wait until it has grown by 2^8. The factor that
  // brings older weights, of up to 2^8, to the new maximum is flushed below 2^-126: 2^-118 of them.
  const double p_smallest =
      probability == DType::bf16 ? 0x1p8 * smallest(probability) : smallest(probability);
  // Tensor cores that take 8-bit operands cut off each of 32 products 13 bits below the largest.
  const bool few_bits = probability == DType::e4m3;
  return {unit_of(out),
          unit_of(probability),
          probability == DType::f64 ? 0x1p-52 : 0x1p-24,
          smallest(out),
          p_smallest,
          few_bits ? 0x1p-13 : 0.0,
          few_bits ? 32 * 0x1p-13 : 0.0,
          probability == DType::f16,
          probability == DType::f16 || probability == DType::bf16};
}

double score_bound(const reference::Oracle& o, std::size_t row, const Arithmetic& a) {
  // The roundings of scale, maximum and exponent; and the random walk of a dot product or, where
  // errors have one sign, what eight products at a time lose of the sum so far.
  const auto head_dim = static_cast<double>(o.head_dim);
  const double walk = std::sqrt(head_dim) * o.magnitude[row];
  const double cut_off = a.cuts_sums ? head_dim / 8 * o.largest_sum[row] : 0.0;
  return a.sum_unit * (4 * o.magnitude[row] + std::max(walk, cut_off));
}

double out_bound(const reference::Oracle& o, std::size_t row, std::size_t column,
                 const Arithmetic& a) {
  const std::size_t at = row * static_cast<std::size_t>(o.v_dim) + column;
  const double want = std::fabs(o.out[at]);
  // Scores kept in 16 bits are off by ε, which for scores of hundreds is not small: not ε ·
  // deviation then, but (e^2ε - 1) / 2 times it (docs/verify.md).
  constexpr double kMost = 1e100;  // infinity times a deviation of 0 would be NaN
  const double score_error =
      score_bound(o, row, a) +
      std::min(0.5 * std::expm1(2 * (a.score_unit * o.magnitude[row] +
                                     a.product_unit * o.largest_product[row])),
               kMost);
  return 2 * a.out_unit * want +
         4 * (a.p_unit + a.sum_unit * std::sqrt(static_cast<double>(o.kv_len[row]))) *
             std::max(o.spread[at], want) +
         score_error * o.deviation[at] + a.out_smallest +
         a.p_smallest * (a.scales_p ? o.v_mass_in_steps : o.v_mass)[at];
}

double lse_bound(const reference::Oracle& o, std::size_t row, const Arithmetic& a) {
  return a.sum_unit * (2e-6 * 0x1p24 + std::sqrt(static_cast<double>(o.kv_len[row])) +
                       2 * std::fabs(o.lse[row])) +
         score_bound(o, row, a) + a.score_unit * (o.magnitude[row] + std::fabs(o.lse[row]) + 1) +
         a.product_unit * o.largest_product[row];
}

Comparison compare(const reference::Oracle& oracle, const Problem& problem, const Tensors& result,
                   const Arithmetic& arithmetic) {
  Comparison c;
  double error_sum = 0, bias_sum = 0, error2 = 0, want2 = 0;
  std::int64_t finite = 0;
  std::map<std::pair<int, int>, Accumulator> heads;
  double worst_score = -1;
  const auto note = [&](const ElementError& e, double score) {
    if (score > worst_score) {
      worst_score = score;
      c.worst = e;
    }
  };
  const std::int64_t total =
      static_cast<std::int64_t>(oracle.rows.size()) * std::max<std::int64_t>(oracle.v_dim, 1);
  const std::int64_t sample_step = std::max<std::int64_t>(total / 5, 1);

  /// One element against its bound; non-finite values must stand at the same places.
  const auto judge = [&](const ElementError& e, bool excused, bool unwritten) {
    const bool is_lse = e.column < 0;
    if (unwritten) {
      ++c.unwritten;
      note(e, 4e300);
    } else if (!std::isfinite(e.want) || !std::isfinite(e.got)) {
      if (excused) return;
      // Of an output only the place counts: whether inf meets a weight of 0, and becomes NaN,
      // depends on when a weight underflows. An LSE of -inf says that no key was seen, and must
      // stand there and nowhere else.
      const bool same_place = std::isfinite(e.want) == std::isfinite(e.got);
      constexpr double kNoKey = -std::numeric_limits<double>::infinity();
      if (!same_place || (is_lse && (e.want == kNoKey) != (e.got == kNoKey))) {
        ++c.non_finite;
        note(e, 2e300);
      }
    } else {
      const double error = std::fabs(e.error());
      if (is_lse) {
        c.max_lse_error = std::max(c.max_lse_error, error);
      } else {
        ++finite;
        c.max_error = std::max(c.max_error, error);
        error_sum += error;
        bias_sum += e.error();
        error2 += error * error;
        want2 += e.want * e.want;
        Accumulator& head = heads[{e.row.b, e.row.h}];
        head.error2 += error * error;
        head.bound2 += e.bound * e.bound;
        if (std::fabs(e.want) > e.bound && e.got * e.want < 0) ++c.sign_flips;
      }
      const double ratio = error / e.bound;
      c.worst_ratio = std::max(c.worst_ratio, ratio);
      if (!(error <= e.bound)) ++c.over_bound;
      note(e, ratio);
    }
  };

  for (std::size_t r = 0; r < oracle.rows.size(); ++r) {
    const reference::RowId& row = oracle.rows[r];
    std::int64_t packed_row = row.i;
    if (problem.q_varlen) {
      packed_row += static_cast<const std::int32_t*>(result.cu_seqlens_q.data)[row.b];
    }
    const bool excused = oracle.may_be_poisoned[r] != 0;
    const std::int64_t base =
        row.b * problem.out.batch + row.h * problem.out.head + packed_row * problem.out.row;
    for (std::int64_t col = 0; col < oracle.v_dim; ++col) {
      const std::int64_t at = base + col * problem.out.column;
      const std::size_t index =
          r * static_cast<std::size_t>(oracle.v_dim) + static_cast<std::size_t>(col);
      ElementError e{row, col, reference::element(result.out.data, problem.out.dtype, at),
                     oracle.out[index],
                     out_bound(oracle, r, static_cast<std::size_t>(col), arithmetic)};
      // A value at the end of the format's range may rightly have been rounded to infinity.
      if (std::isinf(e.got) && std::isfinite(e.want) &&
          std::fabs(e.want) + e.bound >= overflow_edge(problem.out.dtype)) {
        e.want = std::copysign(std::numeric_limits<double>::infinity(), e.want);
      }
      judge(e, excused, holds_poison(result.out.data, problem.out.dtype, at));
      if (c.elements % sample_step == sample_step / 2 && c.samples.size() < 5)
        c.samples.push_back(e);
      ++c.elements;
    }
    if (result.lse.given()) {
      const std::int64_t at =
          row.b * problem.lse.batch + row.h * problem.lse.head + packed_row * problem.lse.row;
      const ElementError e{row, -1, reference::element(result.lse.data, problem.lse.dtype, at),
                           oracle.lse[r], lse_bound(oracle, r, arithmetic)};
      judge(e, false, holds_poison(result.lse.data, problem.lse.dtype, at));
      ++c.lse_elements;
    }
  }
  if (finite > 0) {
    c.mean_error = error_sum / static_cast<double>(finite);
    c.bias = bias_sum / static_cast<double>(finite);
    c.relative_error = want2 > 0 ? std::sqrt(error2 / want2) : std::sqrt(error2);
  }
  for (const auto& [head, sums] : heads) {
    if (sums.bound2 > 0) {
      c.worst_head_ratio =
          std::max(c.worst_head_ratio, std::sqrt(sums.error2) / (0.5 * std::sqrt(sums.bound2)));
    } else if (sums.error2 > 0) {
      c.worst_head_ratio = std::numeric_limits<double>::infinity();
    }
  }
  if (c.unwritten > 0) {
    c.reason = "elements were never written";
  } else if (c.non_finite > 0) {
    c.reason = "non-finite values stand at other places";
  } else if (c.over_bound > 0) {
    c.reason = "errors exceed their bounds";
  } else if (c.worst_head_ratio > 1) {
    c.reason = "a head's error as a whole exceeds half its bound";
  }
  c.ok = c.reason.empty();
  return c;
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
