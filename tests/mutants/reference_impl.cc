#include "mutants/reference_impl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <tuple>

namespace flashcore::mutants {
namespace {

std::int64_t offset(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                    std::int64_t c) {
  const std::int64_t at[4] = {b, h, i, c};
  std::int64_t sum = 0;
  for (int axis = 0; axis < t.ndim; ++axis) sum += at[axis] * t.strides[axis];
  return sum;
}

/// Decode table of an 8-bit format; nullptr for wider formats.
const double* values_of(verify::Format format) {
  using verify::Format;
  if (!verify::is_8bit(format)) return nullptr;
  static const auto tables = [] {
    std::map<Format, std::array<double, 256>> all;
    for (const Format narrow : {Format::e4m3, Format::e5m2, Format::int8, Format::byte8}) {
      for (int bits = 0; bits < 256; ++bits) {
        const auto byte = static_cast<std::uint8_t>(bits);
        all[narrow][byte] = verify::decode_byte(narrow, byte);
      }
    }
    return all;
  }();
  return tables.at(format).data();
}

void load(const Parts& parts, Work& w) {
  const auto tensor = [&](const flashcore_tensor& t, const flashcore_tensor* scale,
                          std::int64_t head, std::int64_t rows, std::int64_t columns,
                          std::vector<float>& to) {
    to.resize(static_cast<std::size_t>(rows * columns));
    const double factor = scale != nullptr ? parts.scale_of(scale, w, head) : 1.0;
    const verify::Format format = format_of(t);
    const double* values = values_of(format);
    const auto value_at = [&](std::int64_t element) {
      return values != nullptr ? values[static_cast<const std::uint8_t*>(t.data)[element]]
                               : verify::decode(format, t.data, element);
    };
    std::size_t at = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t row = offset(t, w.b, head, i, 0);
      for (std::int64_t c = 0; c < columns; ++c) {
        const double x =
            parts.load ? parts.load(t, w.b, head, i, c) : value_at(row + c * t.strides[3]);
        to[at++] = static_cast<float>(x * factor);
      }
    }
  };
  tensor(*w.call->q, w.call->q_scale, w.h, w.m, w.d, w.q);
  tensor(*w.call->k, w.call->k_scale, w.kv_head, w.n, w.d, w.k);
  tensor(*w.call->v, w.call->v_scale, w.kv_head, w.n, w.dv, w.v);
}

void score(const Work& w, Tile& t) {
  t.s.assign(static_cast<std::size_t>(w.m * t.width()), 0.0f);
  for (std::int64_t i = 0; i < w.m; ++i) {
    const float* q = w.q.data() + i * w.d;
    for (std::int64_t j = t.begin; j < t.end; ++j) {
      const float* k = w.k.data() + j * w.d;
      float sums[4] = {};  // four independent chains hide the latency of the additions
      std::int64_t c = 0;
      for (; c + 3 < w.d; c += 4) {
        for (int chain = 0; chain < 4; ++chain) sums[chain] += q[c + chain] * k[c + chain];
      }
      for (; c < w.d; ++c) sums[0] += q[c] * k[c];
      float x = w.scale * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
      if (w.call->softcap > 0) {
        const auto cap = static_cast<float>(w.call->softcap);
        x = cap * std::tanh(x / cap);
      }
      t.s[static_cast<std::size_t>(i * t.width() + j - t.begin)] = x;
    }
  }
}

void update(const Parts& parts, const Work& w, Tile& t, State& state) {
  for (std::int64_t i = 0; i < w.m; ++i) {
    float* row = t.s.data() + i * t.width();
    for (std::int64_t j = 0; j < t.width(); ++j) {
      if (!parts.visible(w, i, t.begin + j)) row[j] = kNoKey;
    }
    const auto at = static_cast<std::size_t>(i);
    const float before = state.max[at], now = parts.new_max(w, t, i, before);
    float tile_sum = 0;
    for (std::int64_t j = 0; j < t.width(); ++j) {
      row[j] = parts.weight(row[j], now);
      tile_sum += row[j];
    }
    const float factor = parts.rescale(before, now);
    state.sum[at] = parts.add_sum(state.sum[at], parts.rescale_sum(before, now), tile_sum);
    for (std::int64_t c = 0; c < w.dv; ++c)
      state.acc[static_cast<std::size_t>(i * w.dv + c)] *= factor;
    state.max[at] = now;
  }
  if (parts.exp_done) parts.exp_done(w, t);
  parts.multiply(w, t, state);
}

State compute_split(const Parts& parts, const Work& w, std::int64_t begin, std::int64_t end) {
  State state;
  state.max.assign(static_cast<std::size_t>(w.m), kNoKey);
  state.sum.assign(static_cast<std::size_t>(w.m), 0.0f);
  state.acc.assign(static_cast<std::size_t>(w.m * w.dv), 0.0f);
  Tile tile;
  for (std::int64_t at = begin; at < end; at += parts.tile, ++tile.index) {
    tile.begin = at;
    tile.end = std::min(at + parts.tile, end);
    if (parts.tile_range) std::tie(tile.begin, tile.end) = parts.tile_range(w, tile.index);
    if (tile.end <= tile.begin) continue;
    score(w, tile);
    if (parts.scored) parts.scored(w, tile);
    update(parts, w, tile, state);
  }
  if (parts.split_done) parts.split_done(w, state);
  return state;
}

State combine(const Parts& parts, const Work& w, const std::vector<State>& splits_done) {
  if (splits_done.size() == 1) return splits_done[0];
  State all = splits_done[0];
  for (std::size_t i = 0; i < all.max.size(); ++i) {
    float max = kNoKey;
    for (const State& r : splits_done) max = std::max(max, r.max[i]);
    all.max[i] = max;
    all.sum[i] = 0;
    std::vector<float> acc(static_cast<std::size_t>(w.dv), 0.0f);
    for (const State& r : splits_done) {
      const float factor = parts.combine_weight(r.max[i], max, r.sum[i]);
      all.sum[i] += r.sum[i] * parts.rescale_sum(r.max[i], max);
      for (std::size_t c = 0; c < acc.size(); ++c) {
        acc[c] += r.acc[i * acc.size() + c] * factor;
      }
    }
    std::copy(acc.begin(), acc.end(),
              all.acc.begin() + static_cast<std::ptrdiff_t>(i * acc.size()));
  }
  return all;
}

void store(const Parts& parts, const Work& w) {
  for (std::int64_t i = 0; i < w.m; ++i) {
    const flashcore_tensor& out = *w.call->out;
    const verify::Format format = format_of(out);
    const std::int64_t row = offset(out, w.b, w.h, i, 0);
    for (std::int64_t c = 0; c < w.dv; ++c) {
      const float x = w.out[static_cast<std::size_t>(i * w.dv + c)];
      if (parts.store) {
        parts.store(out, w.b, w.h, i, c, x);
      } else {
        verify::encode(format, out.data, row + c * out.strides[3], x);
      }
    }
    if (w.call->lse == nullptr) continue;
    const float lse = w.lse[static_cast<std::size_t>(i)];
    if (parts.store) {
      parts.store(*w.call->lse, w.b, w.h, i, 0, lse);
    } else {
      write(*w.call->lse, w.b, w.h, i, 0, lse);
    }
  }
}

bool is_visible(const Work& w, std::int64_t i, std::int64_t j) {
  const std::int64_t position = i + w.n - w.m;  // bottom-right alignment
  const flashcore_verify_call& c = *w.call;
  return !(c.causal != 0 && j > position) &&
         !(c.window_left >= 0 && position - j > c.window_left) &&
         !(c.window_right >= 0 && j - position > c.window_right);
}

float exp_or_0(float x, float max) { return max == kNoKey ? 0.0f : std::exp(x - max); }

}  // namespace

double read(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
            std::int64_t c) {
  return verify::decode(format_of(t), t.data, offset(t, b, h, i, c));
}

void write(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
           std::int64_t c, double value) {
  verify::encode(format_of(t), t.data, offset(t, b, h, i, c), value);
}

verify::Format format_of(const flashcore_tensor& t) {
  using verify::Format;
  switch (t.dtype.code) {
    case FLASHCORE_BFLOAT: return Format::bf16;
    case FLASHCORE_FLOAT8_E4M3: return Format::e4m3;
    case FLASHCORE_FLOAT8_E5M2: return Format::e5m2;
    case FLASHCORE_INT: return Format::int8;
    case FLASHCORE_UINT: return Format::byte8;
    default:
      return t.dtype.bits == 64 ? Format::f64 : t.dtype.bits == 32 ? Format::f32 : Format::f16;
  }
}

Parts default_parts() {
  Parts p;
  p.kv_head = [](const Work& w) { return w.h / (w.q_heads / w.kv_heads); };
  p.scale_of = [](const flashcore_tensor* scale, const Work& w, std::int64_t head) {
    return read(*scale, w.b, head, 0, 0);
  };
  p.scale = [](const Work& w) { return static_cast<float>(w.call->scale); };
  p.visible = is_visible;
  p.new_max = [](const Work&, const Tile& t, std::int64_t i, float before) {
    float max = before;
    for (std::int64_t j = 0; j < t.width(); ++j) {
      max = std::max(max, t.s[static_cast<std::size_t>(i * t.width() + j)]);
    }
    return max;
  };
  p.weight = exp_or_0;
  p.rescale = p.rescale_sum = exp_or_0;
  p.add_sum = [](float sum, float factor, float tile_sum) { return sum * factor + tile_sum; };
  p.combine_weight = [](float max_i, float max, float) { return exp_or_0(max_i, max); };
  p.split_range = [](const Work& w, int split, int splits) {
    const std::int64_t size = (w.n + splits - 1) / splits;
    return std::pair{std::min(split * size, w.n), std::min((split + 1) * size, w.n)};
  };
  p.normalize = [](const Work&, std::int64_t, float acc, float sum) {
    return sum == 0 ? 0.0f : acc / sum;
  };
  p.log_sum = [](const Work&, std::int64_t, float max, float sum) {
    return sum == 0 ? kNoKey : max + std::log(sum);
  };
  return p;  // attend() sets multiply, which depends on `weights`
}

std::int32_t attend(const Parts& given, const flashcore_verify_call& call) {
  Parts parts = given;
  if (!parts.multiply) {
    parts.multiply = [&](const Work& w, const Tile& t, State& state) {
      for (std::int64_t i = 0; i < w.m; ++i) {
        for (std::int64_t j = 0; j < t.width(); ++j) {
          float p = t.s[static_cast<std::size_t>(i * t.width() + j)];
          if (parts.weights != verify::Format::f32) {
            p = static_cast<float>(verify::rounded(parts.weights, p));
          }
          const float* v = w.v.data() + (t.begin + j) * w.dv;
          float* acc = state.acc.data() + i * w.dv;
          if (p == 0) continue;
          for (std::int64_t c = 0; c < w.dv; ++c) acc[c] += p * v[c];
        }
      }
    };
  }
  if (parts.called) parts.called(call);
  Work w;
  w.call = &call;
  w.batch = call.q->shape[0], w.q_heads = call.q->shape[1], w.kv_heads = call.k->shape[1];
  w.m = call.q->shape[2], w.n = call.k->shape[2], w.d = call.q->shape[3], w.dv = call.v->shape[3];
  for (w.b = 0; w.b < w.batch; ++w.b) {
    for (w.h = 0; w.h < w.q_heads; ++w.h) {
      w.kv_head = parts.kv_head(w);
      w.scale = parts.scale(w);
      load(parts, w);
      if (parts.loaded) parts.loaded(w);
      const int splits = std::max(call.num_splits, 1);
      std::vector<State> splits_done;
      for (int split = 0; split < splits; ++split) {
        const auto [begin, end] = parts.split_range(w, split, splits);
        splits_done.push_back(compute_split(parts, w, begin, end));
      }
      const State all = combine(parts, w, splits_done);
      w.out.resize(static_cast<std::size_t>(w.m * w.dv));
      w.lse.resize(static_cast<std::size_t>(w.m));
      for (std::int64_t i = 0; i < w.m; ++i) {
        const auto at = static_cast<std::size_t>(i);
        w.lse[at] = parts.log_sum(w, i, all.max[at], all.sum[at]);
        for (std::int64_t c = 0; c < w.dv; ++c) {
          const auto element = static_cast<std::size_t>(i * w.dv + c);
          w.out[element] = parts.normalize(w, i, all.acc[element], all.sum[at]);
        }
      }
      if (parts.done) parts.done(w);
      store(parts, w);
    }
  }
  if (parts.returned) parts.returned(call);
  return FLASHCORE_OK;
}

}  // namespace flashcore::mutants
