// Explains wrong gradients by the order of axes: a tensor [batch, heads, rows, columns] is read or
// written as if its batches, heads and rows were in another order in memory.
#include <algorithm>
#include <cmath>

#include "verify/probes/gradient_heads.h"

namespace flashcore::verify {
namespace {

/// Relative error of gradients that are explained.
constexpr double kExplained = 0.02;

/// Orders of batch (0), heads (1) and rows (2), from the slowest to the fastest axis.
constexpr int kOrders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
constexpr const char* kOrderNames[] = {"batch, head, row", "batch, row, head", "head, batch, row",
                                       "head, row, batch", "row, batch, head", "row, head, batch"};

struct Extents {
  std::size_t size[3], columns;

  explicit Extents(const TensorView& t) : columns(1) {
    for (int axis = 0; axis < 3; ++axis) size[axis] = static_cast<std::size_t>(t.shape[axis]);
    if (t.rank > 3) columns = static_cast<std::size_t>(t.shape[3]);
  }
  std::size_t rows() const { return size[0] * size[1] * size[2]; }
  /// The place of a row in memory with this order of axes.
  std::size_t place(const int (&order)[3], const std::size_t (&index)[3]) const {
    return (index[order[0]] * size[order[1]] + index[order[1]]) * size[order[2]] + index[order[2]];
  }
};

/// Rows of a tensor that is stored in order `stored` and read as if it were in order `read`.
std::vector<double> reordered(const double* x, const Extents& e, int stored, int read) {
  std::vector<std::size_t> row_at(e.rows());
  std::size_t index[3];
  const auto each = [&](auto visit) {
    std::size_t row = 0;
    for (index[0] = 0; index[0] < e.size[0]; ++index[0]) {
      for (index[1] = 0; index[1] < e.size[1]; ++index[1]) {
        for (index[2] = 0; index[2] < e.size[2]; ++index[2]) visit(row++);
      }
    }
  };
  each([&](std::size_t row) { row_at[e.place(kOrders[stored], index)] = row; });
  std::vector<double> values(e.rows() * e.columns);
  each([&](std::size_t row) {
    const double* from = x + row_at[e.place(kOrders[read], index)] * e.columns;
    std::copy(from, from + e.columns,
              values.begin() + static_cast<std::ptrdiff_t>(row * e.columns));
  });
  return values;
}

enum Input { kQ, kK, kV, kOut, kDout, kLse, kInputs };
constexpr const char* kInputNames[] = {"Q", "K", "V", "out", "dout", "the LSE"};

/// The backward pass in f64, from inputs of which each may be wrong.
struct Model {
  std::size_t heads, group, rows, keys, head_dim, v_dim;
  double scale;
  std::vector<double> input[kInputs];

  Model(const GradientCall& call, const RanGradients& ran) {
    const Tensors& t = call.forward.tensors;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    heads = size(t.q.shape[0] * t.q.shape[1]), group = size(t.q.shape[1] / t.k.shape[1]);
    rows = size(t.q.shape[2]), keys = size(t.k.shape[2]);
    head_dim = size(t.q.shape[3]), v_dim = size(t.v.shape[3]);
    scale = call.forward.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
    const auto copy = [](const TensorView& view) {
      const Extents e(view);
      const auto* x = static_cast<const double*>(view.data);
      return std::vector<double>(x, x + e.rows() * e.columns);
    };
    input[kQ] = copy(t.q), input[kK] = copy(t.k), input[kV] = copy(t.v), input[kOut] = copy(t.out);
    input[kDout] = call.dout, input[kLse] = ran.expected.forward.lse;
  }

  void run(std::vector<double> (&result)[kGradients]) const {
    result[kDq].assign(input[kQ].size(), 0.0);
    result[kDk].assign(input[kK].size(), 0.0);
    result[kDv].assign(input[kV].size(), 0.0);
    for (std::size_t row = 0; row < heads * rows; ++row) {
      const std::size_t first_key = row / rows / group * keys;
      const double *q = &input[kQ][row * head_dim], *dout = &input[kDout][row * v_dim];
      const double delta = dot(dout, &input[kOut][row * v_dim], v_dim);
      for (std::size_t key = first_key; key < first_key + keys; ++key) {
        const double* k = &input[kK][key * head_dim];
        const double p = std::exp(scale * dot(q, k, head_dim) - input[kLse][row]);
        const double ds = scale * p * (dot(dout, &input[kV][key * v_dim], v_dim) - delta);
        add(ds, k, head_dim, &result[kDq][row * head_dim]);
        add(ds, q, head_dim, &result[kDk][key * head_dim]);
        add(p, dout, v_dim, &result[kDv][key * v_dim]);
      }
    }
  }

 private:
  static double dot(const double* a, const double* b, std::size_t count) {
    double sum = 0;
    for (std::size_t c = 0; c < count; ++c) sum += a[c] * b[c];
    return sum;
  }
  static void add(double weight, const double* x, std::size_t count, double* sum) {
    for (std::size_t c = 0; c < count; ++c) sum[c] += weight * x[c];
  }
};

bool matches(const std::vector<double>& got, const std::vector<double>& want) {
  double error2 = 0, want2 = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error2 += (got[i] - want[i]) * (got[i] - want[i]);
    want2 += want[i] * want[i];
  }
  return error2 <= kExplained * kExplained * want2;
}

/// A gradient that is correct but for the order in which it is written.
HeadDiagnosis exchanged_in_output(const GradientCall& call, const RanGradients& ran, int native) {
  const Tensors& t = call.forward.tensors;
  const TensorView* views[] = {&t.q, &t.k, &t.v};
  for (int g = 0; g < kGradients; ++g) {
    if (ran.judged[g].ok()) continue;
    const Extents e(*views[g]);
    for (int order = 0; order < 6; ++order) {
      if (order == native) continue;
      // Written in `order` and read in the native one.
      if (!matches(ran.result.value[g],
                   reordered(ran.expected.of(g).value.data(), e, order, native))) {
        continue;
      }
      return {FaultStage::layout,
              std::string(kGradientNames[g]) + " is written in the order " + kOrderNames[order]};
    }
  }
  return {};
}

}  // namespace

HeadDiagnosis exchanged_axes(const GradientCall& call, const RanGradients& ran,
                             MemoryLayout layout) {
  const int native = layout == MemoryLayout::rows_first ? 1 : 0;
  if (HeadDiagnosis d = exchanged_in_output(call, ran, native); d.stage != FaultStage::none) {
    return d;
  }
  const Tensors& t = call.forward.tensors;
  const TensorView* views[] = {&t.q, &t.k, &t.v, &t.out, &t.out, &t.lse};
  Model model(call, ran);
  for (int input = 0; input < kInputs; ++input) {
    const std::vector<double> right = model.input[input];
    const int stored = input == kLse ? 0 : native;
    for (int order = 0; order < 6; ++order) {
      if (order == stored) continue;
      model.input[input] = reordered(right.data(), Extents(*views[input]), stored, order);
      std::vector<double> result[kGradients];
      model.run(result);
      if (!matches(ran.result.value[kDq], result[kDq]) ||
          !matches(ran.result.value[kDk], result[kDk]) ||
          !matches(ran.result.value[kDv], result[kDv])) {
        continue;
      }
      return {FaultStage::layout,
              std::string(kInputNames[input]) + " is read in the order " + kOrderNames[order]};
    }
    model.input[input] = right;
  }
  return {};
}

}  // namespace flashcore::verify
