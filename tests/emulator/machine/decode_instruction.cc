// Operands and instructions of the decoder.
#include <cctype>
#include <charconv>
#include <cstring>
#include <stdexcept>

#include "emulator/instructions/special.h"
#include "emulator/machine/decoder.h"

namespace flashcore::emulator {
namespace {

using Find = bool (*)(const Opcode&, Recipe&);
constexpr Find kFinders[] = {
    find_control,  find_move,  find_memory, find_compare, find_convert,         find_integer,
    find_bits,     find_float, find_half,   find_atomic,  find_warp_collective, find_barrier,
    find_mbarrier, find_copy,  find_matrix, find_wgmma,   find_bulk_copy};

int element_bytes(std::string_view type) {
  if (type.empty()) return 4;
  const int bytes = ptx::size_of(type);
  return bytes == 0 ? 4 : bytes;
}

}  // namespace

std::optional<Decoder::Register> Decoder::find_register(const Frame& frame, int scope,
                                                        std::string_view name) const {
  std::size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
  int number = -1;
  std::from_chars(name.data() + digits, name.data() + name.size(), number);
  for (; scope >= 0; scope = frame.function.scopes[scope].parent) {
    for (const RegisterRange& range : frame.scopes[scope].registers) {
      const std::size_t row = range.bytes == 0 ? 4 : static_cast<std::size_t>(range.bytes) * kLanes;
      if (range.count < 0 && range.name == name) {
        return Register{static_cast<std::int32_t>(range.offset), range.bytes};
      }
      if (range.count >= 0 && number >= 0 && number < range.count &&
          range.name == name.substr(0, digits)) {
        return Register{static_cast<std::int32_t>(range.offset + row * number), range.bytes};
      }
    }
  }
  return std::nullopt;
}

std::optional<Decoder::Location> Decoder::find_variable(const Frame& frame, int scope,
                                                        std::string_view name) {
  for (; scope >= 0; scope = frame.function.scopes[scope].parent) {
    const auto found = frame.scopes[scope].variables.find(name);
    if (found != frame.scopes[scope].variables.end()) return found->second;
  }
  if (const auto found = frame.params.find(name); found != frame.params.end()) return found->second;
  const auto variable = module_.variables.find(name);
  if (variable == module_.variables.end()) return std::nullopt;
  if (variable->second.space != "shared") {
    const auto found = globals_.find(name);
    return found == globals_.end() ? std::nullopt
                                   : std::optional(Location{Space::global, found->second});
  }
  if (variable->second.is_extern) {
    dynamic_shared_.insert(name);
    return Location{Space::shared, kSharedBase};
  }
  const auto [known, fresh] = module_shared_.try_emplace(name, Location{Space::shared, 0});
  if (fresh) {
    known->second.address = kSharedBase + reserve(program_->shared_bytes, variable->second.bytes,
                                                  static_cast<std::size_t>(variable->second.align));
  }
  return known->second;
}

std::int32_t Decoder::constant(std::uint64_t bits, int bytes) {
  const auto [known, fresh] = known_constants_.try_emplace({bits, bytes}, 0);
  if (fresh) {
    std::vector<std::uint8_t>& pool = program_->constants;
    pool.resize((pool.size() + 63) / 64 * 64);
    known->second = ~static_cast<std::int32_t>(pool.size());
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int k = 0; k < bytes; ++k) pool.push_back(static_cast<std::uint8_t>(bits >> (8 * k)));
    }
  }
  return known->second;
}

std::int32_t Decoder::variable_constant(const Location& location, int bytes, bool dynamic) {
  if (!dynamic) return constant(location.address, bytes);
  // Not shared with plain constants: the base is added at the end.
  std::vector<std::uint8_t>& pool = program_->constants;
  pool.resize((pool.size() + 63) / 64 * 64);
  const std::size_t at = pool.size();
  pool.resize(at + 8 * kLanes);
  std::memcpy(&pool[at], &location.address, sizeof location.address);
  dynamic_shared_constants_.push_back(at);
  if (bytes == 4) narrow_constants_.insert(at);
  return ~static_cast<std::int32_t>(at);
}

std::int32_t Decoder::scratch() {
  if (scratch_ < 0)
    scratch_ = static_cast<std::int32_t>(reserve(program_->register_bytes, 8 * kLanes, 64));
  return scratch_;
}

void Decoder::push(std::int32_t operand, int bytes, Instruction& instruction) {
  if (instruction.op_count == 0) instruction.first_bytes = static_cast<std::uint8_t>(bytes);
  if (instruction.op_count == 1) instruction.second_bytes = static_cast<std::uint8_t>(bytes);
  program_->operands.push_back(operand);
  ++instruction.op_count;
}

void Decoder::add_address(Frame& frame, const ptx::Statement& statement,
                          const ptx::Operand& operand, Instruction& instruction) {
  for (const ptx::Operand& element : operand.elements) {
    if (element.kind == ptx::Operand::Kind::vector) {  // the coordinates of a tensor copy
      add_operand(frame, statement, element, 4, instruction);
      continue;
    }
    if (element.value != 0 && element.kind == ptx::Operand::Kind::name) {
      if (instruction.imm != 0)
        throw std::runtime_error("PTX line " + std::to_string(statement.line) +
                                 ": two displacements");
      instruction.imm = element.value;
    }
    if (const auto found = find_register(frame, statement.scope, element.name)) {
      if (instruction.address_bytes != 4)
        instruction.address_bytes = static_cast<std::uint8_t>(found->bytes);
      push(found->offset, found->bytes, instruction);
    } else if (const auto variable = find_variable(frame, statement.scope, element.name)) {
      push(variable_constant(*variable, 8, dynamic_shared_.contains(element.name)), 8, instruction);
      // The parameters of an inlined function are variables of its caller.
      const auto spaced = static_cast<Space>(instruction.aux & 7);
      if (spaced == Space::param && variable->space == Space::local) {
        instruction.aux = (instruction.aux & ~7u) | static_cast<std::uint32_t>(Space::local);
      }
    } else if (element.kind == ptx::Operand::Kind::integer) {
      push(constant(static_cast<std::uint64_t>(element.value), 8), 8, instruction);
    } else {
      throw std::runtime_error("PTX line " + std::to_string(statement.line) + ": unknown address " +
                               std::string(element.name));
    }
  }
}

void Decoder::add_operand(Frame& frame, const ptx::Statement& statement,
                          const ptx::Operand& operand, int bytes, Instruction& instruction) {
  using Kind = ptx::Operand::Kind;
  switch (operand.kind) {
    case Kind::vector:
      for (const ptx::Operand& element : operand.elements) {
        add_operand(frame, statement, element, bytes, instruction);
      }
      return;
    case Kind::address: add_address(frame, statement, operand, instruction); return;
    case Kind::float32:
      push(bytes == 8 ? constant(static_cast<std::uint64_t>(operand.value), 4)
                      : constant(static_cast<std::uint64_t>(operand.value), bytes),
           bytes, instruction);
      return;
    case Kind::integer:
    case Kind::float64:
      push(constant(static_cast<std::uint64_t>(operand.value), bytes), bytes, instruction);
      return;
    default: break;
  }
  if (operand.name == "_") {
    push(scratch(), bytes, instruction);
  } else if (const auto found = find_register(frame, statement.scope, operand.name)) {
    push(found->offset, found->bytes, instruction);
    if (operand.negated) {
      if (!statement.opcode.starts_with("vote") && !statement.opcode.starts_with("setp")) {
        throw std::runtime_error("PTX line " + std::to_string(statement.line) +
                                 ": negated operand");
      }
      instruction.aux |= kNegated;
    }
  } else if (const auto variable = find_variable(frame, statement.scope, operand.name)) {
    Location at = *variable;
    at.address += static_cast<std::uint64_t>(operand.value);
    push(variable_constant(at, bytes, dynamic_shared_.contains(operand.name)), bytes, instruction);
  } else {
    throw std::runtime_error("PTX line " + std::to_string(statement.line) + ": unknown name " +
                             std::string(operand.name));
  }
  if (!operand.second.empty()) {
    const auto second = find_register(frame, statement.scope, operand.second);
    push(second ? second->offset : scratch(), 4, instruction);
  }
}

Recipe Decoder::find_recipe(const Opcode& opcode, const ptx::Statement& statement,
                            Instruction& instruction) {
  using Kind = ptx::Operand::Kind;
  Recipe recipe;
  const auto& operands = statement.operands;
  if (opcode.base() == "mov" && operands.size() == 2) {
    if (operands[0].kind == Kind::vector) return {unpack_elements};
    if (operands[1].kind == Kind::vector) return {pack_elements};
    if (const int special = special_register(operands[1].name); special >= 0) {
      recipe.handler = move_special;
      recipe.aux = static_cast<std::uint32_t>(special);
      return recipe;
    }
  }
  for (const Find find : kFinders) {
    Recipe found;
    if (!find(opcode, found)) continue;
    if (opcode.base() == "setp" && !operands[0].second.empty()) found.aux |= 4;
    // A destination of an mbarrier is a state; arrivals at other CTAs' barriers have none.
    if (opcode.base() == "mbarrier" && opcode.parts()[1].starts_with("arrive") &&
        operands[0].kind == Kind::address) {
      found.aux |= 4;
    }
    // wgmma: a is a descriptor or a vector of registers.
    if (opcode.has("mma_async") && operands.at(1).kind == Kind::vector) found.aux |= 1u << 13;
    instruction.aux = found.aux;
    return found;
  }
  throw std::runtime_error("PTX line " + std::to_string(statement.line) +
                           ": the emulator has no instruction " + std::string(opcode.text()));
}

void Decoder::add_instruction(Frame& frame, const ptx::Statement& statement,
                              std::string_view text) {
  const Opcode opcode(text);
  Instruction instruction;
  const Recipe recipe = find_recipe(opcode, statement, instruction);
  instruction.handler = recipe.handler;
  instruction.aux = recipe.aux;
  instruction.line = statement.line;
  if (!statement.guard.empty()) {
    const auto guard = find_register(frame, statement.scope, statement.guard);
    if (!guard)
      throw std::runtime_error("PTX line " + std::to_string(statement.line) + ": unknown guard");
    instruction.guard = guard->offset;
    instruction.guard_negated = statement.guard_negated;
  }
  const std::size_t first = program_->operands.size();
  if (opcode.base() != "bra" && recipe.handler != move_special) {
    const int usual = element_bytes(opcode.type());
    for (std::size_t k = 0; k < statement.operands.size(); ++k) {
      const int special = k < 8 ? recipe.immediate_bytes[k] : 0;
      ptx::Operand operand = statement.operands[k];
      const bool is_predicate = opcode.type() == "pred" || (opcode.base() == "vote" && k == 1);
      if (is_predicate && operand.kind == ptx::Operand::Kind::integer) {
        operand.value = operand.value != 0 ? -1 : 0;
      }
      add_operand(frame, statement, operand, special != 0 ? special : usual, instruction);
    }
  } else if (recipe.handler == move_special) {
    add_operand(frame, statement, statement.operands[0], 4, instruction);
  }
  // fix_pointers() makes a pointer of the index.
  instruction.ops = reinterpret_cast<const std::int32_t*>(first);
  program_->code.push_back(instruction);
  program_->opcodes.push_back(std::string(text));
}

}  // namespace flashcore::emulator
