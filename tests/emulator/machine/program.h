// A kernel that is ready to run: decoded instructions over rows of registers.
//
// A register is a row of 32 lanes in its warp's register file; an operand is the byte offset of the
// row. Negative operands ~i are rows of constants, which all warps share. Predicates are masks of
// 32 bits. So one instruction is one loop over rows, without a case for immediates.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flashcore::emulator {

class Warp;
struct Instruction;

inline constexpr int kLanes = 32;
inline constexpr std::uint32_t kFullMask = 0xffffffffu;

enum class Step {
  next,     // the lanes go on to the following instruction
  jumped,   // the handler has set the lanes' next instruction
  blocked,  // the lanes must execute the instruction again later
};

/// Executes an instruction for the lanes of `mask`, never 0.
using Handler = Step (*)(Warp& warp, const Instruction& instruction, std::uint32_t mask);

/// Of aux: the predicate operand is negated.
inline constexpr std::uint32_t kNegated = 1u << 16;

struct Instruction {
  Handler handler = nullptr;
  const std::int32_t* ops = nullptr;  // all operands, vectors and addresses flattened
  std::int64_t imm = 0;               // displacement of the address, or an immediate count
  std::int32_t guard = -1;
  std::uint32_t target = 0;  // of a branch
  std::uint32_t aux = 0;     // modifiers, defined by the handler
  std::uint16_t op_count = 0;
  bool guard_negated = false;
  std::uint8_t first_bytes = 0, second_bytes = 0;  // sizes of the registers of operands 0 and 1
  std::uint8_t address_bytes = 8;                  // size of the register with the address
  std::int32_t line = 0;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<std::int32_t> operands;
  std::vector<std::uint8_t> constants;
  std::vector<std::string> opcodes;  // text of each instruction, for messages
  std::size_t register_bytes = 0;
  std::size_t local_bytes = 0;   // per thread
  std::size_t shared_bytes = 0;  // static
  std::size_t param_bytes = 0;
  std::vector<std::size_t> param_offsets, param_sizes;
  int max_threads = 0, min_ctas = 1;
};

}  // namespace flashcore::emulator
