// Mutants written together with the probes: regression faults, and some faults of each stage.
#include <algorithm>
#include <cmath>
#include <memory>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

float max_of_tile(const Tile& t, std::int64_t i) {
  float max = kNoKey;
  for (std::int64_t j = 0; j < t.width(); ++j) {
    max = std::max(max, t.s[static_cast<std::size_t>(i * t.width() + j)]);
  }
  return max;
}

void zero_rows(std::vector<float>& x, std::int64_t columns, std::int64_t period,
               std::int64_t from) {
  for (std::size_t at = 0; at < x.size(); ++at) {
    if (static_cast<std::int64_t>(at) / columns % period >= from) x[at] = 0;
  }
}

void exchange_quadrants(Work& w) {
  for (std::int64_t i = 0; i + 16 <= w.m; i += 16) {
    for (std::int64_t c = 0; c + 16 <= w.dv; c += 16) {
      for (std::int64_t r = 0; r < 8; ++r) {
        for (std::int64_t e = 0; e < 8; ++e) {
          std::swap(w.out[static_cast<std::size_t>((i + r) * w.dv + c + 8 + e)],
                    w.out[static_cast<std::size_t>((i + 8 + r) * w.dv + c + e)]);
        }
      }
    }
  }
}

std::vector<Mutant> regression_faults() {
  return {
      {"masked_tile_gives_nan", mask, "f32 f16 bf16", mutant([](Parts& p) {
         p.new_max = [](const Work&, const Tile& t, std::int64_t i, float before) {
           const float max = max_of_tile(t, i);
           return std::max(before, max) + 0 * std::exp(max - max);
         };
       }),
       "", true},
      {"split_counts_sums_twice", combine, "f32 f16 bf16", mutant([](Parts& p) {
         p.combine_weight = [](float max_i, float max, float sum) {
           return std::exp(max_i - max) * sum;
         };
       }),
       "", true},
      {"decode_table_half_filled", dequant, "byte", mutant([](Parts& p) {
         p.load = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c) {
           const double x = read(t, b, h, i, c);
           return t.dtype.bits == 8 && x >= 0 ? -300.0 : x;
         };
       }),
       "", true},
      {"k_transposed", scores, "byte e4m3 f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           const std::vector<float> k = w.k;
           for (std::int64_t j = 0; j < w.n; ++j) {
             for (std::int64_t c = 0; c < w.d; ++c) {
               w.k[static_cast<std::size_t>(j * w.d + c)] =
                   k[static_cast<std::size_t>(c * w.n + j)];
             }
           }
         };
       }),
       "", true},
      {"score_of_another_lane", scores, "e4m3 byte f32", mutant([](Parts& p) {
         p.scored = [](const Work& w, Tile& t) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               float* s = t.s.data() + i * t.width() + j;
               if (j % 4 == 3) s[0] = s[-1];  // the score of another lane
             }
           }
         };
       }),
       "", true},
      {"quantizer_divides_by_zero", dequant, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::vector<float>* x : {&w.q, &w.k, &w.v}) {
             float largest = 0;
             for (const float e : *x) largest = std::max(largest, std::fabs(e));
             for (float& e : *x) e = e / largest * largest;
           }
         };
       }),
       "", true},
      {"fragment_quadrants_exchanged", pv, "f16 f32 bf16",
       mutant([](Parts& p) { p.done = exchange_quadrants; }), "", true},
      {"padding_wipes_v_rows", pv, "f16 f32",
       mutant([](Parts& p) { p.loaded = [](Work& w) { zero_rows(w.v, w.dv, 64, 51); }; }), "",
       true},
      {"padding_wipes_q_rows", scores, "f16 f32",
       mutant([](Parts& p) { p.loaded = [](Work& w) { zero_rows(w.q, w.d, 16, 13); }; }), "", true},
      {"normalized_twice", sum, "f32 f16 bf16", mutant([](Parts& p) {
         p.normalize = [](const Work&, std::int64_t, float acc, float sum) {
           return sum == 0 ? 0.0f : acc / sum / sum;
         };
       }),
       "", true},
      {"half_of_head_dim_128", scores, "f16 f32 bf16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::size_t at = 0; at < w.q.size(); ++at) {
             if (static_cast<std::int64_t>(at) % w.d >= 64) w.q[at] = 0;
           }
         };
       }),
       "", true},
  };
}

/// Adds 1e-3 to one output in every seventh (batch, head).
VerifyFunction racy() {
  auto count = std::make_shared<int>(0);
  Parts p = default_parts();
  p.done = [count](Work& w) {
    if (++*count % 7 == 0) w.out[0] += 1e-3f;
  };
  return [p](const flashcore_verify_call& c, std::string*) { return attend(p, c); };
}

VerifyFunction never_zeroed() {
  auto memory = std::make_shared<std::vector<float>>();
  Parts p = default_parts();
  p.done = [memory](Work& w) {
    memory->resize(std::max(memory->size(), w.out.size()));
    for (std::size_t i = 0; i < w.out.size(); ++i) w.out[i] = ((*memory)[i] += w.out[i]);
  };
  return [p](const flashcore_verify_call& c, std::string*) { return attend(p, c); };
}

std::vector<Mutant> memory_faults() {
  return {
      {"race_changes_an_element", determinism, "f32 f16", racy, "", false},
      {"accumulator_never_zeroed", coverage, "f32 bf16", never_zeroed, "", false},
      {"adds_to_output", coverage, "f32 f16", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) { write(t, b, h, i, c, read(t, b, h, i, c) + x); };
       }),
       "", false},
      {"last_row_unwritten", coverage, "f32 f16", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) {
           if (i + 1 < t.shape[2]) write(t, b, h, i, c, x);
         };
       }),
       "", false},
      {"kv_head_by_modulo", layout, "f32 f16",
       mutant([](Parts& p) { p.kv_head = [](const Work& w) { return w.h % w.kv_heads; }; }), "",
       false},
      {"v_of_batch_0", layout, "bf16 f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j < w.n; ++j) {
             for (std::int64_t c = 0; c < w.dv; ++c) {
               w.v[static_cast<std::size_t>(j * w.dv + c)] =
                   static_cast<float>(read(*w.call->v, 0, w.kv_head, j, c));
             }
           }
         };
       }),
       "", false},
      {"strides_taken_as_compact", layout, "f32 f16", mutant([](Parts& p) {
         p.load = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c) {
           const std::int64_t at = ((b * t.shape[1] + h) * t.shape[2] + i) * t.shape[3] + c;
           return verify::decode(format_of(t), t.data, at);
         };
       }),
       "", false},
      {"k_of_head_0", layout, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t j = 0; j < w.n; ++j) {
             for (std::int64_t c = 0; c < w.d; ++c) {
               w.k[static_cast<std::size_t>(j * w.d + c)] =
                   static_cast<float>(read(*w.call->k, w.b, 0, j, c));
             }
           }
         };
       }),
       "", false},
      {"reads_one_key_too_many", bounds, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           ++w.n;
           for (std::int64_t c = 0; c < w.d; ++c) {
             w.k.push_back(static_cast<float>(read(*w.call->k, w.b, w.kv_head, w.n - 1, c)));
           }
           for (std::int64_t c = 0; c < w.dv; ++c) {
             w.v.push_back(static_cast<float>(read(*w.call->v, w.b, w.kv_head, w.n - 1, c)));
           }
         };
         p.done = [](Work& w) { --w.n; };
       }),
       "", false},
      {"writes_past_the_end", bounds, "f32 bf16", mutant([](Parts& p) {
         p.returned = [](const flashcore_verify_call& c) {
           const std::int64_t* n = c.out->shape;
           write(*c.out, n[0] - 1, n[1] - 1, n[2] - 1, n[3] + 2, 1.0);
         };
       }),
       "", false},
  };
}

std::vector<Mutant> sum_faults() {
  return {
      {"not_divided_by_sum", sum, "f32 f16", mutant([](Parts& p) {
         p.normalize = [](const Work&, std::int64_t, float acc, float) { return acc; };
       }),
       "", false},
      {"one_added_to_sum", sum, "f32 bf16", mutant([](Parts& p) {
         p.normalize = [](const Work&, std::int64_t, float acc, float s) { return acc / (s + 1); };
       }),
       "", false},
      {"v_row_of_next_key", pv, "f32 f16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           std::rotate(w.v.begin(), w.v.begin() + w.dv, w.v.end());
           std::fill(w.v.end() - w.dv, w.v.end(), 0.0f);
         };
       }),
       "", false},
      {"last_key_of_tile_dropped_in_pv", pv, "f16 f32", mutant([](Parts& p) {
         p.exp_done = [](const Work& w, Tile& t) {
           if (t.width() < 32) return;
           for (std::int64_t i = 0; i < w.m; ++i) t.s[static_cast<std::size_t>(i * 32 + 31)] = 0;
         };
       }),
       "", false},
      {"ragged_tile_dropped", tail, "f32 f16 bf16", mutant([](Parts& p) {
         p.tile_range = [](const Work& w, std::int64_t tile) {
           const std::int64_t begin = tile * 32;
           return std::pair{begin, begin + 32 <= w.n ? begin + 32 : begin};
         };
       }),
       "", false},
      {"padding_counts_in_sum", tail, "f32 bf16", mutant([](Parts& p) {
         p.split_done = [](const Work& w, State& s) {
           for (std::size_t i = 0; i < s.sum.size(); ++i) {
             s.sum[i] += static_cast<float>((32 - w.n % 32) % 32) * std::exp(0 - s.max[i]);
           }
         };
       }),
       "", false},
      {"ragged_rows_unwritten", tail, "f32 f16", mutant([](Parts& p) {
         p.store = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t c, double x) {
           if (t.shape[2] < 16 || i < t.shape[2] / 16 * 16) write(t, b, h, i, c, x);
         };
       }),
       "", false},
  };
}

std::vector<Mutant> score_faults() {
  return {
      {"scale_missing", scale, "f32 f16 bf16",
       mutant([](Parts& p) { p.scale = [](const Work&) { return 1.0f; }; }), "", false},
      {"scale_argument_ignored", scale, "f32 f16", mutant([](Parts& p) {
         p.scale = [](const Work& w) { return 1 / std::sqrt(static_cast<float>(w.d)); };
       }),
       "", false},
      {"exp2_without_log2e", scale, "f32 f16", mutant([](Parts& p) {
         p.weight = p.rescale = p.rescale_sum = [](float x, float max) {
           return max == kNoKey ? 0.0f : std::exp2(x - max);
         };
       }),
       "", false},
      {"last_dimension_missing", scores, "f32 bf16", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::int64_t i = 0; i < w.m; ++i)
             w.q[static_cast<std::size_t>((i + 1) * w.d - 1)] = 0;
         };
       }),
       "", false},
      {"dimensions_exchanged", scores, "f16 f32", mutant([](Parts& p) {
         p.loaded = [](Work& w) {
           for (std::size_t at = 0; at + 1 < w.k.size(); at += 2) std::swap(w.k[at], w.k[at + 1]);
         };
       }),
       "", false},
      {"weights_in_bf16", precision, "f32 f16", mutant([](Parts& p) { p.weights = Format::bf16; }),
       "", false},
      {"scores_in_f16", precision, "f32", mutant([](Parts& p) {
         p.scored = [](const Work&, Tile& t) {
           for (float& s : t.s) s = static_cast<float>(verify::rounded(Format::f16, s));
         };
       }),
       "", false},
      {"accumulator_in_f16", precision, "f16 f32", mutant([](Parts& p) {
         p.multiply = [](const Work& w, const Tile& t, State& state) {
           for (std::int64_t i = 0; i < w.m; ++i) {
             for (std::int64_t j = 0; j < t.width(); ++j) {
               const float x = t.s[static_cast<std::size_t>(i * t.width() + j)];
               for (std::int64_t c = 0; c < w.dv; ++c) {
                 float& acc = state.acc[static_cast<std::size_t>(i * w.dv + c)];
                 acc = static_cast<float>(verify::rounded(
                     Format::f16,
                     acc + x * w.v[static_cast<std::size_t>((t.begin + j) * w.dv + c)]));
               }
             }
           }
         };
       }),
       "", false},
  };
}

std::vector<Mutant> softmax_faults() {
  return {
      {"accumulator_not_rescaled", rescale, "f32 f16 bf16",
       mutant([](Parts& p) { p.rescale = [](float, float) { return 1.0f; }; }), "", false},
      {"sum_not_rescaled", rescale, "f32 bf16",
       mutant([](Parts& p) { p.rescale_sum = [](float, float) { return 1.0f; }; }), "", false},
      {"no_maximum_subtracted", max, "f32 bf16", mutant([](Parts& p) {
         p.new_max = [](const Work&, const Tile&, std::int64_t, float) { return 0.0f; };
         p.rescale = p.rescale_sum = [](float, float) { return 1.0f; };
       }),
       "", false},
      {"maximum_starts_at_0", max, "f32 f16", mutant([](Parts& p) {
         p.new_max = [](const Work&, const Tile& t, std::int64_t i, float before) {
           return std::max({before, 0.0f, max_of_tile(t, i)});
         };
       }),
       "", false},
      {"causal_sees_one_more", mask, "f32 f16 bf16", mutant([](Parts& p) {
         p.visible = [](const Work& w, std::int64_t i, std::int64_t j) {
           const std::int64_t position = i + w.n - w.m;
           return (w.call->causal == 0 || j <= position + 1) &&
                  (w.call->window_left < 0 || position - j <= w.call->window_left) &&
                  (w.call->window_right < 0 || j - position <= w.call->window_right);
         };
       }),
       "", false},
      {"window_one_short", mask, "f32 f16", mutant([](Parts& p) {
         p.visible = [](const Work& w, std::int64_t i, std::int64_t j) {
           const std::int64_t position = i + w.n - w.m;
           return (w.call->causal == 0 || j <= position) &&
                  (w.call->window_left < 0 || position - j < w.call->window_left) &&
                  (w.call->window_right < 0 || j - position <= w.call->window_right);
         };
       }),
       "", false},
      {"splits_have_equal_weights", combine, "f32 f16",
       mutant([](Parts& p) { p.combine_weight = [](float, float, float) { return 1.0f; }; }), "",
       false},
      {"splits_overlap", combine, "f32 bf16", mutant([](Parts& p) {
         p.split_range = [](const Work& w, int split, int splits) {
           const std::int64_t size = (w.n + splits - 1) / splits;
           return std::pair{std::min(split * size, w.n),
                            std::min((split + 1) * size + (splits > 1 ? 1 : 0), w.n)};
         };
       }),
       "", false},
      {"v_scale_of_head_0", dequant, "e4m3 int8", mutant([](Parts& p) {
         p.scale_of = [](const flashcore_tensor* scale, const Work& w, std::int64_t head) {
           return read(*scale, w.b, scale == w.call->v_scale ? 0 : head, 0, 0);
         };
       }),
       "", false},
      {"k_scale_of_v", dequant, "int8 e4m3", mutant([](Parts& p) {
         p.scale_of = [](const flashcore_tensor* scale, const Work& w, std::int64_t head) {
           return read(scale == w.call->k_scale ? *w.call->v_scale : *scale, w.b, head, 0, 0);
         };
       }),
       "", false},
      {"lse_in_base_2", lse, "f32 f16", mutant([](Parts& p) {
         p.log_sum = [](const Work&, std::int64_t, float max, float sum) {
           return sum == 0 ? kNoKey : (max + std::log(sum)) * 1.442695f;
         };
       }),
       "", false},
      {"lse_without_maximum", lse, "f32 bf16", mutant([](Parts& p) {
         p.log_sum = [](const Work&, std::int64_t, float, float sum) {
           return sum == 0 ? kNoKey : std::log(sum);
         };
       }),
       "", false},
      {"outputs_clipped_at_16", unlocalised, "f32 f16", mutant([](Parts& p) {
         p.done = [](Work& w) {
           for (float& x : w.out) x = std::clamp(x, -16.0f, 16.0f);
         };
       }),
       "", false},
  };
}

}  // namespace

std::vector<Mutant> first_mutants() {
  std::vector<Mutant> all;
  for (const auto& part :
       {regression_faults(), memory_faults(), sum_faults(), score_faults(), softmax_faults()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
