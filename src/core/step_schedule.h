// The form of a kernel's step. All forms compute the same, but for the order of sums; ptxas makes
// another sequence of instructions of each, and the fastest is up to 5 % ahead of the usual one.
// Which it is was measured, shape by shape (docs/performance.md): nothing else speaks for it.
#pragma once

namespace flashcore::core {

struct Form {
  bool turns;        // at the tensor cores: one warpgroup multiplies, others compute exponentials
  bool by_bits;      // maxima: by the bits of scores, three at a time
  int maxima, sums;  // of a row: in so many chains side by side
  bool rows_apart;   // the second row's maximum beside the first one's exponentials
  bool sums_behind;  // all exponentials, not beside each
  bool asks_early;   // whether values are there: before the softmax, not behind it
};

struct KnownForm {
  bool codes;
  int head_dim, tile_q, tile_k;
  Form form;
};

inline constexpr KnownForm kForms[] = {
    // codes, head_dim, tile_q, tile_k {turns, by_bits, maxima, sums, apart, behind, early}
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
constexpr Form form_of(bool codes, int head_dim, int tile_q, int tile_k) {
  for (const KnownForm& known : kForms) {
    if (known.codes == codes && known.head_dim == head_dim && known.tile_q == tile_q &&
        known.tile_k == tile_k) {
      return known.form;
    }
  }
  return {!codes && tile_q > 64, false, 1, 1, false, false, false};
}

}  // namespace flashcore::core
