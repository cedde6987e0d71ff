// Explains wrong gradients by sums: which query heads' parts are in each head of a gradient. The
// parts of different heads are independent, so a least-squares fit finds how often each counts.
#include <algorithm>
#include <cmath>

#include "verify/inputs/decimal.h"
#include "verify/probes/gradient_heads.h"

namespace flashcore::verify {
namespace {

/// Part of a head that a fit may leave unexplained, and the largest error of a count.
constexpr double kUnexplained = 0.05, kCountError = 0.1;

/// The parts of one gradient, one for each query head of all batches.
struct Parts {
  std::size_t count = 0, size = 0;  ///< of parts; of the numbers of each
  std::size_t outputs = 0, group = 1;
  std::vector<double> values;

  const double* of(std::size_t part) const { return values.data() + part * size; }
  bool belongs(std::size_t part, std::size_t output) const { return part / group == output; }
};

Parts parts_of(const GradientCall& call, const RanGradients& ran, int g) {
  const Tensors& t = call.forward.tensors;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t rows = size(t.q.shape[2]), keys = size(t.k.shape[2]);
  const std::size_t columns = size(g == kDv ? t.v.shape[3] : t.q.shape[3]);
  const double scale =
      call.forward.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(t.q.shape[3])));
  Parts parts;
  parts.count = size(t.q.shape[0] * t.q.shape[1]);
  parts.outputs = g == kDq ? parts.count : size(t.k.shape[0] * t.k.shape[1]);
  parts.group = parts.count / parts.outputs;
  parts.size = (g == kDq ? rows : keys) * columns;
  if (g == kDq) {
    parts.values = ran.expected.gradients.dq.value;
    return parts;
  }
  parts.values.assign(parts.count * parts.size, 0.0);
  const double* operands = g == kDv ? call.dout.data() : static_cast<const double*>(t.q.data);
  for (std::size_t row = 0; row < parts.count * rows; ++row) {
    const std::vector<double>& weights =
        g == kDv ? ran.expected.forward.probabilities[row] : ran.expected.gradients.ds[row];
    const double* x = operands + row * columns;
    double* sum = parts.values.data() + row / rows * parts.size;
    for (std::size_t j = 0; j < keys; ++j) {
      const double weight = g == kDv ? weights[j] : scale * weights[j];
      for (std::size_t c = 0; c < columns; ++c) sum[j * columns + c] += weight * x[c];
    }
  }
  return parts;
}

/// Solves a symmetric positive definite system in place, by Cholesky's method. False: singular.
bool solve(std::vector<double>& a, std::vector<double>& b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const double before = a[i * n + i];
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = a[i * n + j];
      for (std::size_t k = 0; k < j; ++k) sum -= a[i * n + k] * a[j * n + k];
      if (i != j) {
        a[i * n + j] = sum / a[j * n + j];
      } else if (sum > 1e-6 * before) {
        a[i * n + i] = std::sqrt(sum);
      } else {
        return false;
      }
    }
    for (std::size_t k = 0; k < i; ++k) b[i] -= a[i * n + k] * b[k];
    b[i] /= a[i * n + i];
  }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k * n + i] * b[k];
    b[i] /= a[i * n + i];
  }
  return true;
}

/// How often each part counts in a head of a gradient; empty if no counts explain it.
std::vector<double> counts_in(const Parts& parts, const std::vector<double>& normal,
                              const double* got) {
  std::vector<double> a = normal, counts(parts.count);
  double got2 = 0, left2 = 0;
  for (std::size_t i = 0; i < parts.size; ++i) got2 += got[i] * got[i];
  if (!std::isfinite(got2)) return {};
  if (got2 == 0) return counts;
  for (std::size_t p = 0; p < parts.count; ++p) {
    const double* part = parts.of(p);
    for (std::size_t i = 0; i < parts.size; ++i) counts[p] += part[i] * got[i];
  }
  if (!solve(a, counts, parts.count)) return {};
  for (std::size_t i = 0; i < parts.size; ++i) {
    double sum = 0;
    for (std::size_t p = 0; p < parts.count; ++p) sum += counts[p] * parts.of(p)[i];
    left2 += (got[i] - sum) * (got[i] - sum);
  }
  if (!(left2 < kUnexplained * kUnexplained * got2)) return {};
  return counts;
}

/// The products of all pairs of parts.
std::vector<double> normal_matrix(const Parts& parts) {
  std::vector<double> normal(parts.count * parts.count);
  for (std::size_t p = 0; p < parts.count; ++p) {
    for (std::size_t q = 0; q <= p; ++q) {
      double sum = 0;
      for (std::size_t i = 0; i < parts.size; ++i) sum += parts.of(p)[i] * parts.of(q)[i];
      normal[p * parts.count + q] = normal[q * parts.count + p] = sum;
    }
  }
  return normal;
}

struct Mix {
  bool moved = true;     ///< each part counts once, some of them in the wrong head
  bool lost = false;     ///< parts count another number of times in their own head
  bool foreign = false;  ///< parts count in a head that is not theirs
  double least = INFINITY, most = -INFINITY;  ///< counts of parts in their own heads
  std::string text;
};

void note_count(const Parts& parts, std::size_t output, std::size_t part, double count, int g,
                Mix& mix) {
  const bool own = parts.belongs(part, output);
  if (own) mix.least = std::min(mix.least, count), mix.most = std::max(mix.most, count);
  if (std::fabs(count - (own ? 1.0 : 0.0)) <= kCountError) return;
  (own ? mix.lost : mix.foreign) = true;
  if (!mix.text.empty()) return;
  mix.text = std::string("the part of head ") + decimal(part) + " counts " + number(count) +
             " times in " + kGradientNames[g] + " of head " + decimal(output) +
             " (counted over all batches)";
}

/// The mix of all heads of a gradient. False: some head is no sum of parts.
bool read_mix(const GradientCall& call, const RanGradients& ran, int g, Mix& mix) {
  const Parts parts = parts_of(call, ran, g);
  if (parts.count < 2 || parts.count > parts.size / 4) return false;
  const std::vector<double> normal = normal_matrix(parts);
  std::vector<double> total(parts.count);
  for (std::size_t output = 0; output < parts.outputs; ++output) {
    const std::vector<double> counts =
        counts_in(parts, normal, ran.result.value[g].data() + output * parts.size);
    if (counts.empty()) return false;
    for (std::size_t part = 0; part < parts.count; ++part) {
      const double rest = std::fabs(counts[part] - std::round(counts[part]));
      mix.moved = mix.moved && rest <= kCountError;
      total[part] += counts[part];
      note_count(parts, output, part, counts[part], g, mix);
    }
  }
  for (const double sum : total) mix.moved = mix.moved && std::fabs(sum - 1) <= kCountError;
  return true;
}

}  // namespace

HeadDiagnosis mixed_heads(const GradientCall& call, const RanGradients& ran) {
  for (int g = 0; g < kGradients; ++g) {
    Mix mix;
    if (ran.judged[g].ok() || !read_mix(call, ran, g, mix)) continue;
    if (!mix.lost && !mix.foreign) continue;
    if (mix.moved) return {FaultStage::layout, mix.text};
    // The same factor of all parts has nothing to do with heads.
    if (!mix.foreign && mix.most - mix.least <= kCountError) continue;
    return {FaultStage::accumulate, mix.text};
  }
  return {};
}

}  // namespace flashcore::verify
