// Mutants designed to get past the probes. docs/verify.md has the scores.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

float exp_or_0(float x, float max) { return max == kNoKey ? 0.0f : std::exp(x - max); }

/// Row i rescales its accumulator with the factor of row other(i).
std::function<VerifyFunction()> factor_of_row(std::int64_t (*other)(std::int64_t)) {
  return mutant([other](Parts& p) {
    auto factors = std::make_shared<std::vector<float>>();
    const auto right = p.new_max;
    p.new_max = [=](const Work& w, const Tile& t, std::int64_t i, float before) {
      const float now = right(w, t, i, before);
      factors->resize(static_cast<std::size_t>(w.m), 1.0f);
      (*factors)[static_cast<std::size_t>(i)] = exp_or_0(before, now);
      return now;
    };
    p.multiply = [=](const Work& w, const Tile& t, State& state) {
      for (std::int64_t i = 0; i < w.m; ++i) {
        const float own = (*factors)[static_cast<std::size_t>(i)];
        const float used = (*factors)[static_cast<std::size_t>(std::min(other(i), w.m - 1))];
        for (std::int64_t c = 0; c < w.dv; ++c) {
          float& acc = state.acc[at(i, w.dv, c)];
          if (own > 0) acc *= used / own;
          for (std::int64_t j = 0; j < t.width(); ++j) {
            acc += t.s[at(i, t.width(), j)] * w.v[at(t.begin + j, w.dv, c)];
          }
        }
      }
    };
  });
}

/// An implementation that chooses its own split count for long sequences and refuses num_splits.
template <typename Change>
std::function<VerifyFunction()> splits_by_itself(Change change) {
  return [change]() -> VerifyFunction {
    Parts parts = default_parts();
    change(parts);
    return [parts](const flashcore_verify_call& call, std::string*) -> std::int32_t {
      if (call.num_splits > 0) return FLASHCORE_UNSUPPORTED;
      flashcore_verify_call split = call;
      split.num_splits = call.k->shape[2] > 96 ? 4 : 1;
      return attend(parts, split);
    };
  };
}

std::pair<std::int64_t, std::int64_t> even_split(const Work& w, int split, int splits) {
  const std::int64_t size = (w.n + splits - 1) / splits;
  return {std::min(split * size, w.n), std::min((split + 1) * size, w.n)};
}

std::vector<Mutant> softmax_faults() {
  return {
      {"factor_of_the_adjacent_row", rescale, "f32 f16",
       factor_of_row([](std::int64_t i) { return i ^ 1; }), "", false},
      {"factor_of_the_first_row", rescale, "f32 bf16",
       factor_of_row([](std::int64_t) { return std::int64_t{0}; }), "", false},
      {"factor_never_above_one", rescale, "f32", mutant([](Parts& p) {
         // Each tile uses its own maximum, so a correct factor may be above 1.
         p.new_max = [](const Work&, const Tile& t, std::int64_t i, float) {
           const auto row = t.s.begin() + i * t.width();
           return *std::max_element(row, row + t.width());
         };
         p.rescale = p.rescale_sum = [](float before, float now) {
           return before == kNoKey ? 0.0f
                  : now == kNoKey  ? 1.0f
                                   : std::min(1.0f, std::exp(before - now));
         };
       }),
       "", false},
      {"new_weights_rescaled_too", rescale, "f32 f16", mutant([](Parts& p) {
         auto factors = std::make_shared<std::vector<float>>();
         const auto right = p.new_max;
         p.new_max = [=](const Work& w, const Tile& t, std::int64_t i, float before) {
           const float now = right(w, t, i, before);
           factors->resize(static_cast<std::size_t>(w.m), 1.0f);
           (*factors)[static_cast<std::size_t>(i)] =
               before == kNoKey ? 1.0f : std::exp(before - now);
           return now;
         };
         p.exp_done = [=](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               t.s[at(i, t.width(), j)] *= (*factors)[static_cast<std::size_t>(i)];
             }
           }
         };
       }),
       "", false},
      {"maximum_of_all_queries", max, "f32 f16", mutant([](Parts& p) {
         p.new_max = [](const Work&, const Tile& t, std::int64_t, float before) {
           float max = before;
           for (const float s : t.s) max = std::max(max, s);
           return max;
         };
       }),
       "", false},
      {"maximum_over_hidden_keys_too", max, "f32 bf16", mutant([](Parts& p) {
         auto unmasked = std::make_shared<std::vector<float>>();
         p.scored = [=](const Work&, Tile& t) { *unmasked = t.s; };
         p.new_max = [=](const Work&, const Tile& t, std::int64_t i, float before) {
           const auto row = unmasked->begin() + i * t.width();
           return std::max(before, *std::max_element(row, row + t.width()));
         };
       }),
       "", false},
      {"scores_clamped_not_shifted", max, "f32", mutant([](Parts& p) {
         p.new_max = [](const Work&, const Tile&, std::int64_t, float) { return 0.0f; };
         p.weight = [](float x, float) { return std::exp(std::min(x, 60.0f)); };
         p.rescale = p.rescale_sum = [](float, float) { return 1.0f; };
       }),
       "", false},
  };
}

std::vector<Mutant> combine_faults() {
  return {
      {"split_edges_counted_twice", combine, "f32 f16", splits_by_itself([](Parts& p) {
         p.split_range = [](const Work& w, int split, int splits) {
           auto [begin, end] = even_split(w, split, splits);
           return std::pair{begin > 0 && begin < w.n ? begin - 1 : begin, end};
         };
       }),
       "", false},
      {"split_edges_skipped", combine, "f32 bf16", splits_by_itself([](Parts& p) {
         p.split_range = [](const Work& w, int split, int splits) {
           auto [begin, end] = even_split(w, split, splits);
           return std::pair{begin > 0 ? std::min(begin + 1, end) : begin, end};
         };
       }),
       "", false},
      {"splits_averaged", combine, "f32 f16", splits_by_itself([](Parts& p) {
         p.split_done = [](const Work& w, State& s) {
           for (std::size_t i = 0; i < s.sum.size(); ++i) {
             if (s.sum[i] == 0) continue;
             for (std::int64_t c = 0; c < w.dv; ++c) {
               s.acc[at(static_cast<std::int64_t>(i), w.dv, c)] /= s.sum[i];
             }
             s.sum[i] = 1, s.max[i] = 0;
           }
         };
       }),
       "", false},
      {"split_weights_by_exp2", combine, "f32", splits_by_itself([](Parts& p) {
         p.combine_weight = [](float max_i, float max, float) {
           return max_i == kNoKey ? 0.0f : std::exp2(max_i - max);
         };
       }),
       "", false},
  };
}

std::vector<Mutant> mask_faults() {
  return {
      {"causal_offset_never_negative", mask, "f32 f16", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return w.call->causal == 0 ? right(w, i, j)
                                      : j <= i + std::max<std::int64_t>(w.n - w.m, 0);
         };
       }),
       "", false},
      {"tiles_skipped_by_first_row_of_block", mask, "f32 bf16", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return right(w, i, j) && (w.call->causal == 0 || j / 32 * 32 <= i / 32 * 32 + w.n - w.m);
         };
       }),
       "", false},
      {"positions_in_int8", mask, "f32", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return w.call->causal == 0
                      ? right(w, i, j)
                      : static_cast<std::int8_t>(j) <= static_cast<std::int8_t>(i + w.n - w.m);
         };
       }),
       "", false},
      {"window_ignored_where_causal", mask, "f32 f16", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return w.call->causal == 0 ? right(w, i, j) : j <= i + w.n - w.m;
         };
       }),
       "", false},
      {"softcap_lifts_hidden_keys", mask, "f32 f16", mutant([](Parts& p) {
         const auto right = p.visible;
         p.visible = [right](const Work& w, std::int64_t i, std::int64_t j) {
           return w.call->softcap > 0 || right(w, i, j);
         };
         p.scored = [right](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m && w.call->softcap > 0; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               if (!right(w, i, t.begin + j)) {
                 t.s[at(i, t.width(), j)] = -static_cast<float>(w.call->softcap);
               }
             }
           }
         };
       }),
       "", false},
  };
}

std::vector<Mutant> score_faults() {
  return {
      {"softmax_over_queries", sum, "f32 bf16", mutant([](Parts& p) {
         p.tile = 1;  // one column of P per tile
         p.exp_done = [](const Work& w, Tile& t) {
           float sum = 0;
           for (std::int64_t i = 0; i < w.m; ++i) sum += t.s[at(i, 1, 0)];
           for (std::int64_t i = 0; i < w.m && sum > 0; ++i) t.s[at(i, 1, 0)] /= sum;
         };
         p.normalize = [](const Work&, std::int64_t, float acc, float) { return acc; };
         p.new_max = [](const Work&, const Tile& t, std::int64_t, float) {
           return *std::max_element(t.s.begin(), t.s.end());
         };
         p.rescale = [](float, float) { return 1.0f; };
       }),
       "", false},
      {"v_read_transposed", pv, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           const std::vector<float> v = w.v;
           for (std::int64_t j = 0; j < w.n; ++j) {
             for (std::int64_t c = 0; c < w.dv; ++c) w.v[at(j, w.dv, c)] = v[at(c, w.n, j)];
           }
         };
       }),
       "", false},
      {"scale_of_v_dim", scale, "f32 f16", mutant([](Parts& p) {
         p.scale = [](const Work& w) {
           return w.call->has_scale != 0 ? static_cast<float>(w.call->scale)
                                         : 1 / std::sqrt(static_cast<float>(w.dv));
         };
       }),
       "", false},
      {"scale_of_q_len", scale, "f32", mutant([](Parts& p) {
         p.scale = [](const Work& w) {
           return w.call->has_scale != 0 ? static_cast<float>(w.call->scale)
                                         : 1 / std::sqrt(static_cast<float>(w.m));
         };
       }),
       "", false},
      {"dimensions_past_a_multiple_of_32", scores, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::size_t x = 0; x < w.q.size(); ++x) {
             if (static_cast<std::int64_t>(x) % w.d >= w.d / 32 * 32) w.q[x] = 0;
           }
         };
       }),
       "", false},
      {"position_leaks_into_scores", scores, "f32", mutant([](Parts& p) {
         p.scored = [](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               t.s[at(i, t.width(), j)] += 0.01f * static_cast<float>(t.begin + j);
             }
           }
         };
       }),
       "", false},
      {"softcap_of_unscaled_scores", scores, "f32 f16", mutant([](Parts& p) {
         p.scored = [](const Work& w, Tile& t) {
           const auto cap = static_cast<float>(w.call->softcap);
           for (float& s : t.s) {
             if (cap <= 0) break;
             const float raw = cap * std::atanh(std::clamp(s / cap, -0.999999f, 0.999999f));
             s = w.scale * cap * std::tanh(raw / w.scale / cap);
           }
         };
       }),
       "", false},
  };
}

std::vector<Mutant> precision_faults() {
  return {
      {"sum_in_f16", precision, "f32", mutant([](Parts& p) {
         p.tile = 16;
         p.add_sum = [](float s, float factor, float tile_sum) {
           return static_cast<float>(verify::rounded(Format::f16, s * factor + tile_sum));
         };
       }),
       "", false},
      {"outputs_in_f16", precision, "f32", mutant([](Parts& p) {
         p.done = [](Work& w) {
           for (float& x : w.out) x = static_cast<float>(verify::rounded(Format::f16, x));
         };
       }),
       "", false},
      {"exp_from_the_exponent_bits", precision, "f32 f16", mutant([](Parts& p) {
         p.weight = [](float x, float max) {
           if (max == kNoKey || x == kNoKey) return 0.0f;
           const float y = std::max(x - max, -80.0f) * 1.442695f + 127 - 0.0430f;
           return std::ldexp(1 + (y - std::floor(y)), static_cast<int>(std::floor(y)) - 127);
         };
       }),
       "", false},
  };
}

/// Caches V of the first call with each shape and reads it in later calls.
VerifyFunction caches_v() {
  auto cached = std::make_shared<std::map<std::vector<std::int64_t>, std::vector<float>>>();
  Parts p = default_parts();
  p.loaded = [cached](Work& w) {
    std::vector<float>& v = (*cached)[{w.b, w.h, w.batch, w.q_heads, w.m, w.n, w.dv}];
    if (v.empty()) v = w.v;
    w.v = v;
  };
  return [p](const flashcore_verify_call& c, std::string*) { return attend(p, c); };
}

/// Passes every decoded element of K through change(), before the scale.
std::function<VerifyFunction()> decoded_k(double (*change)(double)) {
  return mutant([change](Parts& p) {
    p.loaded = [change](Work& w) {
      const auto scale = static_cast<float>(read(*w.call->k_scale, w.b, w.kv_head, 0, 0));
      for (float& x : w.k) x = static_cast<float>(change(x / scale)) * scale;
    };
  });
}

std::vector<Mutant> memory_and_8bit_faults() {
  return {
      {"v_of_an_earlier_call", coverage, "f32 f16", caches_v, "", false},
      {"lse_of_the_last_split", lse, "f32 f16", mutant([](Parts& p) {
         auto last = std::make_shared<State>();
         p.split_done = [last](const Work&, State& s) {
           if (!s.sum.empty() && s.sum[0] > 0) *last = s;
         };
         p.log_sum = [last](const Work&, std::int64_t i, float max, float sum) {
           if (sum == 0) return kNoKey;
           const auto row = static_cast<std::size_t>(i);
           if (row >= last->sum.size() || last->sum[row] == 0) return max + std::log(sum);
           return last->max[row] + std::log(last->sum[row]);
         };
       }),
       "", false},
      {"v_scale_missing", dequant, "int8 e4m3 byte", mutant([](Parts& p) {
         p.scale_of = [](const flashcore_tensor* s, const Work& w, std::int64_t head) {
           return s == w.call->v_scale ? 1.0 : read(*s, w.b, head, 0, 0);
         };
       }),
       "", false},
      {"v_scale_squared", dequant, "int8 e4m3", mutant([](Parts& p) {
         p.scale_of = [](const flashcore_tensor* s, const Work& w, std::int64_t head) {
           const double x = read(*s, w.b, head, 0, 0);
           return s == w.call->v_scale ? x * x : x;
         };
       }),
       "", false},
      {"zero_point_of_v", dequant, "int8", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (float& x : w.v)
             x += static_cast<float>(read(*w.call->v_scale, w.b, w.kv_head, 0, 0));
         };
       }),
       "", false},
      {"k_read_as_unsigned", dequant, "int8",
       decoded_k([](double x) { return x < 0 ? x + 256 : x; }), "", false},
      {"k_subnormals_halved", dequant, "e4m3",
       decoded_k([](double x) { return std::fabs(x) < 0x1p-6 ? x / 2 : x; }), "", false},
      {"k_saturates_at_240", dequant, "e4m3",
       decoded_k([](double x) { return std::clamp(x, -240.0, 240.0); }), "", false},
      {"k_exponent_one_bit_longer", dequant, "e4m3", decoded_k([](double x) {
         // Decodes as e5m2: the first mantissa bit becomes the last exponent bit.
         if (x == 0) return 0.0;
         const int exponent = std::ilogb(x);
         const double mantissa = std::fabs(x) / std::exp2(exponent) - 1;
         const int bits = std::max(exponent + 7, 0) * 8 + static_cast<int>(mantissa * 8);
         return std::copysign((1 + bits % 4 / 4.0) * std::exp2(bits / 4 - 15), x);
       }),
       "", false},
  };
}

}  // namespace

std::vector<Mutant> adversary_mutants() {
  std::vector<Mutant> all;
  for (const auto& part : {softmax_faults(), combine_faults(), mask_faults(), score_faults(),
                           precision_faults(), memory_and_8bit_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
