// Mutants of the backward pass: faults of some options, sizes, heads, rows or calls only.
#include <limits>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

bool is_windowed(const BackwardWork& w) {
  return w.call->forward->window_left >= 0 || w.call->forward->window_right >= 0;
}

float most_of(const std::vector<float>& values, std::int64_t row, std::int64_t columns) {
  float most = 0;
  for (std::int64_t c = 0; c < columns; ++c) {
    most = std::max(most, std::fabs(values[at(row, columns, c)]));
  }
  return most;
}

void leave_dq(BackwardWork& w) { load_rows(*w.call->dq, w.b, w.h, w.m, w.d, w.dq); }
void leave_dk(BackwardWork& w) { load_rows(*w.call->dk, w.b, w.h / w.group, w.n, w.d, w.dk); }
void leave_dv(BackwardWork& w) { load_rows(*w.call->dv, w.b, w.h / w.group, w.n, w.dv_dim, w.dv); }

/// dlse where `counts` holds, else 0.
template <typename Counts>
void dlse_if(BackwardParts& p, Counts counts) {
  p.loaded = [=](BackwardWork& w) {
    if (!counts(w)) std::fill(w.dlse.begin(), w.dlse.end(), 0.0f);
  };
}

}  // namespace

std::vector<Mutant> bwd_coverage_by_option_faults() {
  return {
      backward("bwd_dq_unwritten_with_dlse", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   if (w.call->dlse != nullptr) leave_dq(w);
                 };
               }),
      backward("bwd_dk_unwritten_with_softcap", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.softcap > 0) leave_dk(w);
                 };
               }),
      backward("bwd_dv_of_last_keys_unwritten_if_causal", coverage, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (!is_causal(w) || w.n <= 32) return;
                   std::vector<float> old = w.dv;
                   load_rows(*w.call->dv, w.b, w.h / w.group, w.n, w.dv_dim, old);
                   std::copy(old.begin() + 32 * w.dv_dim, old.end(), w.dv.begin() + 32 * w.dv_dim);
                 };
               }),
      backward("bwd_dv_of_heads_from_2_unwritten", coverage, "f32 bf16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.h / w.group >= 2) leave_dv(w);
                 };
               }),
      backward("bwd_dq_of_batches_from_2_unwritten", coverage, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   if (w.b >= 2) leave_dq(w);
                 };
               }),
      backward("bwd_dk_of_one_row_unwritten", coverage, "f32 f16",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.m == 1) leave_dk(w);
                 };
               }),
      backward("bwd_dq_added_to_old_if_windowed", coverage, "f32",
               [](BackwardParts& p) {
                 p.head_done = [](BackwardWork& w) {
                   if (!is_windowed(w)) return;
                   std::vector<float> old = w.dq;
                   load_rows(*w.call->dq, w.b, w.h, w.m, w.d, old);
                   for (std::size_t e = 0; e < old.size(); ++e) w.dq[e] += old[e];
                 };
               }),
  };
}

std::vector<Mutant> bwd_state_faults() {
  const auto every = [](int times, auto fault) {
    return [=]() -> VerifyBackwardFunction {
      const auto calls = std::make_shared<int>(0);
      BackwardParts p = default_backward();
      p.called = [calls](const flashcore_verify_backward_call&) { ++*calls; };
      fault(p, [=] { return *calls % times == 0; });
      return [p](const flashcore_verify_backward_call& c, std::string*) {
        return differentiate(p, c);
      };
    };
  };
  const auto racing = [&](const char* name, int times, auto fault) {
    return Mutant{name, determinism, "f32", mutant([](Parts&) {}), "", false, every(times, fault)};
  };
  return {
      racing("bwd_dk_sometimes_wrong_if_causal", 3,
             [](BackwardParts& p, auto now) {
               p.group_done = [=](BackwardWork& w) {
                 if (now() && is_causal(w)) w.dk[0] += 0.5f;
               };
             }),
      racing("bwd_dv_sometimes_wrong_in_groups", 3,
             [](BackwardParts& p, auto now) {
               p.group_done = [=](BackwardWork& w) {
                 if (now() && w.group > 1) w.dv[0] *= 1.5f;
               };
             }),
      backward("bwd_dk_of_the_call_before_added", determinism, "f32",
               [](BackwardParts& p) {
                 const auto before = std::make_shared<std::vector<float>>();
                 p.group_done = [=](BackwardWork& w) {
                   if (w.b > 0 || w.h > 0) return;
                   std::vector<float> now = w.dk;
                   if (before->size() == now.size()) {
                     for (std::size_t e = 0; e < now.size(); ++e) w.dk[e] += 0.1f * (*before)[e];
                   }
                   *before = now;
                 };
               }),
      backward("bwd_delta_of_an_equal_shape_kept", determinism, "f32",
               [](BackwardParts& p) {
                 const auto kept = std::make_shared<std::vector<float>>();
                 p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
                   if (w.b > 0 || w.h > 0 || i > 0) return right(w, i);
                   if (kept->empty()) kept->push_back(right(w, i));
                   const float old = kept->back();
                   kept->back() = right(w, i);
                   return old;
                 };
               }),
  };
}

std::vector<Mutant> bwd_sum_by_size_faults() {
  return {
      backward("bwd_heads_of_a_group_from_4_lost", accumulate, "f32 bf16",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
                       return g != kOfDq && w.h % w.group >= 4;
                     });
               }),
      backward("bwd_batches_of_dk_added_up", accumulate, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.b == 0) return;
                   std::vector<float> old = w.dk;
                   load_rows(*w.call->dk, w.b - 1, w.h / w.group, w.n, w.d, old);
                   for (std::size_t e = 0; e < old.size(); ++e) w.dk[e] += old[e];
                 };
               }),
      backward("bwd_two_heads_of_a_group_only", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.count =
                     tile_counts(0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t) {
                       return g == kOfDv && w.h % w.group >= 2;
                     });
               }),
      backward("bwd_second_half_of_keys_lost_in_dq", accumulate, "f32",
               [](BackwardParts& p) {
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
                       return g == kOfDq && w.n >= 96 && k_tile >= (w.n + 31) / 64;
                     });
               }),
      backward("bwd_even_query_tiles_only_in_dk", accumulate, "f32 f16",
               [](BackwardParts& p) {
                 p.tile = 16;
                 p.count = tile_counts(0, [](const BackwardWork&, int g, std::int64_t q_tile,
                                             std::int64_t) { return g == kOfDk && q_tile % 2; });
               }),
      backward("bwd_first_key_tile_of_dq_overwritten", accumulate, "f32",
               [](BackwardParts& p) {
                 p.tile = 64;
                 p.count = tile_counts(
                     0, [](const BackwardWork& w, int g, std::int64_t, std::int64_t k_tile) {
                       return g == kOfDq && k_tile == 0 && w.n > 64;
                     });
               }),
      backward("bwd_dv_of_the_group_added_to_next_head", accumulate, "f32",
               [](BackwardParts& p) {
                 p.group_done = [](BackwardWork& w) {
                   if (w.h == 0) return;
                   std::vector<float> old = w.dv;
                   load_rows(*w.call->dv, w.b, w.h / w.group - 1, w.n, w.dv_dim, old);
                   for (std::size_t e = 0; e < old.size(); ++e) w.dv[e] += old[e];
                 };
               }),
  };
}

std::vector<Mutant> bwd_mask_by_option_faults() {
  return {
      backward(
          "bwd_empty_rows_uniform", mask, "f32 f16",
          [](BackwardParts& p) {
            p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
              return right(w, i, j) || std::isinf(of_row(w.lse, i));
            };
            p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
              return std::isinf(of_row(w.lse, x.i)) ? 1 / static_cast<float>(w.n) : right(w, x);
            };
          }),
      backward("bwd_causal_one_more_in_dq", mask, "f32",
               [](BackwardParts& p) {
                 guard_empty_rows(p);
                 const auto visible = p.visible;
                 p.visible = [=](const BackwardWork& w, std::int64_t i, std::int64_t j) {
                   return visible(w, i, j) || (is_causal(w) && j == i + w.n - w.m + 1);
                 };
                 p.in_dk = [=](const BackwardWork& w, const Pair& x) {
                   return visible(w, x.i, x.j) ? x.ds : 0.0f;
                 };
                 p.in_dv = [=](const BackwardWork& w, const Pair& x) {
                   return visible(w, x.i, x.j) ? x.p : 0.0f;
                 };
               }),
      backward("bwd_causal_ignored_in_groups", mask, "f32 bf16",
               [](BackwardParts& p) {
                 guard_empty_rows(p);
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return right(w, i, j) || (w.group > 1 && is_causal(w));
                 };
               }),
      backward("bwd_window_of_key_tiles", mask, "f32",
               [](BackwardParts& p) {
                 p.count = [](const BackwardWork& w, int g, std::int64_t q_tile,
                              std::int64_t k_tile) {
                   const std::int64_t left = w.call->forward->window_left;
                   if (g != kOfDq || left < 0) return 1.0f;
                   const std::int64_t first = q_tile * 32 + w.n - w.m - left;
                   return k_tile < (std::max<std::int64_t>(first, 0) + 31) / 32 ? 0.0f : 1.0f;
                 };
               }),
      backward("bwd_causal_with_lengths_exchanged", mask, "f32 f16",
               [](BackwardParts& p) {
                 guard_empty_rows(p);
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return is_causal(w) ? j <= i + w.m - w.n : right(w, i, j);
                 };
               }),
      backward("bwd_hidden_p_tiny", mask, "f32",
               [](BackwardParts& p) {
                 const auto visible = p.visible;
                 p.visible = [](const BackwardWork&, std::int64_t, std::int64_t) { return true; };
                 p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
                   if (std::isinf(of_row(w.lse, x.i))) return 0.0f;
                   return visible(w, x.i, x.j) ? right(w, x) : 1e-3f;
                 };
               }),
      backward("bwd_mask_of_large_windows_ignored", mask, "f32",
               [](BackwardParts& p) {
                 guard_empty_rows(p);
                 p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i,
                                                 std::int64_t j) {
                   return right(w, i, j) || (!is_causal(w) && w.call->forward->window_left > 16);
                 };
               }),
  };
}

std::vector<Mutant> bwd_dlse_by_option_faults() {
  return {
      backward("bwd_dlse_ignored_if_causal", dlse, "f32",
               [](BackwardParts& p) {
                 dlse_if(p, [](const BackwardWork& w) { return !is_causal(w); });
               }),
      backward("bwd_dlse_of_later_heads_ignored", dlse, "f32 bf16",
               [](BackwardParts& p) {
                 dlse_if(p, [](const BackwardWork& w) { return w.h % w.group == 0; });
               }),
      backward("bwd_dlse_ignored_with_a_scale", dlse, "f32",
               [](BackwardParts& p) {
                 dlse_if(p, [](const BackwardWork& w) { return w.call->forward->has_scale == 0; });
               }),
      backward("bwd_dlse_ignored_with_other_v_dim", dlse, "f32 f16",
               [](BackwardParts& p) {
                 dlse_if(p, [](const BackwardWork& w) { return w.d == w.dv_dim; });
               }),
      backward("bwd_dlse_times_scale", dlse, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dlse) x *= w.scale;
                 };
               }),
      backward("bwd_dlse_in_dk_only", dlse, "f32 f16",
               [](BackwardParts& p) {
                 p.in_dq = [slope = p.slope](const BackwardWork& w, const Pair& x) {
                   return x.ds - x.p * of_row(w.dlse, x.i) * slope(w, x);
                 };
               }),
      backward("bwd_dlse_added_to_dv", dlse, "f32",
               [](BackwardParts& p) {
                 p.in_dv = [](const BackwardWork& w, const Pair& x) {
                   return x.p * (1 + of_row(w.dlse, x.i));
                 };
               }),
      backward("bwd_dlse_of_rows_from_32_ignored", dlse, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (std::int64_t i = 32; i < w.m; ++i) {
                     w.dlse[static_cast<std::size_t>(i)] = 0;
                   }
                 };
               }),
      backward("bwd_dlse_with_slope_squared", dlse, "f32",
               [](BackwardParts& p) {
                 p.ds = [slope = p.slope](const BackwardWork& w, const Pair& x) {
                   const float dlse = of_row(w.dlse, x.i);
                   return x.p * (x.dp - of_row(w.delta, x.i) - dlse * (1 - slope(w, x)));
                 };
               }),
  };
}

std::vector<Mutant> bwd_few_input_faults() {
  return {
      backward("bwd_large_dout_clipped_at_30", unlocalised, "f32 f16",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dout) x = std::clamp(x, -30.0f, 30.0f);
                 };
               }),
      backward("bwd_small_dout_is_zero", unlocalised, "f32",
               [](BackwardParts& p) {
                 p.loaded = [](BackwardWork& w) {
                   for (float& x : w.dout) x = std::fabs(x) < 1e-6f ? 0.0f : x;
                 };
               }),
      backward("bwd_rows_of_large_dout_skipped", unlocalised, "f32 bf16",
               [](BackwardParts& p) {
                 const auto skip = std::make_shared<std::vector<bool>>();
                 p.loaded = [=](BackwardWork& w) {
                   skip->assign(static_cast<std::size_t>(w.m), false);
                   for (std::int64_t i = 0; i < w.m; ++i) {
                     (*skip)[static_cast<std::size_t>(i)] = most_of(w.dout, i, w.dv_dim) > 200;
                   }
                 };
                 p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
                   return (*skip)[static_cast<std::size_t>(x.i)] ? 0.0f : right(w, x);
                 };
               }),
      backward("bwd_large_ds_is_infinite", unlocalised, "f32",
               [](BackwardParts& p) {
                 p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
                   const float y = right(w, x);
                   return std::fabs(y) > 100 ? std::numeric_limits<float>::infinity() : y;
                 };
               }),
      backward("bwd_scale_ignored_with_window", scale, "f32",
               [](BackwardParts& p) {
                 p.score_scale = p.dq_scale = p.dk_scale = [](const BackwardWork& w) {
                   return is_windowed(w) ? 1 / std::sqrt(static_cast<float>(w.d)) : w.scale;
                 };
               }),
      backward("bwd_softcap_ignored_if_causal", unlocalised, "f32 f16",
               [](BackwardParts& p) {
                 p.p = [right = p.p](const BackwardWork& w, const Pair& x) {
                   Pair pair = x;
                   if (is_causal(w)) pair.score = x.z;
                   return right(w, pair);
                 };
                 p.slope = [right = p.slope](const BackwardWork& w, const Pair& x) {
                   return is_causal(w) ? 1.0f : right(w, x);
                 };
               }),
      backward("bwd_softcap_in_full_tiles_only", unlocalised, "f32",
               [](BackwardParts& p) {
                 const auto is_cut = [visible = p.visible](const BackwardWork& w, const Pair& x) {
                   const std::int64_t row = x.i / 16 * 16, key = x.j / 16 * 16;
                   return !(visible(w, row, std::min(key + 16, w.n) - 1) &&
                            visible(w, std::min(row + 16, w.m) - 1, key));
                 };
                 p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
                   Pair pair = x;
                   if (is_cut(w, x)) pair.score = x.z;
                   return right(w, pair);
                 };
                 p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
                   return is_cut(w, x) ? 1.0f : right(w, x);
                 };
               }),
  };
}

}  // namespace flashcore::mutants
