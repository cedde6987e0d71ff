// wgmma.mma_async: each warp computes its 16 rows. The GEMM runs when a wait requires it, so
// operands that a kernel releases too early are wrong, and accumulators in flight are NaN.
#include <array>
#include <cmath>
#include <cstdint>

#include "emulator/instructions/opcode.h"
#include "emulator/instructions/rows.h"
#include "emulator/instructions/tensor_core.h"
#include "emulator/machine/floats.h"
#include "emulator/machine/grid.h"
#include "emulator/machine/wgmma_descriptor.h"

namespace flashcore::emulator {
namespace {

using Format = TensorFormat;

/// Aux: columns, formats of a and b, majors, and whether a is in registers.
constexpr std::uint32_t kColumns = 0x1ff;
constexpr int kFormatA = 9, kFormatB = 11;
constexpr std::uint32_t kRegisterA = 1u << 13;
constexpr int kMaxColumns = 256, kMaxK = 32;

float decode(Format format, const std::uint8_t* bytes) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 2> all{};
    for (int code = 0; code < 256; ++code) {
      all[0][code] = decode_fp8<3>(static_cast<std::uint8_t>(code));
      all[1][code] = decode_fp8<2>(static_cast<std::uint8_t>(code));
    }
    return all;
  }();
  std::uint16_t bits;
  switch (format) {
    case Format::e4m3: return tables[0][*bytes];
    case Format::e5m2: return tables[1][*bytes];
    default: break;
  }
  __builtin_memcpy(&bits, bytes, 2);
  return format == Format::f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

int bytes_of(Format format) { return format == Format::f16 || format == Format::bf16 ? 2 : 1; }

struct Operands {
  float a[kMaxK][16];
  float b[kMaxK][kMaxColumns];
};

/// Rows [first, first + count) of an operand in shared memory, as to[k][row]. Reads 16 bytes at a
/// time: the swizzle keeps them together.
template <int kWidth>
void read_matrix(Warp& w, std::uint64_t bits, Format format, bool mn_major, int first, int count,
                 float (*to)[kWidth]) {
  constexpr int kChunk = 16;
  const MatrixDescriptor descriptor(bits);
  const int element = bytes_of(format), depth = 32 / element, in_chunk = kChunk / element;
  if (descriptor.has_base_offset()) w.fail("wgmma with a base offset is not emulated");
  const auto read = [&](std::uint32_t address, float* values) {
    const std::uint8_t* chunk = w.cta().shared_at(address, kChunk, w, 0);
    w.note_read_by_async_proxy(chunk, kChunk, 0);
    for (int e = 0; e < in_chunk; ++e) values[e] = decode(format, chunk + e * element);
  };
  for (int row = 0; row < count && !mn_major; ++row) {
    for (int k = 0; k < depth; k += in_chunk) {
      float values[kChunk];
      read(descriptor.k_major(static_cast<std::uint32_t>(first + row),
                              static_cast<std::uint32_t>(k * element)),
           values);
      for (int e = 0; e < in_chunk; ++e) to[k + e][row] = values[e];
    }
  }
  for (int k = 0; k < depth && mn_major; ++k) {
    for (int row = 0; row < count; row += in_chunk) {
      read(descriptor.mn_major(static_cast<std::uint32_t>(first + row),
                               static_cast<std::uint32_t>(k)),
           &to[k][row]);
    }
  }
}

/// The fragment of a in registers: 16 rows, 4 bytes of K per lane and register.
void read_registers(Warp& w, const std::int32_t* ops, Format format, Operands& to) {
  const int element = bytes_of(format), in_register = 4 / element;
  for (int r = 0; r < 4; ++r) {
    const std::uint8_t* row = w.in<std::uint8_t>(ops[r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int m = lane / 4 + r % 2 * 8, k = lane % 4 * in_register + r / 2 * 4 * in_register;
      for (int e = 0; e < in_register; ++e)
        to.a[k + e][m] = decode(format, row + 4 * lane + e * element);
    }
  }
}

/// Accumulator register 4 t + r of a lane: row and column of the warp's 16 rows.
int row_of(int lane, int r) { return lane / 4 + r % 4 / 2 * 8; }
int column_of(int lane, int r) { return r / 4 * 8 + lane % 4 * 2 + r % 2; }

/// Runs the oldest wgmma in flight.
void execute(Warp& w) {
  const PendingMma mma = std::move(w.mmas.front());
  w.mmas.pop_front();
  const Instruction& i = *mma.instruction;
  const int columns = static_cast<int>(i.aux & kColumns), registers = columns / 2;
  const auto format_a = static_cast<Format>(i.aux >> kFormatA & 3),
             format_b = static_cast<Format>(i.aux >> kFormatB & 3);
  const int depth = 32 / bytes_of(format_b);
  Operands operands;
  if ((i.aux & kRegisterA) != 0) {
    read_registers(w, i.ops + registers, format_a, operands);
  } else {
    read_matrix(w, mma.a, format_a, mma.a_mn_major, 16 * (w.index() % 4), 16, operands.a);
  }
  read_matrix(w, mma.b, format_b, mma.b_mn_major, 0, columns, operands.b);
  float c[16][kMaxColumns];
  for (int r = 0; r < registers; ++r) {
    for (int lane = 0; lane < kLanes; ++lane) {
      c[row_of(lane, r)][column_of(lane, r)] =
          mma.accumulate ? mma.accumulators[r * kLanes + lane] : 0.f;
    }
  }
  add_products(tensor_core(90, format_a, format_b), depth, columns, operands.a, operands.b, c);
  // The next wgmma on the same registers continues with the result; otherwise it is in registers
  // now.
  PendingMma* next = nullptr;
  for (PendingMma& other : w.mmas) {
    if (next == nullptr && other.first_accumulator == mma.first_accumulator) next = &other;
  }
  if (next != nullptr) next->accumulators.resize(static_cast<std::size_t>(registers) * kLanes);
  for (int r = 0; r < registers; ++r) {
    float* row = next != nullptr ? &next->accumulators[static_cast<std::size_t>(r) * kLanes]
                                 : w.out<float>(i.ops[r]);
    for (int lane = 0; lane < kLanes; ++lane) row[lane] = c[row_of(lane, r)][column_of(lane, r)];
  }
}

bool scale_of(Warp& w, std::int32_t op) {
  const std::uint32_t bits = w.predicate(op);
  if (op < 0) return bits != 0;
  if (bits != 0 && bits != kFullMask) w.fail("the lanes of a wgmma disagree on scale-d");
  return bits != 0;
}

std::int32_t immediate(Warp& w, std::int32_t op) { return *w.in<std::int32_t>(op); }

/// wgmma.mma_async d, a, b, scale-d, imm-scale-a, imm-scale-b[, [imm-trans-a,] imm-trans-b].
Step issue(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  if (mask != kFullMask) w.fail("wgmma without all lanes of the warp");
  const int registers = static_cast<int>(i.aux & kColumns) / 2;
  const bool in_registers = (i.aux & kRegisterA) != 0;
  const std::int32_t* rest = i.ops + registers + (in_registers ? 4 : 1);
  PendingMma mma;
  mma.instruction = &i;
  mma.group = w.mma_groups;
  if (!in_registers) mma.a = *w.in<std::uint64_t>(i.ops[registers]);
  mma.b = *w.in<std::uint64_t>(rest[0]);
  mma.accumulate = scale_of(w, rest[1]);
  if (immediate(w, rest[2]) != 1 || immediate(w, rest[3]) != 1)
    w.fail("wgmma with a negated operand is not emulated");
  const auto given = static_cast<int>(i.op_count - (rest - i.ops)) - 4;
  if (given == 2) mma.a_mn_major = immediate(w, rest[4]) != 0;
  if (given > 0) mma.b_mn_major = immediate(w, rest[3 + given]) != 0;
  mma.first_accumulator = i.ops[0];
  bool continues = false;
  for (const PendingMma& other : w.mmas)
    continues |= other.first_accumulator == mma.first_accumulator;
  for (int r = 0; r < registers && !continues; ++r) {
    float* row = w.out<float>(i.ops[r]);
    mma.accumulators.insert(mma.accumulators.end(), row, row + kLanes);
    for (int lane = 0; lane < kLanes; ++lane) row[lane] = NAN;
  }
  w.mmas.push_back(std::move(mma));
  return Step::next;
}

Step commit(Warp& w, const Instruction&, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  ++w.mma_groups;
  return Step::next;
}

Step wait(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (!w.converged(mask, kFullMask)) return Step::blocked;
  const std::uint64_t in_flight = w.in<std::uint32_t>(i.ops[0])[0];
  while (!w.mmas.empty() && w.mmas.front().group + in_flight < w.mma_groups) execute(w);
  return Step::next;
}

Step fence(Warp& w, const Instruction&, std::uint32_t mask) {
  return w.converged(mask, kFullMask) ? Step::next : Step::blocked;
}

bool find_format(std::string_view type, Format& format) {
  if (type == "f16")
    format = Format::f16;
  else if (type == "bf16")
    format = Format::bf16;
  else if (type == "e4m3")
    format = Format::e4m3;
  else if (type == "e5m2")
    format = Format::e5m2;
  else
    return false;
  return true;
}

/// The shape m64nNk…: N.
std::uint32_t columns_of(const Opcode& opcode) {
  for (std::string_view part : opcode.parts()) {
    if (part.starts_with("m64n"))
      return static_cast<std::uint32_t>(std::stoul(std::string(part.substr(4))));
  }
  return 0;
}

}  // namespace

bool find_wgmma(const Opcode& opcode, Recipe& recipe) {
  if (opcode.base() != "wgmma") return false;
  for (int& bytes : recipe.immediate_bytes) bytes = 4;
  if (opcode.has("fence")) recipe.handler = fence;
  if (opcode.has("commit_group")) recipe.handler = commit;
  if (opcode.has("wait_group")) recipe.handler = wait;
  if (opcode.has("mma_async")) {
    const auto types = opcode.types();
    Format a, b;
    if (types.size() != 3 || types[0] != "f32" || !find_format(types[1], a) ||
        !find_format(types[2], b))
      return false;
    recipe.handler = issue;
    recipe.aux = columns_of(opcode) | static_cast<std::uint32_t>(a) << kFormatA |
                 static_cast<std::uint32_t>(b) << kFormatB;
  }
  return recipe.handler != nullptr;
}

}  // namespace flashcore::emulator
