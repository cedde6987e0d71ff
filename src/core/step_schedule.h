// The form of a kernel's step. All forms compute the same, but for the order of sums; ptxas makes
// another sequence of instructions of each, and the fastest is up to 5 % ahead of the usual one.
// Which it is was measured, shape by shape (docs/performance.md): nothing else speaks for it.
#pragma once

namespace flashcore::core {

struct StepSchedule {
  bool ping_pong;  // at the tensor cores: one warpgroup multiplies, others compute exponentials
  bool int_max3;   // maxima: by the bits of scores, three at a time
  int max_chains, sum_chains;  // of a row: in so many chains side by side
  bool split_rows;             // the second row's maximum beside the first one's exponentials
  bool sum_after_exp;          // all exponentials, not beside each
  bool probe_v_early;          // whether values are there: before the softmax, not behind it
};

struct TunedSchedule {
  bool fp8;
  int head_dim, tile_q, tile_k;
  StepSchedule schedule;
};

inline constexpr TunedSchedule kTunedSchedules[] = {
    // codes, head_dim, tile_q, tile_k {turns, int_max3, maxima, sums, apart, behind, early}
    {false, 64, 192, 128, {false, true, 1, 1, false, true, false}},
    {false, 64, 128, 128, {false, true, 1, 1, false, true, false}},
    {false, 64, 128, 208, {true, false, 1, 1, false, true, false}},
    {false, 64, 64, 128, {false, false, 2, 1, true, false, false}},
    {false, 96, 192, 96, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 128, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 160, {false, true, 1, 1, false, true, false}},
    {false, 128, 128, 176, {false, true, 1, 4, false, false, false}},
    {false, 192, 128, 112, {true, true, 1, 1, true, false, false}},
    {false, 256, 128, 64, {true, true, 1, 1, false, true, false}},
    {true, 64, 192, 192, {false, true, 1, 1, false, false, false}},
    {true, 64, 192, 128, {false, false, 1, 2, true, false, false}},
    {true, 64, 64, 128, {false, false, 4, 2, true, false, false}},
    {true, 128, 192, 128, {false, true, 1, 4, false, true, false}},
    {true, 256, 128, 128, {false, false, 1, 1, true, false, false}},
};

/// Of a shape that was not measured, the usual one.
constexpr StepSchedule schedule_for(bool fp8, int head_dim, int tile_q, int tile_k) {
  for (const TunedSchedule& known : kTunedSchedules) {
    if (known.fp8 == fp8 && known.head_dim == head_dim && known.tile_q == tile_q &&
        known.tile_k == tile_k) {
      return known.schedule;
    }
  }
  return {!fp8 && tile_q > 64, false, 1, 1, false, false, false};
}

}  // namespace flashcore::core
