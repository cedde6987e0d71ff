// Mutants written after the probes were frozen.
#include <algorithm>
#include <cmath>
#include <memory>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

float rounded(Format format, float x) { return static_cast<float>(verify::rounded(format, x)); }

VerifyFunction every_third_call_differs() {
  auto calls = std::make_shared<int>(0);
  Parts p = default_parts();
  p.called = [calls](const flashcore_verify_call&) { ++*calls; };
  p.done = [calls](Work& w) {
    if (*calls % 3 == 0 && w.h == 0) w.out[w.out.size() / 2] *= 1.0001f;
  };
  return [p](const flashcore_verify_call& c, std::string*) { return attend(p, c); };
}

std::vector<Mutant> memory_faults() {
  return {
      {"one_in_three_calls_differs", determinism, "f32", every_third_call_differs, "", false},
      {"last_head_unwritten", coverage, "f32 f16", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) {
           if (h == 0 || h + 1 < t.shape[1]) write(t, b, h, i, c, x);
         };
       }),
       "", false},
      {"columns_from_64_unwritten", coverage, "f16 f32", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) {
           if (c < 64) write(t, b, h, i, c, x);
         };
       }),
       "", false},
      {"output_batch_and_head_exchanged", layout, "f32 bf16", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) {
           const std::int64_t flat = h * t.shape[0] + b;  // head-major instead of batch-major
           write(t, flat / t.shape[1], flat % t.shape[1], i, c, x);
         };
       }),
       "", false},
      {"kv_head_divided_wrongly", layout, "f32 f16", mutant([](Parts& p) {
         p.kv_head = [](const Work& w) { return w.h / w.kv_heads % w.kv_heads; };
       }),
       "", false},
      {"v_columns_reversed", layout, "f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j < w.n; ++j) {
             std::reverse(w.v.begin() + j * w.dv, w.v.begin() + (j + 1) * w.dv);
           }
         };
       }),
       "", false},
      {"q_rows_shifted_by_one", layout, "f16 f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) { std::rotate(w.q.begin(), w.q.begin() + w.d, w.q.end()); };
       }),
       "", false},
      {"k_of_the_first_batch", layout, "f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j < w.n; ++j) {
             for (std::int64_t c = 0; c < w.d; ++c) {
               w.k[at(j, w.d, c)] = static_cast<float>(read(*w.call->k, 0, w.kv_head, j, c));
             }
           }
         };
       }),
       "", false},
      {"writes_to_q", bounds, "f32 f16", mutant([](Parts& p) {
         p.returned = [](const flashcore_verify_call& c) { write(*c.q, 0, 0, 0, 0, 0.5); };
       }),
       "", false},
      {"element_past_v_added", bounds, "f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           // Reads one element past the last row of V. It is 0 unless the verifier puts a guard
           // there.
           w.v[0] += 1e-3f * static_cast<float>(
                                 read(*w.call->v, w.batch - 1, w.kv_heads - 1, w.n - 1, w.dv));
         };
       }),
       "", false},
  };
}

std::vector<Mutant> sum_faults() {
  return {
      {"divided_by_key_count", sum, "f32 f16", mutant([](Parts& p) {
         p.normalize = [](const Work& w, std::int64_t, float acc, float) {
           return acc / static_cast<float>(w.n + 1);
         };
       }),
       "", false},
      {"sum_of_last_tile_only", sum, "f32",
       mutant([](Parts& p) { p.add_sum = [](float, float, float tile_sum) { return tile_sum; }; }),
       "", false},
      {"weights_squared_in_sum", sum, "f32 bf16", mutant([](Parts& p) {
         p.add_sum = [](float s, float factor, float tile_sum) {
           return s * factor + 2 * tile_sum;
         };
       }),
       "", false},
      {"first_key_of_tile_twice_in_pv", pv, "f32 f16", mutant([](Parts& p) {
         p.exp_done = [](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) t.s[at(i, t.width(), 0)] *= 2;
         };
       }),
       "", false},
      {"v_rows_exchanged_in_pairs", pv, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j + 1 < w.n; j += 2) {
             std::swap_ranges(w.v.begin() + j * w.dv, w.v.begin() + (j + 1) * w.dv,
                              w.v.begin() + (j + 1) * w.dv);
           }
         };
       }),
       "", false},
      {"p_transposed_in_8x8", pv, "f16", mutant([](Parts& p) {
         p.done = [](Work& w) {
           for (std::int64_t i = 0; i + 8 <= w.m; i += 8) {
             for (std::int64_t r = 0; r < 8; ++r) {
               for (std::int64_t c = r + 1; c < 8; ++c) {
                 std::swap(w.out[at(i + r, w.dv, c)], w.out[at(i + c, w.dv, r)]);
               }
             }
           }
         };
       }),
       "", false},
      {"last_tile_of_16_read_as_full", tail, "f16 f32", mutant([](Parts& p) {
         p.split_done = [](const Work& w, State& s) {
           const auto padding = static_cast<float>((16 - w.n % 16) % 16);
           for (std::size_t i = 0; i < s.sum.size(); ++i) s.sum[i] += padding * std::exp(-s.max[i]);
         };
       }),
       "", false},
      {"last_key_dropped_if_odd", tail, "f32 f16", mutant([](Parts& p) {
         p.tile_range = [](const Work& w, std::int64_t tile) {
           const std::int64_t begin = tile * 32, end = std::min(begin + 32, w.n);
           return std::pair{begin, end == w.n && w.n > 1 ? end - w.n % 2 : end};
         };
       }),
       "", false},
      {"more_than_256_keys_ignored", tail, "f32", mutant([](Parts& p) {
         p.tile_range = [](const Work& w, std::int64_t tile) {
           const std::int64_t begin = tile * 32;
           return std::pair{begin, begin >= 256 ? begin : std::min(begin + 32, w.n)};
         };
       }),
       "", false},
  };
}

std::vector<Mutant> score_faults() {
  return {
      {"scale_by_head_dim", scale, "f32 f16", mutant([](Parts& p) {
         p.scale = [](const Work& w) { return static_cast<float>(w.call->scale / std::sqrt(w.d)); };
       }),
       "", false},
      {"log2e_applied_twice", scale, "f32 bf16", mutant([](Parts& p) {
         p.scale = [](const Work& w) { return static_cast<float>(w.call->scale * 1.442695); };
       }),
       "", false},
      {"scale_of_head_dim_64", scale, "f16 f32", mutant([](Parts& p) {
         p.scale = [](const Work& w) {
           return w.call->has_scale != 0 ? static_cast<float>(w.call->scale) : 0.125f;
         };
       }),
       "", false},
      {"every_eighth_dimension_twice", scores, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t c = 0; c < w.d; c += 8) w.q[at(i, w.d, c)] *= 2;
           }
         };
       }),
       "", false},
      {"k_dimensions_rotated", scores, "f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j < w.n; ++j) {
             std::rotate(w.k.begin() + j * w.d, w.k.begin() + j * w.d + 1,
                         w.k.begin() + (j + 1) * w.d);
           }
         };
       }),
       "", false},
      {"k_rows_exchanged_in_tile", scores, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j + 1 < w.n; j += 2) {
             std::swap_ranges(w.k.begin() + j * w.d, w.k.begin() + (j + 1) * w.d,
                              w.k.begin() + (j + 1) * w.d);
           }
         };
       }),
       "", false},
      {"negative_scores_lost", scores, "f32", mutant([](Parts& p) {
         p.scored = [](const Work&, Tile& t) {
           for (float& s : t.s) s = std::max(s, 0.0f);
         };
       }),
       "", false},
      {"softcap_without_division", scores, "f32", mutant([](Parts& p) {
         p.scored = [](const Work& w, Tile& t) {
           const auto cap = static_cast<float>(w.call->softcap);
           for (float& s : t.s)
             s = cap > 0
                     ? cap * std::tanh(std::atanh(std::clamp(s / cap, -0.99999f, 0.99999f)) * cap)
                     : s;
         };
       }),
       "", false},
  };
}

std::vector<Mutant> precision_faults() {
  return {
      {"inputs_rounded_to_bf16", precision, "f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::vector<float>* x : {&w.q, &w.k}) {
             for (float& e : *x) e = rounded(Format::bf16, e);
           }
         };
       }),
       "", false},
      {"weights_in_e4m3", precision, "bf16 f16", mutant([](Parts& p) { p.weights = Format::e4m3; }),
       "", false},
      {"exp_by_a_short_series", precision, "f32", mutant([](Parts& p) {
         p.weight = [](float x, float max) {
           return max == kNoKey ? 0.0f : std::exp(x - max) * (1 + 1e-3f * std::sin(20 * (x - max)));
         };
       }),
       "", false},
      {"sum_in_bf16", precision, "bf16 f32", mutant([](Parts& p) {
         p.tile = 1;
         p.add_sum = [](float s, float factor, float tile_sum) {
           return rounded(Format::bf16, s * factor + tile_sum);
         };
       }),
       "", false},
  };
}

std::vector<Mutant> softmax_faults() {
  return {
      {"rescaled_by_the_inverse", rescale, "f32 f16", mutant([](Parts& p) {
         p.rescale = [](float before, float now) {
           return before == kNoKey ? 0.0f : std::exp(now - before);
         };
       }),
       "", false},
      {"rescaled_only_beyond_8", rescale, "f32", mutant([](Parts& p) {
         // The maximum always moves, but the accumulator is rescaled only after a large change.
         p.rescale = p.rescale_sum = [](float before, float now) {
           return before == kNoKey ? 0.0f : now - before < 8 ? 1.0f : std::exp(before - now);
         };
       }),
       "", false},
      {"rescale_forgotten_in_second_tile", rescale, "f32 bf16", mutant([](Parts& p) {
         p.rescale = [](float before, float now) {
           return before == kNoKey ? 0.0f
                  : now > before   ? 0.5f * (1 + std::exp(before - now))
                                   : 1.0f;
         };
       }),
       "", false},
      {"maximum_of_first_tile_kept", max, "f32 f16", mutant([](Parts& p) {
         const auto right = p.new_max;
         p.new_max = [right](const Work& w, const Tile& t, std::int64_t i, float before) {
           return before == kNoKey ? right(w, t, i, before) : before;
         };
       }),
       "", false},
      {"maximum_starts_at_minus_100", max, "f32", mutant([](Parts& p) {
         const auto right = p.new_max;
         p.new_max = [right](const Work& w, const Tile& t, std::int64_t i, float before) {
           return std::max(-100.0f, right(w, t, i, before));
         };
       }),
       "", false},
  };
}

std::vector<Mutant> mask_faults() {
  return {
      {"causal_excludes_own_key", mask, "f32 f16", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return right(w, i, j) && (w.call->causal == 0 || j != i + w.n - w.m || j == 0);
         };
       }),
       "", false},
      {"causal_in_blocks_of_16", mask, "f16 f32", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           if (w.call->causal == 0) return right(w, i, j);
           return j / 16 <= (i + w.n - w.m) / 16 && i + w.n - w.m >= 0;
         };
       }),
       "", false},
      {"hidden_keys_score_minus_50", mask, "f32", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [](const Work&, std::int64_t, std::int64_t) { return true; };
         p.scored = [right](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               if (!right(w, i, t.begin + j)) t.s[at(i, t.width(), j)] = -50;
             }
           }
         };
       }),
       "", false},
      {"hidden_keys_in_the_sum", mask, "f32", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [](const Work&, std::int64_t, std::int64_t) { return true; };
         p.exp_done = [right](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               if (!right(w, i, t.begin + j)) t.s[at(i, t.width(), j)] = 0;
             }
           }
         };
       }),
       "", false},
  };
}

std::vector<Mutant> combine_faults() {
  return {
      {"partial_sums_not_weighted", combine, "f32 f16", mutant([](Parts& p) {
         p.split_done = [](const Work& w, State& s) {
           if (w.call->num_splits <= 1) return;
           for (std::size_t i = 0; i < s.sum.size(); ++i) {
             for (std::int64_t c = 0; c < w.dv && s.sum[i] > 0; ++c) {
               s.acc[at(static_cast<std::int64_t>(i), w.dv, c)] /= s.sum[i];
             }
             s.sum[i] = s.sum[i] > 0 ? 1.0f : 0.0f;
           }
         };
       }),
       "", false},
      {"last_split_skipped", combine, "f32 bf16", mutant([](Parts& p) {
         const auto right = p.split_range;
         p.split_range = [right](const Work& w, int split, int splits) {
           return splits > 1 && split == splits - 1 ? std::pair{w.n, w.n} : right(w, split, splits);
         };
       }),
       "", false},
      {"empty_split_gives_nan", combine, "f32", mutant([](Parts& p) {
         p.combine_weight = [](float max_i, float max, float) {
           return std::exp(max_i - max) * (max_i == kNoKey ? NAN : 1.0f);
         };
       }),
       "", false},
  };
}

std::vector<Mutant> dequant_and_lse_faults() {
  return {
      {"q_scale_ignored", dequant, "e4m3 int8", mutant([](Parts& p) {
         p.scale_of = [](const flashcore_tensor* s, const Work& w, std::int64_t head) {
           return s == w.call->q_scale ? 1.0 : read(*s, w.b, head, 0, 0);
         };
       }),
       "", false},
      {"negative_values_off_by_one", dequant, "int8", mutant([](Parts& p) {
         p.load = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c) {
           const double x = read(t, b, h, i, c);
           return x < 0 ? x + 1 : x;
         };
       }),
       "", false},
      {"subnormals_as_zero", dequant, "e4m3", mutant([](Parts& p) {
         p.load = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c) {
           const double x = read(t, b, h, i, c);
           return std::fabs(x) < 0x1p-6 ? 0.0 : x;
         };
       }),
       "", false},
      {"lse_of_unscaled_scores", lse, "f32", mutant([](Parts& p) {
         p.log_sum = [](const Work& w, std::int64_t, float max, float sum) {
           return sum == 0 ? kNoKey : max / w.scale + std::log(sum);
         };
       }),
       "", false},
      {"lse_negated", lse, "f16 f32", mutant([](Parts& p) {
         p.log_sum = [](const Work&, std::int64_t, float max, float sum) {
           return sum == 0 ? kNoKey : -(max + std::log(sum));
         };
       }),
       "", false},
      {"lse_of_empty_row_nan", lse, "f32", mutant([](Parts& p) {
         p.log_sum = [](const Work&, std::int64_t, float max, float sum) {
           return sum == 0 ? NAN : max + std::log(sum);
         };
       }),
       "", false},
      {"wrong_for_tiny_values", unlocalised, "f32", mutant([](Parts& p) {
         p.done = [](Work& w) {
           for (float& x : w.out) x = std::fabs(x) < 1e-3f && x != 0 ? x + 1e-4f : x;
         };
       }),
       "", false},
  };
}

}  // namespace

std::vector<Mutant> frozen_mutants() {
  std::vector<Mutant> all;
  for (const auto& part :
       {memory_faults(), sum_faults(), score_faults(), precision_faults(), softmax_faults(),
        mask_faults(), combine_faults(), dequant_and_lse_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
