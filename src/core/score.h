// Score modifications: scale, softcap, ALiBi, bias and boolean mask, in the order of
// docs/numerics.md. The interval of visible keys (core/mask.h) comes after them.
//
// modify_scores() defines the order. A kernel calls it once per row, with a function that visits
// the scores which the thread or vector holds, or it calls modify_score() for one score at a time.
//   Row   ScoreRow<T>, or a type with the same members for a vector of rows
//   Math  the backend's softcap and absolute value
#pragma once

#include "core/element.h"
#include "core/row_offset.h"
#include "core/softcap.h"

namespace flashcore::core {

/// Whether the scores that a kernel passes in are Q K^T, or times score_scale() already.
enum class ScoreInput { qk, scaled };

/// The factor of Q K^T. With a softcap it turns Q K^T into the argument of capped().
template <typename T>
FLASHCORE_HD T score_scale(const AttentionParams& p) {
  return p.fault.is(InjectedFault::scale_ignored) ? T(1) : static_cast<T>(p.score_scale);
}

/// The constants of one query row. Pointers are null if the call lacks the option.
template <typename T>
struct ScoreRow {
  T scale;  // of Q K^T
  T cap;    // 0: none
  T slope;  // 0 without ALiBi
  bool has_alibi;
  const void* bias;
  Element bias_element;
  std::int64_t bias_offset, bias_stride;  // of key 0, and from key to key
  const std::uint8_t* mask;
  std::int64_t mask_offset, mask_stride;
  Fault fault;

  FLASHCORE_HD bool has_softcap() const { return cap > T(0); }
  FLASHCORE_HD bool has_bias() const { return bias != nullptr; }
  FLASHCORE_HD bool has_mask() const { return mask != nullptr; }

  /// use(bias_at), where bias_at(key) is the bias of a key. A row type that knows more about the
  /// format of the bias selects the load here, outside the loop over keys.
  template <typename Use>
  FLASHCORE_HD void with_bias(Use use) const {
    use([this](std::int32_t key) {
      return load_element<T>(bias, bias_element, bias_offset + key * bias_stride);
    });
  }
  /// The score, or -inf if the boolean mask hides the key.
  FLASHCORE_HD T masked(T score, std::int32_t key) const {
    return mask[mask_offset + key * mask_stride] == 0 ? negative_infinity<T>() : score;
  }
};

/// The row of query i in (batch b, query head h).
template <typename T>
FLASHCORE_HD ScoreRow<T> score_row(const AttentionParams& p, std::int32_t b, std::int32_t h,
                                   std::int32_t i) {
  const std::int32_t mask_batch = p.fault.is(InjectedFault::mask_batch_ignored) ? 0 : b;
  ScoreRow<T> row{};
  row.scale = score_scale<T>(p);
  row.cap = static_cast<T>(p.softcap);
  row.has_alibi = p.alibi_slopes != nullptr;
  if (row.has_alibi) {
    row.slope = static_cast<T>(p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride]);
  }
  row.bias = p.bias;
  row.bias_element = p.bias_element;
  row.bias_offset = row_offset(p.bias_strides, b, h, i);
  row.bias_stride = p.bias_strides.column;
  row.mask = p.mask;
  row.mask_offset = row_offset(p.mask_strides, mask_batch, h, i);
  row.mask_stride = p.mask_strides.column;
  row.fault = p.fault;
  return row;
}

/// Math of scalar kernels: a softcap of any size.
struct ScalarScoreMath {
  template <typename T>
  FLASHCORE_HD static T softcap(T argument, T cap) {
    return capped(argument, cap);
  }
  template <typename T>
  FLASHCORE_HD static T absolute(T x) {
    return x < T(0) ? -x : x;
  }
};

/// Modifies the scores of a row, one option after the other: no loop has a branch on an option.
/// each(change) calls change(score, key, distance) for every score, where distance is the query's
/// position minus the key's. A kernel computes the distance as it likes, for example incrementally.
template <typename Math, ScoreInput kInput, typename Row, typename Each>
FLASHCORE_HD void modify_scores(const Row& row, Each each) {
  const auto add_bias = [&] {
    row.with_bias([&](auto bias_at) {
      each([&](auto& score, std::int32_t key, const auto&) { score = score + bias_at(key); });
    });
  };
  const bool bias_first = row.fault.is(InjectedFault::softcap_after_bias);
  if constexpr (kInput == ScoreInput::qk) {
    each([&](auto& score, std::int32_t, const auto&) { score = score * row.scale; });
  }
  if (row.has_bias() && bias_first) add_bias();
  if (row.has_softcap()) {
    each([&](auto& score, std::int32_t, const auto&) { score = Math::softcap(score, row.cap); });
  }
  if (row.has_alibi) {
    const bool is_signed = row.fault.is(InjectedFault::alibi_signed);
    each([&](auto& score, std::int32_t, const auto& distance) {
      score = score - row.slope * (is_signed ? distance : Math::absolute(distance));
    });
  }
  if (row.has_bias() && !bias_first) add_bias();
  if (row.has_mask()) {
    each([&](auto& score, std::int32_t key, const auto&) { score = row.masked(score, key); });
  }
}

/// The same for one score.
template <typename Math, ScoreInput kInput, typename Row, typename Score>
FLASHCORE_HD Score modify_score(Score score, const Row& row, Score distance, std::int32_t key) {
  modify_scores<Math, kInput>(row, [&](auto change) { change(score, key, distance); });
  return score;
}

}  // namespace flashcore::core
