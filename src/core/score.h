// Score modifications: scale, softcap, ALiBi, bias and mask, in the order of
// docs/numerics.md. The interval of visible keys (core/mask.h) comes after them.
//
// modify_scores() defines the order. A kernel calls it once per row, with a function that visits
// the scores which the thread or vector holds, or it calls modify_score() for one score at a time.
//   Row   ScoreRow<T>, or a type with the same functions, for example for a vector of rows
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

/// One query row of a call. Constants are read from the parameters when an option needs them:
/// a kernel has no registers for those of all options at once.
template <typename T>
struct ScoreRow {
  const AttentionParams& p;
  std::int32_t b, h, query;

  FLASHCORE_HD bool has_softcap() const { return p.softcap > 0; }
  FLASHCORE_HD bool has_alibi() const { return p.alibi_slopes != nullptr; }
  FLASHCORE_HD bool has_bias() const { return p.bias != nullptr; }
  FLASHCORE_HD bool has_mask() const { return p.has_mask(); }
  FLASHCORE_HD Fault fault() const { return p.fault; }

  FLASHCORE_HD T scale() const { return score_scale<T>(p); }
  FLASHCORE_HD T cap() const { return static_cast<T>(p.softcap); }
  FLASHCORE_HD T slope() const {
    return static_cast<T>(p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride]);
  }
  FLASHCORE_HD std::int64_t bias_offset() const { return row_offset(p.bias_strides, b, h, query); }
  FLASHCORE_HD std::int32_t mask_batch() const {
    return p.fault.is(InjectedFault::mask_batch_ignored) ? 0 : b;
  }
  FLASHCORE_HD std::int64_t mask_offset() const {
    return row_offset(p.mask_strides, mask_batch(), h, query);
  }
  FLASHCORE_HD const std::int32_t* block_mask_row() const {
    return p.block_mask.row(mask_batch(), h, query);
  }

  /// use(biased), where biased(score, key) is the score plus the key's bias. A row type that knows
  /// more about the format of the bias selects the load here, outside the loop over keys.
  template <typename Use>
  FLASHCORE_HD void with_bias(Use use) const {
    const std::int64_t offset = bias_offset();
    use([&](T score, std::int32_t key) {
      return score + load_element<T>(p.bias, p.bias_element, offset + key * p.bias_strides.column);
    });
  }
  /// use(masked), where masked(score, key) is the score, or -inf if the mask hides the key.
  template <typename Use>
  FLASHCORE_HD void with_mask(Use use) const {
    if (p.block_mask.given()) {
      const std::int32_t* blocks = block_mask_row();
      use([&](T score, std::int32_t key) {
        return p.block_mask.shows(blocks, query, key) ? score : negative_infinity<T>();
      });
      return;
    }
    const std::uint8_t* row = p.mask + mask_offset();
    use([&](T score, std::int32_t key) {
      return row[key * p.mask_strides.column] == 0 ? negative_infinity<T>() : score;
    });
  }
};

/// Math of scalar kernels: a softcap of any size.
struct ScalarScoreMath {
  /// each(change) replaces every score by change(score).
  template <typename T, typename Each>
  FLASHCORE_HD static void softcap(T cap, Each each) {
    each([&](auto argument) { return capped(argument, cap); });
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
    row.with_bias([&](auto biased) {
      each([&](auto& score, std::int32_t key, const auto&) { score = biased(score, key); });
    });
  };
  const bool bias_first = row.fault().is(InjectedFault::softcap_after_bias);
  if constexpr (kInput == ScoreInput::qk) {
    const auto scale = row.scale();
    each([&](auto& score, std::int32_t, const auto&) { score = score * scale; });
  }
  if (row.has_bias() && bias_first) add_bias();
  if (row.has_softcap()) {
    Math::softcap(row.cap(), [&](auto change) {
      each([&](auto& score, std::int32_t, const auto&) { score = change(score); });
    });
  }
  if (row.has_alibi()) {
    const auto slope = row.slope();
    const bool is_signed = row.fault().is(InjectedFault::alibi_signed);
    each([&](auto& score, std::int32_t, const auto& distance) {
      score = score - slope * (is_signed ? distance : Math::absolute(distance));
    });
  }
  if (row.has_bias() && !bias_first) add_bias();
  if (row.has_mask()) {
    row.with_mask([&](auto masked) {
      each([&](auto& score, std::int32_t key, const auto&) { score = masked(score, key); });
    });
  }
}

/// The same for one score.
template <typename Math, ScoreInput kInput, typename Row, typename Score>
FLASHCORE_HD Score modify_score(Score score, const Row& row, Score distance, std::int32_t key) {
  modify_scores<Math, kInput>(row, [&](auto change) { change(score, key, distance); });
  return score;
}

}  // namespace flashcore::core
