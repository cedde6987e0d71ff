// ldmatrix, stmatrix, movmatrix and mma.sync, in the fragment layouts of the PTX manual.
#include <cstdint>
#include <cstring>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/instructions/tensor_core.h"
#include "emulator/machine/floats.h"
#include "emulator/machine/grid.h"

namespace flashcore::emulator {
namespace {

constexpr std::uint32_t kSpaceBits = 7;
constexpr int kRowBytes = 16;  // of an 8x8 matrix of 16-bit elements

using Matrix = std::uint16_t[8][8];

/// Lane l holds elements 2 (l % 4) and the next of row l / 4.
void matrix_to_row(const Matrix& m, std::uint32_t* row, bool transposed) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int r = lane / 4, c = lane % 4 * 2;
    row[lane] = transposed ? m[c][r] | static_cast<std::uint32_t>(m[c + 1][r]) << 16
                           : m[r][c] | static_cast<std::uint32_t>(m[r][c + 1]) << 16;
  }
}
void row_to_matrix(const std::uint32_t* row, Matrix& m, bool transposed) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int r = lane / 4, c = lane % 4 * 2;
    const auto low = static_cast<std::uint16_t>(row[lane]);
    const auto high = static_cast<std::uint16_t>(row[lane] >> 16);
    (transposed ? m[c][r] : m[r][c]) = low;
    (transposed ? m[c + 1][r] : m[r][c + 1]) = high;
  }
}

void need_whole_warp(Warp& w, std::uint32_t mask) {
  if (mask != kFullMask) w.fail("a matrix instruction without all lanes of the warp");
}

template <int kCount, bool kTransposed>
Step ldmatrix(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  need_whole_warp(w, mask);
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  std::uint32_t rows[kCount][kLanes];
  for (int k = 0; k < kCount; ++k) {
    Matrix m;
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * k + r;
      const std::uint8_t* from =
          w.resolve(space, w.address(i, kCount, lane), kRowBytes, kRowBytes, lane);
      w.note_read(from, kRowBytes, lane);
      std::memcpy(m[r], from, kRowBytes);
    }
    matrix_to_row(m, rows[k], kTransposed);
  }
  for (int k = 0; k < kCount; ++k)
    std::memcpy(w.out<std::uint32_t>(i.ops[k]), rows[k], sizeof rows[k]);
  return Step::next;
}

template <int kCount, bool kTransposed>
Step stmatrix(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  need_whole_warp(w, mask);
  const auto space = static_cast<Space>(i.aux & kSpaceBits);
  for (int k = 0; k < kCount; ++k) {
    Matrix m;
    row_to_matrix(w.in<std::uint32_t>(i.ops[1 + k]), m, kTransposed);
    for (int r = 0; r < 8; ++r) {
      const int lane = 8 * k + r;
      std::uint8_t* to = w.resolve(space, w.address(i, 0, lane), kRowBytes, kRowBytes, lane);
      w.note_write(to, reinterpret_cast<const std::uint8_t*>(m[r]), kRowBytes, lane);
      std::memcpy(to, m[r], kRowBytes);
    }
  }
  return Step::next;
}

Step movmatrix(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  need_whole_warp(w, mask);
  Matrix m;
  row_to_matrix(w.in<std::uint32_t>(i.ops[1]), m, false);
  matrix_to_row(m, w.out<std::uint32_t>(i.ops[0]), true);
  return Step::next;
}

struct F16 {
  static constexpr auto kFormat = TensorFormat::f16;
  static float read(std::uint16_t bits) { return half_to_float(bits); }
};
struct Bf16 {
  static constexpr auto kFormat = TensorFormat::bf16;
  static float read(std::uint16_t bits) { return bfloat_to_float(bits); }
};

/// mma m16n8k8 and m16n8k16, f32 accumulators.
template <typename Format, int kK>
Step mma(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  need_whole_warp(w, mask);
  constexpr int kA = kK / 4, kB = kK / 8;  // registers of the operands
  float a[kK][16], b[kK][8], c[16][8];
  for (int r = 0; r < kA; ++r) {
    const std::uint32_t* row = w.in<std::uint32_t>(i.ops[4 + r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int m = lane / 4 + r % 2 * 8, k = lane % 4 * 2 + r / 2 * 8;
      a[k][m] = Format::read(static_cast<std::uint16_t>(row[lane]));
      a[k + 1][m] = Format::read(static_cast<std::uint16_t>(row[lane] >> 16));
    }
  }
  for (int r = 0; r < kB; ++r) {
    const std::uint32_t* row = w.in<std::uint32_t>(i.ops[4 + kA + r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int n = lane / 4, k = lane % 4 * 2 + r * 8;
      b[k][n] = Format::read(static_cast<std::uint16_t>(row[lane]));
      b[k + 1][n] = Format::read(static_cast<std::uint16_t>(row[lane] >> 16));
    }
  }
  for (int r = 0; r < 4; ++r) {
    const float* row = w.in<float>(i.ops[4 + kA + kB + r]);
    for (int lane = 0; lane < kLanes; ++lane)
      c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2] = row[lane];
  }
  const int device = w.cta().grid->compute_capability;
  add_products(tensor_core(device, Format::kFormat, Format::kFormat), kK, 8, a, b, c);
  for (int r = 0; r < 4; ++r) {
    float* row = w.out<float>(i.ops[r]);
    for (int lane = 0; lane < kLanes; ++lane)
      row[lane] = c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  }
  return Step::next;
}

Handler find_mma(const Opcode& opcode) {
  if (!opcode.has("row") || !opcode.has("col")) return nullptr;
  const auto types = opcode.types();
  if (types.size() != 4 || types[0] != "f32" || types[1] != types[2] || types[3] != "f32")
    return nullptr;
  const bool wide = opcode.has("m16n8k16"), narrow = opcode.has("m16n8k8");
  if (types[1] == "f16") return wide ? mma<F16, 16> : narrow ? mma<F16, 8> : nullptr;
  if (types[1] == "bf16") return wide ? mma<Bf16, 16> : narrow ? mma<Bf16, 8> : nullptr;
  return nullptr;
}

template <template <int, bool> typename H>
Handler by_count(const Opcode& opcode) {
  const bool t = opcode.has("trans");
  if (opcode.has("x1")) return t ? H<1, true>::run : H<1, false>::run;
  if (opcode.has("x2")) return t ? H<2, true>::run : H<2, false>::run;
  if (opcode.has("x4")) return t ? H<4, true>::run : H<4, false>::run;
  return nullptr;
}
template <int kCount, bool kTransposed>
struct Load {
  static constexpr Handler run = ldmatrix<kCount, kTransposed>;
};
template <int kCount, bool kTransposed>
struct Store {
  static constexpr Handler run = stmatrix<kCount, kTransposed>;
};

}  // namespace

bool find_matrix(const Opcode& opcode, Recipe& recipe) {
  recipe.aux = static_cast<std::uint32_t>(opcode.space());
  const bool b16 = opcode.has("m8n8") && opcode.has("b16");
  if (opcode.base() == "ldmatrix" && b16) recipe.handler = by_count<Load>(opcode);
  if (opcode.base() == "stmatrix" && b16) recipe.handler = by_count<Store>(opcode);
  if (opcode.base() == "movmatrix" && b16) recipe.handler = movmatrix;
  if (opcode.base() == "mma") recipe.handler = find_mma(opcode);
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
