// Mutants of the backward pass: faults of addresses, lengths and repeated calls.
#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "mutants/bwd_faults.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

VerifyBackwardFunction every_second_call_loses_a_row() {
  auto calls = std::make_shared<int>(0);
  BackwardParts p = default_backward();
  p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
  p.in_dv = [calls](const BackwardWork&, const Pair& x) {
    return *calls % 2 == 0 && x.i == 3 ? 0.0f : x.p;
  };
  return [p](const flashcore_verify_backward_call& c, std::string*) { return differentiate(p, c); };
}

}  // namespace

std::vector<Mutant> bwd_coverage_faults() {
  return {
      backward("bwd_last_row_of_dq_unwritten", coverage, "f32 bf16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   if (i + 1 < t.shape[2] || i == 0) write(t, b, h, i, c, x);
                 };
               }),
      backward("bwd_dk_not_zeroed", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dk[at(j, w.d, c)] +=
                           static_cast<float>(read(*w.call->dk, w.b, w.h / w.group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_columns_from_32_of_dk_unwritten", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 32; c < w.d; ++c) {
                       w.dk[at(j, w.d, c)] =
                           static_cast<float>(read(*w.call->dk, w.b, w.h / w.group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dv_of_last_head_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   const std::int64_t group = w.h / w.group;
                   if (group == 0 || group + 1 < w.kv_heads) return;
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = 0; c < w.dv_dim; ++c) {
                       w.dv[at(j, w.dv_dim, c)] =
                           static_cast<float>(read(*w.call->dv, w.b, group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dq_added_to_old_content", coverage, "f32 bf16",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dq[at(i, w.d, c)] += static_cast<float>(read(*w.call->dq, w.b, w.h, i, c));
                     }
                   }
                 };
               }),
      backward("bwd_dk_of_later_batches_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.b > 0) load_rows(*w.call->dk, w.b, w.h / w.group, w.n, w.d, w.dk);
                 };
               }),
      backward("bwd_dq_of_rows_without_keys_unwritten", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     if (!std::isinf(w.lse[static_cast<std::size_t>(i)])) continue;
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       w.dq[at(i, w.d, c)] = static_cast<float>(read(*w.call->dq, w.b, w.h, i, c));
                     }
                   }
                 };
               }),
      backward("bwd_columns_of_dv_past_head_dim_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   for (std::int64_t j = 0; j < w.n; ++j) {
                     for (std::int64_t c = w.d; c < w.dv_dim; ++c) {
                       w.dv[at(j, w.dv_dim, c)] =
                           static_cast<float>(read(*w.call->dv, w.b, w.h / w.group, j, c));
                     }
                   }
                 };
               }),
      backward("bwd_dq_of_rows_from_512_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   if (i < 512) write(t, b, h, i, c, x);
                 };
               }),
  };
}

std::vector<Mutant> bwd_tail_faults() {
  return {
      backward("bwd_partial_query_tile_lost", tail, "f32 bf16",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t) {
                       return g != kOfDq && (q_tile + 1) * 32 > w.m && w.m > 32;
                     });
               }),
      backward("bwd_partial_key_tile_lost_in_dq", tail, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
                       return g == kOfDq && (k_tile + 1) * 32 > w.n;
                     });
               }),
      backward("bwd_rows_past_a_multiple_of_16_lost", tail, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return x.i >= w.m / 16 * 16 && w.m > 16 ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_last_of_odd_keys_lost", tail, "f32",
               [](BackwardParts& p) {
                 p.in_dq = [](const BackwardWork& w, const Pair& x) {
                   return w.n % 2 == 1 && x.j == w.n - 1 ? 0.0f : x.ds;
                 };
               }),
      backward("bwd_last_row_twice_in_dk_of_partial_tiles", tail, "f32",
               [](BackwardParts& p) {
                 // Rows past the end are read as the last row.
                 p.in_dk = [](const BackwardWork& w, const Pair& x) {
                   return w.m % 16 != 0 && x.i == w.m - 1 ? 2 * x.ds : x.ds;
                 };
               }),
      backward("bwd_partial_query_tile_of_later_keys_lost", tail, "f32 bf16",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t q_tile, std::int64_t k_tile) {
                       return g == kOfDv && k_tile > 0 && (q_tile + 1) * 32 > w.m;
                     });
               }),
      backward("bwd_single_key_of_a_tile_lost", tail, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork& w, const Pair& x) {
                   return w.n % 64 == 1 && w.n > 1 && x.j == w.n - 1 ? 0.0f : x.p;
                 };
               }),
  };
}

std::vector<Mutant> bwd_layout_faults() {
  return {
      backward("bwd_dq_of_heads_exchanged", layout, "f32 f16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   write(t, b, t.shape[1] == 6 || t.shape[1] == 3 ? (h + 1) % t.shape[1] : h, i, c,
                         x);
                 };
               }),
      backward("bwd_strides_of_dv_ignored", layout, "f32 bf16",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   flashcore_tensor compact = t;
                   std::int64_t strides[4] = {t.shape[1] * t.shape[2] * t.shape[3],
                                              t.shape[2] * t.shape[3], t.shape[3], 1};
                   compact.strides = strides;
                   write(compact, b, h, i, c, x);
                 };
               }),
      backward("bwd_batches_of_dq_exchanged", layout, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     for (std::int64_t c = 0; c < w.d; ++c) {
                       write(*w.call->dq, w.batch - 1 - w.b, w.h, i, c, w.dq[at(i, w.d, c)]);
                     }
                   }
                 };
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   const bool is_dq = t.shape[1] == 6;
                   if (!is_dq || t.shape[0] == 1) write(t, b, h, i, c, x);
                 };
               }),
      backward("bwd_heads_interleaved", layout, "f32 f16",
               [](BackwardParts& p) {
                 p.kv_head = [](const BackwardWork& w) { return w.h % w.kv_heads; };
               }),
      backward("bwd_strides_of_dout_ignored", layout, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   const auto* dout = static_cast<const float*>(w.call->dout->data);
                   const std::int64_t first = (w.b * w.q_heads + w.h) * w.m * w.dv_dim;
                   std::copy(dout + first, dout + first + w.m * w.dv_dim, w.dout.begin());
                 };
               }),
      backward("bwd_strides_of_out_ignored", layout, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   const auto* out = static_cast<const float*>(w.call->forward->out->data);
                   const std::int64_t first = (w.b * w.q_heads + w.h) * w.m * w.dv_dim;
                   std::copy(out + first, out + first + w.m * w.dv_dim, w.out.begin());
                 };
               }),
      backward("bwd_kv_of_first_batch", layout, "f32 bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->forward->k, 0, w.kv_head, w.n, w.d, w.k);
                   load_rows(*w.call->forward->v, 0, w.kv_head, w.n, w.dv_dim, w.v);
                 };
               }),
      backward("bwd_dk_and_dv_exchanged", layout, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.d == w.dv_dim) std::swap(w.dk, w.dv);
                 };
               }),
      backward("bwd_rows_of_dq_reversed", layout, "f32 f16",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   for (std::int64_t i = 0; i < w.m / 2; ++i) {
                     std::swap_ranges(w.dq.begin() + i * w.d, w.dq.begin() + (i + 1) * w.d,
                                      w.dq.begin() + (w.m - 1 - i) * w.d);
                   }
                 };
               }),
      backward("bwd_q_of_another_head", layout, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->forward->q, w.b, (w.h + 1) % w.q_heads, w.m, w.d, w.q);
                 };
               }),
      backward("bwd_dout_of_another_head", layout, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   load_rows(*w.call->dout, w.b, w.q_heads - 1 - w.h, w.m, w.dv_dim, w.dout);
                 };
               }),
      backward("bwd_batches_of_dq_in_one_place", layout, "f32",
               [](BackwardParts& p) {
                 p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h,
                              std::int64_t i, std::int64_t c, double x) {
                   write(t, t.shape[1] == 6 ? 0 : b, h, i, c, x);  // 6 heads: dq
                 };
               }),
  };
}

std::vector<Mutant> bwd_bounds_faults() {
  return {
      backward("bwd_key_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.k[0] += 1e-2f * static_cast<float>(read(*w.call->forward->k, w.batch - 1,
                                                             w.kv_heads - 1, w.n - 1, w.d));
                 };
               }),
      backward("bwd_writes_to_dout", bounds, "f32 f16",
               [](BackwardParts& p) {
                 p.returned = [](const flashcore_verify_backward_call& c) {
                   write(*c.dout, 0, 0, 0, 0, 0.5);
                 };
               }),
      backward("bwd_dout_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.dout[0] += 1e-2f * static_cast<float>(read(*w.call->dout, w.batch - 1,
                                                                w.q_heads - 1, w.m - 1, w.dv_dim));
                 };
               }),
      backward("bwd_writes_past_dv", bounds, "f32 bf16",
               [](BackwardParts& p) {
                 p.returned = [](const flashcore_verify_backward_call& c) {
                   const flashcore_tensor& t = *c.dv;
                   write(t, t.shape[0] - 1, t.shape[1] - 1, t.shape[2] - 1, t.shape[3], 1);
                 };
               }),
      backward("bwd_lse_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.lse[0] += 1e-2f * static_cast<float>(read(*w.call->forward->lse, w.batch - 1,
                                                               w.q_heads - 1, w.m, 0));
                 };
               }),
      backward("bwd_v_before_its_start_added", bounds, "f32 bf16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   w.v[0] += 1e-2f * static_cast<float>(read(*w.call->forward->v, 0, 0, 0, -1));
                 };
               }),
      backward("bwd_q_scaled_in_place", bounds, "f32",
               [](BackwardParts& p) {
                 p.returned = [](const flashcore_verify_backward_call& c) {
                   const flashcore_tensor& q = *c.forward->q;
                   write(q, 0, 0, 0, 0, read(q, 0, 0, 0, 0) * c.forward->scale);
                 };
               }),
      backward("bwd_dlse_past_the_end_added", bounds, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   if (w.call->dlse == nullptr) return;
                   w.dlse[0] += 1e-2f * static_cast<float>(read(*w.call->dlse, w.batch - 1,
                                                                w.q_heads - 1, w.m, 0));
                 };
               }),
  };
}

std::vector<Mutant> bwd_determinism_faults() {
  return {
      Mutant{"bwd_every_third_call_differs", determinism, "f32", mutant([](Parts&) {}), "", false,
             []() -> VerifyBackwardFunction {
               auto calls = std::make_shared<int>(0);
               BackwardParts p = default_backward();
               p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
               p.head_done = [calls](BackwardWork& w) {
                 if (*calls % 3 == 0 && w.h == 0) w.dq[w.dq.size() / 2] += 0.01f;
               };
               return [p](const flashcore_verify_backward_call& c, std::string*) {
                 return differentiate(p, c);
               };
             }},
      Mutant{"bwd_every_second_call_loses_a_row", determinism, "f32", mutant([](Parts&) {}), "",
             false, every_second_call_loses_a_row},
      Mutant{"bwd_tile_sometimes_lost_in_long_calls", determinism, "f32", mutant([](Parts&) {}), "",
             false,
             []() -> VerifyBackwardFunction {
               auto calls = std::make_shared<int>(0);
               BackwardParts p = default_backward();
               p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
               p.count = [calls](const BackwardWork&, int g, std::int64_t q_tile, std::int64_t) {
                 return g == kOfDk && q_tile == 2 && *calls % 3 == 0 ? 0.0f : 1.0f;
               };
               return [p](const flashcore_verify_backward_call& c, std::string*) {
                 return differentiate(p, c);
               };
             }},
  };
}

}  // namespace flashcore::mutants
