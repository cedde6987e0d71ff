#include "unit/verify/naive.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashcore::test {
namespace {

constexpr long double kInfinity = std::numeric_limits<long double>::infinity();

struct Sequence {
  std::int64_t q_len, kv_len, q_row, k_row, q_position, k_position;
};

std::int64_t integer(const Tensor& t, std::int64_t index) {
  return static_cast<std::int64_t>(t.at({index}));
}

Sequence sequence_of(const Inputs& in, std::int64_t b) {
  Sequence p{};
  if (in.cu_seqlens_q.given()) {
    p.q_row = integer(in.cu_seqlens_q, b);
    p.q_len = integer(in.cu_seqlens_q, b + 1) - p.q_row;
  } else {
    p.q_len = in.q.size(2);
  }
  if (in.cu_seqlens_k.given()) {
    p.k_row = integer(in.cu_seqlens_k, b);
    p.kv_len = integer(in.cu_seqlens_k, b + 1) - p.k_row;
  } else {
    p.kv_len = in.k.size(2);
  }
  if (in.used_k.given()) p.kv_len = integer(in.used_k, b);
  p.q_position = in.q_start.given() ? integer(in.q_start, b) : p.kv_len - p.q_len;
  p.k_position = in.k_start.given() ? integer(in.k_start, b) : 0;
  return p;
}

/// An element of a dense [batch, heads, len, dim] or varlen [total, heads, dim] tensor.
long double element(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t row,
                    std::int64_t first_row, std::int64_t column) {
  if (t.rank() == 3) return t.at({first_row + row, h, column});
  return t.at({b, h, row, column});
}

/// An element of bias or mask, which are broadcast along axes of extent 1.
long double broadcast(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t j) {
  return t.at({t.size(0) == 1 ? 0 : b, t.size(1) == 1 ? 0 : h, t.size(2) == 1 ? 0 : i, j});
}

/// Computes O = P V and the sums over V that the error bound needs.
void add_outputs(const Inputs& in, std::int64_t b, std::int64_t kv_head, const Sequence& sequence,
                 long double total, long double sink_weight, NaiveRow& row) {
  const std::int64_t v_dim = in.v.shape().back();
  for (std::int64_t c = 0; c < v_dim; ++c) {
    long double out = 0, squares = 0, deviation = 0, mass = 0;
    const auto v = [&](std::size_t j) {
      return element(in.v, b, kv_head, static_cast<std::int64_t>(j), sequence.k_row, c);
    };
    for (std::size_t j = 0; j < row.score.size(); ++j) {
      if (row.score[j] == -kInfinity) continue;
      out += row.probability[j] * v(j);
      squares += row.probability[j] * v(j) * row.probability[j] * v(j);
      mass += std::fabs(v(j)) / total;
    }
    for (std::size_t j = 0; j < row.score.size(); ++j) {
      if (row.score[j] != -kInfinity) deviation += row.probability[j] * std::fabs(v(j) - out);
    }
    if (total != 0) deviation += sink_weight / total * std::fabs(out);
    row.out.push_back(out);
    row.spread.push_back(std::sqrt(squares));
    row.deviation.push_back(deviation);
    row.v_mass.push_back(mass);
  }
}

}  // namespace

std::int64_t naive_q_len(const Inputs& inputs, std::int64_t b) {
  return sequence_of(inputs, b).q_len;
}

NaiveRow naive_row(const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Sequence sequence = sequence_of(in, b);
  const Options& o = in.options;
  const std::int64_t head_dim = in.q.shape().back();
  const std::int64_t kv_head = h / (in.q.size(1) / in.k.size(1));
  const long double scale =
      o.scale.has_value() ? static_cast<long double>(*o.scale) : 1.0L / std::sqrt(1.0L * head_dim);
  NaiveRow row;
  row.max = -kInfinity;
  row.magnitude = row.largest_product = row.largest_sum = 0;
  std::vector<long double> sizes;
  for (std::int64_t j = 0; j < sequence.kv_len; ++j) {
    long double dot = 0, size = 0, largest = 0, farthest = 0;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      const long double product = element(in.q, b, h, i, sequence.q_row, d) *
                                  element(in.k, b, kv_head, j, sequence.k_row, d);
      dot += product;
      size += std::fabs(product);
      largest = std::max(largest, std::fabs(product));
      farthest = std::max(farthest, std::fabs(dot));
    }
    long double s = scale * dot;
    size *= std::fabs(scale);
    if (o.softcap > 0) {
      s = o.softcap * std::tanh(s / o.softcap);
      if (o.softcap <= 256) size += o.softcap;
    }
    const std::int64_t q_position = sequence.q_position + i, k_position = sequence.k_position + j;
    if (in.alibi_slopes.given()) {
      const long double slope =
          in.alibi_slopes.rank() == 2 ? in.alibi_slopes.at({b, h}) : in.alibi_slopes.at({h});
      const long double penalty =
          slope * std::fabs(static_cast<long double>(q_position - k_position));
      s -= penalty;
      size += std::fabs(penalty);
    }
    if (in.bias.given()) {
      const long double bias = broadcast(in.bias, b, h, i, j);
      s += bias;
      if (std::isfinite(bias)) size += std::fabs(bias);
    }
    bool visible = !in.mask.given() || broadcast(in.mask, b, h, i, j) != 0;
    if (o.causal) visible = visible && k_position <= q_position;
    if (o.window_left >= 0) visible = visible && k_position >= q_position - o.window_left;
    if (o.window_right >= 0) visible = visible && k_position <= q_position + o.window_right;
    row.score.push_back(visible ? s : -kInfinity);
    row.max = std::max(row.max, row.score.back());
    sizes.push_back(size);
    if (std::isfinite(row.score.back())) {
      largest *= std::fabs(scale);
      if (std::isfinite(largest)) row.largest_product = std::max(row.largest_product, largest);
      farthest *= std::fabs(scale);
      if (std::isfinite(farthest)) row.largest_sum = std::max(row.largest_sum, farthest);
    }
  }
  for (std::size_t j = 0; j < sizes.size(); ++j) {  // only keys that can have weight
    if (!std::isfinite(row.score[j]) || row.score[j] + 1e-3L * sizes[j] < row.max - 1000) continue;
    row.magnitude = std::max(row.magnitude, sizes[j]);
  }
  const bool has_sink = in.sinks.given() && !o.partial;
  const long double sink = has_sink ? in.sinks.at({h}) : -kInfinity;
  if (has_sink && std::isfinite(sink)) row.magnitude = std::max(row.magnitude, std::fabs(sink));
  const long double top = std::max(row.max, sink);
  long double total = 0;
  row.sum = 0;
  for (const long double s : row.score) {
    row.probability.push_back(top == -kInfinity ? 0 : std::exp(s - top));
    total += row.probability.back();
    if (row.max != -kInfinity) row.sum += std::exp(s - row.max);
  }
  const long double sink_weight = top == -kInfinity ? 0 : std::exp(sink - top);
  total += sink_weight;
  row.lse = total == 0 ? -kInfinity : top + std::log(total);
  for (long double& p : row.probability) p = total == 0 ? 0 : p / total;
  add_outputs(in, b, kv_head, sequence, total, sink_weight, row);
  return row;
}

}  // namespace flashcore::test
