// Variants of a Hopper mainloop step. All compute the same, except for the order of sums. ptxas
// schedules each variant differently; the best is up to 5 % faster than the default. The table was
// measured per tile shape (docs/experiments/sm90.md).
#pragma once

namespace flashcore::core {

struct StepSchedule {
  bool ping_pong;   // warpgroups alternate: one issues GEMMs, the others compute exponentials
  bool int_max3;    // row maximum by integer comparison of three scores at a time
  int max_chains;   // independent chains of a row's maximum
  int sum_chains;   // and of its sum
  bool split_rows;  // one row after the other: the second maximum overlaps the first exponentials
  bool sum_after_exp;  // sum after all exponentials, not beside each
  bool probe_v_early;  // test v_full before the softmax, not after it
};

struct TunedSchedule {
  bool fp8;
  int head_dim, tile_q, tile_k;
  StepSchedule schedule;
};

inline constexpr TunedSchedule kTunedSchedules[] = {
    // fp8, head_dim, tile_q, tile_k
    //     {ping_pong, int_max3, max_chains, sum_chains, split_rows, sum_after_exp, probe_v_early}
    {false, 64, 192, 128, {false, true, 1, 1, false, true, false}},
    {false, 64, 128, 128, {false, true, 1, 1, false, true, false}},
    {false, 64, 128, 208, {true, false, 1, 1, false, true, false}},
    {false, 64, 64, 128, {false, false, 2, 1, true, false, false}},
    {false, 96, 192, 96, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 128, {false, true, 1, 1, false, true, false}},
    {false, 128, 64, 160, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 160, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 176, {false, true, 1, 4, false, false, false}},
    {false, 192, 128, 112, {true, true, 1, 1, true, false, false}},
    {false, 256, 128, 64, {true, true, 1, 1, false, true, false}},
    {true, 64, 192, 192, {false, true, 1, 1, false, false, false}},
    {true, 64, 192, 128, {false, false, 1, 2, true, false, false}},
    {true, 64, 64, 128, {false, false, 4, 2, true, true, false}},
    {true, 128, 192, 128, {false, true, 1, 4, false, true, false}},
    {true, 256, 128, 128, {false, false, 1, 1, true, false, false}},
};

/// The measured schedule of a shape, or the default.
constexpr StepSchedule schedule_for(bool fp8, int head_dim, int tile_q, int tile_k) {
  for (const TunedSchedule& tuned : kTunedSchedules) {
    if (tuned.fp8 == fp8 && tuned.head_dim == head_dim && tuned.tile_q == tile_q &&
        tuned.tile_k == tile_k) {
      return tuned.schedule;
    }
  }
  return {!fp8 && tile_q > 64, false, 1, 1, false, false, false};
}

}  // namespace flashcore::core
