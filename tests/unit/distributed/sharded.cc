#include "unit/distributed/sharded.h"

#include <numeric>

#include "support/draw.h"

namespace flashcore::test {

Placement::Placement(const Case& c, std::int64_t more, std::int32_t ranks)
    : sharding(c.rows.size() == 1 ? Sharding::zigzag : Sharding::contiguous) {
  std::int64_t begin = 0;
  const std::int64_t all = c.rows[0] + more, parts = 2 * ranks;
  for (std::int64_t r = 0; r < ranks; ++r) {
    if (sharding == Sharding::contiguous) {
      const std::int64_t n = c.rows[static_cast<std::size_t>(r) % c.rows.size()];
      rows.push_back(range(begin, begin + n));
      begin += n;
      continue;
    }
    rows.emplace_back();
    for (const std::int64_t part : {r, parts - 1 - r}) {
      const auto more_rows = range(part * all / parts, (part + 1) * all / parts);
      rows.back().insert(rows.back().end(), more_rows.begin(), more_rows.end());
    }
  }
}

std::vector<std::int64_t> Placement::counts() const {
  std::vector<std::int64_t> made;
  for (const auto& one : rows) made.push_back(static_cast<std::int64_t>(one.size()));
  return made;
}

std::int64_t Placement::length() const {
  const auto all = counts();
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

std::vector<std::int64_t> documents_of(const Case& c, std::int64_t length) {
  std::vector<std::int64_t> made;
  for (const std::int64_t first : c.documents) {
    if (first < length) made.push_back(first);
  }
  if (!c.documents.empty()) made.push_back(length);
  return made;
}

Inputs whole_inputs(const Case& c, std::int64_t q_len, std::int64_t k_len) {
  Random random(11);
  const bool packed = !c.documents.empty();
  const auto shape = [&](std::int64_t heads, std::int64_t rows, std::int64_t dim) {
    return packed ? Shape{rows, heads, dim} : Shape{2, heads, rows, dim};
  };
  Inputs inputs;
  inputs.q = draw_normal(random, c.dtype, shape(c.q_heads, q_len, 16));
  inputs.k = draw_normal(random, c.dtype, shape(c.kv_heads, k_len, 16));
  inputs.v = draw_normal(random, c.dtype, shape(c.kv_heads, k_len, 8));
  if (c.sinks) inputs.sinks = draw_normal(random, DType::f32, {c.q_heads});
  if (packed) inputs.cu_seqlens_q = inputs.cu_seqlens_k = ints(documents_of(c, q_len));
  inputs.options = c.options;
  return inputs;
}

TensorView dense(const TensorView& view) {
  if (!view.given() || view.rank == 4) return view;
  TensorView made = view;
  ++made.rank;
  for (int i = view.rank; i > 0; --i) {
    made.shape[i] = view.shape[i - 1];
    made.strides[i] = view.strides[i - 1];
  }
  made.shape[0] = 1, made.strides[0] = 0;
  return swap_axes(made, 1, 2);
}

TensorView dense_lse(const TensorView& lse) {
  if (lse.rank != 2) return lse;
  return {lse.data,
          lse.dtype,
          lse.device,
          3,
          {1, lse.shape[0], lse.shape[1]},
          {0, lse.strides[0], lse.strides[1]}};
}

Tensors dense(const Tensors& tensors) {
  Tensors t = tensors;
  for (TensorView* one : {&t.q, &t.k, &t.v, &t.out}) *one = dense(*one);
  t.lse = dense_lse(t.lse);
  return t;
}

void put(Tensor& whole, int axis, const std::vector<std::int64_t>& rows, const Tensor& part) {
  const auto bits = part.bits();
  std::vector<std::uint64_t> all = whole.bits();
  std::int64_t inner = 1, outer = 1;
  for (int i = axis + 1; i < whole.rank(); ++i) inner *= whole.size(i);
  for (int i = 0; i < axis; ++i) outer *= whole.size(i);
  const auto count = static_cast<std::int64_t>(rows.size());
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t to = (o * whole.size(axis) + rows[static_cast<std::size_t>(r)]) * inner;
      std::copy_n(bits.begin() + (o * count + r) * inner, inner, all.begin() + to);
    }
  }
  whole.set_bits(all);
}

std::string step_difference(const std::vector<SentBytes>& steps,
                            const std::vector<std::int64_t>& messages) {
  std::size_t next = 0;
  for (const SentBytes& step : steps) {
    std::int64_t sum = 0;
    while (sum < step.bytes && next < messages.size()) sum += messages[next++];
    if (sum == step.bytes) continue;
    return step.step + ": " + std::to_string(sum) + " bytes were sent; the model says " +
           std::to_string(step.bytes);
  }
  for (; next < messages.size(); ++next) {
    if (messages[next] != 0) return std::to_string(messages[next]) + " bytes in no step";
  }
  return "";
}

}  // namespace flashcore::test
