#include "mutants/reference_bwd.h"

#include <algorithm>
#include <cmath>

namespace flashcore::mutants {
namespace {

std::vector<float> load(const flashcore_tensor& t, std::int64_t b, std::int64_t h) {
  std::vector<float> values;
  const std::int64_t columns = t.ndim > 3 ? t.shape[3] : 1;
  values.reserve(static_cast<std::size_t>(t.shape[2] * columns));
  for (std::int64_t i = 0; i < t.shape[2]; ++i) {
    for (std::int64_t c = 0; c < columns; ++c) {
      values.push_back(static_cast<float>(read(t, b, h, i, c)));
    }
  }
  return values;
}

float dot(const float* a, const float* b, std::int64_t count) {
  float sums[4] = {};  // four independent chains hide the latency of the additions
  std::int64_t c = 0;
  for (; c + 3 < count; c += 4) {
    for (int chain = 0; chain < 4; ++chain) sums[chain] += a[c + chain] * b[c + chain];
  }
  for (; c < count; ++c) sums[0] += a[c] * b[c];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add_row(const BackwardParts& parts, float weight, const float* row, std::int64_t count,
             float* sum) {
  if (weight == 0) return;
  if (parts.add) {
    for (std::int64_t c = 0; c < count; ++c) sum[c] = parts.add(sum[c], weight * row[c]);
  } else {
    for (std::int64_t c = 0; c < count; ++c) sum[c] += weight * row[c];
  }
}

void add_pair(const BackwardParts& parts, BackwardWork& w, Pair& pair, const float count[3]) {
  const std::int64_t i = pair.i, j = pair.j;
  const float* q = w.q.data() + i * w.d;
  const float* k = w.k.data() + j * w.d;
  pair.z = parts.score_scale(w) * dot(q, k, w.d);
  pair.score = w.softcap > 0 ? w.softcap * std::tanh(pair.z / w.softcap) : pair.z;
  pair.p = parts.p(w, pair);
  pair.dp = parts.dp(w, pair);
  pair.ds = parts.ds(w, pair) * parts.slope(w, pair);
  add_row(parts, count[kOfDv] * parts.in_dv(w, pair), w.dout.data() + i * w.dv_dim, w.dv_dim,
          w.dv.data() + j * w.dv_dim);
  add_row(parts, count[kOfDk] * parts.in_dk(w, pair), q, w.d, w.dk.data() + j * w.d);
  add_row(parts, count[kOfDq] * parts.in_dq(w, pair), k, w.d, w.dq.data() + i * w.d);
}

void add_head(const BackwardParts& parts, BackwardWork& w) {
  for (std::int64_t first_j = 0; first_j < w.n; first_j += parts.tile) {
    for (std::int64_t first_i = 0; first_i < w.m; first_i += parts.tile) {
      const std::int64_t q_tile = first_i / parts.tile, k_tile = first_j / parts.tile;
      float count[3];
      for (const int g : {kOfDq, kOfDk, kOfDv}) {
        count[g] = parts.count ? parts.count(w, g, q_tile, k_tile) : 1.0f;
      }
      for (std::int64_t i = first_i; i < std::min(first_i + parts.tile, w.m); ++i) {
        for (std::int64_t j = first_j; j < std::min(first_j + parts.tile, w.n); ++j) {
          if (!parts.visible(w, i, j)) continue;
          Pair pair{i, j};
          add_pair(parts, w, pair, count);
        }
      }
    }
  }
}

void store(const BackwardParts& parts, const BackwardWork& w, const flashcore_tensor& t,
           std::int64_t head, const std::vector<float>& values) {
  std::size_t at = 0;
  for (std::int64_t i = 0; i < t.shape[2]; ++i) {
    for (std::int64_t c = 0; c < t.shape[3]; ++c) {
      (parts.store ? parts.store : write)(t, w.b, head, i, c, values[at++]);
    }
  }
}

bool is_visible(const BackwardWork& w, std::int64_t i, std::int64_t j) {
  const std::int64_t position = i + w.n - w.m;  // bottom-right alignment
  const flashcore_verify_call& c = *w.call->forward;
  return !(c.causal != 0 && j > position) &&
         !(c.window_left >= 0 && position - j > c.window_left) &&
         !(c.window_right >= 0 && j - position > c.window_right);
}

}  // namespace

BackwardParts default_backward() {
  BackwardParts p;
  p.kv_head = [](const BackwardWork& w) { return w.h / w.group; };
  p.delta = [](const BackwardWork& w, std::int64_t i) {
    return dot(w.dout.data() + i * w.dv_dim, w.out.data() + i * w.dv_dim, w.dv_dim) -
           w.dlse[static_cast<std::size_t>(i)];
  };
  p.score_scale = [](const BackwardWork& w) { return w.scale; };
  p.visible = is_visible;
  p.p = [](const BackwardWork& w, const Pair& x) {
    return std::exp(x.score - w.lse[static_cast<std::size_t>(x.i)]);
  };
  p.dp = [](const BackwardWork& w, const Pair& x) {
    return dot(w.dout.data() + x.i * w.dv_dim, w.v.data() + x.j * w.dv_dim, w.dv_dim);
  };
  p.ds = [](const BackwardWork& w, const Pair& x) {
    return x.p * (x.dp - w.delta[static_cast<std::size_t>(x.i)]);
  };
  p.slope = [](const BackwardWork& w, const Pair& x) {
    if (w.softcap == 0) return 1.0f;
    const float t = std::tanh(x.z / w.softcap);
    return 1 - t * t;
  };
  p.in_dv = [](const BackwardWork&, const Pair& x) { return x.p; };
  p.in_dk = p.in_dq = [](const BackwardWork&, const Pair& x) { return x.ds; };
  p.dq_scale = p.dk_scale = [](const BackwardWork& w) { return w.scale; };
  return p;
}

std::int32_t differentiate(const BackwardParts& parts, const flashcore_verify_backward_call& call) {
  const flashcore_verify_call& f = *call.forward;
  if (call.dlse != nullptr && !parts.takes_dlse) return FLASHCORE_UNSUPPORTED;
  if (parts.called) parts.called(call);
  BackwardWork w;
  w.call = &call;
  w.batch = f.q->shape[0], w.q_heads = f.q->shape[1], w.kv_heads = f.k->shape[1];
  w.m = f.q->shape[2], w.n = f.k->shape[2], w.d = f.q->shape[3], w.dv_dim = f.v->shape[3];
  w.group = w.q_heads / w.kv_heads;
  w.scale = static_cast<float>(f.scale), w.softcap = static_cast<float>(f.softcap);
  for (w.b = 0; w.b < w.batch; ++w.b) {
    for (std::int64_t group = 0; group < w.kv_heads; ++group) {
      w.dk.assign(static_cast<std::size_t>(w.n * w.d), 0.0f);
      w.dv.assign(static_cast<std::size_t>(w.n * w.dv_dim), 0.0f);
      for (w.h = group * w.group; w.h < (group + 1) * w.group; ++w.h) {
        w.kv_head = parts.kv_head(w);
        w.q = load(*f.q, w.b, w.h), w.k = load(*f.k, w.b, w.kv_head);
        w.v = load(*f.v, w.b, w.kv_head), w.out = load(*f.out, w.b, w.h);
        w.dout = load(*call.dout, w.b, w.h), w.lse = load(*f.lse, w.b, w.h);
        w.dlse.assign(static_cast<std::size_t>(w.m), 0.0f);
        if (call.dlse != nullptr) w.dlse = load(*call.dlse, w.b, w.h);
        if (parts.loaded) parts.loaded(w);
        w.delta.resize(static_cast<std::size_t>(w.m));
        for (std::int64_t i = 0; i < w.m; ++i) {
          w.delta[static_cast<std::size_t>(i)] = parts.delta(w, i);
        }
        w.dq.assign(static_cast<std::size_t>(w.m * w.d), 0.0f);
        add_head(parts, w);
        for (float& x : w.dq) x *= parts.dq_scale(w);
        if (parts.head_done) parts.head_done(w);
        store(parts, w, *call.dq, w.h, w.dq);
      }
      w.h = group * w.group;
      for (float& x : w.dk) x *= parts.dk_scale(w);
      if (parts.group_done) parts.group_done(w);
      store(parts, w, *call.dk, group, w.dk);
      store(parts, w, *call.dv, group, w.dv);
    }
  }
  if (parts.returned) parts.returned(call);
  return FLASHCORE_OK;
}

}  // namespace flashcore::mutants
