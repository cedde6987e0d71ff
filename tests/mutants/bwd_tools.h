// Tools of mutants of the backward pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "mutants/mutants.h"

namespace flashcore::mutants {

inline float of_row(const std::vector<float>& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

/// sum += weight * row
inline void add_scaled(float weight, const float* row, std::int64_t count, float* sum) {
  if (weight == 0) return;
  for (std::int64_t c = 0; c < count; ++c) sum[c] += weight * row[c];
}

/// All rows of one head of a tensor.
inline std::vector<float> rows_of(const flashcore_tensor& t, std::int64_t b, std::int64_t h) {
  std::vector<float> values;
  const std::int64_t columns = t.ndim > 3 ? t.shape[3] : 1;
  for (std::int64_t i = 0; i < t.shape[2]; ++i) {
    for (std::int64_t c = 0; c < columns; ++c) {
      values.push_back(static_cast<float>(read(t, b, h, i, c)));
    }
  }
  return values;
}

/// Rows from a length to the end of its last tile.
inline std::int64_t padding(std::int64_t length, std::int64_t tile) {
  return (tile - length % tile) % tile;
}

/// A row without keys has P = 0, whatever else is wrong.
inline void guard_empty_rows(BackwardParts& p) {
  p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
    return std::isinf(of_row(w.lse, x.i)) ? 0.0f : right(w, x);
  };
}

/// Computes a product of its own: `multiply` gets the weights of all pairs, [m, n], when a head is
/// complete. dq has its scale by then, dk not yet.
template <typename Multiply>
void replace_product(BackwardParts& p, int gradient, Multiply multiply) {
  const auto weights = std::make_shared<std::vector<float>>();
  auto& weight = gradient == kOfDq ? p.in_dq : gradient == kOfDk ? p.in_dk : p.in_dv;
  p.loaded = [weights, before = p.loaded](BackwardWork& w) {
    if (before) before(w);
    weights->assign(static_cast<std::size_t>(w.m * w.n), 0.0f);
  };
  weight = [weights, right = weight](const BackwardWork& w, const Pair& x) {
    (*weights)[at(x.i, w.n, x.j)] = right(w, x);
    return 0.0f;
  };
  p.head_done = [weights, multiply, before = p.head_done](BackwardWork& w) {
    if (before) before(w);
    multiply(w, *weights);
  };
}

/// A tensor's memory as one row of elements, and the offset of its last one.
struct FlatTensor {
  explicit FlatTensor(const flashcore_tensor& t) : flat(t) {
    for (int axis = 0; axis < t.ndim; ++axis) last += (t.shape[axis] - 1) * t.strides[axis];
    flat.strides = ones;
  }
  FlatTensor(const FlatTensor&) = delete;
  FlatTensor& operator=(const FlatTensor&) = delete;

  double get(std::int64_t offset) const { return read(flat, 0, 0, std::min(offset, last), 0); }
  void set(std::int64_t offset, double x) const { write(flat, 0, 0, std::min(offset, last), 0, x); }

  flashcore_tensor flat;
  std::int64_t last = 0;

 private:
  std::int64_t ones[4] = {1, 1, 1, 1};
};

}  // namespace flashcore::mutants
