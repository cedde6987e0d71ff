// Mutants of the backward pass: tensors in the wrong strides, order of axes, batch, head or group.
#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

enum Name { kQ, kK, kV, kOut, kDout, kLse, kDqName, kDkName, kDvName };
constexpr const char* kNames[] = {"q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"};

const flashcore_tensor& tensor(const flashcore_verify_backward_call& c, Name name) {
  const flashcore_verify_call& f = *c.forward;
  const flashcore_tensor* all[] = {f.q, f.k, f.v, f.out, c.dout, f.lse, c.dq, c.dk, c.dv};
  return *all[name];
}

std::vector<float>& values(BackwardWork& w, Name name) {
  std::vector<float>* all[] = {&w.q, &w.k, &w.v, &w.out, &w.dout, &w.lse};
  return *all[name];
}

std::int64_t head_of(const BackwardWork& w, Name name) {
  return name == kK || name == kV ? w.kv_head : w.h;
}

/// Reads a tensor at other places: place(b, h, i, c) is an offset in its memory.
template <typename Place>
void read_at(BackwardParts& p, Name name, Place place) {
  p.loaded = [=, before = p.loaded](BackwardWork& w) {
    if (before) before(w);
    const flashcore_tensor& t = tensor(*w.call, name);
    const FlatTensor flat(t);
    const std::int64_t columns = t.ndim > 3 ? t.shape[3] : 1;
    for (std::int64_t i = 0; i < t.shape[2]; ++i) {
      for (std::int64_t c = 0; c < columns; ++c) {
        values(w, name)[at(i, columns, c)] =
            static_cast<float>(flat.get(place(w, t, w.b, head_of(w, name), i, c)));
      }
    }
  };
}

/// Writes a gradient at other places.
template <typename Place>
void write_at(BackwardParts& p, Name name, Place place) {
  p.returned = [=](const flashcore_verify_backward_call& c) {
    const flashcore_tensor& t = tensor(c, name);
    std::vector<std::vector<float>> all;
    for (std::int64_t head = 0; head < t.shape[0] * t.shape[1]; ++head) {
      all.push_back(rows_of(t, head / t.shape[1], head % t.shape[1]));
    }
    const FlatTensor flat(t);
    for (std::int64_t head = 0; head < t.shape[0] * t.shape[1]; ++head) {
      for (std::int64_t i = 0; i < t.shape[2]; ++i) {
        for (std::int64_t e = 0; e < t.shape[3]; ++e) {
          flat.set(place(c, t, head / t.shape[1], head % t.shape[1], i, e),
                   all[static_cast<std::size_t>(head)][at(i, t.shape[3], e)]);
        }
      }
    }
  };
}

Mutant by_strides_of(Name name, Name other) {
  const std::string text = std::string("bwd_") + kNames[name] + "_in_strides_of_" + kNames[other];
  const auto offset = [](const flashcore_tensor& o, std::int64_t b, std::int64_t h, std::int64_t i,
                         std::int64_t c) {
    return b * o.strides[0] + h * o.strides[1] + i * o.strides[2] + c * o.strides[3];
  };
  return backward(text, layout, "f32 f16", [=](BackwardParts& p) {
    if (name < kDqName) {
      read_at(p, name,
              [=](const BackwardWork& w, const flashcore_tensor&, std::int64_t b, std::int64_t h,
                  std::int64_t i,
                  std::int64_t c) { return offset(tensor(*w.call, other), b, h, i, c); });
    } else {
      write_at(p, name,
               [=](const flashcore_verify_backward_call& call, const flashcore_tensor&,
                   std::int64_t b, std::int64_t h, std::int64_t i,
                   std::int64_t c) { return offset(tensor(call, other), b, h, i, c); });
    }
  });
}

/// Rows and heads, or batches and heads, in the other order, in compact memory.
std::int64_t reordered(const flashcore_tensor& t, bool rows, std::int64_t b, std::int64_t h,
                       std::int64_t i, std::int64_t c) {
  const std::int64_t columns = t.ndim > 3 ? t.shape[3] : 1;
  return rows ? ((b * t.shape[2] + i) * t.shape[1] + h) * columns + c
              : ((h * t.shape[0] + b) * t.shape[2] + i) * columns + c;
}

Mutant in_order(Name name, bool rows) {
  const std::string text = std::string("bwd_") + kNames[name] +
                           (rows ? "_with_rows_before_heads" : "_with_heads_before_batches");
  return backward(text, layout, "f32 bf16", [=](BackwardParts& p) {
    if (name < kDqName) {
      read_at(p, name,
              [=](const BackwardWork&, const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                  std::int64_t i, std::int64_t c) { return reordered(t, rows, b, h, i, c); });
    } else {
      write_at(p, name,
               [=](const flashcore_verify_backward_call&, const flashcore_tensor& t, std::int64_t b,
                   std::int64_t h, std::int64_t i,
                   std::int64_t c) { return reordered(t, rows, b, h, i, c); });
    }
  });
}

/// dk or dv of each query head goes to another KV head.
template <typename Group>
Mutant grouped_by(const char* name, bool of_dk, Group group) {
  return backward(name, layout, "f32 bf16", [=](BackwardParts& p) {
    struct State {
      std::vector<std::vector<float>> parts;
      std::vector<float> before;
    };
    const auto state = std::make_shared<State>();
    p.called = [=](const flashcore_verify_backward_call&) { state->parts.clear(); };
    p.head_done = [=](BackwardWork& w) {
      const std::vector<float>& sum = of_dk ? w.dk : w.dv;
      if (w.h % w.group == 0) state->before.assign(sum.size(), 0.0f);
      std::vector<float> part = sum;
      for (std::size_t e = 0; e < part.size(); ++e) {
        part[e] = (of_dk ? w.scale : 1.0f) * (part[e] - state->before[e]);
      }
      state->before = sum;
      state->parts.push_back(std::move(part));
    };
    p.returned = [=](const flashcore_verify_backward_call& c) {
      const flashcore_tensor& t = of_dk ? *c.dk : *c.dv;
      const std::int64_t heads = c.dq->shape[1];
      for (std::int64_t b = 0; b < t.shape[0]; ++b) {
        for (std::int64_t h = 0; h < t.shape[1]; ++h) {
          for (std::int64_t j = 0; j < t.shape[2]; ++j) {
            for (std::int64_t e = 0; e < t.shape[3]; ++e) {
              float sum = 0;
              for (std::int64_t of = 0; of < heads; ++of) {
                if (group(of, heads, t.shape[1]) != h) continue;
                sum += state->parts[static_cast<std::size_t>(b * heads + of)][at(j, t.shape[3], e)];
              }
              write(t, b, h, j, e, sum);
            }
          }
        }
      }
    };
  });
}

}  // namespace

std::vector<Mutant> bwd_address_faults() {
  std::vector<Mutant> all;
  for (const auto& [name, other] : {std::pair{kQ, kK},
                                    {kQ, kDout},
                                    {kK, kV},
                                    {kK, kQ},
                                    {kV, kOut},
                                    {kOut, kQ},
                                    {kDout, kV},
                                    {kDqName, kDout},
                                    {kDkName, kK},
                                    {kDkName, kDvName},
                                    {kDvName, kV},
                                    {kDvName, kDkName}}) {
    all.push_back(by_strides_of(name, other));
  }
  for (const Name name : {kQ, kK, kV, kOut, kDout, kLse, kDqName, kDkName, kDvName}) {
    all.push_back(in_order(name, true));
    all.push_back(in_order(name, false));
  }
  all.push_back(grouped_by("bwd_groups_of_dv_interleaved", false,
                           [](std::int64_t h, std::int64_t, std::int64_t kv) { return h % kv; }));
  all.push_back(grouped_by("bwd_groups_of_dk_reversed", true,
                           [](std::int64_t h, std::int64_t heads, std::int64_t kv) {
                             return (heads - 1 - h) / (heads / kv);
                           }));
  all.push_back(grouped_by("bwd_groups_of_dv_moved_by_a_head", false,
                           [](std::int64_t h, std::int64_t heads, std::int64_t kv) {
                             return (h + 1) % heads / (heads / kv);
                           }));
  return all;
}

}  // namespace flashcore::mutants
