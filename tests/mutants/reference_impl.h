// A small correct attention: KV tiles, online softmax, split-KV with a combine step. A mutant
// replaces one of its parts. It shares no code with the library.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "flashcore/verify_c.h"
#include "verify/inputs/format.h"

namespace flashcore::mutants {

constexpr float kNoKey = -std::numeric_limits<float>::infinity();

/// Inputs and results of one (batch, query head).
struct Work {
  const flashcore_verify_call* call = nullptr;
  std::int64_t b = 0, h = 0, kv_head = 0;
  std::int64_t batch = 0, q_heads = 0, kv_heads = 0;
  std::int64_t m = 0, n = 0, d = 0, dv = 0;  ///< q_len, kv_len, head_dim, v_dim
  float scale = 1;
  std::vector<float> q, k, v;  ///< [m, d], [n, d], [n, dv], dequantized
  std::vector<float> out;      ///< [m, dv]
  std::vector<float> lse;      ///< [m]
};

/// The scores of all queries and the keys begin <= j < end.
struct Tile {
  std::int64_t begin = 0, end = 0;
  std::int64_t index = 0;  ///< within its KV split
  std::vector<float> s;    ///< [m, end - begin]: scores, then weights
  std::int64_t width() const { return end - begin; }
};

/// Online softmax state, and the partial result of a KV split.
struct State {
  std::vector<float> max, sum, acc;  ///< [m], [m], [m, dv]
};

/// The replaceable parts. default_parts() sets the correct ones. An empty part does nothing or
/// means the built-in default.
struct Parts {
  std::int64_t tile = 32;
  verify::Format weights = verify::Format::f32;      ///< format of P as the operand of P·V
  std::function<std::int64_t(const Work&)> kv_head;  ///< KV head to read
  std::function<double(const flashcore_tensor&, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t c)>
      load;  ///< one input element, before its scale
  std::function<double(const flashcore_tensor* scale, const Work&, std::int64_t head)> scale_of;
  std::function<void(Work&)> loaded;  ///< after q, k and v are loaded
  std::function<float(const Work&)> scale;
  std::function<std::pair<std::int64_t, std::int64_t>(const Work&, std::int64_t tile)> tile_range;
  std::function<void(const Work&, Tile&)> scored;  ///< after the scores, before the mask
  std::function<bool(const Work&, std::int64_t i, std::int64_t j)> visible;
  std::function<float(const Work&, const Tile&, std::int64_t i, float before)> new_max;
  std::function<float(float score, float max)> weight;    ///< exp
  std::function<float(float before, float now)> rescale;  ///< factor of the accumulator
  std::function<float(float before, float now)> rescale_sum;
  std::function<float(float sum, float factor, float tile_sum)> add_sum;
  std::function<void(const Work&, Tile&)> exp_done;                ///< after exp(), before P·V
  std::function<void(const Work&, const Tile&, State&)> multiply;  ///< acc += P·V
  std::function<float(float max_i, float max, float sum_i)> combine_weight;  ///< weight of a split
  std::function<std::pair<std::int64_t, std::int64_t>(const Work&, int split, int splits)>
      split_range;
  std::function<void(const Work&, State&)> split_done;  ///< after the last tile of a split
  std::function<float(const Work&, std::int64_t i, float acc, float sum)> normalize;
  std::function<float(const Work&, std::int64_t i, float max, float sum)> log_sum;
  std::function<void(Work&)> done;  ///< after out and lse are computed
  std::function<void(const flashcore_tensor&, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c, double value)>
      store;
  std::function<void(const flashcore_verify_call&)> called;  ///< first step of a call
  std::function<void(const flashcore_verify_call&)> returned;
};

Parts default_parts();

/// Computes a call. Returns FLASHCORE_UNSUPPORTED for options it lacks.
std::int32_t attend(const Parts& parts, const flashcore_verify_call& call);

/// Element access by strides, in the tensor's own format.
double read(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
            std::int64_t c);
void write(const flashcore_tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
           std::int64_t c, double value);
verify::Format format_of(const flashcore_tensor& t);

}  // namespace flashcore::mutants
