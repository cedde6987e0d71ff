// Tools of the fourth table of mutants of the backward pass.
#pragma once

#include <initializer_list>

#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {

constexpr std::int64_t kTile = 16;     // queries of a tile
constexpr std::int64_t kKeyTile = 32;  // keys of a tile

inline std::int64_t tile_start(std::int64_t i, std::int64_t tile) { return i / tile * tile; }

/// Multiplies the weight of a pair in some gradients by `times`.
template <typename Times>
void weigh_pairs(BackwardParts& p, std::initializer_list<int> gradients, Times times) {
  for (const int gradient : gradients) {
    auto& weight = gradient == kOfDq ? p.in_dq : gradient == kOfDk ? p.in_dk : p.in_dv;
    weight = [=, right = weight](const BackwardWork& w, const Pair& x) {
      return times(w, x) * right(w, x);
    };
  }
}

/// Pairs for which `is_lost` holds are missing in some gradients.
template <typename Lost>
void lose_pairs(BackwardParts& p, std::initializer_list<int> gradients, Lost is_lost) {
  weigh_pairs(p, gradients,
              [=](const BackwardWork& w, const Pair& x) { return is_lost(w, x) ? 0.0f : 1.0f; });
}

/// A row of a gradient keeps its old content.
inline void leave_row(const BackwardWork& w, const flashcore_tensor& t, std::int64_t head,
                      std::int64_t row, std::vector<float>& values) {
  for (std::int64_t c = 0; c < t.shape[3]; ++c) {
    values[at(row, t.shape[3], c)] = static_cast<float>(read(t, w.b, head, row, c));
  }
}

/// Dot product of two rows that goes on into the next ones, up to a multiple of 16 columns.
inline float dot_past_the_row(const std::vector<float>& a, std::int64_t i,
                              const std::vector<float>& b, std::int64_t j, std::int64_t columns) {
  float sum = 0;
  for (std::int64_t c = 0; c < columns + padding(columns, 16); ++c) {
    const std::size_t in_a = at(i, columns, c), in_b = at(j, columns, c);
    if (in_a < a.size() && in_b < b.size()) sum += a[in_a] * b[in_b];
  }
  return sum;
}

/// The correct delta of any row of a call.
inline float delta_of(const BackwardWork& w, std::int64_t b, std::int64_t h, std::int64_t i) {
  double sum = w.call->dlse != nullptr ? -read(*w.call->dlse, b, h, i, 0) : 0.0;
  for (std::int64_t c = 0; c < w.dv_dim; ++c) {
    sum += read(*w.call->dout, b, h, i, c) * read(*w.call->forward->out, b, h, i, c);
  }
  return static_cast<float>(sum);
}

/// An event that differs from call to call, true about once in four times.
class Event {
 public:
  bool happens() {
    state_ = state_ * 2862933555777941757u + 3037000493u;
    return state_ >> 62 == 0;
  }

 private:
  std::uint64_t state_ = 9;
};

}  // namespace flashcore::mutants
