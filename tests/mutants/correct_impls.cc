// Correct implementations of different design. The verifier must pass all of them.
#include <algorithm>
#include <cmath>

#include "mutants/mutants.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

/// Attention by its definition, in f64, without tiles. `top_left` aligns the causal mask top-left.
std::int32_t attend_by_definition(const flashcore_verify_call& call, bool top_left,
                                  bool refuse_extras) {
  if (refuse_extras && (call.window_left >= 0 || call.window_right >= 0 || call.softcap > 0 ||
                        call.num_splits > 0 || call.q->shape[1] != call.k->shape[1])) {
    return FLASHCORE_UNSUPPORTED;
  }
  const std::int64_t m = call.q->shape[2], n = call.k->shape[2];
  const std::int64_t d = call.q->shape[3], dv = call.v->shape[3];
  const auto head = [](const flashcore_tensor& t, std::int64_t b, std::int64_t h) {
    std::vector<double> x;
    for (std::int64_t i = 0; i < t.shape[2]; ++i) {
      for (std::int64_t c = 0; c < t.shape[3]; ++c) x.push_back(read(t, b, h, i, c));
    }
    return x;
  };
  const std::int64_t group = call.q->shape[1] / call.k->shape[1];
  const auto scale_of = [](const flashcore_tensor* s, std::int64_t b, std::int64_t h) {
    return s != nullptr ? read(*s, b, h, 0, 0) : 1.0;
  };
  for (std::int64_t b = 0; b < call.q->shape[0]; ++b) {
    for (std::int64_t h = 0; h < call.q->shape[1]; ++h) {
      const std::int64_t g = h / group;
      const std::vector<double> q = head(*call.q, b, h), k = head(*call.k, b, g),
                                v = head(*call.v, b, g);
      const double qk = scale_of(call.q_scale, b, h) * scale_of(call.k_scale, b, g);
      for (std::int64_t i = 0; i < m; ++i) {
        const std::int64_t at = top_left ? i : i + n - m;
        std::vector<double> p(static_cast<std::size_t>(n), 0.0);
        double max = -INFINITY, sum = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          double s = 0;
          for (std::int64_t c = 0; c < d; ++c) {
            s += q[static_cast<std::size_t>(i * d + c)] * k[static_cast<std::size_t>(j * d + c)];
          }
          s *= qk * call.scale;
          if (call.softcap > 0) s = call.softcap * std::tanh(s / call.softcap);
          const bool hidden = (call.causal != 0 && j > at) ||
                              (call.window_left >= 0 && at - j > call.window_left) ||
                              (call.window_right >= 0 && j - at > call.window_right);
          p[static_cast<std::size_t>(j)] = hidden ? -INFINITY : s;
          max = std::max(max, p[static_cast<std::size_t>(j)]);
        }
        for (double& x : p) sum += x = std::isinf(max) ? 0.0 : std::exp(x - max);
        std::vector<double> o(static_cast<std::size_t>(dv), 0.0);
        for (std::int64_t j = 0; j < n; ++j) {
          const double x = p[static_cast<std::size_t>(j)];
          if (x == 0) continue;
          for (std::int64_t c = 0; c < dv; ++c) {
            o[static_cast<std::size_t>(c)] += x * v[static_cast<std::size_t>(j * dv + c)];
          }
        }
        for (std::int64_t c = 0; c < dv; ++c) {
          const double x = o[static_cast<std::size_t>(c)] * scale_of(call.v_scale, b, g);
          write(*call.out, b, h, i, c, sum > 0 ? x / sum : 0.0);
        }
        if (call.lse != nullptr)
          write(*call.lse, b, h, i, 0, sum > 0 ? max + std::log(sum) : -INFINITY);
      }
    }
  }
  return FLASHCORE_OK;
}

std::function<VerifyFunction()> by_definition(bool top_left, bool refuse_extras) {
  return [=]() -> VerifyFunction {
    return [=](const flashcore_verify_call& call, std::string*) {
      return attend_by_definition(call, top_left, refuse_extras);
    };
  };
}

/// Rounds scores and weights to the format of the inputs, like separate GEMM calls.
void round_everything(Parts& p, Format format) {
  p.tile = 1 << 20;
  p.weights = format;
  p.scored = [format](const Work&, Tile& t) {
    for (float& s : t.s) s = static_cast<float>(verify::rounded(format, s));
  };
}

}  // namespace

std::vector<Mutant> correct_impls() {
  const char* floats = "f32 f16 bf16 f64";
  const char* narrow = "e4m3 int8 byte";
  return {
      {"definition_f64", none, "f32 f16 bf16 f64 e4m3 int8 byte", by_definition(false, false), "",
       false},
      {"definition_top_left", none, floats, by_definition(true, false), "", false},
      {"definition_few_options", none, floats, by_definition(false, true), "", false},
      {"tiled_32", none, "f32 f16 bf16 e4m3 int8 byte", mutant([](Parts&) {}), "", false},
      {"tiled_1", none, "f32 f16 bf16", mutant([](Parts& p) { p.tile = 1; }), "", false},
      {"tiled_48", none, "f32 f16 bf16", mutant([](Parts& p) { p.tile = 48; }), "", false},
      {"tiled_128", none, "f32 f16 bf16", mutant([](Parts& p) { p.tile = 128; }), "", false},
      {"two_pass", none, "f32 f16 bf16", mutant([](Parts& p) { p.tile = 1 << 20; }), "", false},
      {"exp2_based", none, "f32 f16 bf16", mutant([](Parts& p) {
         p.weight = p.rescale = p.rescale_sum = [](float x, float max) {
           constexpr float kLog2e = 1.44269504f;
           return max == kNoKey ? 0.0f : std::exp2(std::fma(x, kLog2e, -max * kLog2e));
         };
         p.combine_weight = [weight = p.weight](float max_i, float max, float) {
           return weight(max_i, max);
         };
       }),
       "", false},
      {"lazy_maximum", none, "f32 bf16", mutant([](Parts& p) {
         // Lazy rescale: the maximum moves only after it has grown by 8 · ln 2.
         const auto eager = p.new_max;
         p.new_max = [eager](const Work& w, const Tile& t, std::int64_t i, float before) {
           const float now = eager(w, t, i, before);
           return before != kNoKey && now - before < 5.545f ? before : now;
         };
       }),
       "", false},
      {"weights_f16", none, "f16", mutant([](Parts& p) { p.weights = Format::f16; }), "", false},
      {"weights_bf16", none, "bf16", mutant([](Parts& p) { p.weights = Format::bf16; }), "", false},
      {"weights_e4m3", none, "e4m3", mutant([](Parts& p) { p.weights = Format::e4m3; }), "", false},
      {"everything_rounded_f16", none, "f16",
       mutant([](Parts& p) { round_everything(p, Format::f16); }), "", false},
      {"everything_rounded_bf16", none, "bf16",
       mutant([](Parts& p) { round_everything(p, Format::bf16); }), "", false},
      {"splits_by_itself", none, "f32 f16 bf16", mutant([](Parts& p) {
         p.split_range = [](const Work& w, int split, int splits) {
           (void)splits;
           return split == 0 ? std::pair<std::int64_t, std::int64_t>{0, w.n} : std::pair{w.n, w.n};
         };
       }),
       "", false},
      {"tiled_64_8bit", none, narrow, mutant([](Parts& p) { p.tile = 64; }), "", false},
  };
}

}  // namespace flashcore::mutants
