// The second table of mutants of the backward pass: masks, the gradient of the LSE, and faults of
// few inputs.
#include "mutants/bwd_faults.h"
#include "mutants/bwd_tools.h"

namespace flashcore::mutants {
namespace {

using verify::Format;
using enum FaultStage;

// Masks

/// A tile of queries without keys returns before it writes dq.
void dq_of_empty_rows_unwritten(BackwardParts& p) {
  p.head_done = [](BackwardWork& w) {
    for (std::int64_t i = 0; i < w.m; ++i) {
      if (!std::isinf(of_row(w.lse, i))) continue;
      for (std::int64_t c = 0; c < w.d; ++c) {
        w.dq[at(i, w.d, c)] = static_cast<float>(read(*w.call->dq, w.b, w.h, i, c));
      }
    }
  };
}

/// The loop over queries of a key looks the other way.
void sides_of_the_window_swapped(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const flashcore_verify_call& c = *w.call->forward;
    const std::int64_t behind = i + w.n - w.m - j;
    return !(is_causal(w) && behind < 0) && !(c.window_left >= 0 && -behind > c.window_left) &&
           !(c.window_right >= 0 && behind > c.window_right);
  };
}

void first_query_tile_rounded_up(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto is_skipped = [](const BackwardWork& w, const Pair& x) {
    const std::int64_t first = std::max<std::int64_t>(x.j / kTile * kTile - (w.n - w.m), 0);
    return is_causal(w) && x.i < first + padding(first, kTile);
  };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) { return is_skipped(w, x) ? 0.0f : x.ds; };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return is_skipped(w, x) ? 0.0f : x.p; };
}

/// The kernel for dk and dv has the mask, the one for dq has not.
void mask_missing_in_dq(BackwardParts& p) {
  guard_empty_rows(p);
  const auto visible = p.visible;
  p.visible = [](const BackwardWork&, std::int64_t, std::int64_t) { return true; };
  p.in_dk = [=](const BackwardWork& w, const Pair& x) {
    return visible(w, x.i, x.j) ? x.ds : 0.0f;
  };
  p.in_dv = [=](const BackwardWork& w, const Pair& x) { return visible(w, x.i, x.j) ? x.p : 0.0f; };
}

/// Whether a tile needs the mask is decided by its last row, which sees the most.
void diagonal_tile_not_masked(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const std::int64_t last_row = i / kTile * kTile + kTile - 1;
    const std::int64_t last_key = j / kTile * kTile + kTile - 1;
    return right(w, i, j) || (is_causal(w) && last_key <= last_row + w.n - w.m);
  };
}

void window_ignored_if_causal(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return is_causal(w) ? j <= i + w.n - w.m : right(w, i, j);
  };
}

/// Hidden scores are -inf before the softcap, and its negative after.
void softcap_of_hidden_scores(BackwardParts& p) {
  const auto visible = p.visible;
  p.visible = [=](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    return w.softcap > 0 || visible(w, i, j);
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    Pair capped = x;
    if (!visible(w, x.i, x.j)) capped.score = -w.softcap;
    return right(w, capped);
  };
  p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
    return visible(w, x.i, x.j) ? right(w, x) : 0.0f;
  };
  guard_empty_rows(p);
}

/// The rows of a tile are those of all heads of a group, and the mask takes them for positions.
void packed_rows_as_positions(BackwardParts& p) {
  guard_empty_rows(p);
  p.visible = [right = p.visible](const BackwardWork& w, std::int64_t i, std::int64_t j) {
    const std::int64_t packed = i * w.group + w.h % w.group;
    return is_causal(w) ? j <= packed + w.n - w.m : right(w, i, j);
  };
}

std::vector<Mutant> mask_faults() {
  return {
      backward("bwd_dq_of_empty_rows_unwritten", mask, "f32 f16", dq_of_empty_rows_unwritten,
               coverage),
      backward("bwd_sides_of_the_window_swapped", mask, "f32 bf16", sides_of_the_window_swapped),
      backward("bwd_first_query_tile_rounded_up", mask, "f32", first_query_tile_rounded_up),
      backward("bwd_mask_missing_in_dq", mask, "f32 f16", mask_missing_in_dq),
      backward("bwd_diagonal_tile_not_masked", mask, "f32 bf16", diagonal_tile_not_masked),
      backward("bwd_window_ignored_if_causal", mask, "f32", window_ignored_if_causal),
      backward("bwd_softcap_of_hidden_scores", mask, "f32", softcap_of_hidden_scores),
      backward("bwd_packed_rows_as_positions", mask, "f32 bf16", packed_rows_as_positions),
  };
}

// The gradient of the LSE

void dlse_times_ln2(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.dlse) x *= 0.6931472f;
  };
}

void dlse_by_kv_head(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    if (w.call->dlse != nullptr) w.dlse = rows_of(*w.call->dlse, w.b, w.h / w.group);
  };
}

void dlse_in_dq_only(BackwardParts& p) {
  p.in_dk = [slope = p.slope](const BackwardWork& w, const Pair& x) {
    return x.ds - x.p * of_row(w.dlse, x.i) * slope(w, x);
  };
}

void dlse_of_the_first_batch(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    if (w.call->dlse != nullptr) w.dlse = rows_of(*w.call->dlse, 0, w.h);
  };
}

void dlse_times_p_squared(BackwardParts& p) {
  p.ds = [right = p.ds](const BackwardWork& w, const Pair& x) {
    return right(w, x) + (x.p * x.p - x.p) * of_row(w.dlse, x.i);
  };
}

/// It is added to dS after the derivative of the softcap.
void dlse_without_slope_of_the_softcap(BackwardParts& p) {
  p.ds = [slope = p.slope](const BackwardWork& w, const Pair& x) {
    const float dlse = of_row(w.dlse, x.i);
    return x.p * ((x.dp - (of_row(w.delta, x.i) + dlse)) * slope(w, x) + dlse);
  };
  p.slope = [](const BackwardWork&, const Pair&) { return 1.0f; };
}

std::vector<Mutant> dlse_faults() {
  return {
      backward("bwd_dlse_times_ln2", dlse, "f32 f16", dlse_times_ln2),
      backward("bwd_dlse_by_kv_head", dlse, "f32", dlse_by_kv_head),
      backward("bwd_dlse_in_dq_only", dlse, "f32 f16", dlse_in_dq_only),
      backward("bwd_dlse_of_the_first_batch", dlse, "f32", dlse_of_the_first_batch),
      backward("bwd_dlse_times_p_squared", dlse, "f32 f16", dlse_times_p_squared),
      backward("bwd_dlse_without_slope", dlse, "f32", dlse_without_slope_of_the_softcap),
  };
}

// Faults of all gradients, or of two, under sizes of dout or two options that no stage is behind.

/// Rows of padding have no gradient, so rows with a small one are skipped.
void rows_of_small_dout_skipped(BackwardParts& p) {
  const auto most = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    most->assign(static_cast<std::size_t>(w.m), 0.0f);
    for (std::int64_t i = 0; i < w.m; ++i) {
      float& of_this = (*most)[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < w.dv_dim; ++c) {
        of_this = std::max(of_this, std::fabs(w.dout[at(i, w.dv_dim, c)]));
      }
    }
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    const bool is_skipped = of_row(*most, x.i) > 0 && of_row(*most, x.i) < 1e-5f;
    return is_skipped ? 0.0f : right(w, x);
  };
}

void dout_clipped(BackwardParts& p) {
  p.loaded = [](BackwardWork& w) {
    for (float& x : w.dout) x = std::clamp(x, -100.0f, 100.0f);
  };
}

/// Tiles that need no mask take a short path, which has no other options either.
void softcap_in_masked_tiles_only(BackwardParts& p) {
  constexpr std::int64_t kTile = 16;
  const auto takes_short_path = [visible = p.visible](const BackwardWork& w, const Pair& x) {
    const flashcore_verify_call& c = *w.call->forward;
    const bool has_mask = is_causal(w) || c.window_left >= 0 || c.window_right >= 0;
    const std::int64_t row = x.i / kTile * kTile, key = x.j / kTile * kTile;
    return has_mask && visible(w, row, std::min(key + kTile, w.n) - 1) &&
           visible(w, std::min(row + kTile, w.m) - 1, key);
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    Pair uncapped = x;
    if (takes_short_path(w, x)) uncapped.score = x.z;
    return right(w, uncapped);
  };
  p.slope = [=, right = p.slope](const BackwardWork& w, const Pair& x) {
    return takes_short_path(w, x) ? 1.0f : right(w, x);
  };
}

/// dS times a factor against underflow, which overflows for a large dout.
void ds_overflows_f16(BackwardParts& p) {
  p.in_dq = p.in_dk = [](const BackwardWork&, const Pair& x) {
    return rounded(Format::f16, 1024 * x.ds) / 1024;
  };
}

std::vector<Mutant> faults_of_few_inputs() {
  return {
      backward("bwd_rows_of_small_dout_skipped", unlocalised, "f32 bf16",
               rows_of_small_dout_skipped),
      backward("bwd_dout_clipped", unlocalised, "f32 bf16", dout_clipped),
      backward("bwd_softcap_in_masked_tiles_only", unlocalised, "f32",
               softcap_in_masked_tiles_only),
      backward("bwd_ds_overflows_f16", unlocalised, "f16", ds_overflows_f16),
  };
}

}  // namespace

std::vector<Mutant> bwd_second_options() {
  std::vector<Mutant> all;
  for (const auto& part : {mask_faults(), dlse_faults(), faults_of_few_inputs()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace flashcore::mutants
