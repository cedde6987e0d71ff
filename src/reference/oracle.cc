#include "reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "reference/cut_sums.h"

namespace flashcore::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Decodes a small IEEE format by its definition.
double small_float(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = ((bits >> (exponent_bits + mantissa_bits)) & 1u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * kInfinity;
  }
  const double fraction = std::ldexp(static_cast<double>(mantissa), -mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1.0 + fraction, exponent - bias);
}

/// Decodes OCP's e4m3: no infinity, one NaN of each sign, otherwise IEEE's rules.
double e4m3(std::uint32_t bits) {
  if ((bits & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;
  const auto exponent = static_cast<int>((bits >> 3) & 15);
  const double fraction = static_cast<double>(bits & 7) / 8.0;
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1.0 + fraction, exponent - 7));
}

/// The scale of row (or key) `row` of a sequence.
double scale_at(const TensorView& scale, std::int64_t b, std::int64_t h, std::int64_t row,
                std::int64_t block_rows) {
  if (!scale.given()) return 1.0;
  std::int64_t at = 0;
  if (scale.rank >= 2) at += b * scale.strides[0] + h * scale.strides[1];
  if (scale.rank == 3) at += row / block_rows * scale.strides[2];
  return static_cast<const float*>(scale.data)[at];
}

std::int64_t int_at(const TensorView& t, std::int64_t index) {
  return static_cast<const std::int32_t*>(t.data)[index * (t.shape[0] > 1 ? t.strides[0] : 0)];
}

bool is_visible(const Options& o, std::int64_t q_position, std::int64_t k_position) {
  if (o.causal && k_position > q_position) return false;
  if (o.window_left >= 0 && q_position - k_position > o.window_left) return false;
  if (o.window_right >= 0 && k_position - q_position > o.window_right) return false;
  return true;
}

/// A [batch, heads, rows, columns] operand, dense or varlen, with its layout in Problem.
struct Operand {
  const void* data;
  const Layout& layout;
  double at(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t column) const {
    return element(data, layout.dtype,
                   b * layout.batch + h * layout.head + row * layout.row + column * layout.column);
  }
};

/// An element of key j of a sequence, in dense, varlen or paged K or V.
double key_element(const Problem& p, const Tensors& t, const Operand& operand, std::int64_t b,
                   std::int64_t kv_head, const Lengths& lengths, std::int64_t j,
                   std::int64_t column) {
  if (!t.block_table.given()) return operand.at(b, kv_head, lengths.k_row + j, column);
  const TensorView& table = t.block_table;
  const std::int64_t row_of_table = table.shape[0] > 1 ? b * table.strides[0] : 0;
  const std::int64_t page =
      static_cast<const std::int32_t*>(table.data)[row_of_table + j / p.page_size];
  return operand.at(page, kv_head, j % p.page_size, column);
}

/// K transposed [head_dim][kv_len] and V [kv_len][v_dim] of one (batch, KV head), in f64.
struct Head {
  std::int64_t b = -1, kv_head = -1;
  Lengths lengths{};
  std::vector<double> k, v;
  Factors k_factors;                  // of k, if tensor cores may multiply it
  std::vector<double> v_scale_ratio;  // [kv_len]: V's largest scale over the key's scale
  bool v_finite = true;
};

/// f32 and f64 are multiplied on CUDA cores and CPUs only.
bool may_cut_sums(const Problem& p) { return size_of(p.q.dtype) <= 2; }

void load_head(const Problem& p, const Tensors& t, std::int64_t b, std::int64_t kv_head,
               Head& head) {
  if (head.b == b && head.kv_head == kv_head) return;
  head.b = b;
  head.kv_head = kv_head;
  head.lengths = lengths_of(p, t, b);
  const std::int64_t n = head.lengths.kv_len;
  head.k.assign(static_cast<std::size_t>(n * p.head_dim), 0.0);
  head.v.assign(static_cast<std::size_t>(n * p.v_dim), 0.0);
  head.v_scale_ratio.assign(static_cast<std::size_t>(n), 1.0);
  head.k_factors.clear();
  head.v_finite = true;
  double largest = 0;
  const Operand k{t.k.data, p.k}, v{t.v.data, p.v};
  for (std::int64_t j = 0; j < n; ++j) {
    const double k_scale = scale_at(t.k_scale, b, kv_head, j, p.options.kv_scale_block);
    const double v_scale = scale_at(t.v_scale, b, kv_head, j, p.options.kv_scale_block);
    head.v_scale_ratio[static_cast<std::size_t>(j)] = std::fabs(v_scale);
    largest = std::max(largest, std::fabs(v_scale));
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      head.k[static_cast<std::size_t>(d * n + j)] =
          key_element(p, t, k, b, kv_head, head.lengths, j, d) * k_scale;
    }
    for (std::int64_t c = 0; c < p.v_dim; ++c) {
      const double x = key_element(p, t, v, b, kv_head, head.lengths, j, c) * v_scale;
      head.v[static_cast<std::size_t>(j * p.v_dim + c)] = x;
      if (!std::isfinite(x)) head.v_finite = false;
    }
  }
  for (double& scale : head.v_scale_ratio) scale = scale > 0 ? largest / scale : 1.0;
  for (std::int64_t at = 0; may_cut_sums(p) && at < n * p.head_dim; ++at) {
    const double scale = scale_at(t.k_scale, b, kv_head, at % n, p.options.kv_scale_block);
    head.k_factors.add(head.k[static_cast<std::size_t>(at)], p.k.dtype, scale);
  }
}

constexpr double kSmallCap = 256;  // docs/numerics.md

struct RowScores {
  std::vector<double> score, magnitude, largest_product, largest_sum, cut;
  std::vector<std::uint8_t> visible;
};

/// Scores of row (b, h, i) over all keys of its sequence, in the order of docs/numerics.md.
void compute_scores(const Problem& p, const Tensors& t, const RowId& row, const Head& head,
                    RowScores& s) {
  const std::int64_t n = head.lengths.kv_len;
  const auto size = static_cast<std::size_t>(n);
  s.score.assign(size, 0.0);
  s.magnitude.assign(size, 0.0);
  s.largest_product.assign(size, 0.0);
  s.largest_sum.assign(size, 0.0);
  s.visible.assign(size, 1);
  const Operand operand{t.q.data, p.q};
  const double q_scale = scale_at(t.q_scale, row.b, row.h, row.i, p.options.q_scale_block);
  Factors q;
  for (std::int64_t d = 0; d < p.head_dim; ++d) {
    const double x = operand.at(row.b, row.h, head.lengths.q_row + row.i, d) * q_scale;
    if (may_cut_sums(p)) q.add(x, p.q.dtype, q_scale);
    const double* k = head.k.data() + d * n;
    for (std::size_t j = 0; j < size; ++j) {
      const double product = x * k[j];
      s.score[j] += product;
      s.magnitude[j] += std::fabs(product);
      s.largest_product[j] = std::max(s.largest_product[j], std::fabs(product));
      s.largest_sum[j] = std::max(s.largest_sum[j], std::fabs(s.score[j]));
    }
  }
  s.cut = cut_sums(q, head.k_factors, size);
  const Options& o = p.options;
  const std::int64_t q_position = head.lengths.q_start + row.i;
  double slope = 0;
  if (t.alibi_slopes.given()) {
    slope = static_cast<const float*>(
        t.alibi_slopes.data)[row.b * p.alibi_slopes.batch + row.h * p.alibi_slopes.head];
  }
  for (std::size_t j = 0; j < size; ++j) {
    const auto key = static_cast<std::int64_t>(j);
    const std::int64_t k_position = head.lengths.k_start + key;
    double x = p.scale * s.score[j];
    double magnitude = std::fabs(p.scale) * s.magnitude[j];
    if (o.softcap > 0) {
      x = o.softcap * std::tanh(x / o.softcap);
      const bool finite = std::isfinite(magnitude);
      if (!finite) magnitude = 0.0;  // tanh(inf) is exact
      // With a small cap, kernels may compute tanh with the error of a score of the cap's size.
      if (o.softcap <= kSmallCap || !finite) magnitude += o.softcap;
    }
    if (t.alibi_slopes.given()) {
      const double alibi = slope * static_cast<double>(std::llabs(q_position - k_position));
      x -= alibi;
      magnitude += std::fabs(alibi);
    }
    if (t.bias.given()) {
      const double bias = Operand{t.bias.data, p.bias}.at(row.b, row.h, row.i, key);
      x += bias;
      if (std::isfinite(bias)) magnitude += std::fabs(bias);
    }
    bool visible = is_visible(o, q_position, k_position);
    if (t.mask.given()) {
      visible = visible && Operand{t.mask.data, p.mask}.at(row.b, row.h, row.i, key) != 0;
    }
    if (t.mask_blocks.given()) visible = visible && block_shows(p, t, row, key);
    s.visible[j] = visible ? 1 : 0;
    s.score[j] = visible ? x : -kInfinity;
    s.magnitude[j] = visible ? magnitude : 0.0;
  }
}

/// Softmax of one row: weights, their sum, and the magnitudes that the error bound needs.
struct RowSoftmax {
  double max = -kInfinity, base = 0;   ///< largest score; the value subtracted before exp()
  double sum = 0, keys_sum = 0;        ///< with and without the sink
  double sink_weight = 0, factor = 0;  ///< factor: 1 / sum
  double magnitude = 0, largest_product = 0, largest_sum = 0, largest_cut = 0;
  std::vector<double> weight;  ///< exp(score - base)
};

void find_magnitudes(const Problem& p, const RowScores& s, RowSoftmax& x) {
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    if (!std::isfinite(s.score[j])) continue;
    // A score far below the maximum has no weight, whatever its error.
    if (s.score[j] + 1e-3 * s.magnitude[j] < x.max - 1000) continue;
    x.magnitude = std::max(x.magnitude, s.magnitude[j]);
    // With a softcap these may be infinite.
    const double product = std::fabs(p.scale) * s.largest_product[j];
    if (std::isfinite(product)) x.largest_product = std::max(x.largest_product, product);
    const double sum = std::fabs(p.scale) * s.largest_sum[j];
    if (std::isfinite(sum)) x.largest_sum = std::max(x.largest_sum, sum);
    x.largest_cut = std::max(x.largest_cut, std::fabs(p.scale) * s.cut[j]);
  }
}

RowSoftmax softmax(const Problem& p, const Tensors& t, const RowId& row, const RowScores& s) {
  RowSoftmax x;
  for (const double score : s.score) {
    x.max = std::max(x.max, score);  // std::max keeps its first argument if the second is NaN
  }
  find_magnitudes(p, s, x);
  const bool has_sink = t.sinks.given() && !p.options.partial;
  const double sink =
      has_sink ? static_cast<const float*>(t.sinks.data)[row.h * p.sinks.head] : -kInfinity;
  const double top = std::max(x.max, sink);
  x.base = top == -kInfinity ? 0.0 : top;
  x.weight.resize(s.score.size());
  double lost = 0;  // Kahan: thousands of equal small terms round in the same direction
  for (std::size_t j = 0; j < s.score.size(); ++j) {
    x.weight[j] = std::exp(s.score[j] - x.base);
    const double term = x.weight[j] - lost;
    const double next = x.sum + term;
    lost = (next - x.sum) - term;
    x.sum = next;
  }
  x.keys_sum = x.sum;
  if (has_sink) {
    x.sink_weight = std::exp(sink - x.base);
    x.sum += x.sink_weight;
    if (std::fabs(sink) > x.magnitude && std::isfinite(sink)) x.magnitude = std::fabs(sink);
  }
  constexpr double kMaxMagnitude = 1e100;  // keeps bounds and their squares finite
  x.magnitude = std::min(x.magnitude, kMaxMagnitude);
  x.factor = x.sum == 0 ? 0.0 : 1.0 / x.sum;
  return x;
}

/// O = P V and the sums over V of the error bound. Normalises the weights. Returns true if a hidden
/// key has a non-finite V.
bool multiply_values(const Head& head, const RowScores& s, std::size_t r, RowSoftmax& x,
                     Oracle& result) {
  const std::size_t n = s.score.size();
  const auto v_dim = static_cast<std::size_t>(result.v_dim);
  double* out = result.out.data() + r * v_dim;
  double* spread = result.spread.data() + r * v_dim;
  double* deviation = result.deviation.data() + r * v_dim;
  double* v_mass = result.v_mass.data() + r * v_dim;
  double* v_mass_in_steps = result.v_mass_in_steps.data() + r * v_dim;
  bool poisoned = false;
  constexpr std::size_t kBlock = 64;  // sums of blocks, then the sum of these: less rounding
  std::vector<double> block_out(v_dim, 0.0);
  for (std::size_t j = 0; j < n; ++j) {
    if (j % kBlock == 0) {
      for (std::size_t c = 0; c < v_dim; ++c) {
        out[c] += block_out[c];
        block_out[c] = 0.0;
      }
    }
    const double* v = head.v.data() + j * v_dim;
    if (s.visible[j] == 0 || s.score[j] == -kInfinity) {
      if (!head.v_finite) {
        poisoned =
            poisoned || std::any_of(v, v + v_dim, [](double e) { return !std::isfinite(e); });
      }
      continue;
    }
    const double w = x.weight[j] * x.factor;
    x.weight[j] = w;
    for (std::size_t c = 0; c < v_dim; ++c) {
      block_out[c] += w * v[c];
      spread[c] += w * v[c] * w * v[c];
      v_mass[c] += std::fabs(v[c]);
      v_mass_in_steps[c] += std::fabs(v[c]) * head.v_scale_ratio[j];
    }
  }
  for (std::size_t c = 0; c < v_dim; ++c) out[c] += block_out[c];
  for (std::size_t j = 0; j < n; ++j) {
    if (s.visible[j] == 0 || s.score[j] == -kInfinity) continue;
    const double* v = head.v.data() + j * v_dim;
    for (std::size_t c = 0; c < v_dim; ++c) deviation[c] += x.weight[j] * std::fabs(v[c] - out[c]);
  }
  for (std::size_t c = 0; c < v_dim; ++c) {
    spread[c] = std::sqrt(spread[c]);
    v_mass[c] *= x.factor;
    v_mass_in_steps[c] *= x.factor;
    deviation[c] += x.sink_weight * x.factor * std::fabs(out[c]);  // the sink is a key with V = 0
  }
  return poisoned;
}

/// The most keys whose scores are equal in f32, without one of them. A score 40 below the maximum
/// has no weight in any sum, in f64 neither.
std::int32_t count_equal_keys(const RowScores& s, double max) {
  std::vector<double> scores;
  for (const double score : s.score) {
    if (std::isfinite(score) && score > max - 40) scores.push_back(score);
  }
  std::sort(scores.begin(), scores.end());
  std::size_t most = 0, first = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    while (scores[j] - scores[first] > 0x1p-24 * std::max(1.0, std::fabs(scores[j]))) ++first;
    most = std::max(most, j - first);
  }
  return static_cast<std::int32_t>(most);
}

void compute_row(const Problem& p, const Tensors& t, std::size_t r, const Head& head, RowScores& s,
                 Oracle& result) {
  const RowId& row = result.rows[r];
  compute_scores(p, t, row, head, s);
  RowSoftmax x = softmax(p, t, row, s);
  const bool poisoned = multiply_values(head, s, r, x, result);
  result.lse[r] = x.sum == 0 ? -kInfinity : x.base + std::log(x.sum);
  result.max[r] = x.max;
  result.sum[r] = x.max == -kInfinity ? 0.0 : x.keys_sum * std::exp(x.base - x.max);
  result.magnitude[r] = x.magnitude;
  result.largest_product[r] = x.largest_product;
  result.largest_sum[r] = x.largest_sum;
  result.largest_cut[r] = x.largest_cut;
  result.kv_len[r] = static_cast<std::int32_t>(s.score.size());
  result.equal_keys[r] = count_equal_keys(s, x.max);
  result.may_be_poisoned[r] = poisoned ? 1 : 0;
  if (!result.scores.empty()) {
    for (std::size_t j = 0; j < s.score.size(); ++j) {
      if (s.score[j] == -kInfinity) x.weight[j] = 0.0;
    }
    result.scores[r] = s.score;
    result.probabilities[r] = std::move(x.weight);
  }
}

}  // namespace

bool block_shows(const Problem& p, const Tensors& t, const RowId& row, std::int64_t j) {
  const Layout& layout = p.mask_blocks;
  const std::int32_t entry = static_cast<const std::int32_t*>(
      t.mask_blocks.data)[row.b * layout.batch + row.h * layout.head +
                          row.i / p.mask_block_q * layout.row + j / p.mask_block_k * layout.column];
  if (entry == 1) return true;
  if (entry < 2 || entry - 2 >= t.mask_bits.shape[0]) return false;
  const std::int64_t words = p.mask_block_k / 32;
  const std::int64_t bit = j % p.mask_block_k;
  const std::int64_t at =
      ((entry - 2) * p.mask_block_q + row.i % p.mask_block_q) * words + bit / 32;
  const auto word =
      static_cast<std::uint32_t>(static_cast<const std::int32_t*>(t.mask_bits.data)[at]);
  return (word >> (bit % 32) & 1u) != 0;
}

double element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64: return static_cast<const double*>(data)[index];
    case DType::f32: return static_cast<const float*>(data)[index];
    case DType::f16: return small_float(static_cast<const std::uint16_t*>(data)[index], 5, 10);
    case DType::bf16: return small_float(static_cast<const std::uint16_t*>(data)[index], 8, 7);
    case DType::i32: return static_cast<const std::int32_t*>(data)[index];
    case DType::boolean: return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1.0 : 0.0;
    case DType::e4m3: return e4m3(static_cast<const std::uint8_t*>(data)[index]);
    case DType::e5m2: return small_float(static_cast<const std::uint8_t*>(data)[index], 5, 2);
    case DType::int8: return static_cast<const std::int8_t*>(data)[index];
    case DType::u8:
      return (static_cast<double>(static_cast<const std::uint8_t*>(data)[index]) - 128.0) * 448.0 /
             127.0;
    case DType::none: break;
  }
  return 0.0;
}

Lengths lengths_of(const Problem& p, const Tensors& t, std::int64_t b) {
  Lengths l{p.q_len, p.kv_len, 0, 0, 0, 0};
  if (t.cu_seqlens_q.given()) {
    l.q_row = int_at(t.cu_seqlens_q, b);
    l.q_len = int_at(t.cu_seqlens_q, b + 1) - l.q_row;
  }
  if (t.cu_seqlens_k.given()) {
    l.k_row = int_at(t.cu_seqlens_k, b);
    l.kv_len = int_at(t.cu_seqlens_k, b + 1) - l.k_row;
  }
  if (t.seqused_k.given()) l.kv_len = int_at(t.seqused_k, b);
  l.q_start = t.q_start.given() ? int_at(t.q_start, b) : l.kv_len - l.q_len;
  l.k_start = t.k_start.given() ? int_at(t.k_start, b) : 0;
  return l;
}

std::vector<RowId> all_rows(const Problem& problem, const Tensors& tensors) {
  std::vector<RowId> rows;
  for (std::int32_t b = 0; b < problem.batch; ++b) {
    const auto q_len = static_cast<std::int32_t>(lengths_of(problem, tensors, b).q_len);
    for (std::int32_t h = 0; h < problem.q_heads; ++h) {
      for (std::int32_t i = 0; i < q_len; ++i) rows.push_back({b, h, i});
    }
  }
  return rows;
}

Oracle compute(const Problem& problem, const Tensors& tensors, std::vector<RowId> rows,
               bool keep_stages, int threads) {
  Oracle result;
  result.rows = std::move(rows);
  result.head_dim = problem.head_dim;
  result.v_dim = problem.v_dim;
  const std::size_t count = result.rows.size();
  const std::size_t elements = count * static_cast<std::size_t>(problem.v_dim);
  for (auto* array :
       {&result.out, &result.spread, &result.deviation, &result.v_mass, &result.v_mass_in_steps}) {
    array->assign(elements, 0.0);
  }
  for (auto* array : {&result.lse, &result.max, &result.sum, &result.magnitude,
                      &result.largest_product, &result.largest_sum, &result.largest_cut}) {
    array->assign(count, 0.0);
  }
  result.kv_len.assign(count, 0);
  result.equal_keys.assign(count, 0);
  result.may_be_poisoned.assign(count, 0);
  if (keep_stages) {
    result.scores.resize(count);
    result.probabilities.resize(count);
  }

  // Neighbouring rows share a head, so each thread takes consecutive rows.
  const auto work = [&](std::size_t begin, std::size_t end) {
    Head head;
    RowScores scores;
    const std::int64_t group = problem.q_heads / std::max<std::int64_t>(problem.kv_heads, 1);
    for (std::size_t r = begin; r < end; ++r) {
      const RowId& row = result.rows[r];
      load_head(problem, tensors, row.b, row.h / group, head);
      compute_row(problem, tensors, r, head, scores, result);
    }
  };
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  // A thread costs about as much as 1e6 multiply-adds.
  const double work_estimate = static_cast<double>(elements) * static_cast<double>(problem.kv_len);
  threads = std::clamp(static_cast<int>(work_estimate / 1e6), 1, threads);
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) {
    workers.emplace_back(
        work, count * static_cast<std::size_t>(i) / static_cast<std::size_t>(threads),
        count * static_cast<std::size_t>(i + 1) / static_cast<std::size_t>(threads));
  }
  work(0, count / static_cast<std::size_t>(threads));
  for (std::thread& worker : workers) worker.join();
  return result;
}

}  // namespace flashcore::reference
