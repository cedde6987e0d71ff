#include "support/pages.h"

namespace flashcore::test {
namespace {

/// Widens a [.., .., .., kv_len] tensor. All bits of the new columns are 1.
Tensor widened(const Tensor& t, std::int64_t columns) {
  if (!t.given() || t.size(3) == columns) return t;
  Tensor wide(t.dtype(), {t.size(0), t.size(1), t.size(2), columns});
  for (std::int64_t b = 0; b < t.size(0); ++b) {
    for (std::int64_t h = 0; h < t.size(1); ++h) {
      for (std::int64_t i = 0; i < t.size(2); ++i) {
        for (std::int64_t j = 0; j < t.size(3); ++j) wide.set({b, h, i, j}, t.at({b, h, i, j}));
      }
    }
  }
  return wide;
}

}  // namespace

Inputs paged(Random& random, const Inputs& inputs, std::int64_t page_size) {
  const std::int64_t batch = inputs.k.size(0), heads = inputs.k.size(1), kv_len = inputs.k.size(2);
  const std::int64_t each = (kv_len + page_size - 1) / page_size;
  const std::int64_t pages = batch * each + 2;
  const std::vector<std::int64_t> order = draw_permutation(random, pages);
  Inputs result = inputs;
  result.k = Tensor(inputs.k.dtype(), {pages, page_size, heads, inputs.k.size(3)});
  result.v = Tensor(inputs.v.dtype(), {pages, page_size, heads, inputs.v.size(3)});
  result.block_table = Tensor(DType::i32, {batch, each});  // all bits are 1: every entry is -1
  result.bias = widened(inputs.bias, each * page_size);
  result.mask = widened(inputs.mask, each * page_size);
  std::vector<std::int64_t> lengths;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length =
        inputs.used_k.given() ? static_cast<std::int64_t>(inputs.used_k.at({b})) : kv_len;
    lengths.push_back(length);
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t page = order[static_cast<std::size_t>(b * each + j / page_size)];
      result.block_table.set({b, j / page_size}, static_cast<double>(page));
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < inputs.k.size(3); ++d) {
          result.k.set({page, j % page_size, h, d}, inputs.k.at({b, h, j, d}));
        }
        for (std::int64_t d = 0; d < inputs.v.size(3); ++d) {
          result.v.set({page, j % page_size, h, d}, inputs.v.at({b, h, j, d}));
        }
      }
    }
  }
  result.used_k = ints(lengths);
  return result;
}

}  // namespace flashcore::test
