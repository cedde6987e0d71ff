#include "emulator/machine/decode.h"

#include <cstring>
#include <stdexcept>

#include "emulator/instructions/opcode.h"
#include "emulator/machine/decoder.h"

namespace flashcore::emulator {
namespace {

std::size_t align_up(std::size_t size, std::size_t align) {
  return (size + align - 1) / align * align;
}

}  // namespace

std::size_t reserve(std::size_t& used, std::size_t bytes, std::size_t align) {
  used = align_up(used, align);
  const std::size_t at = used;
  used += bytes;
  return at;
}

Decoder::Decoder(ptx::Module& module, const GlobalAddresses& globals)
    : module_(module), globals_(globals), program_(std::make_unique<Program>()) {
  program_->register_bytes = 0;
}

std::unique_ptr<Program> Decoder::run(ptx::Function& entry) {
  Program& program = *program_;
  program.name = std::string(entry.name);
  program.max_threads = entry.max_threads;
  program.min_ctas = entry.min_ctas;
  Variables params;
  for (const ptx::Variable& param : entry.params) {
    const std::size_t at = reserve(program.param_bytes, param.bytes, param.align);
    program.param_offsets.push_back(at);
    program.param_sizes.push_back(param.bytes);
    params[param.name] = {Space::param, at};
  }
  inline_function(entry, params, true);
  program.shared_bytes = align_up(program.shared_bytes, 128);
  for (const std::size_t constant : dynamic_shared_constants_) add_dynamic_base(constant);
  fix_pointers();
  return std::move(program_);
}

/// Dynamic shared memory follows the static variables. All its extern arrays are the same memory.
void Decoder::add_dynamic_base(std::size_t constant) {
  std::uint64_t value;
  std::memcpy(&value, &program_->constants[constant], sizeof value);
  const std::uint64_t based = value + program_->shared_bytes;
  const bool narrow = narrow_constants_.contains(constant);
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(&program_->constants[constant + lane * (narrow ? 4 : 8)], &based, narrow ? 4 : 8);
  }
}

/// Operand lists have their final addresses only after all of them are known.
void Decoder::fix_pointers() {
  for (Instruction& instruction : program_->code) {
    instruction.ops = program_->operands.data() + reinterpret_cast<std::uintptr_t>(instruction.ops);
  }
}

void Decoder::inline_function(ptx::Function& function, const Variables& params, bool entry) {
  ptx::parse_body(function);
  if (++depth_ > 16) throw std::runtime_error("recursion in " + std::string(function.name));
  Frame frame{function, {}, {}, entry};
  frame.scopes.resize(function.scopes.size());
  declare(frame, params);
  std::vector<std::uint32_t> first(function.statements.size() + 1);
  std::vector<std::pair<std::size_t, const ptx::Statement*>> branches;
  std::vector<std::size_t> returns;
  for (std::size_t k = 0; k < function.statements.size(); ++k) {
    const ptx::Statement& statement = function.statements[k];
    first[k] = static_cast<std::uint32_t>(program_->code.size());
    if (statement.opcode.starts_with("call")) {
      call(frame, statement);
      continue;
    }
    const bool returning = !entry && (statement.opcode == "ret" || statement.opcode == "ret.uni");
    add_instruction(frame, statement, returning ? "bra" : statement.opcode);
    if (returning) returns.push_back(program_->code.size() - 1);
    if (statement.opcode.starts_with("bra"))
      branches.emplace_back(program_->code.size() - 1, &statement);
  }
  first.back() = static_cast<std::uint32_t>(program_->code.size());
  for (const auto& [index, statement] : branches) {
    program_->code[index].target = first[find_label(function, *statement)];
  }
  for (const std::size_t index : returns) program_->code[index].target = first.back();
  if (entry) {  // code that falls off the end
    ptx::Statement ret;
    ret.line = function.statements.empty() ? function.body_line : function.statements.back().line;
    add_instruction(frame, ret, "ret");
  }
  --depth_;
}

std::size_t Decoder::find_label(const ptx::Function& function, const ptx::Statement& statement) {
  const std::string_view label = statement.operands.at(0).name;
  for (int scope = statement.scope; scope >= 0; scope = function.scopes[scope].parent) {
    const auto found = function.scopes[scope].labels.find(label);
    if (found != function.scopes[scope].labels.end()) return found->second;
  }
  throw std::runtime_error("PTX line " + std::to_string(statement.line) + ": no label " +
                           std::string(label));
}

/// Gives every register a row and every variable an address. A function inlined twice has two sets.
void Decoder::declare(Frame& frame, const Variables& params) {
  frame.params = params;
  for (std::size_t s = 0; s < frame.scopes.size(); ++s) {
    const ptx::Scope& scope = frame.function.scopes[s];
    for (const ptx::Registers& registers : scope.registers) {
      const int bytes = ptx::size_of(registers.type);
      const std::size_t row = bytes == 0 ? 4 : static_cast<std::size_t>(bytes) * kLanes;
      const std::size_t count = registers.count < 0 ? 1 : static_cast<std::size_t>(registers.count);
      const std::size_t at = reserve(program_->register_bytes, row * count, bytes == 0 ? 4 : 64);
      frame.scopes[s].registers.push_back({registers.name, registers.count, at, bytes});
    }
    for (const ptx::Variable& variable : scope.variables) {
      const bool is_shared = variable.space == "shared";
      std::size_t& used = is_shared ? program_->shared_bytes : program_->local_bytes;
      const std::size_t at = reserve(used, variable.bytes, variable.align);
      frame.scopes[s].variables[variable.name] =
          is_shared ? Location{Space::shared, at + kSharedBase} : Location{Space::local, at};
    }
  }
}

/// call (results), name, (arguments): the arguments are variables of the caller that the callee
/// uses as its own.
void Decoder::call(Frame& frame, const ptx::Statement& statement) {
  std::vector<const ptx::Operand*> lists;
  std::string_view name;
  for (const ptx::Operand& operand : statement.operands) {
    if (operand.kind == ptx::Operand::Kind::arguments) lists.push_back(&operand);
    if (operand.kind == ptx::Operand::Kind::name && name.empty()) name = operand.name;
  }
  const auto found = module_.functions.find(name);
  if (found == module_.functions.end() || !statement.guard.empty()) {
    throw std::runtime_error("PTX line " + std::to_string(statement.line) +
                             ": the emulator cannot call " + std::string(name));
  }
  Variables params;
  const auto bind = [&](const std::vector<ptx::Variable>& formal, const ptx::Operand& actual) {
    for (std::size_t k = 0; k < formal.size(); ++k) {
      params[formal[k].name] = *find_variable(frame, statement.scope, actual.elements.at(k).name);
    }
  };
  const bool has_results = !found->second.results.empty();
  if (has_results) bind(found->second.results, *lists.at(0));
  if (!found->second.params.empty()) bind(found->second.params, *lists.at(has_results ? 1 : 0));
  inline_function(found->second, params, false);
}

std::unique_ptr<Program> decode(ptx::Module& module, ptx::Function& entry,
                                const GlobalAddresses& globals) {
  return Decoder(module, globals).run(entry);
}

}  // namespace flashcore::emulator
