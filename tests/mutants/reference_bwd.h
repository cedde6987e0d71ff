// A small correct backward pass of attention in tiles. A mutant replaces one of its parts. It
// shares no code with the library.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "flashcore/verify.h"
#include "mutants/reference_impl.h"

namespace flashcore::mutants {

/// One (batch, query head): inputs and gradients. dk and dv sum over the heads of a group.
struct BackwardWork {
  const flashcore_verify_backward_call* call = nullptr;
  std::int64_t b = 0, h = 0, kv_head = 0;
  std::int64_t batch = 0, q_heads = 0, kv_heads = 0, group = 1;
  std::int64_t m = 0, n = 0, d = 0, dv_dim = 0;
  float scale = 1, softcap = 0;
  std::vector<float> q, k, v, out, dout;  ///< [m, d], [n, d], [n, dv_dim], [m, dv_dim] twice
  std::vector<float> lse, dlse, delta;    ///< [m]; dlse 0 if it is not given
  std::vector<float> dq, dk, dv;          ///< [m, d], [n, d], [n, dv_dim]
};

/// One pair of a query and a key.
struct Pair {
  std::int64_t i = 0, j = 0;
  float score = 0;  ///< scaled, with softcap
  float z = 0;      ///< scaled, without softcap
  float p = 0, dp = 0, ds = 0;
};

/// The replaceable parts. default_backward() sets the correct ones. An empty part does nothing.
struct BackwardParts {
  std::int64_t tile = 32;
  bool takes_dlse = true;
  std::function<void(const flashcore_verify_backward_call&)> called;
  std::function<std::int64_t(const BackwardWork&)> kv_head;
  std::function<void(BackwardWork&)> loaded;
  std::function<float(const BackwardWork&, std::int64_t i)> delta;
  std::function<float(const BackwardWork&)> score_scale;
  std::function<bool(const BackwardWork&, std::int64_t i, std::int64_t j)> visible;
  std::function<float(const BackwardWork&, const Pair&)> p;
  std::function<float(const BackwardWork&, const Pair&)> dp;
  std::function<float(const BackwardWork&, const Pair&)> ds;     ///< before the softcap
  std::function<float(const BackwardWork&, const Pair&)> slope;  ///< of the softcap
  /// Weights of a pair in the three products.
  std::function<float(const BackwardWork&, const Pair&)> in_dv, in_dk, in_dq;
  /// How often a tile counts in a gradient.
  std::function<float(const BackwardWork&, int gradient, std::int64_t q_tile, std::int64_t k_tile)>
      count;
  std::function<float(float sum, float term)> add;
  std::function<float(const BackwardWork&)> dq_scale, dk_scale;
  std::function<void(BackwardWork&)> head_done;   ///< dq is complete
  std::function<void(BackwardWork&)> group_done;  ///< dk and dv are complete
  std::function<void(const flashcore_tensor&, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t c, double value)>
      store;
  std::function<void(const flashcore_verify_backward_call&)> returned;
};

enum { kOfDq, kOfDk, kOfDv };

inline float rounded(verify::Format format, float x) {
  return static_cast<float>(verify::rounded(format, x));
}

inline bool is_causal(const BackwardWork& w) { return w.call->forward->causal != 0; }

BackwardParts default_backward();

/// Computes a call. Returns FLASHCORE_UNSUPPORTED for options it lacks.
std::int32_t differentiate(const BackwardParts& parts, const flashcore_verify_backward_call& call);

}  // namespace flashcore::mutants
