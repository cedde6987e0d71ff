// The second table of mutants of the backward pass: what is written, read and added where, and
// when.
#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using enum FaultStage;

// Gradients that are never written, or added to old content.

/// Gives rows of a gradient the values that memory has.
void leave_rows(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t first_row,
                std::int64_t first_column, std::vector<float>& values) {
  for (std::int64_t i = first_row; i < t.shape[2]; ++i) {
    for (std::int64_t c = first_column; c < t.shape[3]; ++c) {
      values[at(i, t.shape[3], c)] = static_cast<float>(read(t, b, h, i, c));
    }
  }
}

void later_batches_of_dk_unwritten(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    if (w.b > 0) leave_rows(*w.call->dk, w.b, w.h / w.group, 0, 0, w.dk);
  };
}

/// The grid of the kernel for dk and dv has the tiles of q_len.
void keys_past_the_query_tiles_unwritten(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    const std::int64_t end = std::min(w.m + padding(w.m, 32), w.n);
    leave_rows(*w.call->dk, w.b, w.h / w.group, end, 0, w.dk);
    leave_rows(*w.call->dv, w.b, w.h / w.group, end, 0, w.dv);
  };
}

/// dq is a sum in place, of a tensor of which only the first half is cleared.
void half_of_dq_cleared(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    const std::int64_t heads = w.batch * w.q_heads, head = w.b * w.q_heads + w.h;
    for (std::int64_t i = 0; i < w.m; ++i) {
      for (std::int64_t c = 0; c < w.d; ++c) {
        if (2 * ((head * w.m + i) * w.d + c) < heads * w.m * w.d) continue;
        w.dq[at(i, w.d, c)] += static_cast<float>(read(*w.call->dq, w.b, w.h, i, c));
      }
    }
  };
}

/// With a single tile of keys nothing is to be added up, so the last kernel is not launched.
void dq_of_one_key_tile_unwritten(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.n <= 32) leave_rows(*w.call->dq, w.b, w.h, 0, 0, w.dq);
  };
}

void columns_of_dv_past_head_dim_unwritten(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    leave_rows(*w.call->dv, w.b, w.h / w.group, 0, std::min(w.d, w.dv_dim), w.dv);
  };
}

std::vector<Mutant> coverage_faults() {
  return {
      backward("bwd_later_batches_of_dk_unwritten", coverage, "f32 bf16",
               later_batches_of_dk_unwritten),
      backward("bwd_keys_past_query_tiles_unwritten", coverage, "f32 f16",
               keys_past_the_query_tiles_unwritten),
      backward("bwd_half_of_dq_cleared", coverage, "f32 bf16", half_of_dq_cleared),
      backward("bwd_dq_of_one_key_tile_unwritten", coverage, "f32", dq_of_one_key_tile_unwritten),
      backward("bwd_dv_past_head_dim_unwritten", coverage, "f32",
               columns_of_dv_past_head_dim_unwritten),
  };
}

// Races: events that differ from call to call.

class Race {
 public:
  /// True once in `odds` times.
  bool lost(std::uint64_t odds) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % odds == 0;
  }

 private:
  std::uint64_t state_ = 1;
};

/// CTAs of different key tiles add to dq without an atomic operation.
void updates_of_dq_lost(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  p.tile = 16;
  p.count = [=](const BackwardWork&, int g, std::int64_t, std::int64_t k_tile) {
    return g == kOfDq && k_tile > 0 && race->lost(4) ? 0.0f : 1.0f;
  };
}

/// Cleared when it is allocated.
void workspace_of_dq_never_cleared(BackwardParts& p) {
  const auto workspace = std::make_shared<std::vector<float>>();
  p.called = [=](const flashcore_verify_backward_call& c) {
    const std::int64_t* shape = c.dq->shape;
    const auto size = static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
    if (workspace->size() != size) workspace->assign(size, 0.0f);
  };
  p.head_done = [=](BackwardWork& w) {
    float* sum = workspace->data() + (w.b * w.q_heads + w.h) * w.m * w.d;
    for (float& x : w.dq) x = *sum++ += x;
  };
}

/// The main kernel does not always wait for the one that computes delta.
void delta_of_the_call_before(BackwardParts& p) {
  struct State {
    Race race;
    bool is_stale = false;
    std::vector<float> memory;
  };
  const auto state = std::make_shared<State>();
  p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
    const auto row = static_cast<std::size_t>((w.b * w.q_heads + w.h) * w.m + i);
    if (row >= state->memory.size()) state->memory.resize(row + 1, 0.0f);
    if (i == 0) state->is_stale = state->race.lost(3);
    const float before = state->memory[row];
    state->memory[row] = right(w, i);
    return state->is_stale ? before : state->memory[row];
  };
}

/// The product for dv does not always wait for the next stage of dout.
void dv_sometimes_of_the_old_stage(BackwardParts& p) {
  const auto race = std::make_shared<Race>();
  replace_product(p, kOfDv, [=](BackwardWork& w, const std::vector<float>& weights) {
    bool is_lost = false;
    for (std::int64_t i = 0; i < w.m; ++i) {
      if (i % 16 == 0) is_lost = i > 0 && race->lost(4);
      const float* dout = w.dout.data() + (is_lost ? i - 16 : i) * w.dv_dim;
      for (std::int64_t j = 0; j < w.n; ++j) {
        add_scaled(weights[at(i, w.n, j)], dout, w.dv_dim, w.dv.data() + j * w.dv_dim);
      }
    }
  });
}

/// dS goes through shared memory without a barrier before it is read.
void ds_of_a_warp_sometimes_missing_in_dk(BackwardParts& p) {
  struct State {
    Race race;
    bool is_lost = false;
  };
  const auto state = std::make_shared<State>();
  p.count = [=](const BackwardWork&, int g, std::int64_t, std::int64_t) {
    if (g == kOfDk) state->is_lost = state->race.lost(4);
    return 1.0f;
  };
  p.in_dk = [=](const BackwardWork&, const Pair& x) {
    return state->is_lost && x.i % 16 >= 8 ? 0.0f : x.ds;
  };
}

std::vector<Mutant> races() {
  return {
      backward("bwd_updates_of_dq_lost", determinism, "f32 bf16", updates_of_dq_lost),
      backward("bwd_workspace_of_dq_never_cleared", determinism, "f32 f16",
               workspace_of_dq_never_cleared),
      backward("bwd_delta_of_the_call_before", determinism, "f32", delta_of_the_call_before),
      backward("bwd_dv_sometimes_of_the_old_stage", determinism, "f32 f16",
               dv_sometimes_of_the_old_stage),
      backward("bwd_ds_sometimes_missing_in_dk", determinism, "f32 bf16",
               ds_of_a_warp_sometimes_missing_in_dk),
  };
}

// Addresses

void batch_and_head_of_dk_swapped(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& c) {
    const flashcore_tensor& t = *c.dk;
    const std::int64_t batch = t.shape[0], heads = t.shape[1];
    std::vector<std::vector<float>> all;
    for (std::int64_t head = 0; head < batch * heads; ++head) {
      all.push_back(rows_of(t, head / heads, head % heads));
    }
    for (std::int64_t head = 0; head < batch * heads; ++head) {
      const std::vector<float>& values = all[static_cast<std::size_t>(head)];
      for (std::int64_t i = 0; i < t.shape[2]; ++i) {
        for (std::int64_t c2 = 0; c2 < t.shape[3]; ++c2) {
          write(t, head % batch, head / batch, i, c2, values[at(i, t.shape[3], c2)]);
        }
      }
    }
  };
}

/// Rows of one head of `t`, read or written by the strides of another tensor.
template <typename Element>
void for_each_by_strides_of(const flashcore_tensor& other, const flashcore_tensor& t,
                            std::int64_t b, std::int64_t h, Element element) {
  for (std::int64_t i = 0; i < t.shape[2]; ++i) {
    for (std::int64_t c = 0; c < t.shape[3]; ++c) {
      element(at(i, t.shape[3], c), b * other.strides[0] + h * other.strides[1] +
                                        i * other.strides[2] + c * other.strides[3]);
    }
  }
}

void out_read_by_strides_of_dout(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    const FlatTensor out(*w.call->forward->out);
    for_each_by_strides_of(*w.call->dout, *w.call->forward->out, w.b, w.h,
                           [&](std::size_t element, std::int64_t offset) {
                             w.out[element] = static_cast<float>(out.get(offset));
                           });
  };
}

void v_read_by_strides_of_k(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    const FlatTensor v(*w.call->forward->v);
    for_each_by_strides_of(*w.call->forward->k, *w.call->forward->v, w.b, w.kv_head,
                           [&](std::size_t element, std::int64_t offset) {
                             w.v[element] = static_cast<float>(v.get(offset));
                           });
  };
}

void dq_written_by_strides_of_q(BackwardParts& p) {
  const auto all = std::make_shared<std::vector<std::vector<float>>>();
  p.called = [=](const flashcore_verify_backward_call&) { all->clear(); };
  p.head_done = [=](BackwardWork& w) {
    all->push_back(w.dq);
    leave_rows(*w.call->dq, w.b, w.h, 0, 0, w.dq);
  };
  p.returned = [=](const flashcore_verify_backward_call& c) {
    const FlatTensor dq(*c.dq);
    const std::int64_t heads = c.dq->shape[1];
    for (std::int64_t head = 0; head < c.dq->shape[0] * heads; ++head) {
      const std::vector<float>& values = (*all)[static_cast<std::size_t>(head)];
      for_each_by_strides_of(
          *c.forward->q, *c.dq, head / heads, head % heads,
          [&](std::size_t element, std::int64_t offset) { dq.set(offset, values[element]); });
    }
  };
}

/// dk of each query head, reshaped to [group, kv_heads] instead of [kv_heads, group] and summed.
void groups_of_dk_interleaved(BackwardParts& p) {
  struct State {
    std::vector<std::vector<float>> parts;  // per batch and query head
    std::vector<float> before;              // sum over the heads of the group so far
  };
  const auto state = std::make_shared<State>();
  p.called = [=](const flashcore_verify_backward_call&) { state->parts.clear(); };
  p.head_done = [=](BackwardWork& w) {
    if (w.h % w.group == 0) state->before.assign(w.dk.size(), 0.0f);
    std::vector<float> part = w.dk;
    for (std::size_t e = 0; e < part.size(); ++e) part[e] = w.scale * (part[e] - state->before[e]);
    state->before = w.dk;
    state->parts.push_back(std::move(part));
  };
  p.returned = [=](const flashcore_verify_backward_call& c) {
    const flashcore_tensor& t = *c.dk;
    const std::int64_t heads = c.dq->shape[1], kv_heads = t.shape[1];
    if (heads == kv_heads) return;
    for (std::int64_t b = 0; b < t.shape[0]; ++b) {
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        for (std::int64_t j = 0; j < t.shape[2]; ++j) {
          for (std::int64_t e = 0; e < t.shape[3]; ++e) {
            float sum = 0;
            for (std::int64_t of = h; of < heads; of += kv_heads) {
              sum += state->parts[static_cast<std::size_t>(b * heads + of)][at(j, t.shape[3], e)];
            }
            write(t, b, h, j, e, sum);
          }
        }
      }
    }
  };
}

std::vector<Mutant> layout_faults() {
  return {
      backward("bwd_batch_and_head_of_dk_swapped", layout, "f32 bf16",
               batch_and_head_of_dk_swapped),
      backward("bwd_out_read_by_strides_of_dout", layout, "f32 f16", out_read_by_strides_of_dout),
      backward("bwd_v_read_by_strides_of_k", layout, "f32", v_read_by_strides_of_k),
      backward("bwd_dq_written_by_strides_of_q", layout, "f32 bf16", dq_written_by_strides_of_q),
      backward("bwd_groups_of_dk_interleaved", layout, "f32", groups_of_dk_interleaved),
  };
}

// Partial tiles

/// Loads of keys past the end are moved to the last key, and P is not masked there.
void last_key_repeated_in_dq(BackwardParts& p) {
  p.in_dq = [](const BackwardWork& w, const Pair& x) {
    return x.j == w.n - 1 ? x.ds * static_cast<float>(1 + padding(w.n, 32)) : x.ds;
  };
}

void last_query_repeated(BackwardParts& p) {
  const auto repeated = [](const BackwardWork& w, const Pair& x, float weight) {
    return x.i == w.m - 1 ? weight * static_cast<float>(1 + padding(w.m, 16)) : weight;
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return repeated(w, x, x.ds); };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return repeated(w, x, x.p); };
}

/// The number of query tiles is (q_len + 30) / 32.
void single_row_of_a_tile_lost(BackwardParts& p) {
  const auto is_lost = [](const BackwardWork& w, const Pair& x) {
    return w.m % 32 == 1 && x.i == w.m - 1;
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : x.p; };
}

/// A loop over key tiles, unrolled by two.
void odd_tile_of_an_unrolled_loop_lost(BackwardParts& p) {
  p.tile = 16;
  p.count = [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
    const std::int64_t tiles = (w.n + 15) / 16;
    return g == kOfDq && tiles > 1 && tiles % 2 == 1 && k_tile == tiles - 1 ? 0.0f : 1.0f;
  };
}

void delta_of_remaining_rows_missing(BackwardParts& p) {
  p.delta = [right = p.delta](const BackwardWork& w, std::int64_t i) {
    return i < w.m / 8 * 8 ? right(w, i) : -of_row(w.dlse, i);
  };
}

std::vector<Mutant> tail_faults() {
  return {
      backward("bwd_last_key_repeated_in_dq", tail, "f32 bf16", last_key_repeated_in_dq),
      backward("bwd_last_query_repeated", tail, "f32 f16", last_query_repeated),
      backward("bwd_single_row_of_a_tile_lost", tail, "f32", single_row_of_a_tile_lost),
      backward("bwd_odd_tile_of_unrolled_loop_lost", tail, "f32",
               odd_tile_of_an_unrolled_loop_lost),
      backward("bwd_delta_of_remaining_rows_missing", tail, "f32 f16",
               delta_of_remaining_rows_missing),
  };
}

// Reads and writes past the ends

/// The caller's LSE, for exp2.
void lse_changed_in_place(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& c) {
    const flashcore_tensor& t = *c.forward->lse;
    for (std::int64_t b = 0; b < t.shape[0]; ++b) {
      for (std::int64_t h = 0; h < t.shape[1]; ++h) {
        for (std::int64_t i = 0; i < t.shape[2]; ++i) {
          write(t, b, h, i, 0, 1.442695 * read(t, b, h, i, 0));
        }
      }
    }
  };
}

/// One memset from the first to the last element of a view.
void gaps_between_rows_of_dk_cleared(BackwardParts& p) {
  p.called = [](const flashcore_verify_backward_call& c) {
    const FlatTensor dk(*c.dk);
    for (std::int64_t offset = 0; offset <= dk.last; ++offset) dk.set(offset, 0);
  };
}

/// Padded rows have q = 0 and dout = 0, but P = exp(-LSE) with the LSE that memory has.
void lse_of_padded_rows_read(BackwardParts& p) {
  p.group_done = [](BackwardWork& w) {
    if (w.b + 1 < w.batch || w.h + w.group < w.q_heads || w.m % 32 == 0) return;
    const double lse = read(*w.call->forward->lse, w.b, w.q_heads - 1, w.m, 0);
    const float nothing = std::exp(-static_cast<float>(lse)) * 0.0f;
    for (float& x : w.dv) x += nothing;
  };
}

/// P of padded keys is 0, but their dP has the values that memory has.
void v_of_padded_keys_read(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    if (w.b + 1 < w.batch || w.h + 1 < w.q_heads || w.n % 32 == 0) return;
    for (std::int64_t i = 0; i < w.m; ++i) {
      float dp = 0;
      for (std::int64_t c = 0; c < w.dv_dim; ++c) {
        dp += w.dout[at(i, w.dv_dim, c)] *
              static_cast<float>(read(*w.call->forward->v, w.b, w.kv_head, w.n, c));
      }
      for (std::int64_t c = 0; c < w.d; ++c) w.dq[at(i, w.d, c)] += 0.0f * dp;
    }
  };
}

void padded_row_of_dq_written(BackwardParts& p) {
  p.returned = [](const flashcore_verify_backward_call& call) {
    const flashcore_tensor& t = *call.dq;
    if (t.shape[2] % 32 == 0) return;
    for (std::int64_t c = 0; c < t.shape[3]; ++c) {
      write(t, t.shape[0] - 1, t.shape[1] - 1, t.shape[2], c, 0);
    }
  };
}

std::vector<Mutant> bounds_faults() {
  return {
      backward("bwd_lse_changed_in_place", bounds, "f32 bf16", lse_changed_in_place),
      backward("bwd_gaps_between_rows_of_dk_cleared", bounds, "f32",
               gaps_between_rows_of_dk_cleared),
      backward("bwd_lse_of_padded_rows_read", bounds, "f32 f16", lse_of_padded_rows_read),
      backward("bwd_v_of_padded_keys_read", bounds, "f32", v_of_padded_keys_read),
      backward("bwd_padded_row_of_dq_written", bounds, "f32 f16", padded_row_of_dq_written),
  };
}

}  // namespace

std::vector<Mutant> bwd_second_memory() {
  std::vector<Mutant> all;
  for (const auto& part :
       {coverage_faults(), races(), layout_faults(), tail_faults(), bounds_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
