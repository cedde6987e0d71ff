// The mutants of the backward pass that its probes were written or extended for, and correct
// implementations.
#include "mutants/bwd_faults.h"
#include "mutants/bwd_pairs.h"

namespace flashcore::mutants {

using verify::Format;
using enum FaultStage;

std::vector<Mutant> first_backward_mutants() {
  std::vector<Mutant> all;
  for (const auto& kind : {bwd_coverage_faults(),
                           bwd_tail_faults(),
                           bwd_layout_faults(),
                           bwd_bounds_faults(),
                           bwd_determinism_faults(),
                           bwd_p_faults(),
                           bwd_scale_faults(),
                           bwd_precision_faults(),
                           bwd_dp_faults(),
                           bwd_delta_faults(),
                           bwd_ds_faults(),
                           bwd_dlse_faults(),
                           bwd_dq_faults(),
                           bwd_dk_faults(),
                           bwd_accumulate_faults(),
                           bwd_mask_faults(),
                           bwd_address_faults(),
                           bwd_p_tile_faults(),
                           bwd_dp_tile_faults(),
                           bwd_delta_tile_faults(),
                           bwd_ds_tile_faults(),
                           bwd_product_faults(),
                           bwd_coverage_by_option_faults(),
                           bwd_state_faults(),
                           bwd_sum_by_size_faults(),
                           bwd_mask_by_option_faults(),
                           bwd_dlse_by_option_faults(),
                           bwd_few_input_faults(),
                           bwd_second_values(),
                           bwd_second_memory(),
                           bwd_second_products(),
                           bwd_second_options(),
                           bwd_third_values(),
                           bwd_third_memory(),
                           bwd_third_products(),
                           bwd_third_options(),
                           bwd_fourth_tiles(),
                           bwd_fourth_rows(),
                           bwd_fourth_arguments(),
                           bwd_fourth_numbers()}) {
    all.insert(all.end(), kind.begin(), kind.end());
  }
  return all;
}

namespace {

/// Q is multiplied by scale · log2 e once, and stored again in its format. The tolerance
/// of a score allows that: its operands may contain a part of the scale.
void scaled_q_in_16_bits(BackwardParts& p) {
  constexpr float kLog2e = 1.442695f;
  const auto q = std::make_shared<std::vector<float>>();
  p.loaded = [=](BackwardWork& w) {
    *q = w.q;
    const Format format = format_of(*w.call->forward->q);
    for (float& x : *q) x = rounded(format, w.scale * kLog2e * x);
  };
  p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
    Pair scored = x;
    scored.score = capped(w, dot_of_rows(*q, x.i, w.k, x.j, w.d) / kLog2e);
    return right(w, scored);
  };
}

}  // namespace

std::vector<Mutant> correct_backwards() {
  const auto rounded_operands = [](Format format) {
    return [=](BackwardParts& p) {
      p.in_dv = [=](const BackwardWork&, const Pair& x) { return rounded(format, x.p); };
      p.in_dk = p.in_dq = [=](const BackwardWork&, const Pair& x) { return rounded(format, x.ds); };
    };
  };
  const auto everything_rounded = [](Format format) {
    return [=](BackwardParts& p) {
      p.p = [=, right = p.p](const BackwardWork& w, const Pair& x) {
        Pair narrow = x;
        narrow.score = rounded(format, x.score);
        return rounded(format, right(w, narrow));
      };
      p.dp = [=, right = p.dp](const BackwardWork& w, const Pair& x) {
        return rounded(format, right(w, x));
      };
      p.delta = [=, right = p.delta](const BackwardWork& w, std::int64_t i) {
        return rounded(format, right(w, i));
      };
      p.ds = [=, right = p.ds](const BackwardWork& w, const Pair& x) {
        return rounded(format, right(w, x));
      };
    };
  };
  return {
      backward("bwd_tiled_32", none, "f32 bf16 f16", [](BackwardParts&) {}),
      backward("bwd_one_tile", none, "f32 bf16", [](BackwardParts& p) { p.tile = 1 << 20; }),
      backward("bwd_tiled_1", none, "f32", [](BackwardParts& p) { p.tile = 1; }),
      backward("bwd_without_dlse", none, "f32", [](BackwardParts& p) { p.takes_dlse = false; }),
      backward("bwd_operands_in_bf16", none, "bf16", rounded_operands(Format::bf16)),
      backward("bwd_operands_in_f16", none, "f16", rounded_operands(Format::f16)),
      backward("bwd_everything_in_bf16", none, "bf16", everything_rounded(Format::bf16)),
      backward("bwd_everything_in_f16", none, "f16", everything_rounded(Format::f16)),
      backward("bwd_scaled_q_in_16_bits", none, "bf16 f16", scaled_q_in_16_bits),
  };
}

}  // namespace flashcore::mutants
