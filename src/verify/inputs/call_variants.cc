#include "verify/inputs/call_variants.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.h"
#include "verify/inputs/case_memory.h"
#include "verify/inputs/random.h"

namespace flashcore::verify {
namespace {

/// Score difference after which exp() is exactly 0 in f32 and f64: e^-800.
constexpr double kGap = 800;
/// Every format can represent this value and sums of several of them.
constexpr double kLargestDigit = 0x1p14;

/// Visits each stored element once, even if strides of 0 repeat it.
template <typename Visit>
void for_each_stored(TensorView t, Visit visit) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.strides[i] == 0) t.shape[i] = std::min<std::int64_t>(t.shape[i], 1);
  }
  for_each_element(t, visit);
}

/// Addresses q, k or v, varlen or dense, by sequence, head, row of the sequence and column.
struct Operand {
  const TensorView& view;
  bool varlen;
  std::int64_t heads() const { return view.shape[1]; }
  std::int64_t columns() const { return view.shape[view.rank - 1]; }
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t first_row, std::int64_t row,
                      std::int64_t column) const {
    const std::int64_t* s = view.strides;
    return varlen ? (first_row + row) * s[0] + h * s[1] + column * s[2]
                  : b * s[0] + h * s[1] + row * s[2] + column * s[3];
  }
};

/// The sizes that lengths_of() needs, without validating the call again.
Problem sizes_of(const Tensors& t) {
  Problem p;
  p.q_varlen = t.cu_seqlens_q.given();
  p.kv_varlen = t.cu_seqlens_k.given();
  p.batch = p.q_varlen    ? t.cu_seqlens_q.shape[0] - 1
            : p.kv_varlen ? t.cu_seqlens_k.shape[0] - 1
                          : t.q.shape[0];
  p.q_len = p.q_varlen ? 0 : t.q.shape[2];
  p.kv_len = p.kv_varlen ? 0 : t.k.shape[2];
  return p;
}

/// Gives an 8-bit tensor one scale under which `unit` and its multiples are exact. Returns the
/// divisor of values before they are stored: the scale, or 1 for wider formats.
double set_scale(HostCall& probe, TensorView Tensors::*tensor, TensorView Tensors::*scale,
                 double unit) {
  const DType dtype = (probe.tensors.*tensor).dtype;
  if (!is_8bit(dtype)) return 1;
  const double step = dtype == DType::u8 ? 448.0 / 127.0 : 1.0;
  probe.place(scale, DType::f32, {1});
  store((probe.tensors.*scale).data, DType::f32, 0, unit / step);
  return reference::element((probe.tensors.*scale).data, DType::f32, 0);
}

/// Fills k or v: value(key of the sequence, column).
template <typename Value>
void fill_keys(const HostCall& call, const TensorView& view, Value value) {
  const Problem sizes = sizes_of(call.tensors);
  const Operand operand{view, sizes.kv_varlen};
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const reference::Lengths l = reference::lengths_of(sizes, call.tensors, b);
    for (std::int64_t h = 0; h < operand.heads(); ++h) {
      for (std::int64_t j = 0; j < l.kv_len; ++j) {
        for (std::int64_t c = 0; c < operand.columns(); ++c) {
          store(view.data, view.dtype, operand.offset(b, h, l.k_row, j, c), value(j, c));
        }
      }
    }
  }
}

/// Fills q: value(sequence, head, row of the sequence, column).
template <typename Value>
void fill_queries(const HostCall& call, Value value) {
  const Tensors& t = call.tensors;
  const Problem sizes = sizes_of(t);
  const Operand q{t.q, sizes.q_varlen};
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const reference::Lengths l = reference::lengths_of(sizes, t, b);
    for (std::int64_t h = 0; h < q.heads(); ++h) {
      for (std::int64_t i = 0; i < l.q_len; ++i) {
        for (std::int64_t d = 0; d < q.columns(); ++d) {
          store(t.q.data, t.q.dtype, q.offset(b, h, l.q_row, i, d), value(b, h, i, d));
        }
      }
    }
  }
}

void drop_score_options(HostCall& call) {
  call.tensors.bias = call.tensors.alibi_slopes = call.tensors.sinks = {};
  call.options.softcap = 0;
}

}  // namespace

HostCall with_lse(const HostCall& call) {
  HostCall probe = call;
  if (call.tensors.lse.given()) return probe;
  const TensorView& q = call.tensors.q;
  const bool varlen = call.tensors.cu_seqlens_q.given();
  const DType dtype = wide(q.dtype);
  varlen ? probe.place(&Tensors::lse, dtype, {q.shape[1], q.shape[0]})
         : probe.place(&Tensors::lse, dtype, {q.shape[0], q.shape[1], q.shape[2]});
  return probe;
}

HostCall with_wide_outputs(const HostCall& call) {
  HostCall probe = with_lse(call);
  const TensorView out = call.tensors.out;
  const DType dtype = wide(call.tensors.q.dtype);
  if (out.dtype != dtype) probe.place(&Tensors::out, dtype, {out.shape, out.shape + out.rank});
  return probe;
}

Result<HostCall> with_one_hot_values(const HostCall& call, std::int64_t first_key) {
  HostCall probe = call;
  const TensorView& v = probe.tensors.v;
  for (const int axis : {probe.tensors.cu_seqlens_k.given() ? 0 : 2, v.rank - 1}) {
    if (v.shape[axis] > 1 && v.strides[axis] == 0) {
      return unsupported(
          "v has a stride of 0 along keys or columns and cannot have one-hot rows; use a v without "
          "broadcast axes");
    }
  }
  const double scale = set_scale(probe, &Tensors::v, &Tensors::v_scale, 1);
  fill_keys(probe, v,
            [&](std::int64_t j, std::int64_t c) { return j == first_key + c ? 1.0 / scale : 0.0; });
  return probe;
}

HostCall with_uniform_probabilities(const HostCall& call) {
  HostCall probe = call;
  drop_score_options(probe);
  const TensorView& q = probe.tensors.q;
  for_each_stored(q, [&](std::int64_t at) { store(q.data, q.dtype, at, 0.0); });
  return probe;
}

HostCall with_selected_keys(const HostCall& call) {
  HostCall probe = call;
  drop_score_options(probe);
  const Tensors& t = probe.tensors;
  const Problem sizes = sizes_of(t);
  const Operand q{t.q, sizes.q_varlen};
  const std::int64_t head_dim = q.columns();
  std::int64_t most_keys = 1;
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    most_keys = std::max(most_keys, reference::lengths_of(sizes, t, b).kv_len);
  }
  // The digits repeat until all columns are used.
  const std::int64_t digits = std::clamp<std::int64_t>(
      std::bit_width(static_cast<std::uint64_t>(most_keys - 1)), 1, head_dim);
  const auto digit = [&](std::int64_t key, std::int64_t column) {
    return (key >> (column % digits)) & 1 ? 1.0 : -1.0;
  };
  const double k_scale = set_scale(probe, &Tensors::k, &Tensors::k_scale, 1);
  fill_keys(probe, t.k, [&](std::int64_t j, std::int64_t c) { return digit(j, c) / k_scale; });

  // A wrong digit lowers the score by 2 · scale · size in every column that repeats it.
  const double scale = call.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const std::int64_t repeats = head_dim / digits;
  const double size =
      scale == 0
          ? 0.0
          : std::copysign(std::min(kGap / (2 * std::fabs(scale) * static_cast<double>(repeats)),
                                   kLargestDigit),
                          scale);
  const double q_scale =
      set_scale(probe, &Tensors::q, &Tensors::q_scale, size == 0 ? 1 : std::fabs(size));
  fill_queries(probe, [&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t d) {
    const reference::Lengths l = reference::lengths_of(sizes, t, b);
    const auto row = static_cast<std::uint64_t>((b * q.heads() + h) * l.q_len + i);
    const auto key = static_cast<std::int64_t>(
        mix(row) % static_cast<std::uint64_t>(std::max<std::int64_t>(l.kv_len, 1)));
    return size * digit(key, d) / q_scale;
  });
  return probe;
}

HostCall with_one_column_queries(const HostCall& call) {
  HostCall probe = call;
  drop_score_options(probe);
  const std::int64_t head_dim = probe.tensors.k.shape[probe.tensors.k.rank - 1];
  const double scale = set_scale(probe, &Tensors::q, &Tensors::q_scale, 1);
  fill_queries(probe, [&](std::int64_t, std::int64_t, std::int64_t i, std::int64_t d) {
    return i % head_dim == d ? 1.0 / scale : 0.0;
  });
  return probe;
}

HostCall with_one_column_keys(const HostCall& call) {
  HostCall probe = call;
  drop_score_options(probe);
  const std::int64_t head_dim = probe.tensors.k.shape[probe.tensors.k.rank - 1];
  const double scale = set_scale(probe, &Tensors::k, &Tensors::k_scale, 1);
  fill_keys(probe, probe.tensors.k,
            [&](std::int64_t j, std::int64_t c) { return j % head_dim == c ? 1.0 / scale : 0.0; });
  return probe;
}

HostCall with_scaled_scores(const HostCall& call, double factor) {
  HostCall probe = call;
  const Tensors& t = probe.tensors;
  const bool quantised = is_8bit(t.q.dtype);  // 8-bit: changes the scale, not q
  if (quantised && !t.q_scale.given()) {
    probe.place(&Tensors::q_scale, DType::f32, {1});
    store(t.q_scale.data, DType::f32, 0, 1);
  }
  for (const TensorView* view :
       {quantised ? &t.q_scale : &t.q, &t.bias, &t.alibi_slopes, &t.sinks}) {
    if (!view->given()) continue;
    for_each_stored(*view, [&](std::int64_t at) {
      store(view->data, view->dtype, at, factor * reference::element(view->data, view->dtype, at));
    });
  }
  probe.options.softcap *= factor;
  return probe;
}

HostCall with_keys_up_to(const HostCall& call, const Problem& problem, std::int64_t end) {
  HostCall probe = call;
  for (TensorView Tensors::*tensor : {&Tensors::seqused_k, &Tensors::q_start, &Tensors::k_start}) {
    probe.place(tensor, DType::i32, {problem.batch});
  }
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const reference::Lengths l = reference::lengths_of(problem, call.tensors, b);
    const auto put = [&](const TensorView& view, std::int64_t value) {
      store(view.data, DType::i32, b, static_cast<double>(value));
    };
    put(probe.tensors.seqused_k, std::min(l.kv_len, end));
    put(probe.tensors.q_start, l.q_start);
    put(probe.tensors.k_start, l.k_start);
  }
  return probe;
}

reference::Oracle one_hot_oracle(const reference::Oracle& whole, const Problem& problem,
                                 const Tensors& tensors, std::int64_t first_key) {
  reference::Oracle o;
  o.rows = whole.rows;
  o.head_dim = whole.head_dim;
  o.v_dim = problem.v_dim;
  o.lse = whole.lse;
  o.max = whole.max;
  o.sum = whole.sum;
  o.magnitude = whole.magnitude;
  o.largest_product = whole.largest_product;
  o.largest_sum = whole.largest_sum;
  o.largest_cut = whole.largest_cut;
  o.kv_len = whole.kv_len;
  o.equal_keys = whole.equal_keys;
  o.may_be_poisoned.assign(o.rows.size(), 0);
  const auto v_dim = static_cast<std::size_t>(o.v_dim);
  for (auto* array : {&o.out, &o.spread, &o.deviation, &o.v_mass, &o.v_mass_in_steps}) {
    array->assign(o.rows.size() * v_dim, 0.0);
  }
  const bool sinks = tensors.sinks.given() && !problem.options.partial;
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    const std::vector<double>& p = whole.probabilities[r];
    double top = whole.max[r];
    if (sinks) {
      top = std::max(top, reference::element(tensors.sinks.data, DType::f32,
                                             o.rows[r].h * problem.sinks.head));
    }
    for (std::size_t c = 0; c < v_dim; ++c) {
      const std::int64_t key = first_key + static_cast<std::int64_t>(c);
      const auto j = static_cast<std::size_t>(key);
      if (key < 0 || j >= p.size() || std::isinf(whole.scores[r][j]))
        continue;  // all values stay 0
      const std::size_t at = r * v_dim + c;
      o.out[at] = o.spread[at] = p[j];
      o.deviation[at] =
          2 * p[j] * (1 - p[j]);  // p (1 - p) for this key, and as much for the others
      o.v_mass[at] = o.v_mass_in_steps[at] = std::exp(top - whole.lse[r]);
    }
  }
  return o;
}

namespace {

/// The block mask of keys [begin, end) as a boolean mask, which replaces it in `part` and `t`: the
/// split may begin inside a block.
std::vector<std::uint8_t> densified(const Problem& problem, Tensors& t, std::int64_t begin,
                                    std::int64_t end, Problem& part) {
  if (!t.mask_blocks.given()) return {};
  const std::int64_t batch = t.mask_blocks.shape[0], heads = t.mask_blocks.shape[1];
  const std::int64_t keys = std::max<std::int64_t>(std::min(end, problem.kv_len) - begin, 0);
  std::vector<std::uint8_t> dense;
  for (std::int64_t row = 0; row < batch * heads * problem.q_len; ++row) {
    const std::int64_t plane = row / problem.q_len;
    const reference::RowId id{static_cast<std::int32_t>(plane / heads),
                              static_cast<std::int32_t>(plane % heads),
                              static_cast<std::int32_t>(row % problem.q_len)};
    for (std::int64_t j = begin; j < begin + keys; ++j) {
      dense.push_back(reference::block_shows(problem, t, id, j) ? 1 : 0);
    }
  }
  t.mask_blocks = t.mask_bits = {};
  t.mask = view(dense.data(), DType::boolean, {batch, heads, problem.q_len, keys});
  part.mask_blocks = part.mask_bits = {};
  part.mask = {
      DType::boolean,    1, batch > 1 ? t.mask.strides[0] : 0, heads > 1 ? t.mask.strides[1] : 0,
      t.mask.strides[2], 1};
  return dense;
}

}  // namespace

reference::Oracle compute_on_keys(const Problem& problem, const Tensors& tensors,
                                  std::vector<reference::RowId> rows, std::int64_t begin,
                                  std::int64_t end, bool keep_stages) {
  Problem part = problem;
  part.options.partial = true;
  Tensors t = tensors;
  // Expands block scales to one scale per key: a scale block may begin before the split.
  std::vector<float> k_scales, v_scales;
  const auto expand = [&](TensorView& scale, std::vector<float>& values) {
    if (scale.rank != 3) return;
    const TensorView old = scale;
    const std::int64_t keys = std::max<std::int64_t>(std::min(end, problem.kv_len) - begin, 0);
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      for (std::int64_t h = 0; h < problem.kv_heads; ++h) {
        for (std::int64_t j = begin; j < begin + keys; ++j) {
          const std::int64_t block = j / problem.options.kv_scale_block;
          values.push_back(static_cast<const float*>(
              old.data)[b * old.strides[0] + h * old.strides[1] + block * old.strides[2]]);
        }
      }
    }
    scale = view(values.data(), DType::f32, {problem.batch, problem.kv_heads, keys});
    part.options.kv_scale_block = 1;
  };
  expand(t.k_scale, k_scales);
  expand(t.v_scale, v_scales);
  std::vector<std::int32_t> used(static_cast<std::size_t>(problem.batch));
  std::vector<std::int32_t> q_start(used), k_start(used);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const reference::Lengths l = reference::lengths_of(problem, tensors, b);
    const auto at = static_cast<std::size_t>(b);
    used[at] = static_cast<std::int32_t>(std::clamp<std::int64_t>(l.kv_len, begin, end) - begin);
    q_start[at] = static_cast<std::int32_t>(l.q_start);
    k_start[at] = static_cast<std::int32_t>(l.k_start + begin);
  }
  t.seqused_k = view(used.data(), DType::i32, {problem.batch});
  t.q_start = view(q_start.data(), DType::i32, {problem.batch});
  t.k_start = view(k_start.data(), DType::i32, {problem.batch});
  // Key 0 of the split is key `begin` of the sequence.
  const auto advance = [&](TensorView& view, std::int64_t stride) {
    if (!view.given()) return;
    view.data = static_cast<std::byte*>(view.data) + begin * stride * size_of(view.dtype);
  };
  advance(t.k, problem.k.row);
  advance(t.v, problem.v.row);
  advance(t.bias, problem.bias.column);
  advance(t.mask, problem.mask.column);
  const std::vector<std::uint8_t> dense = densified(problem, t, begin, end, part);
  return reference::compute(part, t, std::move(rows), keep_stages);
}

}  // namespace flashcore::verify
